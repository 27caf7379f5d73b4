"""Units of sparse_prefill: one program sums a token's whole list, there are tokens enough."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST = 32  # slots that the Hopper kernel can hold


@dataclass(frozen=True)
class Tuning:
    """unit: slots a program; tile: tokens a step of the portable kernel."""

    unit: int
    tile: int
    warps: int


def select(topk: int) -> Tuning:
    return Tuning(unit=min(max(1, topk), _LARGEST), tile=64, warps=4)
