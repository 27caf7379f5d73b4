"""The mono kernel in the emulator: every region of every phase, all checks on."""

from __future__ import annotations

import pytest
import torch

from tests.launcher.emulated import SCHEDULES
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import RANDOM, Group
from tests.mono_kernel.layers import LAYOUTS
from tests.mono_kernel.steps import RAGGED, Step


def check(layout: str, tp: int, lens, per, schedule=RANDOM, padding: int = 0) -> Group:
    group = Group(Step(layout, tp, lens=lens, rows=per, seed=len(lens), padding=padding))
    group.run(schedule)
    regions.check(group)
    return group


def test_every_region_on_four_ranks():
    """Two requests of two rows: a block edge between rows, a request within its first blocks."""
    check("mxfp4", 4, [642, 129], 2)


def test_requests_of_different_rows():
    """Each has the bits that it has alone, as a batch of one request."""
    group = check("mxfp4", 2, *RAGGED, padding=2)
    step = group.step
    for request in (0, 1, 2, 4):
        alone = Group(step.alone(request))
        alone.run()
        rows = slice(*step.batch.starts[request : request + 2].tolist())
        for rank in range(2):
            for name in ("residual_out", "hidden_out"):
                got, want = group.region(name, rank)[rows], alone.region(name, rank)
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
            got, want = group.region("selected", rank)[:, rows], alone.region("selected", rank)
            assert torch.equal(got, want)


def test_padding_rows_hold_anything():
    """Rows behind the last request's: NaN there changes no bit of the others, nor of the caches."""
    found = []
    for value in (0.5, float("nan")):
        step = Step("mxfp4", 2, *RAGGED, seed=5, padding=3)
        step.hidden[-3:], step.residual[-3:] = value, value
        group = Group(step)
        group.run()
        assert (group.region("selected", 1)[:, -3:] == -1).all()
        outs = [group.region(name, 1)[:-3] for name in ("residual_out", "hidden_out")]
        found.append([*outs, *[cache.pages for r in group.ranks for cache in r.caches]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_region(layout, tp):
    check(layout, tp, [642, 129], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lens", "per"),
    [
        ([1], 1),  # the first token: its own block, inserted by this launch
        ([2049, 2048, 2047], 1),  # 17 and 16 blocks
        ([5000], 4),  # more blocks than slots
        ([300, 0, 1024], 3),  # a padded request
        ([130] * 16, 1),
        ([3000, 700], 8),
        RAGGED,
        ([5000, 2050, 129], [1, 11, 4]),
        ([12], [12]),  # a whole prompt
    ],
    ids=str,
)
def test_batches(lens, per):
    check("nvfp4", 4, lens, per)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_schedules(schedule):
    first = check("mxfp4", 2, *RAGGED, RANDOM)
    group = check("mxfp4", 2, *RAGGED, schedule)
    for name in ("residual_out", "hidden_out", "selected"):
        assert torch.equal(group.region(name, 1), first.region(name, 1))
