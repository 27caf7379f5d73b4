"""Tiles of sparse_prefill: constants of the target, whatever the batch.

`item`, `turn` and `programs` change no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

_WORKSPACE = 2**29  # bytes of partial results
_ENTRIES = 2**22  # of a turn
_PROGRAMS = 512  # more than fit at once on any target


@dataclass(frozen=True)
class Tuning:
    """item: entries a program takes at once; turn: tokens that are worked on together; programs: at
    most so many; stages: of the loads; merge_warps: warps of the merge."""

    item: int
    turn: int
    programs: int
    warps: int
    stages: int
    merge_warps: int


def select(topk: int, kv_heads: int, group: int, head_dim: int, kept: int, target: str) -> Tuning:
    """`kept`: bytes of a value of a partial result."""
    entries = min(_ENTRIES, _WORKSPACE // (group * head_dim * kept))
    turn = max(1, entries // (topk * kv_heads))
    stages = 2 if target == "cuda" else 1
    return Tuning(64, turn, _PROGRAMS, 4, stages, 1)
