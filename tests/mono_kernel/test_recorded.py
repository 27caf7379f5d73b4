"""Layers in a row, recorded once and replayed step after step, over edges of blocks and lists."""

from __future__ import annotations

import pytest
import torch

from gfx950_emu import Schedule
from tests.mono_kernel.recorded import Recorded


def run(tp: int, lens, per: int | list[int], layers: int, steps: int, seed: int) -> None:
    schedule = Schedule("random", seed, (1, 5000))
    one = Recorded("mxfp4", tp, lens, per, layers=layers, steps=steps, schedule=schedule)
    for _ in range(steps):
        one.replay()
        one.check()
        one.advance()


def test_two_layers_over_a_block_edge():
    """The second step's rows are the first tokens of their block: this very launch inserts them."""
    run(4, [128, 640], 1, layers=2, steps=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("tp", "lens", "per"),
    [
        # 2049 keys and on: more blocks than a list has; 129, 257: the newest block is new.
        (2, [2020, 100, 250], 1),
        (4, [2000, 2], [2, 1]),
    ],
    ids=str,
)
def test_fifty_steps_of_four_layers(tp, lens, per):
    run(tp, lens, per, layers=4, steps=50, seed=tp)


@pytest.mark.slow
def test_layers_that_share_their_scratch_give_the_same_bits():
    """As the runner has it; other schedules, and a replay of the same contents."""
    found = []
    for own, seed in ((True, 3), (False, 4)):
        schedule = Schedule("random", seed, (1, 5000))
        one = Recorded(
            "nvfp4", 2, [640, 2048], 2, layers=4, steps=3, schedule=schedule, own_scratch=own
        )  # fmt: skip
        found.append([])
        for _ in range(3):
            one.replay()
            found[-1] += one.outputs()
            one.replay()
            found[-1] += one.outputs()
            one.advance()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
