"""block_topk in Triton: one unique int64 rank a block, sorted runs of the best, merged.

    rank = order * 2^24 - id        order: monotone map of fp32 to int32, NaN below -inf

Kept blocks have orders above every score's, blocks beyond nb below. Ranks are unique, so the result
is the same bits for every chunk and split. A program owns one (row, head, split); with more than
one split a second launch merges their sorted runs. Of a chunk it ranks groups of neighbours by
their best order, then the members of the K best groups: no other block is among the K best.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.block_topk.plan import Tuning, select

_BEYOND, _NAN = tl.constexpr(-(1 << 31)), tl.constexpr(1 - (1 << 31))
_LOCAL, _INIT = tl.constexpr((1 << 31) - 2), tl.constexpr((1 << 31) - 1)


@triton.jit
def _orders(scores, block_stride, ids, nb, init_blocks, local_blocks):
    inside = ids < nb
    score = tl.load(scores + ids.to(tl.int64) * block_stride, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(score == score, order, _NAN)
    order = tl.where(ids >= nb - local_blocks, _LOCAL, order)
    order = tl.where(ids < init_blocks, _INIT, order)
    return tl.where(inside, order, _BEYOND)


@triton.jit
def _ranks(orders, ids):
    return orders.to(tl.int64) * 16777216 - ids.to(tl.int64)


@triton.jit
def _id(rank):
    return ((-rank) & 0xFFFFFF).to(tl.int32)


@triton.jit
def _chunk_best(
    scores, block_stride, first, nb, init_blocks, local_blocks, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Ranks of the best of the blocks first .. first + CHUNK - 1, in order `[K]`."""
    kept = (nb, init_blocks, local_blocks)
    ids = first + tl.arange(0, CHUNK)
    if GROUP > 1:
        group = tl.arange(0, CHUNK // GROUP)
        member = tl.arange(0, GROUP)[None, :]
        ids = first + group[:, None] * GROUP + member
        order = tl.max(_orders(scores, block_stride, ids, *kept), 1)
        group = _id(tl.topk(_ranks(order, group), K))
        ids = tl.reshape(first + group[:, None] * GROUP + member, (K * GROUP,))
    return tl.topk(_ranks(_orders(scores, block_stride, ids, *kept), ids), K)


@triton.jit
def _store(best, out, slot_stride, topk, K: tl.constexpr):
    slot = tl.arange(0, K)
    ids = tl.where(best >= _NAN * 16777216 - 16777215, _id(best), -1)
    tl.store(out + slot * slot_stride, ids, mask=slot < topk)


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
    GROUP: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    nb = tl.minimum(tl.load(num_blocks + row * num_blocks_stride), max_blocks)
    scores += head * score_head + row * score_row
    split = tl.program_id(2)
    kept = (nb, init_blocks, local_blocks)
    best = _chunk_best(scores, score_block, split * CHUNK, *kept, CHUNK, GROUP, K)
    for first in range((split + SPLITS) * CHUNK, nb, SPLITS * CHUNK):
        more = _chunk_best(scores, score_block, first, *kept, CHUNK, GROUP, K)
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
        CHUNK=t.chunk, GROUP=t.group, K=t.kept, SPLITS=t.splits, num_warps=t.warps,
    )  # fmt: skip
    if t.splits > 1:
        merge_kernel[(rows, heads)](
            part, out, *out.stride(), topk, K=t.kept, SPLITS=t.splits, num_warps=1
        )
    return out
