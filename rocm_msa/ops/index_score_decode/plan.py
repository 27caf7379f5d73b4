"""Tiles of index_score_decode: a function of the shapes alone, never of lengths."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 2000  # about what an H200 holds of the one-warp kernel: 132 * 16


@dataclass(frozen=True)
class Tuning:
    """pairs: (row, head) pairs a program; run: blocks a program; tile: tokens a step."""

    pairs: int
    run: int
    tile: int
    warps: int


def select(requests: int, pairs: int, max_blocks: int) -> Tuning:
    """`pairs`: rows_per_request * heads."""
    tile_pairs = min(64, max(16, 1 << (pairs - 1).bit_length()))
    run = 1
    while run < 4 and requests * -(-max_blocks // (2 * run)) >= _PROGRAMS:
        run *= 2
    return Tuning(tile_pairs, run, 128, 4)
