"""Softmax attention of rows over lists of cache blocks in Triton: decode, prefill, dense.

A program owns one (row, KV head, unit): `unit` slots of the row's block list, all query heads of
the KV head. It goes through its slots in their order with a running maximum; with more than one
unit the partial results are merged in the order of the units, so a row's result depends on its list
and on the unit size, never on the batch. The unit size is a constant of the case, see plan.py.

Ids outside of the causal blocks, and table entries that name no page of the cache, count as nothing
(the reference raises for the latter). Rows without a key give zeros and lse = -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.cache.paged import MainCache
from rocm_msa.ops.triton_common import half_dims, load_half_pages
from rocm_msa.ops.triton_host import Geometry, aligned, hopper, operand_types, scale

LOG2E = 1.4426950408889634


_PLAIN = ["num_pages", "rows_per_request", "rows", "topk", "units", "unit"]


@triton.jit(do_not_specialize=_PLAIN)
def attend_kernel(
    q_ptr,  # [rows, q_heads, D]
    q_row,
    q_head,
    q_dim,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    block_ids,  # int32 [kv_heads, rows, topk]; unused with LISTS False
    ids_head,
    ids_row,
    ids_slot,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    seq_lens,  # int32 [requests], or int32 [2, rows]: request, length
    rows_per_request,
    rows,
    topk,
    qk_scale,  # sm_scale * log2(e) * k scale
    v_scale,
    out,  # [rows, q_heads, D]
    out_row,
    out_head,
    out_dim,
    lse,  # fp32 [rows, q_heads]
    part,  # fp32 [rows * kv_heads * units, GROUP_PAD, D]: half a, then half b
    part_ml,  # fp32 [2, rows * kv_heads * units, GROUP_PAD]: m, l
    units,
    unit,  # slots
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
    QK: tl.constexpr,
    PV: tl.constexpr,
    TILE: tl.constexpr,
    LISTS: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    program = tl.program_id(0)
    row_head = program // units
    row = (row_head // KV_HEADS).to(tl.int64)
    head = row_head % KV_HEADS
    if DECODE:
        request = row // rows_per_request
        n = tl.load(seq_lens + request) - rows_per_request + (row % rows_per_request) + 1
        n = n.to(tl.int32)
    else:
        request = tl.load(seq_lens + row).to(tl.int64)
        n = tl.load(seq_lens + rows + row)
    h = tl.arange(0, GROUP_PAD)
    own = h < GROUP
    q_at = row * q_row + (head * GROUP + h).to(tl.int64) * q_head
    da, db = half_dims(D, KIND)
    qa = tl.load(q_ptr + q_at[:, None] + da[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)
    qb = tl.load(q_ptr + q_at[:, None] + db[None, :] * q_dim, mask=own[:, None], other=0.0).to(QK)

    m = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    oa = tl.zeros((GROUP_PAD, D // 2), tl.float32)
    ob = tl.zeros((GROUP_PAD, D // 2), tl.float32)
    first_slot = (program % units) * unit
    last_slot = tl.minimum(first_slot + unit, topk)
    if not LISTS:
        last_slot = tl.minimum(last_slot, (n + 127) // 128)
    for slot in range(first_slot, last_slot):
        if LISTS:
            block = tl.load(block_ids + head * ids_head + row * ids_row + slot * ids_slot)
        else:
            block = slot
        causal = (block >= 0) & (block * 128 < n)
        entry = table + request * table_row + tl.where(causal, block, 0).to(tl.int64) * table_column
        page = tl.load(entry, mask=causal, other=-1)
        causal = causal & (page >= 0) & (page < num_pages)
        live = tl.where(causal, tl.minimum(n - block * 128, 128), 0)
        base = pages + page.to(tl.int64) * block_stride + head * HEAD_BYTES
        for first in range(0, live, TILE):
            token = first + tl.arange(0, TILE)
            seen = token < live
            ka, kb = load_half_pages(base, token, seen, K_DATA, K_SCALES, D, KIND, QK)
            s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
            s = tl.dot(qb, tl.trans(kb), acc=s, input_precision="ieee") * qk_scale
            s = tl.where(seen[None, :], s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - top[:, None])
            alpha = tl.exp2(m - top)
            total = total * alpha + tl.sum(p, 1)
            va, vb = load_half_pages(base, token, seen, V_DATA, V_SCALES, D, KIND, PV)
            oa = tl.dot(p.to(PV), va, acc=oa * alpha[:, None], input_precision="ieee")
            ob = tl.dot(p.to(PV), vb, acc=ob * alpha[:, None], input_precision="ieee")
            m = top

    i = tl.arange(0, D // 2)
    if SPLIT:
        tl.store(part_ml + program * GROUP_PAD + h, m)
        tl.store(part_ml + (tl.num_programs(0) + program) * GROUP_PAD + h, total)
        at = part + program.to(tl.int64) * (GROUP_PAD * D) + h[:, None] * D + i[None, :]
        tl.store(at, oa, mask=own[:, None])
        tl.store(at + D // 2, ob, mask=own[:, None])
    else:
        has = total > 0
        factor = tl.where(has, v_scale / tl.where(has, total, 1.0), 0.0)[:, None]
        q_head_id = (head * GROUP + h).to(tl.int64)
        at = out + (row * out_row + q_head_id * out_head)[:, None]
        a = tl.where(has[:, None], oa * factor, 0.0).to(out.dtype.element_ty)
        b = tl.where(has[:, None], ob * factor, 0.0).to(out.dtype.element_ty)
        tl.store(at + da[None, :] * out_dim, a, mask=own[:, None])
        tl.store(at + db[None, :] * out_dim, b, mask=own[:, None])
        value = tl.where(has, (m + tl.log2(tl.where(has, total, 1.0))) * 0.6931471805599453, m)
        tl.store(lse + row * (KV_HEADS * GROUP) + q_head_id, value, mask=own)


@triton.jit(do_not_specialize=["units", "programs", "q_heads"])
def merge_kernel(
    part,  # fp32 [rows * kv_heads * units, GROUP_PAD, D], columns as ORDER says
    part_ml,  # fp32 [2, rows * kv_heads * units, GROUP_PAD]
    out,  # [rows, q_heads, D]
    out_row,
    out_head,
    out_dim,
    lse,  # fp32 [rows, q_heads]
    units,
    programs,
    v_scale,
    lse_shift,
    q_heads,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    UNITS_PAD: tl.constexpr,
    D: tl.constexpr,
    ORDER: tl.constexpr,  # 0: halves of NVFP4, 1, 2: halves of the others, 3: Hopper's fragments
):
    """One (row, query head): m = max m_u, out = sum 2^(m_u - m) o_u / sum 2^(m_u - m) l_u."""
    if ORDER == 3:
        tl.extra.cuda.gdc_wait()  # launched before the units end: wait for all they wrote
    row = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    u = tl.arange(0, UNITS_PAD)
    first = (row * (q_heads // GROUP) + q_head // GROUP) * units + u
    at = first * GROUP_PAD + q_head % GROUP
    m_u = tl.load(part_ml + at, mask=u < units, other=float("-inf"))
    l_u = tl.load(part_ml + programs.to(tl.int64) * GROUP_PAD + at, mask=u < units, other=0.0)
    m = tl.max(m_u, 0)
    live = m_u > float("-inf")
    weight = tl.where(live, tl.exp2(m_u - tl.where(m > float("-inf"), m, 0.0)), 0.0)
    total = tl.sum(weight * l_u, 0)
    c = tl.arange(0, D)
    o = tl.load(part + at[:, None] * D + c[None, :], mask=live[:, None], other=0.0)
    has = total > 0
    o = tl.sum(o * weight[:, None], 0) * v_scale
    o = tl.where(has, tl.div_rn(o, tl.zeros_like(o) + tl.where(has, total, 1.0)), 0.0)
    if ORDER == 0:
        d = (c % (D // 2)) * 2 + c // (D // 2)
    elif ORDER == 3:
        d = (c % 8) * 16 + (c // 64) * 8 + (c // 8) % 8
    else:
        d = c
    to = out + row * out_row + q_head.to(tl.int64) * out_head + d * out_dim
    tl.store(to, o.to(out.dtype.element_ty))
    value = (m + tl.log2(tl.where(has, total, 1.0)) - lse_shift) * 0.6931471805599453
    tl.store(lse + row * q_heads + q_head, tl.where(has, value, float("-inf")))


def attend(
    q: torch.Tensor,
    cache: MainCache,
    block_ids: torch.Tensor | None,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    rows_per_request: int | None,
    sm_scale: float,
    out: torch.Tensor,
    unit: int,
    tile: int = 64,
    warps: int = 4,
    fast: bool = True,
    hopper_tile: int = 32,
    registers: int | None = None,
    ahead_v: bool = True,
) -> torch.Tensor:
    """Launch; returns lse fp32 `[rows, q_heads]`.

    Args:
        block_ids: int32 `[kv_heads, rows, topk]`, or None for every causal block.
        lengths: seq_lens int32 `[requests]` with `rows_per_request`, else int32 `[2, rows]`.
        out: `[rows, q_heads, head_dim]` to write.
        unit: slots a program.
        tile: tokens a step.
        fast: whether the Hopper kernel may be taken where it applies.
        hopper_tile: tokens a step of the Hopper kernel, 16 or 32.
        ahead_v: whether the Hopper kernel loads V, like K, a tile ahead.
        registers: limit a lane of the Hopper kernel, None for the compiler's choice.
    """
    rows, q_heads, dim = q.shape
    group, kv_heads = q_heads // cache.kv_heads, cache.kv_heads
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device)
    slots = block_table.shape[1] if block_ids is None else block_ids.shape[-1]
    if rows == 0 or q_heads == 0:
        return lse
    g = Geometry.of(cache)
    if slots == 0 or block_table.numel() == 0 or cache.num_blocks == 0:
        out.zero_()
        return lse.fill_(float("-inf"))
    hop = (
        fast
        and hopper(q)
        and g.kind == 0
        and dim == 128
        and group <= 16
        and block_ids is not None
        and q.dtype is not torch.float32
        and q.stride(-1) == out.stride(-1) == 1
        and aligned(cache)
        and unit <= 32
    )
    units = triton.cdiv(slots, unit)
    programs, pad = rows * kv_heads * units, 16 if hop else max(16, triton.next_power_of_2(group))
    split = units > 1
    part, part_ml = lse, lse
    if split:
        part = torch.empty(programs, pad, dim, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(2, programs, pad, dtype=torch.float32, device=q.device)
    qk_scale = sm_scale * LOG2E * scale(cache, "k")
    v_scale = scale(cache, "v") * (16384.0 if hop else 1.0)
    ids = block_table if block_ids is None else block_ids
    id_strides = (0, 0, 0) if block_ids is None else block_ids.stride()
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_BYTES": g.head_bytes,
        "K_SCALES": g.k_scales,
        "V_DATA": g.v_data,
        "V_SCALES": g.v_scales,
        "DECODE": rows_per_request is not None,
        "SPLIT": split,
    }
    pages = (cache.pages, cache.block_stride, cache.num_blocks)
    lists = (*id_strides, block_table, *block_table.stride(), lengths, rows_per_request or 1, rows)
    if hop:
        from rocm_msa.ops.triton_hopper_attend import attend_kernel as kernel

        kernel[(programs,)](
            q, q.stride(0), q.stride(1), *pages, ids, *lists, slots, qk_scale, v_scale,
            out, out.stride(0), out.stride(1), lse, part, part_ml, units,
            UNIT=unit, AHEAD_V=ahead_v, TILE=hopper_tile, num_warps=1, maxnreg=registers,
            **constants,
        )  # fmt: skip
    else:
        qk, pv = operand_types(q, cache)
        attend_kernel[(programs,)](
            q, *q.stride(), *pages, ids, *lists, slots, qk_scale, v_scale,
            out, *out.stride(), lse, part, part_ml, units, unit,
            GROUP_PAD=pad, K_DATA=g.k_data, D=dim, KIND=g.kind, QK=qk, PV=pv,
            TILE=tile, LISTS=block_ids is not None, num_warps=warps, **constants,
        )  # fmt: skip
    if split:
        merge_kernel[(rows, q_heads)](
            part, part_ml, out, *out.stride(), lse, units, programs, v_scale,
            12.0 if hop else 0.0, q_heads,
            GROUP=group, GROUP_PAD=pad, UNITS_PAD=triton.next_power_of_2(units), D=dim,
            ORDER=3 if hop else g.kind, num_warps=1, **({"launch_pdl": True} if hop else {}),
        )  # fmt: skip
    return lse
