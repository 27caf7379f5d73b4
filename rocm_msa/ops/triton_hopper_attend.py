"""Attention of one row over a unit of selected NVFP4 blocks, Hopper, one warp a unit.

    s = sm_scale q . k,  p = 2^(s log2(e) - m + 12) in fp16,  o += p v,  l += p      fp32 sums

A program owns one (row, KV head, unit): `unit` slots of the row's list, 16 query heads (GROUP of
them live). With `SPLIT` it stores (m, l, o) for merge, otherwise the result. Ids outside of the
causal blocks and entries that name no page of the cache count as nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rocm_msa.ops.triton_hopper import (
    COLUMNS,
    MMA,
    Q_ROWS,
    ROWS,
    A,
    k_operand,
    load_k,
    load_v,
    query_tile,
    v_operand,
)

_SLOTS = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _page(pages, page, slot, wanted, block_stride, offset):
    """Start of the head's run in the page of slot `wanted`; page 0 where there is none."""
    number = gl.sum(gl.where(slot == wanted, page, 0), 0)
    return pages + gl.multiple_of(number.to(gl.int64) * block_stride + offset, 16)


@gluon.jit
def _load_k(base, first, K_SCALES: gl.constexpr, TILE: gl.constexpr):
    words = (base + first * 64).to(gl.pointer_type(gl.int32))
    return load_k(words, (base + (K_SCALES + first * 8)).to(gl.pointer_type(gl.int16)), TILE)


@gluon.jit
def _load_v(base, first, V_DATA: gl.constexpr, V_SCALES: gl.constexpr, TILE: gl.constexpr):
    words = (base + (V_DATA + first * 64)).to(gl.pointer_type(gl.int32))
    return load_v(words, base + (V_SCALES + first * 8), TILE)


