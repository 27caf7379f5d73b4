"""Tiles of index_score_decode: a function of the shapes alone, never of lengths."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 2000  # of four warps, about what an H200 holds
# One-warp programs that an H200 holds at a time, with tiles of 16 and of 32 tokens.
_SMALL_TILES, _LARGE_TILES = 132 * 16, 132 * 12
_MOST = 32  # blocks whose pages the one-warp kernel's lanes hold


@dataclass(frozen=True)
class Tuning:
    """pairs: (row, head) pairs a program; run: blocks a program; tile: tokens a step."""

    pairs: int
    run: int
    tile: int
    warps: int


def select(requests: int, pairs: int, max_blocks: int) -> Tuning:
    """Of the portable kernel. `pairs`: rows_per_request * heads."""
    tile_pairs = min(64, max(16, 1 << (pairs - 1).bit_length()))
    run = 1
    while run < 4 and requests * -(-max_blocks // (2 * run)) >= _PROGRAMS:
        run *= 2
    return Tuning(tile_pairs, run, 128, 4)


def select_hopper(requests: int, pairs: int, max_blocks: int) -> Tuning:
    """Of the one-warp kernel: whole waves of equal programs, as few as the runs' length allows."""
    work = requests * -(-pairs // 16) * max_blocks
    if work <= 2 * _SMALL_TILES:
        return Tuning(16, max(1, -(-work // _SMALL_TILES)), 16, 1)
    waves = -(-work // (_LARGE_TILES * _MOST))
    return Tuning(16, -(-work // (_LARGE_TILES * waves)), 32, 1)
