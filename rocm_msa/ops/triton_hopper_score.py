"""Block scores from NVFP4 index pages, Hopper, one warp a run of blocks.

Decode: a program owns up to 16 (row, head) pairs of one request. Prefill: 64 pairs of neighbouring
tokens, so that the decoding of a key is shared by four products; a tile may hold several requests.
One or two tiles of keys (DEPTH) are on their way while one is computed, across the pages.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rocm_msa.ops.triton_hopper import COLUMNS, MMA, Q_ROWS, ROWS, k_operand, load_k, query_tile

_RUN = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _load(base, first, K_SCALES: gl.constexpr, TILE: gl.constexpr):
    words = (base + first * 64).to(gl.pointer_type(gl.int32))
    scales = (base + (K_SCALES + first * 8)).to(gl.pointer_type(gl.int16))
    return load_k(words, scales, TILE)


@gluon.jit
def _tile(best, a, words, scales, limit, MASK: gl.constexpr, M: gl.constexpr, TILE: gl.constexpr):
    zero = gl.zeros([M, TILE], gl.float32, MMA)
    s = mma_v2(a, k_operand(words, scales, TILE), zero)
    if MASK:
        column = gl.arange(0, TILE, COLUMNS)
        s = gl.where(column[None, :] < limit[:, None], s, float("-inf"))
    return gl.maximum(best, s)


@gluon.jit
def _page(pages, page, block, wanted, block_stride):
    """(Page number or -1, its start; page 0's where there is none)."""
    this = gl.max(gl.where(block == wanted, page, -1), 0)
    return this, pages + gl.multiple_of(gl.maximum(this, 0).to(gl.int64) * block_stride, 16)


@gluon.jit
def _blocks(
    first_block,
    end,
    a,
    factor,
    n,
    mine,
    to,
    out_block,
    pages,
    page,
    block,
    block_stride,
    K_SCALES: gl.constexpr,
    MASK: gl.constexpr,
    M: gl.constexpr,
    TILE: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Scores of the blocks first_block .. end - 1; without MASK every key counts for every row."""
    this, base = _page(pages, page, block, first_block, block_stride)
    if first_block < end:
        w0, s0 = _load(base, 0, K_SCALES, TILE)
        if DEPTH == 2:
            w1, s1 = _load(base, TILE, K_SCALES, TILE)
        for b in range(first_block, end):
            following, next_base = _page(pages, page, block, b + 1, block_stride)
            best = gl.full([M, TILE], float("-inf"), gl.float32, MMA)
            limit = n - b * 128
            for step in range(128 // (DEPTH * TILE)):
                first = step * (DEPTH * TILE)
                last = first + DEPTH * TILE >= 128
                ahead = gl.where(last, next_base, base)
                then = gl.where(last, 0, first + DEPTH * TILE)
                if DEPTH == 2:
                    best = _tile(best, a, w0, s0, limit - first, MASK, M, TILE)
                    w0, s0 = _load(ahead, then, K_SCALES, TILE)
                    best = _tile(best, a, w1, s1, limit - first - TILE, MASK, M, TILE)
                    w1, s1 = _load(ahead, then + TILE, K_SCALES, TILE)
                else:
                    w, s = _load(ahead, then, K_SCALES, TILE)
                    best = _tile(best, a, w0, s0, limit - first, MASK, M, TILE)
                    w0, s0 = w, s
            score = gl.max(best, 1)
            dead = (score == float("-inf")) | (this < 0)
            score = gl.where(dead, float("-inf"), score * factor)
            gl.store(to + b.to(gl.int64) * out_block, score, mask=mine)
            this = following
            base = next_base


@gluon.jit(do_not_specialize=["num_pages", "max_blocks", "rows_per_request", "rows"])
def score_kernel(
    q_ptr,  # [rows, heads, 128]
    q_row,
    q_head,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    max_blocks,
    seq_lens,  # int32 [requests], or int32 [2, rows]: request, length
    rows_per_request,
    rows,
    k_scale,
    out,  # fp32 [heads, rows, max_blocks]
    out_head,
    out_row,
    out_block,
    HEADS: gl.constexpr,
    K_SCALES: gl.constexpr,
    RUN: gl.constexpr,
    TILE: gl.constexpr,
    DECODE: gl.constexpr,
    M: gl.constexpr,
    DEPTH: gl.constexpr,
):
    first_block = gl.program_id(1) * RUN
    last = gl.minimum(first_block + RUN, max_blocks)
    pair = gl.arange(0, M, Q_ROWS)
    own = gl.arange(0, M, ROWS)
    if DECODE:
        low = gl.program_id(0)
        high = low
        shift = gl.program_id(2) * M
        start = low.to(gl.int64) * rows_per_request
        seq_len = gl.load(seq_lens + low)
        row = start + (shift + pair) // HEADS
        live = shift + pair < rows_per_request * HEADS
        mine = shift + own < rows_per_request * HEADS
        own_row = start + (shift + own) // HEADS
        n = gl.where(mine, seq_len - rows_per_request + (shift + own) // HEADS + 1, 0)
        requests = low + own * 0
        pair = shift + pair
        own = shift + own
    else:
        start = gl.program_id(0).to(gl.int64) * (M // HEADS)
        row = start + pair // HEADS
        live = (row < rows) & (pair < (M // HEADS) * HEADS)
        own_row = start + own // HEADS
        mine = (own_row < rows) & (own < (M // HEADS) * HEADS)
        requests = gl.load(seq_lens + own_row, mask=mine, other=0)
        n = gl.load(seq_lens + rows + own_row, mask=mine, other=0)
        low = gl.min(gl.where(mine, requests, 2147483647), 0)
        high = gl.max(gl.where(mine, requests, 0), 0)
    a, factor = query_tile(q_ptr, q_row, q_head, row, (pair % HEADS).to(gl.int64), live, M)
    factor = factor * k_scale
    to = out + ((own % HEADS).to(gl.int64) * out_head + own_row * out_row)
    run = gl.arange(0, 32, _RUN)
    block = first_block + run
    for request in range(low, high + 1):
        here = mine & (requests == request)
        longest = gl.max(gl.where(here, n, 0), 0)
        shortest = gl.min(gl.where(here, n, 2147483647), 0)
        end = gl.minimum(last, (longest + 127) // 128)
        at = table + request.to(gl.int64) * table_row + block.to(gl.int64) * table_column
        page = gl.load(at, (block < end) & (run < RUN), other=-1)
        page = gl.where((page >= 0) & (page < num_pages), page, -1)
        full = gl.minimum(gl.maximum(shortest // 128, first_block), end)
        _blocks(
            first_block, full, a, factor, n, here, to, out_block, pages, page, block,
            block_stride, K_SCALES, False, M, TILE, DEPTH,
        )  # fmt: skip
        _blocks(
            gl.maximum(full, first_block), end, a, factor, n, here, to, out_block, pages, page,
            block, block_stride, K_SCALES, True, M, TILE, DEPTH,
        )  # fmt: skip
        nothing = gl.full([M], float("-inf"), gl.float32, ROWS)
        for b in range(gl.maximum(first_block, end), last):
            gl.store(to + b.to(gl.int64) * out_block, nothing, mask=here)
