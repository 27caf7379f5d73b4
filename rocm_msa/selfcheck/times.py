"""The ops' times beside the modelled ones.

data/modelled.json, by `python benchmarks/bench_ops_gfx950.py --backend flydsl --store`: what each
call of bench_cases.py costs by the counts of its gfx950 kernels in the emulator and the model of
gfx950_emu/report.py, latency ignored. On a GPU a call is timed by replays of a graph over calls
on different memory, together more than CACHE_BYTES; in the emulator it is counted again. Counts of
bytes depend a little on where tensors lie; those of instructions do not.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from rocm_msa.errors import expect
from rocm_msa.selfcheck.bench_cases import OPS, Case, cases_of
from rocm_msa.selfcheck.kernels import KINDS, moved

FILE = Path(__file__).parent / "data" / "modelled.json"
FORMAT = 1
SUMMED = ("us", "instructions", "bytes")
CACHE_BYTES = 512 * 2**20
"""Twice the largest cache in front of the memory that we expect: 256 MiB on MI355X."""
MOST_CALLS, REPLAYS = 32, 20
SMALL = ("qkv_insert", "block_topk")
"""The ops that are counted where only a small set is wanted."""


def modelled(file: Path = FILE) -> dict:
    """{"source": commit and command, "rows": [{op, dtype, shape, us, instructions, bytes}]}."""
    found = json.loads(file.read_text())
    if found["format"] != FORMAT:
        raise ValueError(expect(f"{file}: format", FORMAT, found["format"]))
    return found


def store(rows: list[dict], command: str, file: Path = FILE) -> None:
    """Keep a benchmark's rows, a kernel each, as sums a call."""
    sums: dict[tuple, dict] = {}
    for row in rows:
        if row["kernel"] == "all":
            continue
        key = (row["op"], row["dtype"], row["shape"])
        entry = sums.setdefault(key, dict(zip(("op", "dtype", "shape"), key, strict=True)))
        for name in SUMMED:
            entry[name] = entry.get(name, 0) + row[name]
    ask = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    described = {
        "format": FORMAT,
        "source": {"command": command, "commit": commit},
        "rows": list(sums.values()),
    }
    file.write_text(json.dumps(described, indent=1) + "\n")


def cases(small: bool) -> Iterator[tuple[str, str, Case]]:
    """(op, cache dtype, call), the same at every call; small: the first call of a few ops."""
    for op in OPS:
        if small and op.__name__ not in SMALL:
            continue
        for kind in KINDS[:1] if small else KINDS:
            for case in cases_of(op, kind):
                yield op.__name__, kind, case
                if small:
                    break


def measured(case: Case, backend: str, device: torch.device) -> dict[str, float]:
    """Microseconds a call on a GPU: us (median), low, high."""
    _, least, call = case
    count = max(2, min(MOST_CALLS, 1 + CACHE_BYTES // least))
    calls = [_moved(call, backend, device) for _ in range(count)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0](), calls[-1]()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept += [call() for call in calls]
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1000 / count)
    return {"us": statistics.median(found), "low": min(found), "high": max(found)}


def _moved(call: functools.partial, backend: str, device: torch.device) -> Callable[[], object]:
    args = [moved(value, device) for value in call.args]
    options = {name: moved(value, device) for name, value in call.keywords.items()}
    return functools.partial(call.func, *args, **options, backend=backend)


def counted(case: Case, under: Callable[[], AbstractContextManager[list]]) -> dict[str, float]:
    """us (modelled), instructions and bytes of a call in the emulator.

    under: makes the emulator the device of CPU tensors and gives the list of its reports.
    """
    with under() as reports:
        case[2](backend="flydsl")
    launches = [launch for report in reports for launch in report.launches]
    return {
        "us": 1e6 * sum(launch.model_time()["bound"] for launch in launches),
        "instructions": sum(launch.executed for launch in launches),
        "bytes": sum(launch.hbm_bytes for launch in launches),
    }
