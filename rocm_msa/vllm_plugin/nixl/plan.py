"""Which bytes of which prefill rank a decode rank reads, as few descriptors as possible.

A rank's row of a block holds its own KV heads and the whole index key. Where one prefill rank has
exactly the heads of a decode rank, the row is one piece; otherwise a piece is a run of heads of
one page, and each index page is read once. Pieces that are neighbours on both sides are merged,
across pages and across blocks, so that n adjacent blocks are one descriptor.

NumPy and plain integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.errors import expect


@dataclass(frozen=True)
class Piece:
    """A run of bytes of every block: from a remote row offset to a local one, in bytes."""

    remote_rank: int
    remote_offset: int
    local_offset: int
    nbytes: int


@dataclass(frozen=True)
class ReadPlan:
    """Pieces of one decode rank, by prefill rank, in the order of their local offsets.

    reason: why it is not one piece a block; None when it is.
    """

    pieces: dict[int, tuple[Piece, ...]]
    reason: str | None

    @property
    def nbytes(self) -> int:
        """Bytes read a block."""
        return sum(p.nbytes for pieces in self.pieces.values() for p in pieces)


def owned_heads(kv_heads: int, tp: int, rank: int) -> range:
    """KV heads of a rank: a slice of them, or one head that tp / kv_heads ranks share."""
    if not 0 <= rank < tp:
        raise ValueError(expect("rank", f"0..{tp - 1}", rank))
    if tp >= kv_heads:
        head = rank * kv_heads // tp
        return range(head, head + 1)
    each = kv_heads // tp
    return range(rank * each, (rank + 1) * each)


def source_rank(kv_heads: int, tp: int, head: int, reader: int) -> int:
    """A rank of `tp` that holds `head`; readers of a shared head are spread over its holders."""
    if tp <= kv_heads:
        return head * tp // kv_heads
    holders = tp // kv_heads
    return head * holders + reader % holders


def read_plan(
    kv_heads: int,
    local_row: OuterBlockRow,
    local_tp: int,
    local_rank: int,
    remote_row: OuterBlockRow,
    remote_tp: int,
) -> ReadPlan:
    """What rank `local_rank` of `local_tp` reads from `remote_tp` prefill ranks.

    The rows are of the same model and dtypes (`digest`); each has its side's heads a rank.
    """
    heads = owned_heads(kv_heads, local_tp, local_rank)
    sources = [source_rank(kv_heads, remote_tp, head, local_rank) for head in heads]
    if local_tp == remote_tp:
        sources = [local_rank] * len(heads)
    first = sources[0]
    if set(sources) == {first} and owned_heads(kv_heads, remote_tp, first) == heads:
        return ReadPlan({first: (Piece(first, 0, 0, local_row.nbytes),)}, None)
    pieces: dict[int, list[Piece]] = {}
    for mine, theirs in zip(local_row.pages, remote_row.pages, strict=True):
        if not mine.sharded:
            piece = Piece(first, theirs.offset, mine.offset, mine.page.page_bytes)
            _append(pieces.setdefault(first, []), piece)
            continue
        nbytes = mine.page.head_bytes
        for position, (head, rank) in enumerate(zip(heads, sources, strict=True)):
            place = head - owned_heads(kv_heads, remote_tp, rank).start
            piece = Piece(
                rank, theirs.offset + place * nbytes, mine.offset + position * nbytes, nbytes
            )
            _append(pieces.setdefault(rank, []), piece)
    reason = (
        f"tensor-parallel sizes differ (prefill {remote_tp}, decode {local_tp}): a row mixes heads "
        f"of several ranks, so rank {local_rank} reads {sum(map(len, pieces.values()))} runs of "
        f"heads and index pages a block from {len(pieces)} prefill rank(s)"
    )
    return ReadPlan({rank: tuple(run) for rank, run in sorted(pieces.items())}, reason)


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, joined to the last one where both sides continue it."""
    if pieces:
        last = pieces[-1]
        if (
            last.remote_offset + last.nbytes == piece.remote_offset
            and last.local_offset + last.nbytes == piece.local_offset
        ):
            pieces[-1] = Piece(
                last.remote_rank, last.remote_offset, last.local_offset, last.nbytes + piece.nbytes
            )
            return
    pieces.append(piece)


def descriptors(
    pieces: Sequence[Piece],
    local_base: int,
    local_stride: int,
    local_blocks: Sequence[int],
    remote_base: int,
    remote_stride: int,
    remote_blocks: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Local and remote `[descriptors, 2]` uint64 (address, bytes), neighbours merged.

    Args:
        local_base, remote_base: address of block 0's row; strides are in bytes.
        local_blocks, remote_blocks: block ids, pairwise.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(local_blocks) != len(remote_blocks):
        raise ValueError(
            expect("remote_blocks", f"{len(local_blocks)} block ids", len(remote_blocks))
        )
    if not len(local_blocks) or not pieces:
        empty = np.zeros((0, 2), dtype=np.uint64)
        return empty, empty
    sizes = np.array([p.nbytes for p in pieces], dtype=np.uint64)

    def addresses(base: int, stride: int, blocks: Sequence[int], offsets: list[int]) -> np.ndarray:
        rows = np.asarray(blocks, dtype=np.uint64)[:, None] * np.uint64(stride) + np.uint64(base)
        return (rows + np.asarray(offsets, dtype=np.uint64)[None, :]).ravel()

    local = addresses(local_base, local_stride, local_blocks, [p.local_offset for p in pieces])
    remote = addresses(remote_base, remote_stride, remote_blocks, [p.remote_offset for p in pieces])
    nbytes = np.tile(sizes, len(local_blocks))
    broken = (local[1:] != local[:-1] + nbytes[:-1]) | (remote[1:] != remote[:-1] + nbytes[:-1])
    starts = np.concatenate([[0], np.flatnonzero(broken) + 1])
    merged = np.add.reduceat(nbytes, starts)
    return (
        np.stack([local[starts], merged], axis=1),
        np.stack([remote[starts], merged], axis=1),
    )
