"""The indexer's exchange on gfx950: instructions COUNTED in the emulator, times MODELLED.

    python benchmarks/bench_dcp_gfx950.py [--ranks 4] [--requests 45] [--rows 4] [--json FILE]

Nothing here was measured on a GPU. A layer's scan and selection of one rank, NVFP4 index pages,
requests of 30K to 210K tokens evenly spread, alone (index_score_decode and block_topk, every rank
for its own head) and shared (one launch of the exchange):

    scan      index pages read / 8 TB/s (datasheet), the fullest workgroup at its share of that
    links     bytes to one peer / 76.8 GB/s (datasheet, one Infinity Fabric link each way)
    select    instructions of one wave on the critical path, counted, CYCLES each
    latency   of each dependent step: ASSUMED, see `Latency`; counted from the protocol's phases

What both have in common (the first launch's start, the end of the last) is left out of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dcp.exchange_gfx950 import workgroups
from dcp.shard import Shard
from gfx950_emu import Checks, Schedule
from rocm_msa import ops
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import index_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.ops.block_topk import flydsl_gfx950 as topk_module
from tests.dcp.exchange_group import Case, Group
from tests.launcher.emulated import emulated

PAGE = index_page(128, CacheDType.NVFP4).page_bytes
QUERY_BYTES, CANDIDATE_BYTES = 64 * 8, 32 * 8  # of one row and head, tagged
CYCLES = 5  # an instruction of a wave that is alone on its SIMD, most of them dependent
FAST = Schedule("round_robin", 0, (100_000, 100_000))


@dataclass(frozen=True)
class Latency:
    """Seconds. ASSUMED, of the order of public figures for MI300X; none is a datasheet's."""

    near: float = 0.4e-6  # a load of what was just written: the memory-side cache
    fabric: float = 0.8e-6  # a store until a peer can load it
    publish: float = 0.5e-6  # draining stores, writing back the L2
    boundary: float = 1.5e-6  # between two launches of a graph that depend on each other


@dataclass(frozen=True)
class Counts:
    """Instructions of one wave, by the blocks that it selects among."""

    own: int  # the best of a rank's blocks
    merge: int  # of all ranks' candidates
    alone_first: int  # block_topk: a wave of the first step, and the last wave
    alone_last: int


