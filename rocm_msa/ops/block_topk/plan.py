"""Chunks and splits of block_topk: a function of the shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = 264  # programs that fill a large GPU twice
_CHUNKS = (64, 256, 1024)  # few, since each is a kernel of its own


@dataclass(frozen=True)
class Tuning:
    """chunk: blocks sorted at a time; kept: a run's length; splits: programs a row and head.

    All powers of two, chunk >= kept.
    """

    chunk: int
    kept: int
    splits: int
    warps: int

    def __post_init__(self) -> None:
        sizes = (self.chunk, self.kept, self.splits, self.warps)
        assert all(s > 0 and s & (s - 1) == 0 for s in sizes) and self.chunk >= self.kept


def select(rows: int, max_blocks: int, topk: int) -> Tuning:
    """`rows`: (row, head) pairs of the launch."""
    kept = max(2, power_of_two(topk))
    fitting = next((c for c in _CHUNKS if c >= max_blocks), _CHUNKS[-1])
    chunk = max(kept, fitting)
    chunks = -(-max_blocks // chunk)
    splits = 1
    while splits < chunks and rows * splits * 2 <= _FULL:
        splits *= 2
    return Tuning(chunk, kept, splits, 1 if chunk <= 128 else 4)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
