"""sparse_prefill in Triton, block-outer: a page is decoded once for the tokens that selected it.

worklist.py brings the (token, slot) pairs of a page together. A program takes up to ITEM of them,
decodes K and V of the page once into shared memory, and goes through its tokens four at a time, all
query heads of the KV head together:

    s = q k^T,  m = max s,  p = 2^(s - m),  l = sum p,  o = p v / l,  lse = m + log2 l

A row's result is a function of its query, its page and how many of its keys it sees: the same bits
whichever tokens share the program. A second kernel merges the results of a token in the order of
its slots (triton_prefill_merge.py). Between the two a result is kept in fp32, or for bf16 queries
in fp16 (with a power of two a row for bf16 pages): an error of at most 2^-11 of a value, a quarter
of the rounding of the bf16 result. The batch is taken in turns that bound their memory.

Ids outside of the causal blocks, and table entries that name no page of the cache, count as nothing
(the reference raises for the latter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.sparse_prefill import worklist
from rocm_msa.ops.sparse_prefill.plan import Tuning, select
from rocm_msa.ops.triton_host import (
    Geometry,
    aligned,
    hopper,
    prefill_table,
    scale,
    target_of,
)
from rocm_msa.ops.triton_prefill import LOG2E, factor, operands, page_side, product
from rocm_msa.ops.triton_prefill_merge import merge

_PLAIN = ["first_token", "topk", "num_pages", "most_items", "size"]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["order"])
def attend_kernel(
    q_ptr,  # [rows, q_heads, D]
    q_row,
    q_head,
    q_dim,
    first_token,
    topk,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    order,  # int32 [entries]: entry * 128 + seen keys - 1
    items,  # int32 [3, most items]: key, first place, entries
    most_items,
    totals,  # int32 [3]: entries, items, the next item to take
    qk_scale,  # |sm_scale| * log2(e) * k scale / factor of K
    v_scale,  # v scale / factor of V
    part,  # [entries, GROUP, D] to write
    part_lse,  # fp32 [2, size, GROUP] to write: lse, and the factor of SCALED results
    size,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_DATA: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_DATA: tl.constexpr,
    V_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    K_TYPE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    V_TYPE: tl.constexpr,
    P_PARTS: tl.constexpr,
    NEGATIVE: tl.constexpr,  # sign of sm_scale
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
):
    M: tl.constexpr = 4 * GROUP_PAD
    h = tl.arange(0, M) % GROUP_PAD
    d = tl.arange(0, D)
    key_token = tl.arange(0, 128)
    every = key_token < 128
    last = tl.load(totals + 1)
    item = tl.atomic_add(totals + 2, 1, sem="relaxed")
    while item < last:
        key = tl.load(items + item)
        at = order + tl.load(items + most_items + item)
        count = tl.load(items + 2 * most_items + item)
        item = tl.atomic_add(totals + 2, 1, sem="relaxed")
        head = key // num_pages
        base = pages + (key % num_pages).to(tl.int64) * block_stride + head * HEAD_BYTES
        k = page_side(base, key_token, every, K_DATA, K_SCALES, D, KIND, K_TYPE, FAST, False)
        v = page_side(base, key_token, every, V_DATA, V_SCALES, D, KIND, V_TYPE, FAST, True)
        # scalars, not a vector: they reach every layout without a way through shared memory
        e0, e1, e2, e3 = _four(at, 0, count)
        for first in tl.range(0, count, 4, num_stages=STAGES):
            n0, n1, n2, n3 = _four(at, first + 4, count)
            packed = _rows(e0, e1, e2, e3, M, GROUP_PAD)
            least = tl.minimum(tl.minimum(e0 % 128, e1 % 128), tl.minimum(e2 % 128, e3 % 128))
            live = (packed >= 0) & (h < GROUP)
            token = (packed // 128 // (topk * KV_HEADS) + first_token).to(tl.int64)
            q_at = q_ptr + token * q_row + (head * GROUP + h).to(tl.int64) * q_head
            q = tl.load(q_at[:, None] + d[None, :] * q_dim, mask=live[:, None], other=0.0)
            s = product(q, tl.trans(k), Q_PARTS)
            if NEGATIVE:
                s = -s
            seen = tl.where(packed >= 0, packed % 128 + 1, 128)
            if least < 127:
                s = tl.where(key_token[None, :] < seen[:, None], s, float("-inf"))
            top = tl.max(s, 1) * qk_scale
            p = tl.exp2(s * qk_scale - top[:, None])
            total = tl.sum(p, 1)
            o = product(p, v, P_PARTS)
            o = o * (v_scale / total)[:, None]
            e = (packed // 128).to(tl.int64) * GROUP + h
            if SCALED:
                bits = tl.max(tl.abs(o), 1).to(tl.int32, bitcast=True) & 0x7F800000
                bits = tl.minimum(bits, 0x7E800000)
                o = o * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
                largest = bits.to(tl.float32, bitcast=True)
                tl.store(part_lse + size.to(tl.int64) * GROUP + e, largest, mask=live)
            to = part + e[:, None] * D + d[None, :]
            tl.store(to, o.to(part.dtype.element_ty), mask=live[:, None])
            tl.store(part_lse + e, top + tl.log2(total), mask=live)
            e0, e1, e2, e3 = n0, n1, n2, n3


@triton.jit
def _four(at, first, count):
    """Entries first .. first + 3 of an item, -1 beyond its end."""
    return (
        tl.load(at + first, mask=first < count, other=-1),
        tl.load(at + first + 1, mask=first + 1 < count, other=-1),
        tl.load(at + first + 2, mask=first + 2 < count, other=-1),
        tl.load(at + first + 3, mask=first + 3 < count, other=-1),
    )


@triton.jit
def _rows(e0, e1, e2, e3, M: tl.constexpr, GROUP_PAD: tl.constexpr):
    """int32 `[M]`: the entry of each row of a tile of four."""
    t = tl.arange(0, M) // GROUP_PAD
    return tl.where(t < 2, tl.where(t == 0, e0, e1), tl.where(t == 2, e2, e3))


def run(
    q, main_cache, block_ids, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out in q's dtype, lse); see api.py."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, q_heads, dim = q.shape
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    topk = block_ids.shape[-1]
    if topk == 0 or tokens == 0 or block_table.numel() == 0 or main_cache.num_blocks == 0:
        out.zero_()
        return out, lse.fill_(float("-inf"))
    g, kv_heads = Geometry.of(main_cache), main_cache.kv_heads
    group = q_heads // kv_heads
    fast = hopper(q) and aligned(main_cache)
    k_type, v_type, q_parts, p_parts = operands(q, g.kind)
    small = q.dtype is torch.bfloat16
    scaled = small and g.kind == 2
    t = tuning or select(topk, kv_heads, group, dim, 2 if small else 4, target_of(q))
    rows = prefill_table(cu_seqlens_q, seq_lens, tokens)
    pad = max(4, triton.next_power_of_2(group))
    size = min(tokens, t.turn) * kv_heads * topk
    kept = torch.float16 if small else torch.float32
    part = torch.empty(size, group, dim, dtype=kept, device=q.device)
    part_lse = torch.empty(2, size, group, dtype=torch.float32, device=q.device)
    qk_scale = max(abs(sm_scale), 1e-30) * LOG2E * scale(main_cache, "k")
    qk_scale /= factor(g.kind, k_type, fast)
    v_scale = scale(main_cache, "v") / factor(g.kind, v_type, fast)
    for start in range(0, tokens, t.turn):
        turn = range(start, min(tokens, start + t.turn))
        order, items, totals = worklist.build(
            block_ids, block_table, rows, turn, main_cache.num_blocks, t.item, part_lse[0]
        )
        attend_kernel[(min(t.programs, items.shape[1]),)](
            q, *q.stride(), start, topk, main_cache.pages, main_cache.block_stride,
            main_cache.num_blocks, order, items, items.shape[1], totals,
            qk_scale, v_scale,
            part, part_lse, size,
            KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=pad, HEAD_BYTES=g.head_bytes,
            K_DATA=g.k_data, K_SCALES=g.k_scales, V_DATA=g.v_data, V_SCALES=g.v_scales, D=dim,
            KIND=g.kind, FAST=fast, K_TYPE=k_type,
            Q_PARTS=q_parts, V_TYPE=v_type, P_PARTS=p_parts, NEGATIVE=sm_scale < 0,
            STAGES=t.stages, SCALED=scaled, num_warps=t.warps,
        )  # fmt: skip
        merge(
            part, part_lse, topk, len(turn), cu_seqlens_q, out, lse, kv_heads,
            step=min(32, triton.next_power_of_2(topk)), warps=t.merge_warps, scaled=scaled,
            first_token=start,
        )  # fmt: skip
    return out, lse
