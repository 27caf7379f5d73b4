"""Tiles of index_score_decode: a function of the shapes alone, never of lengths."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 2000  # of four warps, about what an H200 holds
# One-warp programs that an H200 holds at a time, with tiles of 16 and of 32 tokens. One wave each:
# more programs, of fewer registers, took longer.
_SMALL_TILES, _LARGE_TILES = 132 * 16, 132 * 12
REGISTERS = {16: 128, 32: 168}  # a lane, so that they fit; nothing is spilled
_FEW, _MANY = 64, 1024  # requests: few classes, since each is a kernel of its own


@dataclass(frozen=True)
class Tuning:
    """pairs: (row, head) pairs a program; run: blocks a program; tile: tokens a step."""

    pairs: int
    run: int
    tile: int
    warps: int


@dataclass(frozen=True)
class HopperTuning:
    """programs: for each 16 (row, head) pairs; tile: tokens a step; requests: a power of two that
    holds them."""

    programs: int
    tile: int
    requests: int


def select(requests: int, pairs: int, max_blocks: int) -> Tuning:
    """Of the portable kernel. `pairs`: rows_per_request * heads."""
    tile_pairs = min(64, max(16, 1 << (pairs - 1).bit_length()))
    run = 1
    while run < 4 and requests * -(-max_blocks // (2 * run)) >= _PROGRAMS:
        run *= 2
    return Tuning(tile_pairs, run, 128, 4)


def select_hopper(requests: int, pairs: int, max_blocks: int) -> HopperTuning:
    """Of the one-warp kernel: as many programs as fit at a time, which share all blocks."""
    turns = -(-pairs // 16)
    held = 1 if requests == 1 else _FEW
    if requests > _FEW:
        held = max(_MANY, 1 << (requests - 1).bit_length())
    blocks = requests * max_blocks
    tile = 16 if _LARGE_TILES < blocks * turns <= 2 * _SMALL_TILES else 32
    most = _SMALL_TILES if tile == 16 else _LARGE_TILES
    return HopperTuning(min(blocks, max(1, most // turns)), tile, held)
