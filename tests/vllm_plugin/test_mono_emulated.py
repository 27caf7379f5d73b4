"""The compiled mono layer as the plugin launches it on emulated GPUs, one process a rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mono_kernel.layer_gfx950 import Build
from mono_kernel.shapes import Shape
from rocm_msa import emulated, launcher
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.vllm_plugin import emulated as plugin
from rocm_msa.vllm_plugin import mono
from tests.comm.ranks import run_processes, thread_groups
from tests.mono_kernel.steps import Step
from tests.vllm_plugin.engine import engine, generate
from tests.vllm_plugin.test_mono_engine import MONO, judged, prompt

LENS, ROWS = [642, 129], 2
CLOSE = 2.0**-7  # of the outputs' norm: a rounding to bf16 on the way may go the other way
CACHE = 2e-3  # share of cache bytes that a step writes


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Nothing offered and nothing counted, before and afterwards."""
    monkeypatch.setattr(launcher, "_offered", {})
    monkeypatch.setattr(emulated.tally, "launches", Counter())
    monkeypatch.setattr(mono, "steps", Counter())


def started(group, *shapes: Shape) -> list:
    """A runner of each shape."""
    emulated.start([Build.from_shape(shape) for shape in shapes])
    return [plugin.mono_runner(group, shape, 16) for shape in shapes]


def launched(runner, step: Step, rank: int) -> dict:
    """Outputs, distances from the reference and differing bytes of a launch."""
    caches, wanted = step.copies()[rank], step.copies()
    r = step.reference(wanted)[rank]
    outs = [torch.full_like(step.hidden, float("nan")) for _ in range(2)]
    packed = step.weights[rank].packed()
    runner.run(packed, caches, step.batch, step.hidden, step.residual, *outs)
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
    (runner,) = started(group, step.shape)
    kernel = (Build.from_shape(step.shape).symbol,)
    assert good(launched(runner, step, 0)) and good(launched(runner, step, 0))
    assert emulated.tally.launches == {kernel: 2} and runner.generation == 3
    runner.close()


def launches_in_turns(rank: int, ranks: int, layout: str) -> list[dict]:
    """Of the runner that scans alone, between two of the one that shares the scan."""
    step = Step(layout, ranks, LENS, ROWS, seed=7)
    alone, sharing = started(None, step.shape, step.shape.sharing())
    found = [launched(runner, step, rank) for runner in (sharing, alone, sharing)]
    for runner in (alone, sharing):
        runner.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_sum_and_share_the_scan_through_memory_that_they_share(tmp_path):
    everyone = run_processes(launches_in_turns, 2, tmp_path, "mxfp4")
    wanted = [out.view(torch.uint8) for out in everyone[0][0]["outs"]]
    for launches in everyone:
        assert [good(one) for one in launches] == [True] * 3, launches
        for one in launches:  # the same bits on all ranks and either way
            got = [out.view(torch.uint8) for out in one["outs"]]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_whose_ops_and_mono_layers_are_emulated(tmp_path):
    """Prompts through the ops' kernels, then decode steps through the layer's; short prompts too,
    as requests of different numbers of rows."""
    checkpoint = str(tmp_path / "mxfp4")
    make_checkpoint(checkpoint, "tiny", "mxfp4", intermediate_size=256)
    asked, short = [prompt(40, 1), prompt(130, 2)], [prompt(9, 3), prompt(4, 4)]
    options = MONO | {"additional_config": {"rocm_msa": {"mono": True, "backend": "emulated"}}}
    with engine(checkpoint, **options) as llm:
        answers = generate(llm, asked, 3) + generate(llm, short, 2)
    assert mono.steps == {
        ("layers", "prefill"): 1, ("mono", "decode"): 3, ("mono", "ragged"): 1,
    }  # fmt: skip
    launches = emulated.tally.launches
    assert [n for (k,), n in launches.items() if k.startswith("mono_layer_")] == [4 * 3]
    assert len(launches) > 3  # the prompts went through the kernels of the ops
    judged(checkpoint, asked + short, answers)
