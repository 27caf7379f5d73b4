"""Block scores of decode rows from NVFP4 index pages, Hopper, one warp a run of blocks.

A program owns up to 16 (row, head) pairs of one request and RUN neighbouring blocks. While a tile
of keys is computed, the next one is on its way to registers, across the pages.
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
    TILE: gl.constexpr,
):
    """Scores of the blocks first_block .. end - 1; without MASK every key counts for every row."""
    this, base = _page(pages, page, block, first_block, block_stride)
    if first_block < end:
        words, scales = _load(base, 0, K_SCALES, TILE)
        for b in range(first_block, end):
            following, next_base = _page(pages, page, block, b + 1, block_stride)
            best = gl.full([16, TILE], float("-inf"), gl.float32, MMA)
            limit = n - b * 128
            for first in range(0, 128, TILE):
                last = first + TILE >= 128
                ahead, then = gl.where(last, next_base, base), gl.where(last, 0, first + TILE)
                next_words, next_scales = _load(ahead, then, K_SCALES, TILE)
                zero = gl.zeros([16, TILE], gl.float32, MMA)
                s = mma_v2(a, k_operand(words, scales, TILE), zero)
                if MASK:
                    column = gl.arange(0, TILE, COLUMNS)
                    seen = column[None, :] < (limit - first)[:, None]
                    s = gl.where(seen, s, float("-inf"))
                best = gl.maximum(best, s)
                words, scales = next_words, next_scales
            score = gl.max(best, 1)
            dead = (score == float("-inf")) | (this < 0)
            score = gl.where(dead, float("-inf"), score * factor)
            gl.store(to + b.to(gl.int64) * out_block, score, mask=mine)
            this = following
            base = next_base


_PLAIN = ["num_pages", "max_blocks", "rows_per_request", "out_head", "out_row", "length"]


@gluon.jit(do_not_specialize=_PLAIN)
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
    seq_lens,  # int32 [requests]
    rows_per_request,
    k_scale,
    out,  # fp32 [heads, rows, max_blocks]
    out_head,
    out_row,
    out_block,
    length,  # blocks a program, <= 32
    HEADS: gl.constexpr,
    K_SCALES: gl.constexpr,
    TILE: gl.constexpr,  # 16 or 32 tokens
):
    request = gl.program_id(0)
    first_block = gl.program_id(1) * length
    shift = gl.program_id(2) * 16
    last = gl.minimum(first_block + length, max_blocks)
    start = request.to(gl.int64) * rows_per_request
    pair = shift + gl.arange(0, 16, Q_ROWS)
    own = shift + gl.arange(0, 16, ROWS)
    live = pair < rows_per_request * HEADS
    mine = own < rows_per_request * HEADS
    seq_len = gl.load(seq_lens + request)
    n = gl.where(mine, seq_len - rows_per_request + own // HEADS + 1, 0)
    a, factor = query_tile(
        q_ptr, q_row, q_head, start + pair // HEADS, (pair % HEADS).to(gl.int64), live, 16
    )
    factor = factor * k_scale
    to = out + ((own % HEADS).to(gl.int64) * out_head + (start + own // HEADS) * out_row)
    longest = gl.max(n, 0)
    shortest = gl.min(gl.where(mine, n, 2147483647), 0)
    end = gl.minimum(last, (longest + 127) // 128)
    run = gl.arange(0, 32, _RUN)
    block = first_block + run
    at = table + request.to(gl.int64) * table_row + block.to(gl.int64) * table_column
    page = gl.load(at, (block < end) & (run < length), other=-1)
    page = gl.where((page >= 0) & (page < num_pages), page, -1)
    full = gl.minimum(gl.maximum(shortest // 128, first_block), end)
    _blocks(
        first_block, full, a, factor, n, mine, to, out_block, pages, page, block, block_stride,
        K_SCALES, False, TILE,
    )  # fmt: skip
    _blocks(
        gl.maximum(full, first_block), end, a, factor, n, mine, to, out_block, pages, page, block,
        block_stride, K_SCALES, True, TILE,
    )  # fmt: skip
    nothing = gl.full([16], float("-inf"), gl.float32, ROWS)
    for b in range(gl.maximum(first_block, end), last):
        gl.store(to + b.to(gl.int64) * out_block, nothing, mask=mine)
