"""The scan of the Triton exchange: this rank's part of the blocks, scored for all heads.

    batch   tuple, see exchange_triton_kernel.py
    end     tuple, see triton_mailbox.py

The scores are those of the op index_score_decode, bit for bit. Keys are loaded a tile ahead and as
words, and decoded in the lanes that loaded them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp import triton_mailbox as box
from dcp import triton_select as pick
from dcp.shard import Site
from rocm_msa.ops.triton_common import e4m3_words, halves_of, page_bytes
from rocm_msa.ops.triton_hopper import K_SCALES, K_WORD

QUERY_TIMES = 2  # bound of the wait for queries, in units of patience
TILE = 32  # tokens of a product
PAIRS = 16  # (row, head) pairs of a product; more are taken in turns: twice as many would spill
HOPPER = 5
"""KIND of NVFP4 pages with the sums of ops/triton_hopper.py; the others: ops/triton_common.py."""

WIDE = triton.__version__.startswith("3.6.")
"""Whether the compiler gives a lane four neighbouring k of a joined operand, and not two. The order
of k is chosen so that lanes need not exchange values; the matrix instruction sees the same."""

_TILE, _PAIRS, _HOPPER = tl.constexpr(TILE), tl.constexpr(PAIRS), tl.constexpr(HOPPER)
_WIDE, _QUERIES = tl.constexpr(WIDE), tl.constexpr(QUERY_TIMES)
_NO_QUERIES = tl.constexpr(int(Site.QUERIES))


@triton.jit
def _values(words, SHIFT: tl.constexpr, Q: tl.constexpr, QK: tl.constexpr):
    return ((words >> SHIFT) & 0xFFFF).to(tl.uint16).to(Q, bitcast=True).to(QK)


@triton.jit
def _query_halves(
    end, base, mine, pusher, W: tl.constexpr, KIND: tl.constexpr, Q: tl.constexpr,
    QK: tl.constexpr, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The two halves of the pairs' queries as page_halves has the keys': QK `[pairs, W]` each.

    For KIND _HOPPER: see _hopper_query.
    """
    PAIRS: tl.constexpr = base.shape[0]
    if KIND == 0 or KIND == _HOPPER:  # even and odd head_dim
        word = tl.arange(0, W)
        place = base[:, None] + word[None, :]
        wanted = tl.broadcast_to(mine[:, None], (PAIRS, W))
        peer = tl.broadcast_to(pusher[:, None], (PAIRS, W))
        words, ok = box.collect(end, place, wanted, peer, _NO_QUERIES, _QUERIES, RANKS, R, AMD)
        a, b = _values(words, 0, Q, QK), _values(words, 16, Q, QK)
        if KIND == _HOPPER:
            a, b = _hopper_query(tl.reshape(tl.join(a, b), (PAIRS, 2 * W)))
        return a, b, ok
    else:  # first and second half
        word = tl.arange(0, W // 2)
        place = base[:, None] + word[None, :]
        wanted = tl.broadcast_to(mine[:, None], (PAIRS, W // 2))
        peer = tl.broadcast_to(pusher[:, None], (PAIRS, W // 2))
        a, ok = box.collect(end, place, wanted, peer, _NO_QUERIES, _QUERIES, RANKS, R, AMD)
        b, also = box.collect(
            end, place + W // 2, wanted, peer, _NO_QUERIES, _QUERIES, RANKS, R, AMD
        )
        qa = tl.reshape(tl.join(_values(a, 0, Q, QK), _values(a, 16, Q, QK)), (PAIRS, W))
        qb = tl.reshape(tl.join(_values(b, 0, Q, QK), _values(b, 16, Q, QK)), (PAIRS, W))
        return qa, qb, ok & also


@triton.jit
def _hopper_query(q):
    """fp16 queries in k order and their factors, as ops/triton_hopper.py query_rows has them."""
    M: tl.constexpr = q.shape[0]
    q = q.to(tl.float32)
    top = tl.max(tl.abs(q), 1)
    bits = tl.minimum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    bits = tl.maximum(bits, 0x2B800000)
    q = (q * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    q = tl.reshape(q, (M, 4, 2, 2, 2, 2, 2))  # [pair, j, w1, w0, h, p1, p0]
    if _WIDE:
        q = tl.permute(q, (0, 2, 3, 5, 1, 6, 4))
    else:
        q = tl.permute(q, (0, 2, 3, 5, 6, 1, 4))
    return tl.reshape(q, (M, 128)), bits.to(tl.float32, bitcast=True) * 16384.0


@triton.jit
def _hopper_keys(words, scales):
    """NVFP4 keys times 2^-14, fp16 `[128, tokens]`, in the k order of ops/triton_hopper.py.

    words: int32 `[tokens, 16]`; scales: int16 `[tokens, 4]`, two codes each.
    """
    T: tl.constexpr = words.shape[0]
    low, high = tl.inline_asm_elementwise(
        K_SCALES, "=r,=r,h", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    s = tl.join(low, high)[:, :, :, None]
    e = tl.inline_asm_elementwise(
        K_WORD, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [tl.reshape(words, (T, 4, 2, 2)), s],
        dtype=(tl.float16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    p0 = tl.join(tl.join(e[0], e[1]), tl.join(e[2], e[3]))  # [t, j, w1, w0, h, p0]
    p1 = tl.join(tl.join(e[4], e[5]), tl.join(e[6], e[7]))
    k = tl.join(p0, p1)  # [t, j, w1, w0, h, p0, p1]
    if _WIDE:
        k = tl.permute(k, (2, 3, 6, 1, 5, 4, 0))
    else:
        k = tl.permute(k, (2, 3, 6, 5, 1, 4, 0))
    return tl.reshape(k, (128, T))


@triton.jit
def _tile(base, first, K_SCALES: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr):
    """The bytes of _TILE keys, as `_tile_scores` takes them."""
    token = first + tl.arange(0, _TILE)
    if KIND == _HOPPER:
        words = base.to(tl.pointer_type(tl.int32)) + token[:, None] * 16
        scales = (base + K_SCALES).to(tl.pointer_type(tl.int16)) + token[:, None] * 4
        return tl.load(words + tl.arange(0, 16)[None, :]), tl.load(
            scales + tl.arange(0, 4)[None, :]
        )
    elif KIND == 3:  # as words: a byte that is carried through the loop takes a register
        words = base.to(tl.pointer_type(tl.int32)) + token[:, None] * (D // 4)
        words += tl.arange(0, D // 8)[None, :]
        return tl.load(words), tl.load(words + D // 8)
    else:
        return page_bytes(base, token, 0, K_SCALES, D, KIND)


@triton.jit
def _tile_scores(qa, qb, x, y, D: tl.constexpr, KIND: tl.constexpr, QK: tl.constexpr):
    """fp32 `[pairs, _TILE]`; for KIND _HOPPER without qb, the queries' factors."""
    if KIND == _HOPPER:
        return tl.dot(qa, _hopper_keys(x, y))
    else:
        if KIND == 3:
            ka, kb = e4m3_words(x, QK), e4m3_words(y, QK)
        else:
            ka, kb = halves_of(x, y, D, KIND, QK)
        s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        return tl.dot(qb, tl.trans(kb), acc=s, input_precision="ieee")


@triton.jit
def _page(pages, entries, table_column, block, within, num_pages, block_stride):
    """(whether there is such a page, where it lies); page 0 where there is none."""
    page = tl.load(entries + block.to(tl.int64) * table_column, mask=within, other=-1)
    good = (page >= 0) & (page < num_pages)
    return good, pages + tl.where(good, page, 0).to(tl.int64) * block_stride


@triton.jit
def score(
    end, batch, upto, ok, q_at, r_at, keys, table, table_row, table_column, pages, block_stride,
    num_pages, k_scale, max_rows, slots, result_words, HEADS: tl.constexpr, OWN: tl.constexpr,
    REPLICAS: tl.constexpr, SCORES: tl.constexpr, D: tl.constexpr,
    K_SCALES: tl.constexpr, KIND: tl.constexpr, Q: tl.constexpr, QK: tl.constexpr,
    RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Score this program's part of the blocks, and send or keep their order keys.

    While a tile is computed, the next one is on its way, across the pages; the first of a request
    is asked for before the queries are waited for.

    q_at, r_at: words of a mailbox, where this launch's queries and results lie.
    """
    W: tl.constexpr = D // 2
    rank, total = end[4], tl.max(upto)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    at = tl.program_id(0) * share
    stop = tl.minimum(at + share, total)
    pairs = batch[2] * HEADS
    while (at < stop) & ok:
        request = tl.sum((upto <= at).to(tl.int32))
        start = tl.max(tl.where(upto <= at, upto, 0))
        after = tl.minimum(tl.min(tl.where(upto > at, upto, 2147483647)), stop)
        entries = table + request.to(tl.int64) * table_row
        for first_pair in range(0, pairs, _PAIRS):
            block = (at - start) * RANKS + rank
            good, base = _page(pages, entries, table_column, block, True, num_pages, block_stride)
            x, y = _tile(base, 0, K_SCALES, D, KIND)
            p = first_pair + tl.arange(0, _PAIRS)
            mine = p < pairs
            head, row = p % HEADS, request * batch[2] + p // HEADS
            owner = head // OWN * REPLICAS
            init, last, _ = pick.row_range(batch, row, mine)
            queries = end[0] + q_at + (head * max_rows + row) * W
            qa, qb, there = _query_halves(end, queries, mine, owner, W, KIND, Q, QK, RANKS, R, AMD)
            ok = ok & there
            factor = qb * k_scale if KIND == _HOPPER else k_scale
            result = r_at + (((head % OWN) * RANKS + rank) * max_rows + row) * result_words
            kept = keys + (head * max_rows + row) * slots
            for k in range(at - start, tl.where(ok, after - start, 0)):
                more = k + 1 < after - start
                block = k * RANKS + rank
                next_good, next_base = _page(
                    pages, entries, table_column, block + RANKS, more, num_pages, block_stride
                )
                best = tl.full((_PAIRS, _TILE), float("-inf"), tl.float32)
                for first in range(0, 128, _TILE):
                    after_it = first + _TILE
                    ahead = tl.where(after_it < 128, base, next_base)
                    next_x, next_y = _tile(ahead, after_it % 128, K_SCALES, D, KIND)
                    best = tl.maximum(best, _tile_scores(qa, qb, x, y, D, KIND, QK))
                    x, y = next_x, next_y
                score = tl.where(good, tl.max(best, 1) * factor, float("-inf"))
                good, base = next_good, next_base
                key, wanted = pick.order_key(score), mine & (block >= init) & (block < last)
                if SCORES:
                    for replica in tl.static_range(REPLICAS):
                        to = tl.load(end[1] + owner + replica).to(tl.pointer_type(tl.int64))
                        box.post(end, to + result + k, key, wanted, AMD)
                else:
                    tl.store(kept + k, key, mask=wanted)
        at = after
    return ok
