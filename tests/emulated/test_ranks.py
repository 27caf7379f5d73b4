"""The exchange's gfx950 kernel in two processes, each an emulator, over memory that they share."""

from __future__ import annotations

import torch

from dcp import exchange_gfx950
from dcp.api import DcpError
from dcp.plan import Batch
from dcp.runner import PeerExchange
from dcp.shard import Shard, Site
from gfx950_emu import Schedule
from rocm_msa import aot, emulated, launcher
from rocm_msa.ops import block_topk
from tests.comm.ranks import run_processes
from tests.dcp.exchange_group import Case, inputs, scores_alone

CASE = Case(ranks=2, lens=(2305, 1, 0, 700), rows=2)
LAYERS = 3


def builds() -> list:
    x = inputs(CASE)
    batch = Batch(len(CASE.lens), CASE.rows, x.table.shape[1])
    shard = Shard(0, CASE.ranks, CASE.heads)
    return exchange_gfx950.needs(shard, x.index_q, x.index, batch, CASE.topk)


def rank_of_two(rank: int, ranks: int) -> tuple:
    """Selections of three launches; then rank 1 launches no more, and rank 0's error."""
    x = inputs(CASE)
    loaded = emulated.start(builds())
    exchange = PeerExchange(
        None, CASE.heads, max_rows=8, max_blocks=x.table.shape[1], device="cpu",
        backend="flydsl", grid=2, runtime=emulated.EmulatedPeers(loaded.gpu),
    )  # fmt: skip
    loaded.gpu.map(exchange.status)
    own = exchange.shard.own_heads
    index_q = x.index_q[:, own.start : own.stop].contiguous()

    def select(layer: int) -> torch.Tensor:
        paging = (x.index, x.table, x.seq_lens, CASE.rows, x.num_blocks)
        with launcher.using(loaded):
            return exchange.select(index_q, *paging, *CASE.kept, layer=layer)

    outs = [select(layer) for layer in range(LAYERS)]
    exchange.check()
    error = None
    if rank == 0:
        loaded.gpu.schedule = Schedule(outside_s=0.5)
        assert (select(LAYERS) == -1).all()
        try:
            exchange.check()
        except DcpError as found:
            error = (found.rank, found.peer, found.site, found.generation)
    return outs, error, sum(emulated.tally.launches.values())


def test_two_processes_select_as_one_rank_and_find_out_who_is_gone(tmp_path):
    aot.compile_builds(builds(), tmp_path / "kernels", processes=1)
    x = inputs(CASE)
    wanted = block_topk(scores_alone(CASE), x.num_blocks, *CASE.kept)
    assert (wanted >= 0).any()
    both = run_processes(rank_of_two, CASE.ranks, tmp_path)
    for rank, outcome in enumerate(both):
        assert isinstance(outcome, tuple), outcome
        outs, error, launches = outcome
        own = Shard(rank, CASE.ranks, CASE.heads).own_heads
        for out in outs:
            assert torch.equal(out, wanted[own.start : own.stop])
        assert launches == LAYERS + (rank == 0)
        assert error == ((0, 1, Site.START, LAYERS + 1) if rank == 0 else None)
