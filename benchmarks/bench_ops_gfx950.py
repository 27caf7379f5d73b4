"""What the ops cost on gfx950: COUNTED in the emulator, times MODELLED, nothing measured.

    python benchmarks/bench_ops_gfx950.py [--backend flydsl] [--ops sparse_decode,...] [--json FILE]
    python benchmarks/bench_ops_gfx950.py --backend flydsl --store    # what `verify` expects

One GPU of four (TP4): 16 query heads, 1 KV head, 1 index head of 128, caches as in service (larger
than 2 GiB). A row is a kernel's launches of one call: wave-instructions, of these VALU and MFMA;
bytes of LDS a workgroup; registers a lane and waves a SIMD that both allow; bytes of memory by
unique 128-byte lines, `of least` over what the op must move; the model's time (report.Cost: the
largest of the pipes' issue times and HBM bytes over 8 TB/s, with all CUs that the grid can fill,
latency ignored) and what bounds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gfx950_emu import Checks, Schedule
from gfx950_emu.report import LaunchReport
from rocm_msa import launcher
from rocm_msa.code_object import kernel_metadata
from rocm_msa.selfcheck import times
from rocm_msa.selfcheck.bench_cases import OPS, Case, cases_of, dense_attention
from rocm_msa.selfcheck.kernels import KINDS, builds
from tests.launcher.emulated import emulated as emulated_flydsl
from tests.ops.emulated_triton import CACHES, emulated

FAST = Schedule("round_robin", 0, (100_000, 100_000))


def rows_of(backend: str, op: str, dtype: str, case: Case) -> list[dict]:
    """One row a kernel, and their sum when there are several."""
    shape, least, call = case
    by_kernel: dict[str, list[tuple[dict, LaunchReport]]] = {}
    for name, facts, report in RUNS[backend](dtype, call):
        by_kernel.setdefault(name, []).append((facts, report))
    rows = [kernel_row(name, group) for name, group in by_kernel.items()]
    if len(rows) > 1:
        summed = ("instructions", "valu", "mfma", "bytes", "us")
        total = {key: sum(r[key] for r in rows) for key in summed}
        rows.append({"kernel": "all"} | total)
    rows[-1]["of_least"] = rows[-1]["bytes"] / least
    return [{"op": op, "dtype": dtype, "shape": shape, "least_bytes": least} | r for r in rows]


def run_triton(_: str, call: Callable) -> Iterator[tuple[str, dict, LaunchReport]]:
    """(kernel, its resources, report) of each launch."""
    with emulated(checks=Checks.NONE, schedule=FAST, large=frozenset(CACHES)) as launches:
        call(backend="triton")
    for launch in launches:
        compiled = launch.compiled
        facts = kernel_metadata(compiled.code_object, compiled.kernel)
        used = {"vgprs": facts[".vgpr_count"], "lds": compiled.lds_bytes}
        used["sgpr_spills"] = facts[".sgpr_spill_count"]
        for report in launch.report.launches:
            yield launch.kernel, used, report


def run_flydsl(dtype: str, call: Callable) -> Iterator[tuple[str, dict, LaunchReport]]:
    with emulated_flydsl(builds([dtype]), checks=Checks.NONE, schedule=FAST) as reports:
        call(backend="flydsl")
        loaded = launcher.active(torch.device("cpu")).kernels
    by_symbol = {entry.symbol: entry for entry in loaded}
    for report in reports:
        for launch in report.launches:
            entry = by_symbol[launch.kernel]
            used = {"vgprs": entry.registers["vgpr"], "lds": entry.static_lds + entry.dynamic_lds}
            used["sgpr_spills"] = entry.registers["sgpr_spills"]
            yield entry.name, used, launch


RUNS = {"triton": run_triton, "flydsl": run_flydsl}


def kernel_row(name: str, group: list[tuple[dict, LaunchReport]]) -> dict:
    runs = [report for _, report in group]
    times = [r.model_time() for r in runs]
    longest = max(times, key=lambda t: t["bound"])
    return {
        "kernel": name,
        "instructions": sum(r.executed for r in runs),
        "valu": sum(r.pipes.get("valu", 0) for r in runs),
        "mfma": sum(r.pipes.get("mfma", 0) for r in runs),
        "bytes": sum(r.hbm_bytes for r in runs),
        "us": 1e6 * sum(t["bound"] for t in times),
        "bound": next(p for p, t in longest.items() if t == longest["bound"] and p != "bound"),
        "workgroups": sum(r.counters["workgroups"] for r in runs),
        **group[0][0],
        "occupancy": runs[0].occupancy,
    }


COLUMNS = {
    "op": "op",
    "dtype": "cache",
    "shape": "shape",
    "kernel": "kernel",
    "workgroups": "workgroups",
    "instructions": "wave-instructions",
    "valu": "VALU",
    "mfma": "MFMA",
    "vgprs": "VGPRs",
    "lds": "LDS",
    "occupancy": "waves/SIMD",
    "bytes": "bytes",
    "of_least": "of least",
    "us": "modelled us",
    "bound": "bound",
}


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="names, by comma; all by default")
    parser.add_argument("--backend", choices=tuple(RUNS), default="triton")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", action="store_true", help="write rocm_msa/selfcheck's figures")
    arguments = parser.parse_args()
    if arguments.store and (arguments.backend != "flydsl" or arguments.ops):
        parser.error("--store takes --backend flydsl and all ops")
    wanted = arguments.ops.split(",") if arguments.ops else [op.__name__ for op in OPS]
    print("Counted in the emulator; times are modelled, not measured.\n")
    print("| " + " | ".join(COLUMNS.values()) + " |")
    print("|" + "---|" * len(COLUMNS))
    rows = []
    for op in OPS:
        if arguments.backend == "flydsl" and op is dense_attention:
            continue  # it has no FlyDSL kernels
        for dtype in KINDS if op.__name__ in wanted else ():
            for case in cases_of(op, dtype):
                for row in rows_of(arguments.backend, op.__name__, dtype, case):
                    rows.append(row)
                    print("| " + " | ".join(shown(row.get(c, "")) for c in COLUMNS) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.store:
        times.store(rows, "python benchmarks/bench_ops_gfx950.py --backend flydsl --store")


if __name__ == "__main__":
    main()
