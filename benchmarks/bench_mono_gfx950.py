"""The mono kernel on gfx950: bytes COUNTED, times MODELLED, nothing measured.

    python benchmarks/bench_mono_gfx950.py [--rows 1,4,16] [--context 8192] [--layout mxfp8]
                                           [--json FILE] [--plot FILE]
    python benchmarks/bench_mono_gfx950.py --emulate      also one launch in the emulator a case:
                                                          minutes, and 1 GB of untouched memory
    python benchmarks/bench_mono_gfx950.py --weights      error of weight formats, no kernel

One rank's share of MiniMax-M3 at TP 4 on 256 workgroups. The time of a phase is the largest of
    memory     the bytes that it must move (mono_kernel/plan.py, weights.py) over 8 TB/s
    unit       what the lanes of the busiest compute unit ask for, 64 bytes a cycle
    latency    LATENCY, however little moves
plus HAND_OFF for the meeting of the grid behind it, where there is one, and, where ranks add up,
EXCHANGE and the bytes over one fabric link. Weights that are asked for ahead (mono_kernel/phases/
ahead.py) cost their phase nothing as far as they fit into the meeting, or norm, that they are
asked for behind. LATENCY, HAND_OFF and EXCHANGE are ASSUMED, after public figures of memory latency
(0.7 to 0.8 us); nobody has measured them here. Instructions are left out: --emulate counts them.
--without NAMES leaves improvements out of the model: ahead, norm, join, insert.
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
from mono_kernel.shapes import TILE, Formats, Shape
from mono_kernel.weights import data_bytes, format_errors, scale_bytes, weight_layout
from rocm_msa.arch import GFX950
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.capacity import MINIMAX_M3
from tests.mono_kernel.emulated import compiled, packed_arguments

RANKS, BLOCK = 4, 128
HAND_OFF, EXCHANGE, LATENCY = 1.5e-6, 1.5e-6, 1.0e-6  # seconds, assumed
UNIT_BYTES_A_CYCLE = 64
PUBLIC = 43.5  # us a sparse layer at one row, as reported for another engine on MI350X
LAYOUTS = {
    "mxfp4": Formats("bf16", "mxfp4", "mxfp4"),
    "mxfp8": Formats("mxfp8", "mxfp4", "mxfp4"),
    "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8"),
}
SCRATCH = 5  # among the kernel's arguments
IMPROVEMENTS = ("ahead", "norm", "join", "insert")
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
    router.normal_(std=build.hidden**-0.5, generator=generator)
    main = MainCache.allocate(rows * blocks, build.kv_heads, "nvfp4")
    index = IndexCache.allocate(rows * blocks, "nvfp4")
    for cache in (main, index):
        cache.pages.random_(0, 64, generator=generator)
    table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    slots = table[:, -1].long() * BLOCK + (context - 1) % BLOCK
    cos_sin = torch.ones(context, build.rotary_dim)
    lens = torch.full((rows,), context, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    batch = Batch(lens.long() - 1, slots, slots.clone(), table, lens, starts, 1, cos_sin)
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


def tile_bytes(kind: str, inputs: int) -> int:
    """Packed bytes of a tile of 16 outputs."""
    return data_bytes(kind, TILE, inputs) + scale_bytes(kind, TILE, inputs)


def phase_bytes(shape: Shape, rows: int, context: int, experts: int) -> dict[str, tuple]:
    """phase -> (tasks, bytes that memory moves, bytes that the lanes of a task ask for).

    Weights once; an operand of a row (2 bytes a value) once from memory, and once a task from
    caches. experts: in use.
    """
    s, blocks = shape, -(-context // BLOCK)
    wide, page, index_page = 2 * s.hidden, BLOCK * 144, BLOCK * 72
    kept = min(s.topk, blocks)
    partial = plan.PARTIAL_BYTES + 64
    qkv, output = (tile_bytes(s.attention_format, n) for n in (s.hidden, s.attended))
    up = 2 * tile_bytes(s.routed_format, s.hidden)
    down = tile_bytes(s.routed_format, s.intermediate)
    shared_up = 2 * tile_bytes(s.shared_format, s.hidden) if s.shared else 0
    shared_down = tile_bytes(s.shared_format, s.shared) if s.shared else 0
    tiles = s.hidden // TILE
    routed, more = experts * s.intermediate // TILE, s.shared // TILE
    slots = rows * s.kv_heads * s.topk // plan.SLOTS_A_TASK
    act = 2 * s.widest * rows
    down_task = experts * down + shared_down + s.slots * act
    return {
        "norm": (rows, 5 * rows * wide, 5 * wide),
        "project": (s.features // TILE, qkv * (s.features // TILE), qkv + rows * wide),
        "insert": (-(-rows // 4) * -(-s.heads // 4), 3 * rows * 2 * s.features, 16 * 3 * 256),
        "score": (rows * -(-blocks // 4), rows * blocks * index_page, 4 * index_page),
        "attend": (slots, rows * s.kv_heads * kept * page, 4 * (page + partial) + 4 * blocks),
        "join": (rows, 2 * rows * s.kv_heads * s.topk * partial, s.kv_heads * s.topk * partial),
        "output": (tiles, output * tiles, output + rows * 2 * s.attended),
        "route": (rows + s.experts, 4 * s.experts * s.hidden, 2 * wide + rows * wide),
        "up": (routed + more, routed * up + more * shared_up, max(up, shared_up) + rows * wide),
        "down": (tiles, tiles * (experts * down + shared_down), down_task),
    }


def asked_ahead(shape: Shape, experts: int) -> dict[str, int]:
    """phase -> bytes of its weights that ahead.py asks for behind the phase before."""
    s, tiles = shape, shape.hidden // TILE
    down = min(experts, plan.AHEAD_EXPERTS) * tile_bytes(s.routed_format, s.intermediate)
    shared_up = shared_down = 0
    if s.shared:
        shared_up = 2 * tile_bytes(s.shared_format, s.hidden) * (s.shared // TILE)
        shared_down = tile_bytes(s.shared_format, s.shared)
    return {
        "project": tile_bytes(s.attention_format, s.hidden) * (s.features // TILE),
        "output": tile_bytes(s.attention_format, s.attended) * tiles,
        "route": 4 * s.experts * s.hidden,
        "up": shared_up,
        "down": (down + shared_down) * tiles,
    }


def sent(shape: Shape, rows: int, blocks: int, exchange: bool) -> dict[str, int]:
    """phase -> bytes over one link: the batch's rows, and a tile of one more in turns."""
    found = dict.fromkeys(plan.SITES, (rows * shape.hidden + TILE) * plan.WORD_BYTES)
    if exchange:
        pairs = rows * shape.index_heads * plan.WORD_BYTES
        found |= {"score": pairs * plan.QUERY_WORDS, "attend": pairs * -(-blocks // RANKS)}
    return found


def phase_rows(
    layout: str, rows: int, context: int, experts: int, without: tuple[str, ...] = (),
    exchange: bool = False,
) -> tuple[list[dict], int]:  # fmt: skip
    """(a row of the table a phase, MODELLED; bytes that must be moved: weights and caches)."""
    shape, found, before = shape_of(layout), [], 0.0
    counts, ahead = phase_bytes(shape, rows, context, experts), asked_ahead(shape, experts)
    words = sent(shape, rows, -(-context // BLOCK), exchange)
    if exchange:
        tasks, moved, asked = counts["score"]
        counts["score"] = (-(-tasks // RANKS), moved // RANKS, asked)
    merged = {n for n, yes in plan.in_place(shape, rows, 1).items() if yes and n not in without}
    if "norm" not in merged:
        del ahead["project"]
    for name in plan.PHASE_NAMES:
        tasks, moved, asked = counts[name]
        rounds = -(-tasks // GFX950.compute_units)
        if name in merged - {"insert"}:  # all rows, in every workgroup
            rounds = tasks
        early = 0 if "ahead" in without else ahead.get(name, 0)
        parts = {
            "memory": (moved - min(early, before * GFX950.hbm_bytes_per_s))
            / GFX950.hbm_bytes_per_s,
            "unit": rounds * asked / (UNIT_BYTES_A_CYCLE * GFX950.clock_hz),
            "latency": LATENCY,
        }
        seconds = max(parts.values())
        before = seconds
        if name not in merged and name != plan.PHASE_NAMES[-1]:
            seconds, before = seconds + HAND_OFF, HAND_OFF
        if name in words:
            seconds += EXCHANGE + words[name] / GFX950.fabric_link_bytes_per_s
        found.append(
            {
                "phase": name, "tasks": tasks, "bytes": moved, "asked": asked,
                "exchange": words.get(name, 0), "bound": max(parts, key=parts.get),
                "us": seconds * 1e6,
                "meets": name not in merged,
                "parts": {k: v * 1e6 for k, v in parts.items()},
            }
        )  # fmt: skip
    streamed = ("project", "score", "attend", "output", "route", "up", "down")
    return found, sum(counts[name][1] for name in streamed)


def show(rows: int, experts: int, table: list[dict], least: int) -> None:
    print(f"\n{rows} rows, {experts} routed experts in use, MODELLED")
    print(f"{'phase':9}{'tasks':>7}{'MB':>9}{'KB a task':>11}{'us':>8}  bound")
    for r in table:
        print(
            f"{r['phase']:9}{r['tasks']:7}{r['bytes'] / 1e6:9.2f}{r['asked'] / 1e3:11.1f}"
            f"{r['us']:8.2f}  {r['bound']}"
        )
    total = sum(r["us"] for r in table)
    floor = least / GFX950.hbm_bytes_per_s * 1e6
    meetings = sum(r["meets"] for r in table[:-1])
    exchanges = sum(r["exchange"] > 0 for r in table)
    fixed = meetings * HAND_OFF + exchanges * EXCHANGE
    print(f"{'layer':9}{'':7}{sum(r['bytes'] for r in table) / 1e6:9.2f}{'':11}{total:8.2f}")
    print(
        f"{least / 1e6:.2f} MB of weights and caches: {floor:.2f} us at 8 TB/s; {meetings} "
        f"meetings and {exchanges} exchanges {fixed * 1e6:.1f} us; reported for another engine, "
        f"one row: {PUBLIC} us"
    )


def show_counts(build: Build, rows: int, context: int) -> None:
    """One launch in the emulator, COUNTED."""
    one, experts = count(build, rows, context)
    moved = one.traffic["hbm"]
    print(f"{rows} rows, {experts} experts in use, COUNTED: {dict(one.pipes)}")
    print(f"memory lines: {moved['read'] / 1e6:.2f} MB read, {moved['written'] / 1e6:.2f} written")


def plot(results: dict[int, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3))
    left = dict.fromkeys(results, 0.0)
    labels = [f"{n} row" if n == 1 else f"{n} rows" for n in results]
    colors = plt.get_cmap("tab10").colors
    for name, color in zip(plan.PHASE_NAMES, colors, strict=True):
        us = [next(r["us"] for r in table if r["phase"] == name) for table in results.values()]
        axes.barh(labels, us, left=list(left.values()), label=name, color=color)
        left = {n: left[n] + u for n, u in zip(results, us, strict=True)}
    for label, total in zip(labels, left.values(), strict=True):
        axes.text(total, label, f" {total:.1f}", va="center", fontsize=8)
    axes.set_xlim(0, 1.15 * max(left.values()))
    axes.set_xlabel("us a layer on a TP 4 rank of MI355X, MODELLED; meetings with the phase before")
    axes.legend(ncol=5, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="mxfp8")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--without", default="", help=f"of {', '.join(IMPROVEMENTS)}")
    parser.add_argument("--exchange", action="store_true", help="the ranks share the index scan")
    parser.add_argument("--weights", action="store_true", help="error of weight formats only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.weights:
        for name, error in format_errors().items():
            print(f"{name:16}{error:8.4f}")
        return
    without = tuple(name for name in options.without.split(",") if name)
    if unknown := set(without) - set(IMPROVEMENTS):
        parser.error(f"--without: expected some of {IMPROVEMENTS}, got {sorted(unknown)}")
    results = {}
    for rows in (int(n) for n in options.rows.split(",")):
        shape = shape_of(options.layout)
        experts = round(shape.experts * (1 - (1 - shape.chosen / shape.experts) ** rows))
        results[rows], least = phase_rows(
            options.layout, rows, options.context, experts, without, options.exchange
        )
        show(rows, experts, results[rows], least)
        if options.emulate:
            show_counts(Build.from_shape(shape), rows, options.context)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
