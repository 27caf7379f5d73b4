"""Attention of decode rows over aligned slots of their block lists, any cache dtype, any GPU.

    s = qk_scale q . k,  p = 2^(s - m),  o = sum p v,  l = sum p     a page, running over its tiles

`attend_kernel`: a program owns (row, KV head, unit), M = the query heads of the KV head.
`shared_kernel`: (tile of rows, KV head, unit) of the plan in sharing.py, M = those of all its rows.
A page is worked on from empty sums, and all its tokens are, so that a row's numbers are the same
in both; pages are joined in the tree of merge.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_msa.ops.sparse_decode.merge import join_sums, weights
from rocm_msa.ops.triton_common import half_dims, page_halves


@triton.jit
def _page(
    qa,  # [M, D / 2] of type QK
    qb,
    keys,  # int32 [M]: keys of the page that count for the line
    base,  # uint8 pointer to the head's run in the page
    qk_scale,
    K_DATA: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_DATA: tl.constexpr,
    V_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    PV: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(m, l, halves of o) of one page."""
    M: tl.constexpr = qa.shape[0]
    scale = tl.maximum(tl.abs(qk_scale), 1e-30)  # > 0, its sign is in the query
    m = tl.full((M,), float("-inf"), tl.float32)
    sums = tl.zeros((M, 16), tl.float32)
    oa = tl.zeros((M, D // 2), tl.float32)
    ob = tl.zeros((M, D // 2), tl.float32)
    for first in tl.range(0, 128, TILE, num_stages=STAGES):
        token = first + tl.arange(0, TILE)
        ka, kb = page_halves(base, token, K_DATA, K_SCALES, D, KIND, qa.dtype)
        s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        s = tl.dot(qb, tl.trans(kb), acc=s, input_precision="ieee")
        s = tl.where(token[None, :] < keys[:, None], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(top > float("-inf"), top, 0.0)
        less = tl.broadcast_to((-shift * scale)[:, None], (M, TILE))
        p = tl.exp2(tl.fma(s, tl.zeros_like(s) + scale, less))
        alpha = tl.exp2((m - shift) * scale)
        # Summed by the matrix instruction: in the same order for one row and for a tile of rows.
        ones = tl.full((TILE, 16), 1.0, PV)
        sums = tl.dot(p.to(PV), ones, acc=sums * alpha[:, None], input_precision="ieee")
        va, vb = page_halves(base, token, V_DATA, V_SCALES, D, KIND, PV)
        oa = tl.dot(p.to(PV), va, acc=oa * alpha[:, None], input_precision="ieee")
        ob = tl.dot(p.to(PV), vb, acc=ob * alpha[:, None], input_precision="ieee")
        m = top
    return m * scale, tl.max(sums, 1), oa, ob


@triton.jit
def _join(m0, l0, a0, b0, m1, l1, a1, b1):
    M: tl.constexpr = a0.shape[0]
    H: tl.constexpr = a0.shape[1]
    m, w0, w1 = weights(m0, m1)
    total = join_sums(l0, w0, l1, w1)
    w0, w1 = w0[:, None], tl.broadcast_to(w1[:, None], (M, H))
    return m, total, join_sums(a0, w0, a1, w1), join_sums(b0, w0, b1, w1)


@triton.jit
def _query(q_ptr, q_dim, at, live, qk_scale, D: tl.constexpr, KIND: tl.constexpr, QK: tl.constexpr):
    """The halves of the queries at offsets `at` [M], with the sign of qk_scale."""
    da, db = half_dims(D, KIND)
    keep = live[:, None]
    a = tl.load(q_ptr + at[:, None] + da[None, :] * q_dim, mask=keep, other=0.0)
    b = tl.load(q_ptr + at[:, None] + db[None, :] * q_dim, mask=keep, other=0.0)
    sign = tl.where(qk_scale < 0, -1.0, 1.0)
    return (a.to(tl.float32) * sign).to(QK), (b.to(tl.float32) * sign).to(QK)


@triton.jit
def _store(m, total, oa, ob, to, keep, part, part_ml, lines, D: tl.constexpr):
    """Partial results of lines `to` int64 [M] of `lines` in all."""
    i = tl.arange(0, D // 2)
    tl.store(part_ml + to, m, mask=keep)
    tl.store(part_ml + lines + to, total, mask=keep)
    at = part + to[:, None] * D + i[None, :]
    tl.store(at, oa, mask=keep[:, None])
    tl.store(at + D // 2, ob, mask=keep[:, None])


@triton.jit(do_not_specialize=["num_pages", "rows_per_request", "topk", "units"])
def attend_kernel(
    q_ptr,  # [rows, q_heads, D]
    q_row,
    q_head,
    q_dim,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    block_ids,  # int32 [kv_heads, rows, topk]
    ids_head,
    ids_row,
    ids_slot,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    seq_lens,  # int32 [requests]
    rows_per_request,
    topk,
    qk_scale,  # sm_scale * log2(e) * k scale
    part,  # fp32 [rows * kv_heads * units, GROUP_PAD, D]: half a, then half b
    part_ml,  # fp32 [2, rows * kv_heads * units, GROUP_PAD]: m, l
    units,
    taken,  # int32 [rows * kv_heads * units]: > 0 where shared_kernel has the unit
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
    STAGES: tl.constexpr,
    SLOTS: tl.constexpr,  # topk or more, a power of two
    UNIT: tl.constexpr,  # 1 or 2
    SHARING: tl.constexpr,
):
    program = tl.program_id(0)
    if SHARING:  # noqa: SIM102 - a branch when compiling
        if tl.load(taken + program) > 0:
            return
    row_head = program // units
    row = (row_head // KV_HEADS).to(tl.int64)
    head = row_head % KV_HEADS
    request = row // rows_per_request
    n = tl.load(seq_lens + request) - rows_per_request + (row % rows_per_request) + 1
    n = n.to(tl.int32)
    slot = tl.arange(0, SLOTS)
    at = block_ids + head * ids_head + row * ids_row + slot * ids_slot
    ids = tl.load(at, mask=slot < topk, other=-1)
    causal = (ids >= 0) & (ids * 128 < n)
    entry = table + request * table_row + tl.where(causal, ids, 0).to(tl.int64) * table_column
    page = tl.load(entry, mask=causal, other=-1)
    # Ascending blocks, what is no causal block behind them.
    key = tl.where(causal, ids, 0x7FFFFF00 + slot)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    causal = causal & (page >= 0) & (page < num_pages)
    live = tl.where(causal, tl.minimum(n - ids * 128, 128), 0)
    h = tl.arange(0, GROUP_PAD)
    q_at = row * q_row + (head * GROUP + h).to(tl.int64) * q_head
    qa, qb = _query(q_ptr, q_dim, q_at, h < GROUP, qk_scale, D, KIND, QK)
    m0 = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    l0 = tl.zeros((GROUP_PAD,), tl.float32)
    a0 = tl.zeros((GROUP_PAD, D // 2), tl.float32)
    b0 = tl.zeros((GROUP_PAD, D // 2), tl.float32)
    for i in range(UNIT):
        here = rank == (program % units) * UNIT + i
        keys = tl.sum(tl.where(here, live, 0), 0)
        number = tl.sum(tl.where(here & causal, page, 0), 0)
        if keys > 0:
            base = pages + number.to(tl.int64) * block_stride + head * HEAD_BYTES
            m1, l1, a1, b1 = _page(
                qa, qb, tl.zeros((GROUP_PAD,), tl.int32) + keys, base, qk_scale,
                K_DATA, K_SCALES, V_DATA, V_SCALES, D, KIND, PV, TILE, STAGES,
            )  # fmt: skip
            m0, l0, a0, b0 = _join(m0, l0, a0, b0, m1, l1, a1, b1)
    to = program.to(tl.int64) * GROUP_PAD + h
    lines = tl.num_programs(0).to(tl.int64) * GROUP_PAD
    _store(m0, l0, a0, b0, to, h < GROUP_PAD, part, part_ml, lines, D)


@triton.jit(do_not_specialize=["units"])
def shared_kernel(
    q_ptr,  # [rows, q_heads, D]
    q_row,
    q_head,
    q_dim,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    qk_scale,
    part,  # as attend_kernel's
    part_ml,
    units,
    tile_rows,  # the plan, see sharing.py
    slot_keys,
    leading,
    work,
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
    STAGES: tl.constexpr,
    SLOTS: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
):
    program = tl.program_id(0)
    if tl.load(leading + program) == 0:
        return
    leader_head = (program // units).to(tl.int64)
    leader, head = leader_head // KV_HEADS, leader_head % KV_HEADS
    M: tl.constexpr = R * GROUP_PAD
    line = tl.arange(0, M)
    h = line % GROUP_PAD
    row = tl.load(tile_rows + leader * R + line // GROUP_PAD).to(tl.int64)
    is_row = row >= 0
    q_at = row * q_row + (head * GROUP + h) * q_head
    qa, qb = _query(q_ptr, q_dim, q_at, is_row & (h < GROUP), qk_scale, D, KIND, QK)
    m0 = tl.full((M,), float("-inf"), tl.float32)
    l0 = tl.zeros((M,), tl.float32)
    a0 = tl.zeros((M, D // 2), tl.float32)
    b0 = tl.zeros((M, D // 2), tl.float32)
    lists = leader_head * (R * SLOTS) + line // GROUP_PAD * SLOTS + (program % units) * UNIT
    for slot in range(UNIT):
        page = tl.load(work + program.to(tl.int64) * UNIT + slot)
        base = pages + page.to(tl.int64) * block_stride + head * HEAD_BYTES
        m1, l1, a1, b1 = _page(
            qa, qb, tl.load(slot_keys + lists + slot), base, qk_scale,
            K_DATA, K_SCALES, V_DATA, V_SCALES, D, KIND, PV, TILE, STAGES,
        )  # fmt: skip
        m0, l0, a0, b0 = _join(m0, l0, a0, b0, m1, l1, a1, b1)
    at = (row * KV_HEADS + head) * units + program % units
    lines = tl.num_programs(0).to(tl.int64) * GROUP_PAD
    _store(m0, l0, a0, b0, at * GROUP_PAD + h, is_row, part, part_ml, lines, D)
