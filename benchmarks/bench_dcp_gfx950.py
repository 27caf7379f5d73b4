"""The indexer's exchange on gfx950: instructions COUNTED in the emulator, times MODELLED.

    python benchmarks/bench_dcp_gfx950.py [--ranks 4] [--requests 45] [--rows 4] [--json FILE]

Nothing here was measured on a GPU. A layer's scan and selection of one rank, NVFP4 index pages,
requests of 30K to 210K tokens evenly spread, alone (every rank for its own head; the faster of
index_score_decode with block_topk, and select_decode, which is one launch) and shared (one launch
of the exchange):

    scan      index pages read / 8 TB/s (datasheet), or vector instructions, counted, at the
              emulator's issue cost: what ends later
    links     bytes to one peer / 76.8 GB/s (datasheet, one Infinity Fabric link each way)
    select    instructions of one wave on the critical path, counted, CYCLES each
    latency   of each dependent step: ASSUMED, see `Latency`; counted from the protocol's phases

A wave of the exchange asks for its first block before it waits for queries, so the pages come from
the memory meanwhile: a phase of the table is what it adds to the time, not how long it takes.
What both have in common (the first launch's start, the end of the last) is left out of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dcp.exchange_gfx950 import workgroups
from dcp.shard import Shard
from gfx950_emu import Checks, Schedule
from gfx950_emu.report import Cost
from rocm_msa import ops
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import index_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.ops import flydsl_host as host
from rocm_msa.ops.block_topk import flydsl_gfx950 as topk_module
from rocm_msa.ops.index_select_decode import flydsl_gfx950 as fused_module
from rocm_msa.ops.rows import decode_rows
from tests.dcp.exchange_group import Case, Group
from tests.launcher.emulated import emulated
from tests.ops.cases import make_batch, queries

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

    block: int  # vector instructions to score a block
    own: int  # the best of a rank's blocks
    merge: int  # of all ranks' candidates
    alone_first: int  # block_topk: a wave of the first step, and the last wave
    alone_last: int
    fused: int  # select_decode: a workgroup's list of 64 blocks, and the selection among lists


def count(ranks: int, blocks: int) -> Counts:
    """Of one request of `blocks` blocks, by differences between launches."""

    def launched(case: Case):
        group = Group(case)
        group.queue()
        report = group.run(FAST)
        report.raise_for_findings()
        return report.launches[0]

    def case(ranks: int, blocks: int) -> Case:
        return Case(ranks=ranks, lens=(BLOCK_TOKENS * (blocks + 1),), grid=1)

    def a_row(ranks: int, blocks: int) -> int:
        """Of one row more: a selection for each of 4 heads, and a merge for each own head."""
        few, many = (launched(replace(case(ranks, blocks), rows=n)).useful for n in (2, 4))
        return (many - few) // 2

    # With as many blocks a rank, two ranks differ from four by one more own head.
    merge = a_row(2, 2 * 8) - a_row(4, 4 * 8)
    own = (a_row(ranks, blocks) - merge * max(1, 4 // ranks)) // 4
    # Blocks of one rank alone, as many as one turn of its selection takes.
    few, many = (launched(case(ranks, ranks * n)).pipes["valu"] for n in (32, 64))
    first, last = alone_topk()
    return Counts((many - few) // 32, own, merge, first, last, alone_fused())


def alone_topk() -> tuple[int, int]:
    def executed(nb: int) -> int:
        scores = torch.randn(1, 1, 8192)
        lengths = torch.tensor([nb + 1], dtype=torch.int32)
        build = topk_module.needs(scores, lengths, 16, 0, 1)
        with emulated(build, schedule=FAST, checks=Checks.NONE) as reports:
            ops.block_topk(scores, lengths, backend="flydsl")
        return reports[0].launches[0].useful

    wave = 64 * 8  # blocks of a wave
    one, four_waves = executed(wave - 1), executed(4 * wave - 1)
    first = (four_waves - one) // 3
    return first, one - first


def alone_fused() -> int:
    """By the difference of one row more, of a request with one workgroup of 64 blocks."""

    def executed(rows: int) -> int:
        batch = make_batch([BLOCK_TOKENS * 64], dtype="nvfp4", head_dim=128)
        index_q = queries(1, rows, 1, 128, dtype=torch.bfloat16)
        arguments = (index_q, batch.index, batch.table, batch.seq_lens, rows)
        counts = decode_rows(batch.seq_lens, rows).num_blocks.int()
        build = fused_module.needs(*arguments, 16)
        with (
            mock.patch.object(host, "run_length", return_value=64),
            emulated(build, schedule=FAST, checks=Checks.NONE) as reports,
        ):
            ops.select_decode(
                *arguments, counts, counters=torch.zeros(1, dtype=torch.int32), backend="flydsl"
            )
        return reports[0].launches[0].useful

    return (executed(3) - executed(1)) // 2


def lengths(requests: int, low: int = 30_000, high: int = 210_000) -> list[int]:
    return [low + (high - low) * i // max(1, requests - 1) for i in range(requests)]


def read_time(blocks: float) -> float:
    return blocks * PAGE / GFX950.hbm_bytes_per_s


def issue_time(blocks: float, counts: Counts) -> float:
    """Vector instructions of so many blocks, spread over all SIMDs."""
    return blocks * counts.block * Cost().valu / (4 * GFX950.compute_units * GFX950.clock_hz)


def rounded(blocks: int, groups: int) -> int:
    """Blocks in the time that the fullest workgroup takes: its waves go in turns."""
    fullest = -(-blocks // groups)
    return max(blocks, -(-fullest // 4) * 4 * min(groups, blocks) if fullest < 8 else 0)


def instructions(number: int) -> float:
    return number * CYCLES / GFX950.clock_hz


def alone(tokens: list[int], counts: Counts, wait: Latency) -> dict[str, float]:
    """One rank for its own head, by the faster of two ways; rows * heads <= 4 for the fused one."""
    blocks = sum(-(-n // BLOCK_TOKENS) for n in tokens)
    scan = {
        "lengths, queries": wait.near,
        "table, first page": 2 * wait.near,
        "scan": max(read_time(blocks), issue_time(blocks, counts)),
    }
    two = {
        **scan,
        "launch of block_topk": wait.boundary,
        "scores": wait.near,
        "select": instructions(counts.alone_first + counts.alone_last),
    }
    one = {
        **scan,
        "publish lists, count": wait.publish + 2 * wait.near,
        "list, select": instructions(counts.fused),
    }
    return min(one, two, key=lambda phases: sum(phases.values()))


def shared(tokens: list[int], rows: int, ranks: int, counts: Counts, wait: Latency):
    """Seconds that each phase of the exchange adds, on rank 0, which has the most blocks."""
    shard = Shard(0, ranks, 4)
    owned = [shard.owned_blocks(-(-n // BLOCK_TOKENS) - 1) for n in tokens]
    groups = workgroups(len(tokens), max(owned))
    blocks, waves = rounded(sum(owned), groups), 4 * groups
    pairs = len(tokens) * rows * shard.heads_per_rank
    link = GFX950.fabric_link_bytes_per_s
    turns = -(-len(tokens) * rows * shard.heads // waves)
    merges = -(-pairs // waves)
    # Batch, errors, queries and generation are one round; then a table entry, then pages.
    asked = 2 * wait.near
    first = min(waves, blocks)
    first_there = asked + wait.near + read_time(first)
    # A query is looked for again until it is there; the first look waits for the pages before it.
    queries_there = wait.near + pairs * QUERY_BYTES / link + wait.fabric + wait.near
    begin = max(first_there, queries_there)
    end = max(
        asked + wait.near + read_time(blocks),
        begin + issue_time(blocks, counts),
        begin + read_time(blocks - first),
    )
    return {
        "0, 1 batch, table, push": asked,
        "2, 3 first page, queries": begin - asked,
        "3 scan beyond these": end - begin,
        "4 publish keys": wait.publish + 2 * wait.near,
        "4 best of own": turns * instructions(counts.own),
        "4 send": pairs * CANDIDATE_BYTES / link + wait.fabric,
        "5 merge": wait.near + merges * instructions(counts.merge),
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
    ratio = sum(one.values()) / sum(many.values())
    blocks = sum(-(-n // BLOCK_TOKENS) for n in tokens)
    scan = read_time(blocks / options.ranks)
    fixed = 1e6 * (sum(many.values()) - scan)
    print(
        f"\nMODELLED fixed cost {fixed:.1f} us beyond {scan * 1e6:.1f} us to read a rank's pages,"
    )
    print(f"{ratio:.2f} times as fast")
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
