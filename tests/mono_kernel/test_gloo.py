"""The runner for CPU tensors: bits of the reference with simulated ranks, and its faults."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mono_kernel.faults import MonoError, sum_site
from mono_kernel.gloo import GlooRunner
from tests.comm.ranks import run_processes
from tests.mono_kernel.steps import Step

NEVER = 0.5  # seconds, for a message that does not come
LONG = 250.0
pytestmark = pytest.mark.timeout(600)


def launch(runner: GlooRunner, step: Step, rank: int, caches) -> list[torch.Tensor]:
    """[hidden_out, residual_out] of a rank."""
    outs = [torch.full_like(step.hidden, float("nan")) for _ in range(2)]
    weights = runner.load(step.weights[rank])
    runner.run(weights, caches, step.batch, step.hidden, step.residual, *outs)
    return outs


def same_bits(step: Step, rank: int, caches, outs) -> bool:
    """Whether outputs and cache bytes are those of the reference."""
    wanted = step.copies()
    r = step.reference(wanted)[rank]
    pairs = zip(caches, wanted[rank], strict=True)
    return (
        torch.equal(outs[0], r["hidden_out"])
        and torch.equal(outs[1], r["residual_out"])
        and all(torch.equal(a.pages, b.pages) for a, b in pairs)
    )


def several_steps(rank: int, ranks: int, layout: str) -> list[bool]:
    """Two steps in a row, of two rows a request."""
    step = Step(layout, ranks, [642, 0, 129], 2, seed=7, room=8)
    runner = GlooRunner(None, step.shape, max_blocks=16, timeout_s=LONG)
    found = []
    for _ in range(2):
        caches = step.copies()[rank]
        outs = launch(runner, step, rank, caches)
        found.append(same_bits(step, rank, caches, outs))
        everyones = step.copies()
        step.reference(everyones)
        step = step.next(everyones)
    runner.check()
    return [*found, runner.generation == 3]


def caught(runner: GlooRunner, step: Step, rank: int) -> tuple:
    """(rank, peer, site, generation, whether it stays) of the error of a launch."""
    try:
        launch(runner, step, rank, step.copies()[rank])
    except MonoError as error:
        again = None
        try:
            runner.check()
        except MonoError as kept:
            again = kept
        return error.rank, error.peer, error.site, error.generation, again is error
    return ()


def steps_then_faults(rank: int, ranks: int) -> dict:
    """Good steps; ranks at other batches; then rank 1 stays away from a launch."""
    found: dict = {"good": several_steps(rank, ranks, "mxfp4")}
    step, longer = (Step("mxfp4", ranks, [n]) for n in (130, 131))
    runner = GlooRunner(None, step.shape, max_blocks=16, timeout_s=LONG)
    launch(runner, step, rank, step.copies()[rank])
    found["other"] = caught(runner, longer if rank == 1 else step, rank)
    runner = GlooRunner(None, step.shape, max_blocks=16, timeout_s=NEVER)
    found["silent"] = caught(runner, step, rank) if rank == 0 else ()
    return found


def test_two_processes_have_the_bits_of_the_reference_and_name_a_peer_that_is_missing(tmp_path):
    zero, one = run_processes(steps_then_faults, 2, tmp_path)
    output = sum_site("output")
    assert zero["good"] == one["good"] == [True] * 3
    assert zero["other"] == (0, 1, output, 2, True)
    assert one["other"] == (1, 0, output, 2, True)
    assert zero["silent"] == (0, 1, output, 1, True)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("nvfp4", 2), ("mxfp8", 4)])
def test_more_ranks_and_formats_have_the_bits_of_the_reference(layout, ranks, tmp_path):
    assert run_processes(several_steps, ranks, tmp_path, layout) == [[True] * 3] * ranks


def test_one_rank_needs_no_group_and_names_bad_input():
    step = Step("mxfp8", 1, [130, 40])
    runner = GlooRunner(None, step.shape, max_blocks=16)
    caches = step.copies()[0]
    assert same_bits(step, 0, caches, launch(runner, step, 0, caches))
    outs = [torch.empty_like(step.hidden) for _ in range(2)]
    call = (step.weights[0], caches, step.batch, step.hidden, step.residual, *outs)
    with pytest.raises(TypeError, match="hidden"):
        runner.run(*call[:3], step.hidden.float(), *call[4:])
    with pytest.raises(ValueError, match="residual_out"):
        runner.run(*call[:6], outs[1][:1])
    with pytest.raises(NotImplementedError, match="main_cache"):
        runner.run(call[0], caches[::-1], *call[2:])
    wide = dataclasses.replace(step.batch, block_table=torch.zeros(2, 17, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block_table.shape\[1\]: expected <= 16, got 17"):
        runner.run(*call[:2], wide, *call[3:])
    with pytest.raises(ValueError, match="shape: expected Shape"):
        runner.load(Step("mxfp4", 1, [130]).weights[0])
    with pytest.raises(ValueError, match="timeout_s: expected > 0, got 0"):
        GlooRunner(None, step.shape, max_blocks=16, timeout_s=0)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.run(*call)
