"""index_score_prefill in Triton: matrix products of query tiles with whole index pages.

A program owns some (token, head) pairs of one request and a run of neighbouring blocks. It decodes
a page once for one or two matrix products of PAIRS pairs, and takes the largest score of each pair:

    score[h, t, b] = k_scale * max over keys j < n(t) of block b of  q[t, h] . k_j

Entries at and beyond a row's causal blocks are -inf; nothing is read for them. A block whose table
entry names no page of the cache scores -inf (the reference raises). A score is a function of its
query and page alone: the same bits for every tile, run and batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.index_score_prefill.plan import Tuning, select
from rocm_msa.ops.triton_host import Geometry, aligned, hopper, scale, target_of
from rocm_msa.ops.triton_prefill import (
    factor,
    find_tile,
    operands,
    page_side,
    product,
    register_limit,
)

_PLAIN = ["num_pages", "max_blocks", "requests", "rows", "out_head", "out_row", "run"]
_ANY = ["table", "cu_seqlens", "seq_lens"]


@triton.jit
def _pairs(q_ptr, q_row, q_head, q_dim, first, end, n_of, place, HEADS: tl.constexpr,
           PAIRS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Pairs [place * PAIRS, (place + 1) * PAIRS) of a tile: row, live, length, operand."""
    p = place * PAIRS + tl.arange(0, PAIRS)
    row = (first + p // HEADS).to(tl.int64)
    live = row < end
    d = tl.arange(0, D)
    at = q_ptr + row * q_row + (p % HEADS).to(tl.int64) * q_head
    q = tl.load(at[:, None] + d[None, :] * q_dim, mask=live[:, None], other=0.0)
    n = tl.where(live, tl.maximum(n_of + row.to(tl.int32), 0), 0)
    return row, live, n, q


@triton.jit
def _best(q, k, n, block, masked, k_scale, Q_PARTS: tl.constexpr):
    """Largest live score of each pair."""
    s = product(q, tl.trans(k), Q_PARTS)
    if masked:
        key = block * 128 + tl.arange(0, 128)
        s = tl.where(key[None, :] < n[:, None], s, float("-inf"))
    return tl.where(block * 128 < n, tl.max(s, 1) * k_scale, float("-inf"))


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_ANY)
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
    cu_seqlens,  # int32 [requests + 1]
    seq_lens,  # int32 [requests]
    requests,
    rows,
    k_scale,  # over the factor of K
    out,  # fp32 [heads, rows, max_blocks]
    out_head,
    out_row,
    out_block,
    run,  # blocks a program
    HEADS: tl.constexpr,
    K_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    K_TYPE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,  # of one product
    PRODUCTS: tl.constexpr,  # with each decoded page, 1 or 2
    STAGES: tl.constexpr,
):
    request, first, end = find_tile(tl.program_id(0), cu_seqlens, requests, rows, TOKENS)
    if first >= end:
        return
    # what added to a token's place in the batch gives its causal length
    n_of = tl.load(seq_lens + request, mask=request < requests, other=0) - end + 1
    n_of = tl.where(request < requests, n_of, -rows)
    wide = tl.full((), 0, tl.int64)
    last = tl.minimum(first + TOKENS, end)
    end = last
    query = (q_ptr, q_row, q_head, q_dim)
    row, live, n, q = _pairs(*query, first, end, n_of, 0, HEADS, PAIRS, D)
    to = out + (tl.arange(0, PAIRS) % HEADS).to(tl.int64) * out_head + row * out_row
    if PRODUCTS == 2:
        row2, live2, n2, q2 = _pairs(*query, first, end, n_of, 1, HEADS, PAIRS, D)
        to2 = out + ((PAIRS + tl.arange(0, PAIRS)) % HEADS).to(tl.int64) * out_head
        to2 += row2 * out_row
    first_block = tl.program_id(1) * run
    last_block = tl.minimum(first_block + run, max_blocks)
    causal_end = tl.minimum(last_block, (n_of + last - 1 + 127) // 128)
    entries = table + (wide + request) * table_row
    token = tl.arange(0, 128)
    for block in tl.range(first_block, causal_end, num_stages=STAGES):
        page = tl.load(entries + (wide + block) * table_column)
        good = (page >= 0) & (page < num_pages)
        base = pages + tl.where(good, page, 0).to(tl.int64) * block_stride
        k = page_side(base, token, token < 128, 0, K_SCALES, D, KIND, K_TYPE, FAST, False)
        masked = (block + 1) * 128 > n_of + first
        best = _best(q, k, tl.where(good, n, 0), block, masked, k_scale, Q_PARTS)
        tl.store(to + (wide + block) * out_block, best, mask=live)
        if PRODUCTS == 2:
            best = _best(q2, k, tl.where(good, n2, 0), block, masked, k_scale, Q_PARTS)
            tl.store(to2 + (wide + block) * out_block, best, mask=live2)
    nothing = tl.full((PAIRS,), float("-inf"), tl.float32)
    for block in range(tl.maximum(first_block, causal_end), last_block):
        tl.store(to + (wide + block) * out_block, nothing, mask=live)
        if PRODUCTS == 2:
            tl.store(to2 + (wide + block) * out_block, nothing, mask=live2)


def run(
    index_q, index_cache, block_table, cu_seqlens_q, seq_lens, out=None,
    tuning: Tuning | None = None,
) -> torch.Tensor:  # fmt: skip
    """fp32 `[heads, tokens, max_blocks]`; see api.py."""
    tokens, heads, dim = index_q.shape
    max_blocks = block_table.shape[1]
    if out is None:
        shape = (heads, tokens, max_blocks)
        out = torch.empty(shape, dtype=torch.float32, device=index_q.device)
    if out.numel() == 0:
        return out
    if index_cache.num_blocks == 0 or seq_lens.numel() == 0:
        return out.fill_(float("-inf"))
    g = Geometry.of(index_cache)
    fast = hopper(index_q) and aligned(index_cache)
    k_type, _, parts, _ = operands(index_q, g.kind)
    t = tuning or select(tokens, heads, max_blocks, g.kind, parts > 1, target_of(index_q))
    a_tile = t.pairs * t.products // heads
    grid = (tokens // a_tile + seq_lens.shape[0] + 1, triton.cdiv(max_blocks, t.run))
    score_kernel[grid](
        index_q, *index_q.stride(), index_cache.pages, index_cache.block_stride,
        index_cache.num_blocks, block_table, *block_table.stride(), max_blocks, cu_seqlens_q,
        seq_lens, seq_lens.shape[0], tokens, scale(index_cache, "k") / factor(g.kind, k_type, fast),
        out, *out.stride(), t.run,
        HEADS=heads, K_SCALES=g.k_scales, D=dim, KIND=g.kind, FAST=fast, K_TYPE=k_type,
        Q_PARTS=parts, TOKENS=a_tile,
        PAIRS=t.pairs, PRODUCTS=t.products, STAGES=t.stages, num_warps=t.warps,
        **register_limit(t.registers),
    )  # fmt: skip
    return out