@gluon.jit
def _tile(m, total, o, a, factor, k, v, live, TILE: gl.constexpr):
    """One step of the running softmax over TILE tokens, the first `live` of which count."""
    words, scales = k
    even, odd, s_even, s_odd = v
    zero = gl.zeros([16, TILE], gl.float32, MMA)
    s = mma_v2(a, k_operand(words, scales, TILE), zero) * factor[:, None]
    column = gl.arange(0, TILE, COLUMNS)
    s = gl.where((column < live)[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    shift = gl.where(top > float("-inf"), top, 0.0)
    p = gl.exp2(s - (shift - 12.0)[:, None])
    alpha = gl.exp2(m - shift)
    total = total * alpha + gl.sum(p, 1)
    p = gl.convert_layout(p.to(gl.float16), A, assert_trivial=True)
    o = mma_v2(p, v_operand(even, odd, s_even, s_odd, TILE), o * alpha[:, None])
    return top, total, o


@gluon.jit(do_not_specialize=["num_pages", "rows_per_request", "rows", "topk", "units"])
def attend_kernel(
    q_ptr,  # [rows, q_heads, 128]
    q_row,
    q_head,
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
    seq_lens,  # int32 [requests], or int32 [2, rows]: request, length
    rows_per_request,
    rows,
    topk,
    qk_scale,  # sm_scale * log2(e) * k scale
    v_scale,  # 2^14 * v scale
    out,  # [rows, q_heads, 128]
    out_row,
    out_head,
    lse,  # fp32 [rows, q_heads]
    part,  # fp32 [rows * kv_heads * units, 16, 128], columns permuted
    part_ml,  # fp32 [2, rows * kv_heads * units, 16]: m, l
    units,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_BYTES: gl.constexpr,
    K_SCALES: gl.constexpr,
    V_DATA: gl.constexpr,
    V_SCALES: gl.constexpr,
    UNIT: gl.constexpr,
    TILE: gl.constexpr,
    DECODE: gl.constexpr,
    SPLIT: gl.constexpr,
    AHEAD_V: gl.constexpr,
):
    if SPLIT:  # the merge may be set up already; it waits for this grid's end
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    program = gl.program_id(0)
    unit = program % units
    row_head = program // units
    row = (row_head // KV_HEADS).to(gl.int64)
    head = row_head % KV_HEADS

    slot = unit * UNIT + gl.arange(0, 32, _SLOTS)
    mine = (slot < topk) & (slot < unit * UNIT + UNIT)
    ids = gl.load(block_ids + head * ids_head + row * ids_row + slot * ids_slot, mine, other=-1)
    if DECODE:
        request = (row // rows_per_request).to(gl.int64)
        n = (
            gl.load(seq_lens + request)
            - rows_per_request
            + (row % rows_per_request).to(gl.int32)
            + 1
        )
    else:
        request = gl.load(seq_lens + row).to(gl.int64)
        n = gl.load(seq_lens + rows + row)
    heads = gl.arange(0, 16, Q_ROWS)
    q_at = q_ptr + row * q_row
    own = (head * GROUP + heads).to(gl.int64)
    a, factor = query_tile(q_at, 0, q_head, heads * 0, own, heads < GROUP, 16)
    factor = factor * qk_scale
    causal = (ids >= 0) & (ids * 128 < n)
    page = gl.load(
        table + request * table_row + gl.where(causal, ids, 0).to(gl.int64) * table_column,
        causal,
        other=-1,
    )
    causal = causal & (page >= 0) & (page < num_pages)
    keys = gl.where(causal, gl.minimum(n - ids * 128, 128), 0)
    page = gl.where(causal, page, 0)

    m = gl.full([16], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([16], gl.float32, ROWS)
    o = gl.zeros([16, 128], gl.float32, MMA)
    base = _page(pages, page, slot, unit * UNIT, block_stride, head * HEAD_BYTES)
    raw = _load_k(base, 0, K_SCALES, TILE)
    if AHEAD_V:
        raw_v = _load_v(base, 0, V_DATA, V_SCALES, TILE)
    for i in range(UNIT):
        # The tile after the one that is computed is on its way, across the pages.
        live = gl.sum(gl.where(slot == unit * UNIT + i, keys, 0), 0)
        next_base = _page(pages, page, slot, unit * UNIT + i + 1, block_stride, head * HEAD_BYTES)
        tiles = gl.maximum((live + TILE - 1) // TILE, 1)
        for tile in range(tiles):
            last = tile + 1 == tiles
            ahead = gl.where(last, next_base, base)
            first = gl.where(last, 0, (tile + 1) * TILE)
            if AHEAD_V:
                v = raw_v
            else:
                v = _load_v(base, tile * TILE, V_DATA, V_SCALES, TILE)
            following = _load_k(ahead, first, K_SCALES, TILE)
            if AHEAD_V:
                raw_v = _load_v(ahead, first, V_DATA, V_SCALES, TILE)
            m, total, o = _tile(m, total, o, a, factor, raw, v, live - tile * TILE, TILE)
            raw = following
        base = next_base

    h = gl.arange(0, 16, ROWS)
    c = gl.arange(0, 128, COLUMNS)
    if SPLIT:
        gl.store(part_ml + program * 16 + h, m)
        gl.store(part_ml + (gl.num_programs(0) + program) * 16 + h, total)
        any_key = gl.sum(keys, 0) > 0
        at = part + program.to(gl.int64) * 2048
        gl.store(at + (h[:, None] * 128 + c[None, :]), o, mask=(h < GROUP)[:, None] & any_key)
    else:
        has = total > 0
        o = gl.where(has[:, None], o * v_scale / gl.where(has, total, 1.0)[:, None], 0.0)
        d = (c % 8) * 16 + (c // 64) * 8 + (c // 8) % 8
        q_head_id = (head * GROUP + h).to(gl.int64)
        at = row * out_row + q_head_id * out_head
        o = o.to(out.dtype.element_ty)
        gl.store(out + at[:, None] + d[None, :], o, mask=(h < GROUP)[:, None])
        value = gl.where(
            has, (m + gl.log2(gl.where(has, total, 1.0)) - 12.0) * 0.6931471805599453, m
        )
        gl.store(lse + row * (KV_HEADS * GROUP) + q_head_id, value, mask=h < GROUP)
