"""The mono kernel on gfx950: COUNTED in the emulator, times MODELLED, nothing measured.

    python benchmarks/bench_mono_gfx950.py [--rows 1,4,16] [--context 8192] [--layout mxfp4]
                                           [--json FILE] [--plot FILE]
    python benchmarks/bench_mono_gfx950.py --weights        error of weight formats, no kernel

One rank's share of MiniMax-M3 at TP 4, 256 workgroups. Counts of a phase are the difference of two
kernels that stop after it and before it. Its time is the largest of
    memory     unique 128-byte lines over 8 TB/s
    unit       the busiest compute unit's part of the bytes that lanes ask for, 64 bytes a cycle
    issue      the busiest unit's part of the VALU cycles (report.Cost)
plus HAND_OFF for the meeting of the grid behind it and, where ranks add up, EXCHANGE plus the bytes
over one fabric link. LATENCY is what a phase takes however little it moves. These three are
ASSUMED, from public figures of memory latency (0.7 to 0.8 us); nobody has measured them here.
Compiling takes about 20 s a kernel the first time, ten kernels in all.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gfx950_emu import Checks, Machine, Schedule
from gfx950_emu.report import LaunchReport
from mono_kernel import plan
from mono_kernel.batch import Batch
from mono_kernel.layer_gfx950 import Build, Memory, arguments
from mono_kernel.shapes import Formats, Shape
from mono_kernel.weights import format_errors, weight_layout
from rocm_msa.arch import GFX950
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.capacity import MINIMAX_M3
from tests.mono_kernel.emulated import compiled, packed_arguments

RANKS, BLOCK = 4, 128
HAND_OFF, EXCHANGE, LATENCY = 1.5e-6, 1.5e-6, 1.0e-6  # seconds, assumed
UNIT_BYTES_A_CYCLE = 64
VALU_CYCLES = 4
PUBLIC = 43.5  # us a sparse layer at one row, as reported for another engine on MI350X
LAYOUTS = {
    "mxfp4": Formats("bf16", "mxfp4", "mxfp4"),
    "mxfp8": Formats("mxfp8", "mxfp4", "mxfp4"),
    "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8"),
}
SCRATCH = 5  # among the kernel's arguments
FAST = Schedule("round_robin", 0, (100_000, 100_000))


def shape_of(layout: str) -> Shape:
    """A TP-4 rank's widths, with nobody to exchange with."""
    return replace(Shape.of(MINIMAX_M3, RANKS, LAYOUTS[layout]), tp=1)


