"""The compiled mono layer as the plugin launches it on emulated GPUs, one process a rank."""

from __future__ import annotations

import pytest
import torch

from mono_kernel.layer_gfx950 import Build
from rocm_msa import emulated, launcher
from rocm_msa.vllm_plugin import mono
from tests.comm.ranks import run_processes, thread_groups
from tests.mono_kernel.steps import Step

LENS, ROWS = [642, 129], 2
CLOSE = 2.0**-7  # of the outputs' norm: a rounding to bf16 on the way may go the other way
CACHE = 2e-3  # share of cache bytes that a step writes


@pytest.fixture(autouse=True)
def not_offered_afterwards(monkeypatch):
    monkeypatch.setattr(launcher, "_offered", {})


def started(group, step: Step):
    emulated.start([Build.from_shape(step.shape)])
    return mono._between_emulators(group, step.shape, 16)


def launched(runner, step: Step, rank: int) -> dict:
    """Outputs, distances from the reference and differing bytes of a launch."""
    caches, wanted = step.copies()[rank], step.copies()
    r = step.reference(wanted)[rank]
    outs = [torch.full_like(step.hidden, float("nan")) for _ in range(2)]
    weights = runner.load(step.weights[rank])
    runner.run(weights, caches, step.batch, step.hidden, step.residual, *outs)
    runner.check()
    names = ("hidden_out", "residual_out")
    return {
        "outs": outs,
        "distances": [
            float((out.float() - r[n].float()).norm() / r[n].float().norm())
            for n, out in zip(names, outs, strict=True)
        ],
        "chosen": torch.equal(runner.region("chosen")[: step.batch.rows], r["chosen"]),
        "bytes": max(
            float((a.pages != b.pages).float().mean())
            for a, b in zip(caches, wanted[rank], strict=True)
        ),
    }


def good(one: dict) -> bool:
    return max(one["distances"]) < CLOSE and one["chosen"] and one["bytes"] < CACHE


def test_one_rank():
    step = Step("mxfp4", 1, LENS, ROWS, seed=7)
    (group,) = thread_groups(1)
    runner = started(group, step)
    kernel = (Build.from_shape(step.shape).symbol,)
    before = emulated.tally.launches[kernel]
    assert good(launched(runner, step, 0)) and good(launched(runner, step, 0))
    assert emulated.tally.launches[kernel] == before + 2 and runner.generation == 3
    runner.close()


def test_without_an_emulator_it_is_said():
    with pytest.raises(RuntimeError, match="mono: no emulator was started"):
        mono._between_emulators(None, Step("mxfp4", 1, [130]).shape, 16)


def two_launches(rank: int, ranks: int, layout: str) -> list[dict]:
    step = Step(layout, ranks, LENS, ROWS, seed=7)
    runner = started(None, step)
    found = [launched(runner, step, rank) for _ in range(2)]
    runner.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("layout", "ranks"), [("mxfp4", 2), ("nvfp4", 4)])
def test_ranks_sum_through_memory_that_they_share(layout, ranks, tmp_path):
    everyone = run_processes(two_launches, ranks, tmp_path, layout)
    for launches in everyone:
        assert [good(one) for one in launches] == [True, True], launches
        for one, first in zip(launches, everyone[0], strict=True):
            pairs = zip(one["outs"], first["outs"], strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
