"""A step of several layers through the runner and the product's launcher, recorded and replayed.

What a graph of the HIP runtime keeps of a launch is the function, the grid and the bytes of its
arguments; that is what is kept here, from the runtime's own call on. Lengths and queries change in
place between replays, as they do for a captured step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from dcp import exchange_gfx950
from dcp.plan import Batch, Results
from dcp.runner import PeerExchange
from gfx950_emu import Machine, Schedule
from rocm_msa import launcher
from rocm_msa.aot import compile_builds
from rocm_msa.ops import attention_checks, block_topk, dispatch, index_score_decode
from rocm_msa.ops import rows as row_checks
from rocm_msa.ops.index_score_decode import flydsl_gfx950 as score_module
from tests.comm import fake_peers
from tests.comm.ranks import run_threads
from tests.dcp.exchange_group import DIM, Case, QueueHip, inputs
from tests.dcp.test_runner import _Seen, reachable
from tests.launcher.emulated import Recording, emulated

CASE = Case(ranks=2, heads=2, lens=(128 * 9 + 5, 0, 128 * 4), rows=2)
LAYERS = 3


@pytest.fixture
def recorder():
    """The product's launcher on a runtime that keeps launches for the emulator."""
    x = inputs(CASE)
    batch = Batch(len(CASE.lens), CASE.rows, x.table.shape[1])
    fake = QueueHip(run_kernels=False, machine=Machine())
    with tempfile.TemporaryDirectory() as folder:
        shard = exchange_gfx950.Shard(0, CASE.ranks, CASE.heads)
        builds = exchange_gfx950.needs(
            shard, x.index_q, x.index, batch, CASE.topk, Results.CANDIDATES
        )
        compile_builds(builds, Path(folder), processes=1)
        loaded = Recording(Path(folder), fake)
    with launcher.using(loaded):
        yield fake


@pytest.fixture
def ends(recorder):
    def make(group):
        return PeerExchange(
            group, CASE.heads, max_rows=8, max_blocks=16, device="cpu", topk=CASE.topk,
            head_dim=DIM, backend="flydsl", results=Results.CANDIDATES, patience_ms=20, grid=2,
            runtime=fake_peers.runtime(),
        )  # fmt: skip

    made = run_threads(make, CASE.ranks)
    yield made
    for _ in range(2):
        run_threads(lambda group: made[group.rank].close(), CASE.ranks)


def test_a_recorded_step_replayed_with_other_lengths_and_queries(recorder, ends, monkeypatch):
    x = inputs(CASE)
    for module in (dispatch, row_checks, attention_checks):
        if hasattr(module, "on_host"):  # values of tensors are read on the CPU alone
            monkeypatch.setattr(module, "on_host", lambda tensor: False)
    num_blocks, queries, outs = x.num_blocks.clone(), [], {}
    for end in ends:
        recorder.rank = end.shard.rank
        for memory in reachable(ends, end):
            recorder.gpu.map(memory)
        q = x.index_q[:, list(end.shard.own_heads)].contiguous()
        queries.append(q)
        end.prepare(q, x.index, x.table, x.seq_lens, CASE.rows, num_blocks, *CASE.kept)
        for layer in range(LAYERS):
            out = torch.empty(1, len(q), CASE.topk, dtype=torch.int32)
            outs[end.shard.rank, layer] = out
            with _Seen() as seen:
                end.select(
                    q, x.index, x.table, x.seq_lens, CASE.rows, num_blocks, *CASE.kept,
                    layer=layer, out=out,
                )  # fmt: skip
            # Nothing is allocated, computed or read on the host's side.
            assert seen.names <= {"view", "_local_scalar_dense", "alias", "detach"}, sorted(
                seen.names
            )
    assert len(recorder.calls) == CASE.ranks * LAYERS

    for replay in range(4):
        step = torch.Generator().manual_seed(replay)
        fewer = torch.randint(0, 4, num_blocks.shape, generator=step, dtype=torch.int32)
        num_blocks.copy_((x.num_blocks - fewer).clamp(min=0))
        index_q = torch.randn(x.index_q.shape, generator=step).to(x.index_q.dtype)
        for end, q in zip(ends, queries, strict=True):
            q.copy_(index_q[:, list(end.shard.own_heads)])
        arguments = (index_q, x.index, x.table, x.seq_lens, CASE.rows)
        with emulated(score_module.needs(*arguments)):
            scores = index_score_decode(*arguments, backend="flydsl")
        wanted = block_topk(scores, num_blocks, *CASE.kept)
        recorder.machine.schedule = Schedule("random", replay, (1, 2000))
        recorder.machine.run().raise_for_findings()
        for (rank, layer), out in outs.items():
            own = list(ends[rank].shard.own_heads)
            assert torch.equal(out, wanted[own]), (replay, rank, layer)
        for end in ends:
            end.check()
            assert end.generation == 1 + LAYERS * (replay + 1)
    assert len(recorder.calls) == CASE.ranks * LAYERS  # replays make no call
