"""Traced code of the exchange in Triton; README.md has the protocol, exchange_triton.py runs it.

A program is one warp. It takes an equal part of the blocks that this rank scores, in the order of
the requests, a block at a time; all else is dealt to the programs one (row, head) at a time. A
program that gives up goes on to the end without sending or selecting anything.

    batch   tuple: num_blocks int32 pointer [rows], requests, rows_per_request, max_blocks,
            init_blocks, local_blocks
    end     tuple, see triton_mailbox.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp import triton_mailbox as box
from dcp import triton_select as pick
from dcp.mailbox_layout import BUFFERS, SCRUB_WORDS
from dcp.shard import Site
from rocm_msa.ops.triton_common import e4m3_words, halves_of, page_bytes
from rocm_msa.ops.triton_hopper import K_WORD, SCALE_PAIR

PHASES = ("push", "wait", "score", "send", "merge")
TILE = 32  # tokens of a product
PAIRS = 16  # (row, head) pairs of a product; more are taken in turns: twice as many would spill
HOPPER = 5
"""KIND of NVFP4 pages with the sums of ops/triton_hopper.py; the others: ops/triton_common.py."""

WIDE = triton.__version__.startswith("3.6.")
"""Whether the compiler gives a lane four neighbouring k of a joined operand, and not two. The order
of k is chosen so that lanes need not exchange values; the matrix instruction sees the same."""

# Bounds of the waits in units of the launch's patience: who misses a message itself reports first.
# The last and longest is triton_select.RESULT_TIMES.
_START, _QUERIES, _OWN = (tl.constexpr(times) for times in (1, 2, 3))
_NO_START, _NO_QUERIES, _NO_RESULTS, _OTHER_SHAPE = (
    tl.constexpr(int(site)) for site in (Site.START, Site.QUERIES, Site.RESULTS, Site.SHAPE)
)
_BUFFERS, _SCRUB = tl.constexpr(BUFFERS), tl.constexpr(SCRUB_WORDS)
_TILE, _PAIRS, _HOPPER = tl.constexpr(TILE), tl.constexpr(PAIRS), tl.constexpr(HOPPER)
_WIDE = tl.constexpr(WIDE)


@triton.jit
def _survey(batch, rank, RANKS: tl.constexpr, REQUESTS: tl.constexpr):
    """Blocks that this rank scores: up to each request `[REQUESTS]`; a digest of all row counts."""
    request = tl.arange(0, REQUESTS)
    known = request < batch[1]
    longest, mark = tl.zeros((REQUESTS,), tl.int32), tl.zeros((REQUESTS,), tl.int32)
    for i in range(batch[2]):
        row = request * batch[2] + i
        _, last, count = pick.row_range(batch, row, known)
        longest = tl.maximum(longest, last)
        mixed = (count + 1) * ((row * 2 + 1) * 0x61C88647 | 1)
        mark += tl.where(known, mixed ^ (mixed >> 15), 0)
    owned = tl.where(known, pick.owned(rank, longest, RANKS), 0)
    return tl.cumsum(owned, 0), tl.sum(mark)


@triton.jit
def _push(
    end, q, q_row, q_head, rows, seen, buffer, hello_at, queries_at, max_rows, scrub_mask,
    buffers_at, buffer_words, OWN: tl.constexpr, REPLICAS: tl.constexpr,
    W: tl.constexpr, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Hello, and the queries of the heads that this rank pushes, to every rank; then clear."""
    boxes, rank, gen = box.mailboxes(end, RANKS, R), end[4], end[5]
    peers = tl.arange(0, R) < RANKS
    first, programs = tl.program_id(0), tl.num_programs(0)
    if first == 0:
        box.post(end, boxes + buffer + hello_at + rank, seen, peers, AMD)
    items = tl.where(rank % REPLICAS == 0, rows * OWN, 0)
    word = tl.arange(0, W)
    for item in range(first, items, programs):
        row, own = (item // OWN).to(tl.int64), item % OWN
        payload = tl.load(q + row * q_row + own * q_head + word)
        head = rank // REPLICAS * OWN + own
        at = buffer + queries_at + (head * max_rows + row) * W + word
        box.post(end, boxes[:, None] + at[None, :], payload[None, :], peers[:, None], AMD)
    if first == programs - 1:
        chunk = (gen // _BUFFERS) & scrub_mask
        at = buffers_at + (gen + 2) % _BUFFERS * buffer_words + chunk * _SCRUB
        box.clear(end[0] + at + tl.arange(0, _SCRUB), AMD)


@triton.jit
def _all_here(end, hello, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr):
    """Wait for the hello of every rank; whether all are here with this rank's digest."""
    peer = tl.arange(0, R)
    known = peer < RANKS
    found, ok = box.collect(end, hello + peer, known, peer, _NO_START, _START, RANKS, R, AMD)
    alike = (found[:, None] == found[None, :]) & known[:, None] & known[None, :]
    same = tl.sum(alike.to(tl.int32), 1)  # ranks with each one's digest
    agreed = tl.min(tl.where(known, same, RANKS)) == RANKS
    odd = tl.min(tl.where(known, same * R + peer, RANKS * R)) % R
    if RANKS == 2:
        odd = 1 - end[4]
    if ok & (agreed == 0):
        box.fail(end, _OTHER_SHAPE, odd, RANKS, R, AMD)
    return ok & agreed & (box.hear_first(end, RANKS, R, AMD) == 0)


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
        SCALE_PAIR, "=h,=h,h", [scales], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
    )
    s = tl.join(low, high)[:, :, :, None]
    e = tl.inline_asm_elementwise(
        K_WORD, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [tl.reshape(words, (T, 4, 2, 2)), s],
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
def _score(
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


@triton.jit
def _send_candidates(
    end, batch, upto, ok, r_at, keys, flags, max_rows, slots, result_words, HEADS: tl.constexpr,
    OWN: tl.constexpr, REPLICAS: tl.constexpr, TOPK: tl.constexpr, K: tl.constexpr,
    REQUESTS: tl.constexpr, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The best blocks of this rank, of every (row, head), to the owners."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    rank, total = end[4], tl.max(upto)
    share = tl.maximum((total + programs - 1) // programs, 1)
    every, slot = tl.arange(0, REQUESTS), tl.arange(0, K)
    for item in range(first, batch[1] * batch[2] * HEADS, programs):
        row, head = item // HEADS, item % HEADS
        init, last, _ = pick.row_range(batch, row, True)
        begin, stop = pick.owned(rank, init, RANKS), pick.owned(rank, last, RANKS)
        if ok & (begin < stop):
            start = tl.max(tl.where(every < row // batch[2], upto, 0))
            ok = box.await_flags(
                end, flags, (start + begin) // share, (start + stop - 1) // share, _NO_RESULTS,
                _OWN, RANKS, R, AMD,
            )  # fmt: skip
            if ok:
                kept = keys + (head * max_rows + row) * slots
                best = pick.best_of_kept(kept, begin, stop, RANKS, rank, K)
                key = tl.where(best > 0, (best + 0xFFFFFF) // 16777216, 0)
                result = r_at + (((head % OWN) * RANKS + rank) * max_rows + row) * result_words
                for replica in tl.static_range(REPLICAS):
                    owner = head // OWN * REPLICAS + replica
                    to = tl.load(end[1] + owner).to(tl.pointer_type(tl.int64)) + result
                    box.post(end, to + slot, key, slot < TOPK, AMD)
                    box.post(end, to + TOPK + slot, pick.id_of(best), slot < TOPK, AMD)
    return ok


@triton.jit
def _note(times, phase: tl.constexpr, AMD: tl.constexpr):
    if times is not None:
        tl.store(times + phase, box.now(AMD), mask=tl.program_id(0) == 0)


_PLAIN = [
    "q_row", "q_head", "num_pages", "table_row", "requests", "rows_per_request",
    "max_blocks", "init_blocks", "local_blocks", "launch", "rank", "patience", "max_rows",
    "slots", "result_words", "buffer_words", "results_at", "scrub_mask", "out_head", "out_row",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["num_blocks"])
def exchange_kernel(
    q,  # int32 [rows, own heads, D / 2]: pairs of 16-bit values
    q_row,  # in elements of q
    q_head,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    k_scale,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    num_blocks,  # int32 [rows]
    requests,
    rows_per_request,
    max_blocks,
    init_blocks,
    local_blocks,
    launch,  # digest of what the host knows
    addresses,  # int64 [RANKS + 1]: of all mailboxes, of the host's error word
    rank,
    state,  # int64 words, Geometry.state
    patience,  # ticks
    max_rows,  # Geometry.rows, slots, result_words
    slots,
    result_words,
    buffer_words,
    results_at,  # words, in a buffer
    scrub_mask,  # chunks - 1
    out,  # int32 [own heads, rows, topk]
    out_head,
    out_row,
    out_slot,
    times,  # int64 [PHASES + 1] or None: ticks at the end of each phase of the first program
    RANKS: tl.constexpr,
    HEADS: tl.constexpr,  # of the model
    TOPK: tl.constexpr,
    SCORES: tl.constexpr,  # form of the results
    BUFFERS_AT: tl.constexpr,  # words: in a mailbox, in a buffer, in the state
    HELLO_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr,
    ERROR_AT: tl.constexpr,
    ARRIVALS_AT: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    R: tl.constexpr,  # powers of two: >= RANKS,
    K: tl.constexpr,  # >= TOPK,
    REQUESTS: tl.constexpr,  # >= requests
    D: tl.constexpr,
    K_SCALES: tl.constexpr,
    KIND: tl.constexpr,
    Q: tl.constexpr,  # type of the queries
    QK: tl.constexpr,  # of the operands
    AMD: tl.constexpr,
):
    OWN: tl.constexpr = (HEADS + RANKS - 1) // RANKS
    REPLICAS: tl.constexpr = (RANKS + HEADS - 1) // HEADS
    # Writer: the launch before, its last program. The kernel boundary orders them.
    gen = tl.load(state)
    own_box = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    status = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int64))
    end = (own_box, addresses, state + ERROR_AT, status, rank, gen, patience.to(tl.int64))
    batch = (num_blocks, requests, rows_per_request, max_blocks, init_blocks, local_blocks)
    max_rows = max_rows.to(tl.int64)
    buffer = BUFFERS_AT + (gen % _BUFFERS) * buffer_words
    q_at, r_at = buffer + QUERIES_AT, buffer + results_at
    keys = (state + KEYS_AT).to(tl.pointer_type(tl.int32))
    _note(times, 0, AMD)
    upto, mark = _survey(batch, rank, RANKS, REQUESTS)
    seen = launch ^ mark
    if box.hear_first(end, RANKS, R, AMD) == 0:
        _push(
            end, q, q_row, q_head, requests * rows_per_request, seen, buffer, HELLO_AT, QUERIES_AT,
            max_rows, scrub_mask, BUFFERS_AT, buffer_words, OWN, REPLICAS, D // 2, RANKS, R, AMD,
        )  # fmt: skip
    _note(times, 1, AMD)
    ok = _all_here(end, own_box + buffer + HELLO_AT, RANKS, R, AMD)
    _note(times, 2, AMD)
    ok = _score(
        end, batch, upto, ok, q_at, r_at, keys, table, table_row, table_column, pages,
        block_stride, num_pages, k_scale, max_rows, slots, result_words, HEADS, OWN, REPLICAS,
        SCORES, D, K_SCALES, KIND, Q, QK, RANKS, R, AMD,
    )  # fmt: skip
    _note(times, 3, AMD)
    if SCORES == 0:
        flags = state + FLAGS_AT
        box.raise_flag(end, flags + tl.program_id(0), AMD)
        ok = _send_candidates(
            end, batch, upto, ok, r_at, keys, flags, max_rows, slots, result_words, HEADS, OWN,
            REPLICAS, TOPK, K, REQUESTS, RANKS, R, AMD,
        )  # fmt: skip
    _note(times, 4, AMD)
    pick.select(
        end, batch, ok, r_at, max_rows, result_words, out, out_head, out_row, out_slot, OWN,
        SCORES, TOPK, K, RANKS, R, AMD,
    )  # fmt: skip
    _note(times, 5, AMD)
    box.arrive(end, (state + ARRIVALS_AT).to(tl.pointer_type(tl.int32)), state)
