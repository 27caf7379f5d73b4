"""Block scores from the index cache in Triton: one kernel for decode and prefill rows.

A program owns a tile of (row, head) pairs and a run of neighbouring blocks. Decode: the pairs of
one request. Prefill: neighbouring tokens; a tile may hold the end of a request and the start of the
next, and goes through the requests that it holds one after the other. Entries at and beyond a row's
causal blocks are stored as -inf by the program that owns them; nothing is read for them. A block
whose table entry names no page of the cache scores -inf (the reference raises).

The score of a (row, head, block) is a function of its query and page alone: the same bits for every
tile, run and batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.cache.paged import IndexCache
from rocm_msa.ops.triton_common import half_dims, load_half_pages
from rocm_msa.ops.triton_host import Geometry, aligned, hopper, operand_types, scale


@triton.jit(do_not_specialize=["num_pages", "max_blocks", "rows_per_request", "rows"])
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
    seq_lens,  # int32 [requests], or int32 [2, rows]: request, length
    rows_per_request,
    rows,
    k_scale,
    out,  # fp32 [heads, rows, max_blocks]
    out_head,
    out_row,
    out_block,
    HEADS: tl.constexpr,
    K_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    QK: tl.constexpr,
    PAIRS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    DECODE: tl.constexpr,
):
    wide = tl.full((), 0, tl.int64)
    p = tl.arange(0, PAIRS)
    if DECODE:
        request = tl.program_id(0)
        p += tl.program_id(2) * PAIRS
        own = p < rows_per_request * HEADS
        row = request.to(tl.int64) * rows_per_request + p // HEADS
        n = tl.load(seq_lens + request) - rows_per_request + p // HEADS + 1
        n = tl.where(own, tl.maximum(n, 0), 0)
        requests = tl.zeros((PAIRS,), tl.int32) + request
        low, high = request, request
    else:
        row = tl.program_id(0).to(tl.int64) * (PAIRS // HEADS) + p // HEADS
        own = (p < (PAIRS // HEADS) * HEADS) & (row < rows)
        requests = tl.load(seq_lens + row, mask=own, other=0)
        n = tl.load(seq_lens + rows + row, mask=own, other=0)
        low = tl.min(tl.where(own, requests, 2147483647), 0)
        high = tl.max(tl.where(own, requests, 0), 0)
    head = (p % HEADS).to(tl.int64)
    q_at = row * q_row + head * q_head
    da, db = half_dims(D, KIND)
    qa = tl.load(q_ptr + q_at[:, None] + da[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)
    qb = tl.load(q_ptr + q_at[:, None] + db[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)
    to = out + head * out_head + row * out_row
    first_block = tl.program_id(1) * RUN
    last_block = tl.minimum(first_block + RUN, max_blocks)
    for request in range(low, high + 1):
        mine = own & (requests == request)
        longest = tl.max(tl.where(mine, n, 0), 0)
        shortest = tl.min(tl.where(mine, n, 2147483647), 0)
        causal_end = tl.minimum(last_block, (longest + 127) // 128)
        entries = table + (wide + request) * table_row
        for block in range(first_block, causal_end):
            page = tl.load(entries + (wide + block) * table_column)
            good = (page >= 0) & (page < num_pages)
            base = pages + tl.where(good, page, 0).to(tl.int64) * block_stride
            best = tl.full((PAIRS,), float("-inf"), tl.float32)
            for first in tl.static_range(0, 128, TILE):
                token = first + tl.arange(0, TILE)
                key = block * 128 + token
                seen = key < tl.where(good, longest, 0)
                ka, kb = load_half_pages(base, token, seen, 0, K_SCALES, D, KIND, QK)
                s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
                s = tl.dot(qb, tl.trans(kb), acc=s, input_precision="ieee")
                if (block + 1) * 128 > shortest:
                    s = tl.where(key[None, :] < n[:, None], s, float("-inf"))
                best = tl.maximum(best, tl.max(s, 1))
            best = tl.where(block * 128 < tl.where(good, n, 0), best * k_scale, float("-inf"))
            tl.store(to + (wide + block) * out_block, best, mask=mine)
        nothing = tl.full((PAIRS,), float("-inf"), tl.float32)
        for block in range(tl.maximum(first_block, causal_end), last_block):
            tl.store(to + (wide + block) * out_block, nothing, mask=mine)


def score(
    index_q: torch.Tensor,
    cache: IndexCache,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    rows_per_request: int | None,
    out: torch.Tensor,
    pairs: int,
    run: int,
    tile: int,
    warps: int,
    fast: bool = True,
    hopper_tile: int = 16,
    registers: int | None = None,
    hopper_pairs: int = 64,
    hopper_depth: int | None = None,
) -> None:
    """Launch.

    Args:
        lengths: seq_lens int32 `[requests]` with `rows_per_request`, else int32 `[2, rows]`.
        out: fp32 `[heads, rows, max_blocks]` to write, any strides.
        pairs: (row, head) pairs a program.
        run: blocks a program.
        tile: tokens a step.
        fast: whether the Hopper kernel may be taken where it applies.
        hopper_tile, registers: see triton_attention.attend.
        hopper_depth: tiles that it loads ahead, 1 or 2; None for the faster on an H200.
        hopper_pairs: pairs a program of the Hopper prefill kernel, 16, 32 or 64.
    """
    rows, heads, dim = index_q.shape
    max_blocks = block_table.shape[1]
    if rows == 0 or heads == 0 or max_blocks == 0:
        return
    if cache.num_blocks == 0:
        out.fill_(float("-inf"))
        return
    g = Geometry.of(cache)
    table = (block_table, *block_table.stride(), max_blocks)
    runs = triton.cdiv(max_blocks, run)
    decode = rows_per_request is not None
    hop = (
        fast
        and hopper(index_q)
        and g.kind == 0
        and dim == 128
        and heads <= 16
        and index_q.dtype is not torch.float32
        and index_q.stride(-1) == 1
        and aligned(cache)
    )
    pages = (cache.pages, cache.block_stride, cache.num_blocks)
    if hop:
        from rocm_msa.ops.triton_hopper_score import score_kernel as kernel

        pairs, run = (16, min(run, 32)) if decode else (hopper_pairs, 32)
        grid = (triton.cdiv(rows, pairs // heads), triton.cdiv(max_blocks, run))
        if decode:
            grid = (lengths.shape[0], grid[1], triton.cdiv(rows_per_request * heads, pairs))
        kernel[grid](
            index_q, index_q.stride(0), index_q.stride(1), *pages, *table, lengths,
            rows_per_request or 1, rows, scale(cache, "k"), out, *out.stride(),
            HEADS=heads, K_SCALES=g.k_scales, RUN=run, TILE=hopper_tile if decode else 16,
            DECODE=decode, M=pairs, DEPTH=hopper_depth or (1 if decode else 2),
            num_warps=1, maxnreg=registers,
        )  # fmt: skip
        return
    if decode:
        grid = (lengths.shape[0], runs, triton.cdiv(rows_per_request * heads, pairs))
    else:
        grid = (triton.cdiv(rows, pairs // heads), runs)
    qk, _ = operand_types(index_q, cache)
    score_kernel[grid](
        index_q, *index_q.stride(), *pages, *table, lengths, rows_per_request or 1, rows,
        scale(cache, "k"), out, *out.stride(),
        HEADS=heads, K_SCALES=g.k_scales, D=dim, KIND=g.kind, QK=qk, PAIRS=pairs, RUN=run,
        TILE=tile, DECODE=decode, num_warps=warps,
    )  # fmt: skip
