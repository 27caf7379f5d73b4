"""Block scores of decode rows from the index cache, any cache dtype, any GPU.

A program owns PAIRS (row, head) pairs of one request and RUN neighbouring blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_msa.ops.triton_common import half_dims, page_halves

_PLAIN = ["num_pages", "max_blocks", "rows_per_request", "out_head", "out_row", "run"]


@triton.jit(do_not_specialize=_PLAIN)
def score_kernel(
    q_ptr,  # [rows, heads, D]
    q_row,
    q_head,
    q_dim,
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
    run,  # blocks a program
    HEADS: tl.constexpr,
    K_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    QK: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
):
    wide = tl.full((), 0, tl.int64)
    request = tl.program_id(0)
    p = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    own = p < rows_per_request * HEADS
    row = request.to(tl.int64) * rows_per_request + p // HEADS
    seq_len = tl.load(seq_lens + request)
    n = tl.where(own, seq_len - rows_per_request + p // HEADS + 1, 0)
    shortest = tl.min(tl.where(own, n, 2147483647), 0)
    head = (p % HEADS).to(tl.int64)
    q_at = row * q_row + head * q_head
    da, db = half_dims(D, KIND)
    qa = tl.load(q_ptr + q_at[:, None] + da[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)
    qb = tl.load(q_ptr + q_at[:, None] + db[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)
    to = out + head * out_head + row * out_row
    first_block = tl.program_id(1) * run
    last_block = tl.minimum(first_block + run, max_blocks)
    causal_end = tl.minimum(last_block, (seq_len + 127) // 128)
    entries = table + request.to(tl.int64) * table_row
    for block in range(first_block, causal_end):
        page = tl.load(entries + (wide + block) * table_column)
        good = (page >= 0) & (page < num_pages)
        base = pages + tl.where(good, page, 0).to(tl.int64) * block_stride
        best = tl.full((PAIRS,), float("-inf"), tl.float32)
        for first in tl.static_range(0, 128, TILE):
            token = first + tl.arange(0, TILE)
            ka, kb = page_halves(base, token, 0, K_SCALES, D, KIND, QK)
            s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
            s = tl.dot(qb, tl.trans(kb), acc=s, input_precision="ieee")
            if (block + 1) * 128 > shortest:
                s = tl.where((block * 128 + token)[None, :] < n[:, None], s, float("-inf"))
            best = tl.maximum(best, tl.max(s, 1))
        best = tl.where(good & (block * 128 < n), best * k_scale, float("-inf"))
        tl.store(to + (wide + block) * out_block, best, mask=own)
    nothing = tl.full((PAIRS,), float("-inf"), tl.float32)
    for block in range(tl.maximum(first_block, causal_end), last_block):
        tl.store(to + (wide + block) * out_block, nothing, mask=own)