def count(ranks: int, blocks: int) -> Counts:
    """Of one request of `blocks` blocks, by differences between launches."""

    def executed(case: Case) -> int:
        group = Group(case)
        group.queue()
        report = group.run(FAST)
        report.raise_for_findings()
        return report.launches[0].useful

    def a_row(ranks: int, blocks: int) -> int:
        """Of one row more: a selection for each of 4 heads, and a merge for each own head."""
        case = Case(ranks=ranks, lens=(BLOCK_TOKENS * (blocks + 1),), grid=1)
        return (executed(replace(case, rows=4)) - executed(replace(case, rows=2))) // 2

    # With as many blocks a rank, two ranks differ from four by one more own head.
    merge = a_row(2, 2 * 8) - a_row(4, 4 * 8)
    own = (a_row(ranks, blocks) - merge * max(1, 4 // ranks)) // 4

    def alone(nb: int) -> int:
        scores = torch.randn(1, 1, 8192)
        lengths = torch.tensor([nb + 1], dtype=torch.int32)
        build = topk_module.needs(scores, lengths, 16, 0, 1)
        with emulated(build, schedule=FAST, checks=Checks.NONE) as reports:
            ops.block_topk(scores, lengths, backend="flydsl")
        return reports[0].launches[0].useful

    wave = 64 * 8  # blocks of a wave
    one, four_waves = alone(wave - 1), alone(4 * wave - 1)
    first = (four_waves - one) // 3
    return Counts(own, merge, first, one - first)


def lengths(requests: int, low: int = 30_000, high: int = 210_000) -> list[int]:
    return [low + (high - low) * i // max(1, requests - 1) for i in range(requests)]


def scan_time(parts: list[int], groups: int) -> float:
    """Seconds to read so many blocks: an equal part a workgroup, rounded up to its waves' turns."""
    total = sum(parts)
    fullest = -(-total // groups) if total else 0
    rounded = -(-fullest // 4) * 4 / 4 if fullest < 8 else fullest / 4
    return max(total, rounded * 4 * min(groups, total)) * PAGE / GFX950.hbm_bytes_per_s


def alone(tokens: list[int], counts: Counts, wait: Latency) -> dict[str, float]:
    """Scores of one head by one rank, then block_topk."""
    blocks = [-(-n // BLOCK_TOKENS) for n in tokens]
    select = (counts.alone_first + counts.alone_last) * CYCLES / GFX950.clock_hz
    return {
        "query": wait.near,
        "scan": sum(blocks) * PAGE / GFX950.hbm_bytes_per_s,
        "launch of block_topk": wait.boundary,
        "scores": wait.near,
        "select": select,
    }


def shared(tokens: list[int], rows: int, ranks: int, counts: Counts, wait: Latency):
    """Seconds of each phase of the exchange, of rank 0, which has the most blocks."""
    shard = Shard(0, ranks, 4)
    blocks = [-(-n // BLOCK_TOKENS) for n in tokens]
    owned = [shard.owned_blocks(n - 1) for n in blocks]
    groups = workgroups(len(tokens), max(owned))
    pairs = len(tokens) * rows * shard.heads_per_rank
    link = GFX950.fabric_link_bytes_per_s
    a_selection = counts.own * CYCLES / GFX950.clock_hz
    turns = -(-len(tokens) * rows * shard.heads // (4 * groups))
    merges = -(-pairs // (4 * groups))
    return {
        "0 batch": wait.near,
        "1 push": wait.near + pairs * QUERY_BYTES / link + wait.fabric,
        "2, 3 hello and queries": 2 * wait.near,
        "3 scan": scan_time(owned, groups),
        "4 publish keys": wait.publish + 2 * wait.near,
        "4 best of own": turns * a_selection,
        "4 send": pairs * CANDIDATE_BYTES / link + wait.fabric,
        "5 merge": wait.near + merges * counts.merge * CYCLES / GFX950.clock_hz,
    }


def crossover(requests: int, rows: int, ranks: int, counts: Counts, wait: Latency) -> int:
    """Tokens a request from which the exchange is faster."""
    for tokens in range(1024, 1 << 20, 1024):
        batch = [tokens] * requests
        mine = sum(shared(batch, rows, ranks, counts, wait).values())
        if mine < sum(alone(batch, counts, wait).values()):
            return tokens
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--requests", type=int, default=45)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wait, tokens = Latency(), lengths(options.requests)
    counts = count(options.ranks, -(-sum(tokens) // len(tokens)) // BLOCK_TOKENS)
    one = alone(tokens, counts, wait)
    many = shared(tokens, options.rows, options.ranks, counts, wait)
    print(f"COUNTED, instructions of a wave: {asdict(counts)}")
    assumed = {name: round(value * 1e6, 3) for name, value in asdict(wait).items()}
    print(f"ASSUMED, us: {assumed}; {CYCLES} cycles an instruction\n")
    for name, phases in (("one rank for its head", one), (f"{options.ranks} ranks", many)):
        print(f"MODELLED, {name}, {options.requests} requests x {options.rows} rows")
        for phase, seconds in phases.items():
            print(f"  {phase:24} {seconds * 1e6:8.2f} us")
        print(f"  {'total':24} {sum(phases.values()) * 1e6:8.2f} us")
    scan = many["3 scan"]
    ratio = sum(one.values()) / sum(many.values())
    fixed = 1e6 * (sum(many.values()) - scan)
    print(f"\nMODELLED fixed cost {fixed:.1f} us, {ratio:.2f} times as fast")
    half = Latency(**{name: value / 2 for name, value in asdict(wait).items()})
    quick = [
        sum(f.values())
        for f in (
            alone(tokens, counts, half),
            shared(tokens, options.rows, options.ranks, counts, half),
        )
    ]
    print(f"MODELLED with half the assumed latencies: {quick[0] / quick[1]:.2f} times as fast")
    cross = {n: crossover(n, options.rows, options.ranks, counts, wait) for n in (1, 8, 45)}
    print(f"MODELLED crossover, tokens a request by requests: {cross}")
    if options.json:
        options.json.write_text(json.dumps({
            "modelled": True, "counts": asdict(counts), "assumed_s": asdict(wait),
            "alone_s": one, "shared_s": many, "ratio": ratio, "crossover_tokens": cross,
        }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
