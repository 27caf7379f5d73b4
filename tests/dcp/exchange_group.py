"""Ranks of the gfx950 exchange in one emulated machine, and what one rank alone selects.

case = Case(ranks=4, lens=(2305, 0, 5000), rows=2)
group = Group(case)
group.queue()                                # one launch a rank
report = group.run(schedule)
group.wrong()                                # ranks whose selection is not that of one rank
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from dcp import exchange_gfx950
from dcp.mailbox_layout import Geometry
from dcp.plan import Batch, Results
from gfx950_emu import Machine
from rocm_msa import launcher
from rocm_msa.aot import compile_builds
from rocm_msa.ops import block_topk, index_score_decode
from rocm_msa.ops.index_score_decode import flydsl_gfx950 as score_module
from rocm_msa.ops.rows import decode_rows
from tests.dcp.emulated_ranks import Ranks
from tests.launcher.emulated import FakeHip, Recording, assert_clean, emulated
from tests.ops.cases import guarded, guards_intact, make_batch, queries, random_values

DIM = 128
CANDIDATES, SCORES = Results.CANDIDATES, Results.SCORES
PATIENCE_MS = 20


@dataclass(frozen=True)
class Case:
    """A batch and how a group takes it. rows: a request; grid: workgroups a rank."""

    ranks: int = 4
    heads: int = 4
    lens: tuple[int, ...] = (2305, 1, 0, 5000)
    rows: int = 1
    kind: str = "nvfp4"
    query: torch.dtype = torch.bfloat16
    results: Results = CANDIDATES
    topk: int = 16
    init: int = 0
    local: int = 1
    grid: int = 2
    seed: int = 0
    content: str = "random"
    pages: int = 0  # with so many pages, that the blocks share; 0: each block its own

    @property
    def kept(self) -> tuple[int, int, int]:
        return self.topk, self.init, self.local

    def geometry(self, spare_rows: int = 3) -> Geometry:
        slots = -(-inputs(self).table.shape[1] // self.ranks)
        words = slots if self.results is SCORES else 0
        rows = len(self.lens) * self.rows + spare_rows
        return Geometry(self.ranks, self.heads, rows, slots + 1, self.topk, DIM // 2, words)


@dataclass(frozen=True)
class Inputs:
    index: object
    table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: torch.Tensor
    index_q: torch.Tensor  # all heads


@functools.lru_cache(maxsize=64)
def inputs(case: Case) -> Inputs:
    stored = [case.pages * 128] if case.pages else list(case.lens)
    batch = make_batch(stored, dtype=case.kind, head_dim=DIM, seed=case.seed)
    if case.pages:
        pages = batch.table[0, : case.pages]
        blocks = [-(-max(case.lens) // 128) + 1] * len(case.lens)
        chosen = random_values(case.seed + 9, len(blocks), max(blocks)).argsort(-1) % case.pages
        batch.table, batch.lens = pages[chosen], list(case.lens)
    rows = len(case.lens) * case.rows
    index_q = queries(case.seed + 5, rows, case.heads, DIM, dtype=case.query)
    if case.content == "ties":  # four different scores, over and over
        batch.index.pages.copy_(batch.index.pages[:1].expand_as(batch.index.pages))
        index_q[1::2] = 0
    elif case.content == "zero":
        index_q.zero_()
    elif case.content == "nan":  # a whole head, and one row of the others
        index_q[:, 0, 3] = torch.nan
        index_q[0] = torch.nan
    elif case.content == "extreme":
        index_q[:, 0] *= 1e38
        index_q[:, -1] *= -1e-38
        index_q[0, :, 7] = torch.inf
    num_blocks = decode_rows(batch.seq_lens, case.rows).num_blocks.int()
    return Inputs(batch.index, batch.table, batch.seq_lens, num_blocks, index_q)


@functools.lru_cache(maxsize=64)
def scores_alone(case: Case) -> torch.Tensor:
    """One rank's scores of all heads, by the kernel that scores on gfx950."""
    x = inputs(case)
    arguments = (x.index_q, x.index, x.table, x.seq_lens, case.rows)
    with emulated(score_module.needs(*arguments)) as reports:
        scores = index_score_decode(*arguments, backend="flydsl")
    if reports:
        assert_clean(reports)
    return scores


