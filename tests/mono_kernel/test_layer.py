"""The mono kernel in the emulator: every region of every phase, all checks on."""

from __future__ import annotations

import pytest
import torch

from tests.launcher.emulated import SCHEDULES
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import RANDOM, Group
from tests.mono_kernel.layers import LAYOUTS
from tests.mono_kernel.steps import Step


def check(layout: str, tp: int, lens, per: int, schedule=RANDOM, **options):
    group = Group(Step(layout, tp, lens=lens, rows_per_request=per, seed=len(lens)))
    report = group.run(schedule, **options)
    regions.check(group)
    return group, report


def test_every_region_on_four_ranks():
    """Two requests of two rows: a block edge between rows, a request within its first blocks."""
    check("mxfp4", 4, [642, 129], 2)


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
    ],
    ids=str,
)
def test_batches(lens, per):
    check("nvfp4", 4, lens, per)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_schedules(schedule):
    first, _ = check("mxfp4", 2, [642, 129], 2, RANDOM)
    group, _ = check("mxfp4", 2, [642, 129], 2, schedule)
    for name in ("residual_out", "hidden_out", "selected"):
        assert torch.equal(group.region(name, 1), first.region(name, 1))
