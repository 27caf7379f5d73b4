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
from dcp import triton_scan as scan
from dcp import triton_select as pick
from dcp.mailbox_layout import BUFFERS, SCRUB_WORDS
from dcp.shard import Site

PHASES = ("push", "wait", "score", "send", "merge")

# Bounds of the waits in units of the launch's patience: who misses a message itself reports first.
# The others are triton_scan.QUERY_TIMES and, the longest, triton_select.RESULT_TIMES.
_START, _OWN = tl.constexpr(1), tl.constexpr(3)
_NO_START, _NO_RESULTS, _OTHER_SHAPE = (
    tl.constexpr(int(site)) for site in (Site.START, Site.RESULTS, Site.SHAPE)
)
_BUFFERS, _SCRUB = tl.constexpr(BUFFERS), tl.constexpr(SCRUB_WORDS)


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
    ok = scan.score(
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