@dataclass
class QueueHip(FakeHip):
    """A HIP runtime that queues launches for a rank of a machine."""

    machine: Machine | None = None
    rank: int = 0
    delay: int = 0

    def _launch(self, function, geometry, lds, stream, kernarg, size) -> int:
        super()._launch(function, geometry, lds, stream, kernarg, size)
        call = self.calls[-1]
        self.gpu.queue(
            self.machine, function, call.grid, call.block, lds, call.kernarg,
            rank=self.rank, delay=self.delay,
        )  # fmt: skip
        return 0


class Group(Ranks):
    """The ranks of a case. `geometry`, `generation`, `stale`: see Ranks."""

    def __init__(self, case: Case, geometry: Geometry | None = None, **memory) -> None:
        super().__init__(geometry or case.geometry(), **memory)
        self.case = case
        self.outputs: list[dict] = [{} for _ in range(case.ranks)]  # by rank: case -> guarded out
        self.num_blocks: dict[Case, torch.Tensor] = {}  # to be changed between replays

    @contextlib.contextmanager
    def queueing(self, rank: int, delay: int = 0, builds=()):
        fake = QueueHip(run_kernels=False, machine=self.machine, rank=rank, delay=delay)
        for memory in (*self.mailboxes, self.status[rank]):
            fake.gpu.map(memory)
        with tempfile.TemporaryDirectory() as folder:
            compile_builds(list(builds), Path(folder), processes=1)
            loaded = Recording(Path(folder), fake)
        with launcher.using(loaded):
            yield fake

    def queue(self, case: Case | None = None, ranks=None, layer: int = 0, delay: int = 0) -> None:
        """A launch of `case` on some ranks, all by default. Outputs are shared by its launches."""
        case = case or self.case
        x = inputs(case)
        num_blocks = self.num_blocks.setdefault(case, x.num_blocks.clone())
        batch = Batch(len(case.lens), case.rows, x.table.shape[1])
        for rank in range(case.ranks) if ranks is None else ranks:
            shard = self.shard(rank)
            own = x.index_q[:, list(shard.own_heads)].contiguous()
            if rank not in {shard.pusher(h) for h in shard.own_heads}:
                own.fill_(torch.nan)  # what a head's other owners hold plays no part
            shape = [shard.heads_per_rank, batch.rows, case.topk]
            buffer, out = guarded(shape, torch.int32)
            out = self.outputs[rank].setdefault(case, (buffer, out, own))[1]
            own = self.outputs[rank][case][2]
            needs = exchange_gfx950.needs(shard, own, x.index, batch, case.topk, case.results)
            self.builds = needs
            with self.queueing(rank, delay, needs):
                exchange_gfx950.run(
                    shard, self.geometry, self.memory(rank), own, x.index, x.table, num_blocks,
                    batch, *case.kept, out, layer=layer, results=case.results,
                    patience_ms=PATIENCE_MS, grid=case.grid,
                )  # fmt: skip

    def selected(self, rank: int, case: Case | None = None) -> torch.Tensor:
        buffer, out, _ = self.outputs[rank][case or self.case]
        assert guards_intact(buffer)
        return out

    def wanted(self, rank: int, case: Case | None = None) -> torch.Tensor:
        """What one rank alone selects. Candidates are full blocks, so that their scores hold for
        shorter lengths than those of the case, too."""
        case = case or self.case
        ids = block_topk(scores_alone(case), self.num_blocks[case], *case.kept)
        return ids[list(self.shard(rank).own_heads)]

    def wrong(self, case: Case | None = None) -> list[int]:
        """Ranks whose selection differs from that of one rank alone."""
        case = case or self.case
        pairs = [(self.selected(r, case), self.wanted(r, case)) for r in range(case.ranks)]
        return [rank for rank, (got, want) in enumerate(pairs) if not torch.equal(got, want)]

    def forget(self) -> None:
        """Let outputs hold what no launch writes."""
        for found in self.outputs:
            for _, out, _ in found.values():
                out.fill_(-7)
