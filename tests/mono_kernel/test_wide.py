"""MiniMax-M3's own widths at TP 4 in the emulator, region by region: minutes, 3 GB of memory."""

from __future__ import annotations

import pytest

from gfx950_emu import Schedule
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import Group
from tests.mono_kernel.wide import WideStep

WORKGROUPS = 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "lens", "per"),
    [
        ("mxfp4", [2049], 1),  # the 17th block, inserted by this very launch
        ("nvfp4", [2946, 129], 2),
        ("mxfp8", [4100, 128, 0, 2052], 4),
    ],
    ids=["1 row", "4 rows", "16 rows"],
)
def test_every_region(layout, lens, per):
    group = Group(WideStep(layout, 4, lens, per, seed=len(lens)), workgroups=WORKGROUPS)
    group.run(Schedule("random", len(lens), (1, 20_000)))
    found = regions.check(group)
    assert set(found[0]["chosen"].flatten().tolist()) <= set(group.step.written)
