"""Tiles of index_score_prefill: a function of the shapes alone, never of lengths."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 264


@dataclass(frozen=True)
class Tuning:
    """pairs: (token, head) pairs a program; run: blocks a program; tile: keys a step."""

    pairs: int
    run: int
    tile: int
    warps: int


def select(tokens: int, heads: int, max_blocks: int) -> Tuning:
    pairs = 128
    while pairs > 16 and pairs >= 2 * tokens * heads:
        pairs //= 2
    pairs = max(pairs, 1 << (heads - 1).bit_length())
    tiles = -(-tokens // (pairs // heads))
    run = 64
    while run > 1 and tiles * -(-max_blocks // run) < _PROGRAMS:
        run //= 2
    return Tuning(pairs, run, 128, 8 if pairs >= 128 else 4)
