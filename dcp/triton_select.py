"""Which blocks of a row are candidates, their order, and the selection, for the Triton exchange.

    batch   tuple: num_blocks int32 pointer [rows], requests, rows_per_request, max_blocks,
            init_blocks, local_blocks
    end     tuple, see triton_mailbox.py

Ranks are int64 numbers, one a candidate: order key * 2^24 - block id, below 0 for none; so the
highest key comes first, then the lower id, whatever the order in which they are met.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp import triton_mailbox as box
from dcp.shard import Site

CHUNK = 128  # scores of peers that are ranked at a time
KEPT = 256  # own keys
RESULT_TIMES = 4  # bound of the wait for results, in units of patience: the longest of all

_CHUNK, _KEPT, _RESULTS = (tl.constexpr(n) for n in (CHUNK, KEPT, RESULT_TIMES))
_NO_RESULTS = tl.constexpr(int(Site.RESULTS))
_ABSENT = tl.constexpr(-(1 << 60))


@triton.jit
def row_range(batch, row, known):
    """(init, last, nb) of rows: their candidates are the blocks [init, last)."""
    count = tl.load(batch[0] + row, mask=known, other=0)
    count = tl.maximum(tl.minimum(count, batch[3]), 0)
    init = tl.minimum(batch[4], count)
    return init, tl.maximum(count - batch[5], init), count


@triton.jit
def owned(rank, blocks, RANKS: tl.constexpr):
    """How many of the first `blocks` blocks a rank scores."""
    return tl.maximum(blocks - rank + (RANKS - 1), 0) // RANKS


@triton.jit
def order_key(score):
    """int32 bits of the key: monotone in fp32, -0 equal to +0, NaN (1) below -inf; never 0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(score == score, key, 1)


@triton.jit
def _ranked(key, ids, present):
    """Numbers that order as (key, lower id first); below 0: none. Keys int64, ids < 2^24."""
    ids = ids.to(tl.int64)
    return tl.where(present & (key != 0), key * 16777216 - ids, _ABSENT - ids)


@triton.jit
def id_of(ranks):
    return tl.where(ranks > 0, (-ranks) & 0xFFFFFF, -1).to(tl.int32)


@triton.jit
def best_of_kept(place, begin, stop, id_step, id_first, K: tl.constexpr):
    """The best of this rank's blocks [begin, stop) of one (row, head), in order `[K]`."""
    ranks = _ABSENT - tl.arange(0, K).to(tl.int64)
    for first in range(begin, stop, _KEPT):
        k = first + tl.arange(0, _KEPT)
        key = tl.load(place + k, mask=k < stop, other=0).to(tl.int64) & 0xFFFFFFFF
        more = tl.topk(_ranked(key, k * id_step + id_first, k < stop), K)
        ranks = tl.topk(tl.reshape(tl.join(ranks, more), (2 * K,)), K)
    return ranks


@triton.jit
def _merge_scores(
    end, line, sender_words, init, last, K: tl.constexpr, RANKS: tl.constexpr,
    R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """(rank-ordered best, whether all came) of all blocks' scores of one (row, head)."""
    best = _ABSENT - tl.arange(0, K).to(tl.int64)
    ok, first = init == init, init
    while (first < last) & ok:
        block = first + tl.arange(0, _CHUNK)
        sender = block % RANKS
        place = line + sender * sender_words + block // RANKS
        key, ok = box.collect(
            end, place, block < last, sender, _NO_RESULTS, _RESULTS, RANKS, R, AMD
        )
        more = tl.topk(_ranked(key, block, block < last), K)
        best = tl.topk(tl.reshape(tl.join(best, more), (2 * K,)), K)
        first += _CHUNK
    return best, ok


@triton.jit
def _merge_candidates(
    end, line, sender_words, init, last, TOPK: tl.constexpr, K: tl.constexpr,
    RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The same of every rank's best blocks."""
    listed = tl.arange(0, R * K)
    sender, i = listed // K, listed % K
    some = owned(sender, init, RANKS) < owned(sender, last, RANKS)
    wanted = some & (sender < RANKS) & (i < TOPK)
    place = line + sender * sender_words + i
    key, ok = box.collect(end, place, wanted, sender, _NO_RESULTS, _RESULTS, RANKS, R, AMD)
    block, also = box.collect(
        end, place + TOPK, wanted, sender, _NO_RESULTS, _RESULTS, RANKS, R, AMD
    )
    return tl.topk(_ranked(key, block, wanted), K), ok & also


@triton.jit
def select(
    end, batch, ok, r_at, max_rows, result_words, out, out_head, out_row, out_slot,
    OWN: tl.constexpr, SCORES: tl.constexpr, TOPK: tl.constexpr, K: tl.constexpr,
    RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Merge what all ranks sent for the own heads, and write the selection."""
    slot = tl.arange(0, K)
    sender_words = max_rows * result_words
    for item in range(tl.program_id(0), batch[1] * batch[2] * OWN, tl.num_programs(0)):
        row, own_head = item // OWN, item % OWN
        init, last, count = row_range(batch, row, True)
        line = end[0] + r_at + (own_head * RANKS * max_rows + row) * result_words
        best = _ABSENT - slot.to(tl.int64)
        if ok:
            if SCORES:
                best, ok = _merge_scores(end, line, sender_words, init, last, K, RANKS, R, AMD)
            else:
                best, ok = _merge_candidates(
                    end, line, sender_words, init, last, TOPK, K, RANKS, R, AMD
                )
        always = init + count - last
        kept = tl.where(slot < init, slot, last + slot - init)
        to = out + own_head.to(tl.int64) * out_head + row.to(tl.int64) * out_row
        kept, ranked = tl.where(ok, kept, -1), tl.where(ok, id_of(best), -1)
        tl.store(to + slot * out_slot, kept, mask=slot < tl.minimum(always, TOPK))
        tl.store(to + (always + slot) * out_slot, ranked, mask=slot < TOPK - always)