def inputs(build: Build, rows: int, context: int) -> list:
    """Arguments of a launch: random activations and router, other weights zero, untouched memory
    not there. `rows` requests of one row."""
    generator = torch.Generator().manual_seed(rows)
    blocks = -(-context // BLOCK)
    layout = weight_layout(build)
    weights = torch.from_numpy(np.zeros(layout.nbytes, np.uint8))
    router = weights[layout["router"].offset : layout["router"].end].view(torch.float32)
    router.normal_(generator=generator)
    main = MainCache.allocate(rows * blocks, build.kv_heads, "nvfp4")
    index = IndexCache.allocate(rows * blocks, "nvfp4")
    for cache in (main, index):
        cache.pages.random_(0, 64, generator=generator)
    table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    slots = table[:, -1].long() * BLOCK + (context - 1) % BLOCK
    cos_sin = torch.ones(context, build.rotary_dim)
    lens = torch.full((rows,), context, dtype=torch.int32)
    batch = Batch(lens.long() - 1, slots, slots.clone(), table, lens, 1, cos_sin)
    scratch = torch.zeros(plan.scratch_layout(build, blocks).nbytes, dtype=torch.uint8)
    state = torch.zeros(plan.state_layout().nbytes, dtype=torch.uint8)
    state[:8].view(torch.int64)[0] = 1
    box = torch.zeros(plan.mailbox_layout(build).nbytes, dtype=torch.uint8)
    status = torch.zeros(1, dtype=torch.int64)
    addresses = torch.tensor([box.data_ptr(), status.data_ptr()])
    memory = Memory(scratch, state, addresses, 0, 10_000, plan.grid())
    hidden = [torch.randn(rows, build.hidden, generator=generator).bfloat16() for _ in range(2)]
    outs = [torch.zeros_like(x) for x in hidden]
    args = arguments(build, memory, weights, (main, index), batch, *hidden, *outs)
    return [args, [box, status]]


def count(build: Build, rows: int, context: int) -> tuple[LaunchReport, int]:
    """(one launch in the emulator, experts in use)."""
    entry, code = compiled(build)
    args, buffers = inputs(build, rows, context)
    machine = Machine(schedule=FAST, checks=Checks.NONE)
    machine.launch(
        code, entry.symbol, (plan.grid(), 1, 1), entry.block, packed_arguments(args, entry),
        lds_bytes=entry.dynamic_lds, buffers=buffers,
    )  # fmt: skip
    report = machine.run()
    report.raise_for_findings()
    where = plan.scratch_layout(build, 1)["chosen"]
    chosen = args[SCRATCH][where.offset : where.end].view(torch.int32)
    return report.launches[0], len(chosen[: rows * build.chosen].unique())


def tasks_of(shape: Shape, phase: plan.Phase, rows: int, context: int, experts: int) -> int:
    if phase.name == "score":
        return rows * -(-context // (BLOCK * plan.WAVES))
    if phase.name == "up":
        return len(list(plan.up_tasks(shape, list(range(experts)))))
    return phase.count(shape, rows)


def phase_rows(layout: str, rows: int, context: int) -> tuple[list[dict], int]:
    """(a row of the table a phase, bytes that must be moved)."""
    shape = shape_of(layout)
    counted = [
        count(Build.from_shape(shape, number + 1), rows, context)
        for number in range(len(plan.PHASES))
    ]
    experts = counted[-1][1]
    found, before = [], None
    for number, (phase, (one, _)) in enumerate(zip(plan.PHASES, counted, strict=True)):
        traffic, last = one.traffic, before.traffic if before else None
        moved = {
            level: sum(traffic[level].values()) - (sum(last[level].values()) if last else 0)
            for level in ("hbm", "instructions")
        }
        valu = one.pipes["valu"] - (before.pipes["valu"] if before else 0)
        tasks = tasks_of(shape, phase, rows, context, experts)
        found.append(model(phase.name, number, shape, rows, tasks, moved, valu))
        before = one
    return found, least_bytes(shape, rows, context, experts)


def model(name, number, shape, rows, tasks, moved, valu) -> dict:
    """Seconds of a phase, MODELLED, and what bounds it."""
    units = GFX950.compute_units
    busy = min(tasks, units)
    rounds = -(-tasks // units)
    share = rounds / tasks  # of the phase's work, the busiest unit's
    parts = {
        "memory": max(moved["hbm"], 0) / GFX950.hbm_bytes_per_s,
        "unit": max(moved["instructions"], 0) * share / (UNIT_BYTES_A_CYCLE * GFX950.clock_hz),
        "issue": valu * share * VALU_CYCLES / (GFX950.simds_per_cu * GFX950.clock_hz),
        "latency": LATENCY,
    }
    seconds = max(parts.values())
    bound = max(parts, key=parts.get)
    seconds += HAND_OFF if number < plan.HAND_OFFS else 0.0
    exchange = 0
    if name in plan.SITES:
        exchange = rows * shape.hidden * plan.WORD_BYTES
        seconds += EXCHANGE + exchange / GFX950.fabric_link_bytes_per_s
    return {
        "phase": name, "tasks": tasks, "busy": busy, "hbm": moved["hbm"],
        "asked": moved["instructions"], "valu": valu, "exchange": exchange, "bound": bound,
        "us": seconds * 1e6, "parts": {k: v * 1e6 for k, v in parts.items()},
    }  # fmt: skip


def least_bytes(shape: Shape, rows: int, context: int, experts: int) -> int:
    """Weights in use once, index keys, selected pages."""
    layout = weight_layout(shape)
    whole = {r.name: r.nbytes for r in layout}
    weights = sum(whole[n] for n in ("router", "qkv", "output"))
    weights += sum(n for name, n in whole.items() if name.startswith("shared_"))
    weights += sum(n for name, n in whole.items() if name.endswith("_scales") and name[0] in "qo")
    per_expert = sum(whole.get(n, 0) for n in ("up", "up_scales", "down", "down_scales"))
    weights += per_expert // shape.experts * experts
    pages = min(shape.topk, -(-context // BLOCK)) * BLOCK * 144 * shape.kv_heads
    return weights + rows * (context * 72 + pages)


def show(rows: int, table: list[dict], least: int) -> None:
    print(f"\n{rows} rows, MODELLED (assumed: hand-off {HAND_OFF * 1e6} us)")
    print(f"{'phase':9}{'tasks':>7}{'HBM MB':>9}{'asked MB':>10}{'VALU k':>9}{'us':>7}  bound")
    for r in table:
        print(
            f"{r['phase']:9}{r['tasks']:7}{r['hbm'] / 1e6:9.2f}{r['asked'] / 1e6:10.2f}"
            f"{r['valu'] / 1e3:9.1f}{r['us']:7.2f}  {r['bound']}"
        )
    total = sum(r["us"] for r in table)
    floor = least / GFX950.hbm_bytes_per_s * 1e6
    print(f"{'layer':9}{'':7}{sum(r['hbm'] for r in table) / 1e6:9.2f}{'':19}{total:7.2f}")
    print(f"least bytes {least / 1e6:.2f} MB: {floor:.2f} us at 8 TB/s; public, one row: {PUBLIC}")


def plot(results: dict[int, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3))
    left = dict.fromkeys(results, 0.0)
    for name in plan.PHASE_NAMES:
        us = [next(r["us"] for r in table if r["phase"] == name) for table in results.values()]
        axes.barh([f"{n} rows" for n in results], us, left=list(left.values()), label=name)
        left = {n: left[n] + u for n, u in zip(results, us, strict=True)}
    axes.set_xlabel("us a layer, modelled")
    axes.legend(ncol=5, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="mxfp8")
    parser.add_argument("--weights", action="store_true", help="error of weight formats only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.weights:
        for name, error in format_errors().items():
            print(f"{name:16}{error:8.4f}")
        return
    results = {}
    for rows in (int(n) for n in options.rows.split(",")):
        results[rows], least = phase_rows(options.layout, rows, options.context)
        show(rows, results[rows], least)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
