"""Units of sparse_decode.

The unit (slots of a row's list that one program sums before the merge) decides the order of the
additions. It depends on the list's length alone, never on the batch, so that a row's result is the
same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """unit: slots a program; tile: tokens a step of the portable kernel."""

    unit: int
    tile: int
    warps: int


def select(topk: int) -> Tuning:
    return Tuning(unit=2 if topk <= 32 else -(-topk // 16), tile=64, warps=4)
