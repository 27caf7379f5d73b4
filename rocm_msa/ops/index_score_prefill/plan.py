"""Tiles of index_score_prefill: a function of the shapes alone, never of lengths.

None of them changes a bit of a score: a product has 64 query rows or more for a group of four warps
whatever the tile, and sums over head_dim in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 264  # two a multiprocessor


@dataclass(frozen=True)
class Tuning:
    """pairs: (token, head) pairs a matrix product; products: with each decoded page, 1 or 2; run:
    blocks a program; stages: of the loads; registers: limit a lane on NVIDIA, None for the
    compiler's choice."""

    pairs: int
    products: int
    run: int
    warps: int
    stages: int
    registers: int | None = None


def select(tokens: int, heads: int, max_blocks: int, kind: int, wide: bool, target: str) -> Tuning:
    """All but `run` are constants of the target and the types.

    `kind`: 0 NVFP4, 1 FP8, 2 bf16; `wide`: whether queries have more than 16 bits
    or are multiplied in parts.
    """
    pairs = max(128, 1 << (heads - 1).bit_length())
    fast = target == "cuda" and not wide
    direct = fast and kind == 2  # pages go into shared memory as they are
    products = 2 if fast and not direct else 1
    tiles = tokens * heads // (products * pairs) + 1
    run = 16
    while run > 1 and tiles * -(-max_blocks // run) < _PROGRAMS:
        run //= 2
    if fast:
        return Tuning(pairs, products, run, 8, 3 if direct else 1, 128)
    return Tuning(pairs, products, run, 8 if wide else 4, 1)
