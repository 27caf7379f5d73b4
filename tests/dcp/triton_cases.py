"""Batches for the Triton exchange in the emulator, and what one rank alone selects for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dcp import exchange_triton
from dcp.mailbox_layout import Geometry
from dcp.plan import Batch, Results, choose_results
from gfx950_emu import Report, Schedule
from rocm_msa import ops
from rocm_msa.code_object import kernel_metadata
from rocm_msa.ops.rows import decode_rows
from tests.dcp.emulated_ranks import Ranks
from tests.ops.cases import make_batch, queries
from tests.ops.emulated_triton import CACHES, emulated

DIM = 128
UNWRITTEN = 1234567  # in `out`; no block id


@dataclass(frozen=True)
class Case:
    """A batch: `kept` is (topk, init_blocks, local_blocks).

    content: random; ties (all blocks of a request but the last are one page), extreme (queries
    with infinities and NaN), gone (every third block has no page).
    """

    lens: tuple[int, ...]
    rows: int = 1
    kind: str = "nvfp4"
    heads: int = 4
    kept: tuple[int, int, int] = (4, 0, 1)
    content: str = "random"
    dtype: torch.dtype = torch.bfloat16

    @functools.cached_property
    def tensors(self):
        """(index_q of all heads, index cache, block table, seq_lens, num_blocks)."""
        made = make_batch(list(self.lens), dtype=self.kind, kv_heads=1, head_dim=DIM, gap=48)
        index_q = queries(3, len(self.lens) * self.rows, self.heads, DIM, dtype=self.dtype)
        table = made.table
        if self.content == "ties":
            for request, length in enumerate(self.lens):
                table[request, : max(0, length - 1) // 128] = table[request, 0]
        if self.content == "gone":
            table[:, 1::3] = -1
        if self.content == "extreme":
            index_q[0, 0, 3], index_q[-1, -1, 7] = float("inf"), float("nan")
            index_q[-1, 0] = 0.0
        num_blocks = decode_rows(made.seq_lens, self.rows).num_blocks.int()
        return index_q, made.index, table, made.seq_lens, num_blocks

    @functools.cached_property
    def alone(self) -> torch.Tensor:
        """int32 `[heads, rows, topk]`: selection of the single-rank kernels."""
        index_q, cache, table, lens, num_blocks = self.tensors
        with emulated(large=frozenset(CACHES)):
            scores = ops.index_score_decode(
                index_q, cache, table, lens, self.rows, backend="triton"
            )
        return ops.block_topk(scores, num_blocks, *self.kept, backend="reference")

    @property
    def batch(self) -> Batch:
        return Batch(len(self.lens), self.rows, self.tensors[2].shape[1])

    def geometry(self, ranks: int, spare: int = 1) -> Geometry:
        """Room for this batch and a little more."""
        words = exchange_triton.query_words(DIM)
        slots = -(-self.batch.max_blocks // ranks) + spare
        rows = self.batch.rows + spare
        return Geometry(ranks, self.heads, rows, slots, self.kept[0], words, slots)

    def form(self, ranks: int) -> Results:
        return choose_results(Ranks(self.geometry(ranks)).shard(0), self.batch.max_blocks, 4)


def queue(
    ranks: Ranks,
    case: Case,
    *,
    form: Results | None = None,
    grid: int = 3,
    layer: int = 0,
    patience_ms: int = 1000,
    only: range | None = None,
    delays: dict[int, int] | None = None,
) -> list[torch.Tensor]:
    """Queue a launch on each rank; returns what they will write."""
    index_q, cache, table, _, num_blocks = case.tensors
    topk, init_blocks, local_blocks = case.kept
    outs = []
    for rank in only or range(ranks.geometry.ranks):
        shard = ranks.shard(rank)
        own = shard.own_heads
        out = torch.full(
            (len(own), case.batch.rows, topk), UNWRITTEN, dtype=torch.int32
        )  # fmt: skip
        with ranks.queueing(rank, (delays or {}).get(rank, 0)):
            exchange_triton.run(
                shard, ranks.geometry, ranks.memory(rank),
                index_q[:, own.start : own.stop].contiguous(), cache, table, num_blocks,
                case.batch, topk, init_blocks, local_blocks, out, layer=layer, results=form,
                grid=grid, patience_ms=patience_ms,
            )  # fmt: skip
        outs.append(out)
    return outs


def check(ranks: Ranks, case: Case, outs: list[torch.Tensor], report: Report) -> None:
    """No finding, no error, one rank's selection on each."""
    report.raise_for_findings()
    assert ranks.errors() == [None] * ranks.geometry.ranks
    for rank, out in enumerate(outs):
        own = ranks.shard(rank).own_heads
        assert torch.equal(out, case.alone[own.start : own.stop]), rank


def exchange(
    case: Case, ranks: int, schedule: Schedule | None = None, *, form: Results | None = None,
    grid: int = 3, generation: int = 1,
) -> Ranks:  # fmt: skip
    """One launch on every rank, checked."""
    group = Ranks(case.geometry(ranks), generation)
    outs = queue(group, case, form=form, grid=grid)
    check(group, case, outs, group.run(schedule))
    for compiled in group.compiled.values():
        facts = kernel_metadata(compiled.code_object, compiled.kernel)
        assert facts[".private_segment_fixed_size"] == facts[".vgpr_spill_count"] == 0, facts
    assert group.generations() == [generation + 1] * ranks
    return group


def without(case: Case, **change) -> Case:
    """The same case with other fields."""
    return replace(case, **change)
