"""Chunks and splits of block_topk: a function of the shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = 264  # programs that fill a large GPU twice
_CHUNKS = (64, 256, 1024)  # few, since each is a kernel of its own
MANY = 512  # rows, from which on nothing changes: what warm-up compiles


@dataclass(frozen=True)
class Tuning:
    """chunk: blocks looked at at a time; kept: a run's length; splits: programs a row and head;
    group: blocks of a chunk of which the best one stands for all at first.

    All powers of two, chunk / group >= kept.
    """

    chunk: int
    kept: int
    splits: int
    warps: int
    group: int = 1

    def __post_init__(self) -> None:
        sizes = (self.chunk, self.kept, self.splits, self.warps, self.group)
        assert all(s > 0 and s & (s - 1) == 0 for s in sizes)
        assert self.chunk >= self.kept * self.group


def select(rows: int, max_blocks: int, topk: int) -> Tuning:
    """`rows`: (row, head) pairs of the launch."""
    kept = max(2, power_of_two(topk))
    fitting = next((c for c in _CHUNKS if c >= max_blocks), _CHUNKS[-1])
    chunk = max(kept, fitting)
    chunks = -(-max_blocks // chunk)
    splits = 1
    while splits < chunks and rows * splits * 2 <= _FULL:
        splits *= 2
    group = 1
    while chunk >= 1024 and 4 * group * group * kept <= chunk:
        group *= 2  # as many groups as members of the kept ones, or more
    warps = 1 if chunk <= 128 else 4 if rows < MANY else 2
    return Tuning(chunk, kept, splits, warps, group)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
