"""What the ops cost on gfx950: COUNTED in the emulator, times MODELLED, nothing measured.

    python benchmarks/bench_ops_gfx950.py [--backend flydsl] [--ops sparse_decode,...] [--json FILE]

One GPU of four (TP4): 16 query heads, 1 KV head, 1 index head of 128, caches as in service (larger
than 2 GiB). A row is a kernel's launches of one call: wave-instructions, of these VALU and MFMA;
bytes of LDS a workgroup; registers a lane and waves a SIMD that both allow; bytes of memory by
unique 128-byte lines, `of least` over what the op must move; the model's time (report.Cost: the
largest of the pipes' issue times and HBM bytes over 8 TB/s, with all CUs that the grid can fill,
latency ignored) and what bounds it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gfx950_emu import Checks, Schedule
from gfx950_emu.report import LaunchReport
from rocm_msa import launcher, ops
from rocm_msa.aot import ServingConfig, builds
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.code_object import kernel_metadata
from tests.launcher.emulated import emulated as emulated_flydsl
from tests.ops.emulated_triton import CACHES, emulated

DIM, BLOCK, TOPK = 128, 128, 16
HEADS = ops.Heads(q=16, kv=1, index=1, head_dim=DIM, rotary_dim=64)
KINDS = ("nvfp4", "fp8", "bf16")
FAST = Schedule("round_robin", 0, (100_000, 100_000))

Case = tuple[str, int, Callable[..., object]]  # shape, least bytes, call


def later(op: Callable, *args: object) -> Callable[..., object]:
    return functools.partial(op, *args)


def caches(blocks: int, dtype: str) -> tuple[MainCache, IndexCache]:
    """Random bytes: what a kernel does hardly depends on them, how much not at all."""
    main = MainCache.allocate(blocks, HEADS.kv, dtype)
    index = IndexCache.allocate(blocks, dtype)
    for cache in (main, index):
        cache.pages.random_(0, 256, generator=torch.Generator().manual_seed(blocks))
    return main, index


def table_of(requests: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block table, seq_lens): every block has a page of its own."""
    table = torch.randperm(requests * (length // BLOCK)).int().view(requests, -1)
    return table, torch.full((requests,), length, dtype=torch.int32)


def q_of(rows: int, heads: int) -> torch.Tensor:
    return torch.randn(rows, heads, DIM).bfloat16()


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def lists_of(rows: int, blocks: int) -> torch.Tensor:
    ids = [torch.randperm(blocks)[:TOPK] for _ in range(rows)]
    return torch.stack(ids).int().view(1, rows, -1)


def qkv_insert(dtype: str) -> Iterator[Case]:
    for tokens in (32, 1024):
        main, index = caches(-(-tokens // BLOCK), dtype)
        qkv = torch.randn(tokens, HEADS.qkv_columns).bfloat16()
        norms = ops.Norms(*(torch.zeros(DIM).bfloat16() for _ in range(4)))
        angles, where = torch.randn(tokens, HEADS.rotary_dim), torch.arange(tokens)
        stored = tokens * (main.page.page_bytes + index.page.page_bytes) // BLOCK
        least = size(qkv) + tokens * (HEADS.q + HEADS.index) * DIM * 2 + stored + size(angles)
        yield (
            f"{tokens} tokens",
            least + 3 * size(where),
            later(ops.qkv_insert, qkv, norms, angles, where, main, index, where, where + 0, HEADS),
        )


def index_score_decode(dtype: str) -> Iterator[Case]:
    for requests, rows, length in ((16, 1, 16384), (8, 4, 16384)):
        _, index = caches(requests * length // BLOCK, dtype)
        table, lens = table_of(requests, length)
        q = q_of(requests * rows, HEADS.index)
        out = q.shape[0] * HEADS.index * table.shape[1] * 4
        yield (
            f"{requests} x {rows} rows of {length // 1024}K",
            size(q, table, lens, index.pages) + out,
            later(ops.index_score_decode, q, index, table, lens, rows),
        )


def index_score_prefill(dtype: str) -> Iterator[Case]:
    tokens, length = 1024, 8192
    _, index = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.index), torch.tensor([0, tokens], dtype=torch.int32)
    out = tokens * HEADS.index * table.shape[1] * 4
    yield (
        f"{tokens} tokens at {length // 1024}K",
        size(q, table, lens, index.pages) + out,
        later(ops.index_score_prefill, q, index, table, cu, lens),
    )


def block_topk(dtype: str) -> Iterator[Case]:
    if dtype != KINDS[0]:
        return
    for rows, blocks in ((32, 1024), (512, 1024), (1, 8192)):
        scores = torch.randn(1, rows, blocks)
        nb = torch.full((rows,), blocks, dtype=torch.int32)
        yield (
            f"{rows} rows of {blocks} blocks",
            size(scores, nb) + rows * TOPK * 4,
            later(ops.block_topk, scores, nb),
        )


def select_decode(dtype: str) -> Iterator[Case]:
    for requests, rows, length in ((16, 1, 16384), (8, 4, 16384), (1, 1, 8192 * BLOCK)):
        stored = min(length, 16384)  # longer contexts: the same pages again
        _, index = caches(requests * stored // BLOCK, dtype)
        table, lens = table_of(requests, stored)
        table, lens = table.repeat(1, length // stored), lens * (length // stored)
        q = q_of(requests * rows, HEADS.index)
        blocks = torch.full((q.shape[0],), length // BLOCK, dtype=torch.int32)
        counters = torch.zeros(requests, dtype=torch.int32)
        yield (
            f"{requests} x {rows} rows of {length // 1024}K",
            size(q, table, lens, index.pages) + q.shape[0] * HEADS.index * TOPK * 4,
            functools.partial(
                ops.select_decode, q, index, table, lens, rows, blocks, TOPK, counters=counters
            ),
        )


def sparse_decode(dtype: str) -> Iterator[Case]:
    for requests, rows in ((128, 1), (32, 4)):
        count = requests * rows
        main, _ = caches(count * TOPK, dtype)
        table, lens = table_of(requests, rows * TOPK * BLOCK)
        ids = torch.arange(rows * TOPK).int().view(1, rows, TOPK).repeat(1, requests, 1)
        q = q_of(count, HEADS.q)
        yield (
            f"{requests} x {rows} rows",
            size(q, q, table, lens, ids, main.pages) + count * HEADS.q * 4,
            later(ops.sparse_decode, q, main, ids, table, lens, rows, 0.09),
        )


def sparse_prefill(dtype: str) -> Iterator[Case]:
    tokens, length = 256, 8192
    main, _ = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.q), torch.tensor([0, tokens], dtype=torch.int32)
    ids = lists_of(tokens, length // BLOCK)
    yield (
        f"{tokens} tokens at {length // 1024}K",
        size(q, q, table, lens, ids, main.pages) + tokens * HEADS.q * 4,
        later(ops.sparse_prefill, q, main, ids, table, cu, lens, 0.09),
    )


def dense_attention(dtype: str) -> Iterator[Case]:
    tokens = length = 256
    main, _ = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.q), torch.tensor([0, tokens], dtype=torch.int32)
    yield (
        f"{tokens} tokens at {length}",
        size(q, q, table, lens, main.pages) + tokens * HEADS.q * 4,
        later(ops.dense_attention, q, main, table, cu, lens, 0.09),
    )


OPS = (
    qkv_insert,
    index_score_decode,
    index_score_prefill,
    block_topk,
    select_decode,
    sparse_decode,
    sparse_prefill,
    dense_attention,
)


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
    config = ServingConfig(HEADS.q, HEADS.kv, HEADS.index, DIM, HEADS.rotary_dim, dtype, dtype)
    with emulated_flydsl(builds(config), checks=Checks.NONE, schedule=FAST) as reports:
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
    arguments = parser.parse_args()
    wanted = arguments.ops.split(",") if arguments.ops else [op.__name__ for op in OPS]
    torch.manual_seed(0)
    print("Counted in the emulator; times are modelled, not measured.\n")
    print("| " + " | ".join(COLUMNS.values()) + " |")
    print("|" + "---|" * len(COLUMNS))
    rows = []
    for op in OPS:
        if arguments.backend == "flydsl" and op is dense_attention:
            continue  # it has no FlyDSL kernels
        for dtype in KINDS if op.__name__ in wanted else ():
            for case in op(dtype):
                for row in rows_of(arguments.backend, op.__name__, dtype, case):
                    rows.append(row)
                    print("| " + " | ".join(shown(row.get(c, "")) for c in COLUMNS) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
