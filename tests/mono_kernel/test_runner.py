"""The runner over a fake peer memory, its launches in the emulator."""

from __future__ import annotations

import contextlib

import pytest
import torch

from gfx950_emu import Machine, Schedule
from mono_kernel import plan, runner
from mono_kernel.faults import MonoError
from mono_kernel.runner import MonoRunner
from rocm_msa.comm.peer_memory import PeerMemoryError
from tests.comm import fake_peers
from tests.comm.ranks import run_threads
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import RANDOM, Group, compiled, packed_arguments
from tests.mono_kernel.steps import Step

RANKS, WORKGROUPS, PATIENCE = 4, 8, 20


@pytest.fixture(autouse=True)
def nothing_left():
    before = fake_peers.live()
    yield
    assert fake_peers.live() == before


def make(group, step: Step, **change) -> MonoRunner:
    how = {"max_blocks": 16, "device": "cpu", "patience_ms": PATIENCE, "workgroups": WORKGROUPS}
    return MonoRunner(group, step.shape, **how | change, runtime=fake_peers.runtime())


@contextlib.contextmanager
def runners(step: Step, **change):
    """One a rank, all in this process."""
    made = run_threads(lambda group: make(group, step, **change), RANKS)
    try:
        for one in made:
            assert isinstance(one, MonoRunner), one
        yield made
    finally:
        for _ in range(2):
            run_threads(lambda group: made[group.rank].close(), RANKS)


def launch(made, group: Group, monkeypatch, ranks=range(RANKS), schedule: Schedule = RANDOM):
    """One launch on some ranks, all at once; outputs and regions are found in `group`."""
    machine = Machine(schedule=schedule)
    boxes = [one._peers.view(0, (one._peers.nbytes,), torch.uint8) for one in made]

    def queue(build, grid, args, device):
        entry, code = compiled(build)
        rank = args[[a.name for a in entry.arguments].index("rank")]
        machine.launch(
            code, entry.symbol, (*grid, 1, 1), entry.block, packed_arguments(args, entry),
            lds_bytes=entry.dynamic_lds, rank=rank, buffers=[*boxes, made[rank].status],
        )  # fmt: skip

    monkeypatch.setattr(runner.launcher, "launch", queue)
    step = group.step
    for rank in ranks:
        r = group.ranks[rank]
        r.memory = made[rank].memory
        weights = made[rank].load(step.weights[rank])
        outs = (r.hidden_out, r.residual_out)
        made[rank].run(weights, r.caches, step.batch, step.hidden, step.residual, *outs)
    return machine.run()


def test_launches_a_fault_and_a_reset(monkeypatch):
    step = Step("mxfp4", RANKS, [642, 129], 2, seed=7, room=8)
    with runners(step) as made:
        group = Group(step)
        launch(made, group, monkeypatch).raise_for_findings()
        regions.check(group)
        assert [one.generation for one in made] == [2] * RANKS
        assert torch.equal(made[1].region("chosen")[:4], group.region("chosen", 1))
        for one in made:
            one.check()
        # Rank 3 stays away.
        assert not launch(made, group, monkeypatch, ranks=(0, 1, 2)).findings
        for one in made[:3]:
            with pytest.raises(MonoError, match="waited in vain for rank 3 at the sum over ranks"):
                one.check()
            with pytest.raises(MonoError):
                launch(made, group, monkeypatch, ranks=(one.memory.rank,))
        outcomes = run_threads(lambda group: made[group.rank].reset(), RANKS)
        assert outcomes == [None] * RANKS
        group = Group(step)
        launch(made, group, monkeypatch).raise_for_findings()
        regions.check(group)
        assert [one.generation for one in made] == [2] * RANKS


def test_a_launch_that_shares_the_index_scan(monkeypatch):
    how = {"lens": [2690, 129], "seed": 2, "room": 8}
    step = Step("mxfp4", RANKS, exchange=True, **how)
    with runners(step, max_blocks=32) as made:
        group, alone = Group(step), Group(Step("mxfp4", RANKS, **how))
        alone.run()
        for _ in range(2):
            launch(made, group, monkeypatch).raise_for_findings()
            for name in ("selected", "residual_out", "hidden_out"):
                for rank in range(RANKS):
                    assert torch.equal(group.region(name, rank), alone.region(name, rank)), name
        for one in made:
            one.check()


def test_bad_input_is_named():
    step = Step("mxfp4", RANKS, [130])
    with runners(step) as made:
        one = made[0]
        other = Step("mxfp4", 2, [130])
        with pytest.raises(ValueError, match=r"weights.shape: expected Shape\(tp=4"):
            one.load(other.weights[0])
        r = Group(step).ranks[0]
        weights, outs = one.load(step.weights[0]), (r.hidden_out, r.residual_out)
        call = (weights, r.caches, step.batch, step.hidden, step.residual, *outs)
        with pytest.raises(TypeError, match="hidden"):
            one.run(*call[:3], step.hidden.float(), *call[4:])
        with pytest.raises(ValueError, match="weights"):
            one.run(weights[:-1], *call[1:])
        with pytest.raises(NotImplementedError, match="main_cache"):
            one.run(weights, r.caches[::-1], *call[2:])
        one.max_blocks = 1
        with pytest.raises(ValueError, match=r"block_table.shape\[1\]: expected <= 1, got 3"):
            one.run(*call)
    with pytest.raises(RuntimeError, match="closed"):
        one.run(*call)


def test_ranks_that_disagree_all_say_so():
    step = Step("mxfp4", RANKS, [130])
    outcomes = run_threads(lambda group: make(group, step, patience_ms=1 + group.rank % 2), RANKS)
    for outcome in outcomes:
        assert isinstance(outcome, PeerMemoryError) and "patience_ms" in str(outcome)
    outcomes = run_threads(lambda group: make(group, step), 2)
    assert all("group: expected 4 ranks" in str(outcome) for outcome in outcomes)
    assert plan.grid() == 256
