"""Block scores of decode rows from NVFP4 index pages, Hopper, one warp a program.

The causal blocks of all requests, one request after another, are cut into equal parts, one a
program, whatever the lengths; a program takes up to 16 (row, head) pairs with each. What lies
beyond the causal blocks is cut in the same way. While a tile of keys is computed, the next one is
on its way to registers, across the pages.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rocm_msa.ops.triton_hopper import (
    COLUMNS,
    MMA,
    Q_LOAD,
    Q_ROWS,
    QUERIES,
    ROWS,
    A,
    k_operand,
    load_k,
    query_rows,
)

_RUN = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_FILL = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
_FILL_ROWS = gl.constexpr(gl.SliceLayout(1, _FILL))
_FILL_COLUMNS = gl.constexpr(gl.SliceLayout(0, _FILL))


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
    queries,  # in shared memory
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
                a = queries.load(A)
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


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _causal_blocks(seq_len, max_blocks):
    return gl.minimum((gl.maximum(seq_len, 0) + 127) // 128, max_blocks)


@gluon.jit
def _find(upto, known, at):
    """(the request that item `at` belongs to, items of those before it)."""
    before = known & (upto <= at)
    return gl.sum(before.to(gl.int32), 0), gl.max(gl.where(before, upto, 0), 0)


@gluon.jit
def _fill(
    upto, known, seq_lens, rows_per_request, max_blocks, shift, out, out_head, out_row, out_block,
    HEADS: gl.constexpr,
):  # fmt: skip
    """-inf for this program's part of the blocks that no row of their request sees."""
    total = gl.max(upto, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    at = gl.program_id(0) * share
    stop = gl.minimum(at + share, total)
    request, start = _find(upto, known, at)
    own, column = shift + gl.arange(0, 16, _FILL_ROWS), gl.arange(0, 32, _FILL_COLUMNS)
    nothing = gl.full([16, 32], float("-inf"), gl.float32, _FILL)
    while at < stop:
        beyond = _causal_blocks(gl.load(seq_lens + request), max_blocks)
        row = request.to(gl.int64) * rows_per_request + own // HEADS
        to = out + ((own % HEADS).to(gl.int64) * out_head + row * out_row)
        end = gl.minimum(max_blocks, beyond + stop - start)
        for first in range(beyond + at - start, end, 32):
            block = first + column
            mask = (own < rows_per_request * HEADS)[:, None] & (block < end)[None, :]
            gl.store(to[:, None] + block.to(gl.int64)[None, :] * out_block, nothing, mask=mask)
        start += max_blocks - beyond
        at = start
        request += 1


_PLAIN = ["num_pages", "max_blocks", "requests", "rows_per_request", "out_head", "out_row"]


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
    requests,
    rows_per_request,
    k_scale,
    out,  # fp32 [heads, rows, max_blocks]
    out_head,
    out_row,
    out_block,
    HEADS: gl.constexpr,
    K_SCALES: gl.constexpr,
    TILE: gl.constexpr,  # 16 or 32 tokens
    REQUESTS: gl.constexpr,  # a power of two, >= 32 and >= requests
):
    shift = gl.program_id(1) * 16
    which = gl.arange(0, REQUESTS, _RUN)
    known = which < requests
    seq_len = gl.load(seq_lens + which, known, other=0)
    upto = gl.associative_scan(_causal_blocks(seq_len, max_blocks), 0, _sum)
    beyond = gl.where(known, (which + 1) * max_blocks - upto, 0)
    _fill(
        beyond, known, seq_lens, rows_per_request, max_blocks, shift, out, out_head, out_row,
        out_block, HEADS,
    )  # fmt: skip
    total = gl.max(upto, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    at = gl.program_id(0) * share
    stop = gl.minimum(at + share, total)
    request, start = _find(upto, known, at)
    pair = shift + gl.arange(0, 16, Q_ROWS)
    own = shift + gl.arange(0, 16, ROWS)
    live = pair < rows_per_request * HEADS
    mine = own < rows_per_request * HEADS
    run = gl.arange(0, 32, _RUN)
    queries = gl.allocate_shared_memory(gl.float16, [16, 128], QUERIES)
    while at < stop:
        length = gl.load(seq_lens + request)
        blocks = _causal_blocks(length, max_blocks)
        end = gl.minimum(blocks, stop - start)
        row = request.to(gl.int64) * rows_per_request
        n = gl.where(mine, length - rows_per_request + own // HEADS + 1, 0)
        head = (pair % HEADS).to(gl.int64)
        q, factor = query_rows(q_ptr, q_row, q_head, row + pair // HEADS, head, live, 1.0, Q_LOAD)
        queries.store(q)
        factor = gl.convert_layout(factor, ROWS) * k_scale
        to = out + ((own % HEADS).to(gl.int64) * out_head + (row + own // HEADS) * out_row)
        shortest = gl.min(gl.where(mine, n, 2147483647), 0)
        entries = table + request.to(gl.int64) * table_row
        for first in range(at - start, end, 32):
            last = gl.minimum(first + 32, end)
            block = first + run
            page = gl.load(entries + block.to(gl.int64) * table_column, block < last, other=-1)
            page = gl.where((page >= 0) & (page < num_pages), page, -1)
            full = gl.minimum(gl.maximum(shortest // 128, first), last)
            what = (queries, factor, n, mine, to, out_block, pages, page, block, block_stride)
            _blocks(first, full, *what, K_SCALES, False, TILE)
            _blocks(full, last, *what, K_SCALES, True, TILE)
        start += blocks
        at = start
        request += 1
