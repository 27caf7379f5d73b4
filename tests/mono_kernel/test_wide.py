"""MiniMax-M3's own widths in the emulator, region by region: minutes, 3 GB of memory."""

from __future__ import annotations

import pytest

from gfx950_emu import Schedule
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import Group
from tests.mono_kernel.wide import WideStep

WORKGROUPS = {4: 64, 8: 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tp", "lens", "per", "exchange"),
    [
        ("mxfp4", 4, [2049], 1, False),  # the 17th block, inserted by this very launch
        ("nvfp4", 4, [2946, 129], 2, False),
        ("mxfp8", 4, [4100, 128, 0, 2052], 4, False),
        ("nvfp4", 8, [2049], 1, False),  # two ranks hold each KV head
        ("mxfp4", 8, [2946, 129], 2, False),
        ("mxfp8", 8, [4100, 128, 0, 2052], 4, False),
        ("mxfp4", 8, [4100, 129], [2, 1], True),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_region(layout, tp, lens, per, exchange):
    step = WideStep(layout, tp, lens, per, seed=len(lens), exchange=exchange)
    group = Group(step, workgroups=WORKGROUPS[tp])
    group.run(Schedule("random", len(lens), (1, 20_000)))
    found = regions.check(group)
    assert set(found[0]["chosen"].flatten().tolist()) <= set(group.step.written)
