"""Merging partial results of a query: the last step of sparse_prefill and dense_attention.

    out = sum_p w_p o_p / sum_p w_p,    w_p = 2^(lse_p - max_p lse_p)

A partial result is o_p, already divided by its own sum and times the global scale of V, and lse_p
to the base 2; lse_p = -inf says that o_p was not written. Sums are fp32, in an order that follows
from STEP alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["size", "first_token", "first_request", "parts", "packed"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def merge_kernel(
    part,  # [size, GROUP, D], size = tokens * kv_heads * parts
    part_lse,  # fp32 [2, size, GROUP]: base 2; factors of SCALED results
    size,
    first_token,
    parts,
    cu_seqlens,  # int32 [requests + 1], with FEW
    first_request,
    packed,  # with FEW: whether `part` is by token all the same
    out,  # [rows, q_heads, D]
    out_row,
    out_head,
    out_dim,
    lse,  # fp32 [rows, q_heads], natural logarithm
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,  # parts at a time
    SCALED: tl.constexpr,
    FEW: tl.constexpr,  # 0, or rows a request has in `part`: the requests with at most so many
):
    """One (token, query head)."""
    program = tl.program_id(0).to(tl.int64)
    q_head = program % (KV_HEADS * GROUP)
    row = program // (KV_HEADS * GROUP)
    place = row
    row += first_token
    if FEW > 0:
        request = row // FEW + first_request
        begin = tl.load(cu_seqlens + request)
        new = tl.load(cu_seqlens + request + 1) - begin
        if (new > FEW) | (row % FEW >= new):
            return
        row = begin + row % FEW
        place = tl.where(packed != 0, row, place)
    first = (place * KV_HEADS + q_head // GROUP) * parts * GROUP + q_head % GROUP
    p = tl.arange(0, STEP)
    d = tl.arange(0, D)
    top = tl.full((STEP,), float("-inf"), tl.float32)
    for start in range(0, parts, STEP):
        at = part_lse + first + (start + p) * GROUP
        top = tl.maximum(top, tl.load(at, mask=start + p < parts, other=float("-inf")))
    top = tl.max(top, 0)
    some = top > float("-inf")
    base = tl.where(some, top, 0.0)
    total = tl.full((), 0.0, tl.float32)
    o = tl.zeros((D,), tl.float32)
    for start in range(0, parts, STEP):
        inside = start + p < parts
        at = first + (start + p) * GROUP
        one = tl.load(part_lse + at, mask=inside, other=float("-inf"))
        x = tl.load(part + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        live = one > float("-inf")  # the others' memory holds anything
        w = tl.exp2(one - base)
        total += tl.sum(w, 0)
        if SCALED:
            at_factor = part_lse + size.to(tl.int64) * GROUP + at
            w *= tl.where(live, tl.load(at_factor, mask=inside, other=0.0), 0.0)
        o += tl.sum(tl.where(live[:, None], x.to(tl.float32), 0.0) * w[:, None], 0)
    whole = tl.where(some, total, 1.0)
    o = tl.where(some, tl.div_rn(o, tl.zeros_like(o) + whole), 0.0)
    to = out + row * out_row + q_head * out_head + d * out_dim
    tl.store(to, o.to(out.dtype.element_ty))
    value = tl.where(some, (base + tl.log2(whole)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + row * (KV_HEADS * GROUP) + q_head, value)


def merge(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    parts: int,
    places: int,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_heads: int,
    step: int,
    warps: int,
    scaled: bool = False,
    first_token: int = 0,
    first_request: int = 0,
    few: int = 0,
    packed: bool = False,
) -> None:
    """Launch for `places` tokens from `first_token` on, or `few` a request."""
    size, group, dim = part.shape
    merge_kernel[(places * kv_heads * group,)](
        part, part_lse, size, first_token, parts, cu_seqlens, first_request, int(packed), out,
        *out.stride(), lse, KV_HEADS=kv_heads, GROUP=group, D=dim, STEP=step, SCALED=scaled,
        FEW=few, num_warps=warps,
    )  # fmt: skip
