"""Tiles of dense_attention: constants of the target, whatever the batch.

A request with at most FEW new tokens is split finely over its context (decode), any other into
units of a constant number of blocks. So the bits of a token depend on its own request alone.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW = 8
_UNIT = 64  # blocks
_FEW_UNITS, _FEW_UNIT = 256, 4  # at most so many units, of at least so many blocks
_WORKSPACE = 2**28  # bytes of partial results


@dataclass(frozen=True)
class Tuning:
    """rows: query rows (tokens * heads) of a tile; unit: blocks a program, at least; units: at most
    so many a row; turn: tokens that are worked on together; stages: of the loads."""

    rows: int
    unit: int
    units: int
    turn: int
    warps: int
    stages: int


def select(max_blocks: int, q_heads: int, head_dim: int, wide: bool, target: str) -> Tuning:
    """For requests with many new tokens; `wide`: whether queries are multiplied in parts."""
    units = -(-max_blocks // _UNIT)
    turn = max(1, _WORKSPACE // (units * q_heads * head_dim * 4))
    if target == "cuda":
        return Tuning(128, _UNIT, units, turn, 8, 1 if wide else 3)
    return Tuning(64, _UNIT, units, turn, 4, 1)


def select_few(max_blocks: int, q_heads: int, head_dim: int, wide: bool, target: str) -> Tuning:
    """For requests with at most FEW new tokens."""
    units = min(_FEW_UNITS, -(-max_blocks // _FEW_UNIT))
    turn = max(FEW, _WORKSPACE // (units * q_heads * head_dim * 4))
    return Tuning(64, _FEW_UNIT, units, turn, 4, 2 if target == "cuda" and not wide else 1)
