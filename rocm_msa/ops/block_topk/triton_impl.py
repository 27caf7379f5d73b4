"""block_topk in Triton: one unique int64 rank a block, sorted runs of the best, merged.

    rank = order(score) * 2^24 - id        order: monotone map of fp32 to int32, NaN below -inf

Kept blocks rank above every score, blocks beyond nb below. Ranks are unique, so the result is the
same bits for every chunk and split. A program owns one (row, head, split); with more than one split
a second launch merges their sorted runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.block_topk.plan import Tuning, select

_BEYOND = tl.constexpr(-(1 << 60))
_KEPT = tl.constexpr(1 << 58)


@triton.jit
def _ranks(scores, block_stride, ids, nb, init_blocks, local_blocks):
    inside = ids < nb
    score = tl.load(scores + ids.to(tl.int64) * block_stride, mask=inside, other=0.0)
    nan = score != score
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    order = tl.where(nan, -2147483648, order)
    id64 = ids.to(tl.int64)
    rank = order * 16777216 - id64
    rank = tl.where(ids >= nb - local_blocks, _KEPT - id64, rank)
    rank = tl.where(ids < init_blocks, 2 * _KEPT - id64, rank)
    return tl.where(inside, rank, _BEYOND - id64)


@triton.jit
def _store(best, out, slot_stride, topk, K: tl.constexpr):
    slot = tl.arange(0, K)
    ids = ((-best) & 0xFFFFFF).to(tl.int32)
    tl.store(out + slot * slot_stride, tl.where(best > _BEYOND // 2, ids, -1), mask=slot < topk)


_PLAIN = ["init_blocks", "local_blocks", "topk", "max_blocks"]
_PLAIN += ["score_head", "score_row", "out_head", "out_row"]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["num_blocks"])
def select_kernel(
    scores,  # fp32 [heads, rows, max_blocks]
    score_head,
    score_row,
    score_block,
    num_blocks,  # int32 [rows]
    num_blocks_stride,
    max_blocks,
    topk,
    init_blocks,
    local_blocks,
    out,  # int32 [heads, rows, topk]
    out_head,
    out_row,
    out_slot,
    part,  # int64 [heads, rows, splits, K]
    CHUNK: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    nb = tl.minimum(tl.load(num_blocks + row * num_blocks_stride), max_blocks)
    scores += head * score_head + row * score_row
    split = tl.program_id(2)
    ids = split * CHUNK + tl.arange(0, CHUNK)
    best = tl.topk(_ranks(scores, score_block, ids, nb, init_blocks, local_blocks), K)
    for first in range((split + SPLITS) * CHUNK, nb, SPLITS * CHUNK):
        ids = first + tl.arange(0, CHUNK)
        more = tl.topk(_ranks(scores, score_block, ids, nb, init_blocks, local_blocks), K)
        best = tl.topk(tl.reshape(tl.join(best, more), (2 * K,)), K)
    if SPLITS == 1:
        _store(best, out + head * out_head + row * out_row, out_slot, topk, K)
    else:
        at = ((head * tl.num_programs(0) + row) * SPLITS + split) * K
        tl.store(part + at + tl.arange(0, K), best)


@triton.jit(do_not_specialize=["topk", "out_head", "out_row"])
def merge_kernel(
    part,  # int64 [heads, rows, splits, K]
    out,  # int32 [heads, rows, topk]
    out_head,
    out_row,
    out_slot,
    topk,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = (head * tl.num_programs(0) + row) * (SPLITS * K)
    best = tl.topk(tl.load(part + at + tl.arange(0, SPLITS * K)), K)
    _store(best, out + head * out_head + row * out_row, out_slot, topk, K)


def run(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """int32 `[heads, rows, topk]`; see api.py. `tuning` is for tests and benchmarks."""
    heads, rows, max_blocks = scores.shape
    if out is None:
        out = torch.empty(heads, rows, topk, dtype=torch.int32, device=scores.device)
    if rows == 0 or heads == 0:
        return out
    if max_blocks == 0:
        return out.fill_(-1)
    t = tuning or select(rows * heads, max_blocks, topk)
    part = out
    if t.splits > 1:
        shape = (heads, rows, t.splits, t.kept)
        part = torch.empty(shape, dtype=torch.int64, device=scores.device)
    select_kernel[(rows, heads, t.splits)](
        scores, *scores.stride(), num_blocks, num_blocks.stride(0), max_blocks, topk,
        init_blocks, local_blocks, out, *out.stride(), part,
        CHUNK=t.chunk, K=t.kept, SPLITS=t.splits, num_warps=t.warps,
    )  # fmt: skip
    if t.splits > 1:
        merge_kernel[(rows, heads)](
            part, out, *out.stride(), topk, K=t.kept, SPLITS=t.splits, num_warps=1
        )
    return out
