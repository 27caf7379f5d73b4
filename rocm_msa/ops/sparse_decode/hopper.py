"""Attention of one row over aligned slots of its list of NVFP4 blocks, Hopper, one warp a program.

    s = sm_scale q . k,  p = 2^(s log2(e) - m + 12) in fp16,  o = sum p v,  l = sum p   a page

A program owns (row, KV head, unit): UNIT slots of the row's causal blocks in ascending order, 16
query heads (GROUP of them live). A page's scores go through shared memory, then its V is weighed;
a tile of K and one of V are on their way meanwhile. Pages are joined in the tree of merge.py, here
as far as the unit reaches. Ids outside of the causal blocks and entries that name no page of the
cache count as nothing.
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
    scaled_query,
    v_operand,
)

TILE = gl.constexpr(32)
_SORT = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0]))
_SLOTS = gl.constexpr(gl.SliceLayout(1, _SORT))
_OTHERS = gl.constexpr(gl.SliceLayout(0, _SORT))
# Conflict-free for accumulators of the matrix instructions: 8 rows, 4 lanes with 8 bytes each.
STASH = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
STASH_SCORES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
STASH_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def combine(m0, l0, o0, m1, l1, o1):
    """The softmax sums of two disjoint sets of keys as one; bit for bit merge.py's."""
    m = gl.maximum(m0, m1)
    shift = gl.where(m > float("-inf"), m, 0.0)
    w0, w1 = gl.exp2(m0 - shift), gl.exp2(m1 - shift)
    total = gl.fma(l1, w1, l0 * w0)
    w1 = gl.expand_dims(w1, 1).broadcast_to(o1.shape)
    return m, total, gl.fma(o1, w1, o0 * gl.expand_dims(w0, 1))


@gluon.jit
def join(i, m, total, o, stash_m, stash_l, stash_o, UNIT: gl.constexpr, MMA_LAYOUT: gl.constexpr):
    """Slot i of a unit is done: join it with the finished parts before it, keep the rest."""
    LINES: gl.constexpr = gl.SliceLayout(1, MMA_LAYOUT)
    level = 0
    while ((i >> level) & 1) == 1:
        m, total, o = combine(
            stash_m.index(level).load(LINES), stash_l.index(level).load(LINES),
            stash_o.index(level).load(MMA_LAYOUT), m, total, o,
        )  # fmt: skip
        level += 1
    if i + 1 < UNIT:
        stash_m.index(level).store(m)
        stash_l.index(level).store(total)
        stash_o.index(level).store(o)
    return m, total, o


@gluon.jit
def _load_k(base, first, K_SCALES: gl.constexpr):
    words = (base + first * 64).to(gl.pointer_type(gl.int32))
    return load_k(words, (base + (K_SCALES + first * 8)).to(gl.pointer_type(gl.int16)), TILE)


@gluon.jit
def _load_v(base, first, V_DATA: gl.constexpr, V_SCALES: gl.constexpr):
    words = (base + (V_DATA + first * 64)).to(gl.pointer_type(gl.int32))
    return load_v(words, base + (V_SCALES + first * 8), TILE)


@gluon.jit
def _weigh(t, v, sums, o, scores, wide, offset, base, V_DATA: gl.constexpr, V_SCALES: gl.constexpr):
    """Tile t of a page: (the next tile of V, l column by column, o)."""
    ahead = _load_v(base, gl.minimum(t + 1, 3) * TILE, V_DATA, V_SCALES)
    p = gl.exp2(gl.fma(scores.index(t).load(MMA), wide, offset))
    sums += p
    p = gl.convert_layout(p.to(gl.float16), A, assert_trivial=True)
    return ahead, sums, mma_v2(p, v_operand(v[0], v[1], v[2], v[3], TILE), o)


@gluon.jit
def _page(
    a,
    factor,
    live,  # keys of the page that count, > 0
    k,
    base,
    next_base,
    scores,
    K_SCALES: gl.constexpr,
    V_DATA: gl.constexpr,
    V_SCALES: gl.constexpr,
    UNIT: gl.constexpr,
):
    """(m, l, o) of a page, and the first tile of K of the next one; `scores`: room for a page's."""
    v = _load_v(base, 0, V_DATA, V_SCALES)
    top = gl.full([16, TILE], float("-inf"), gl.float32, MMA)
    column = gl.expand_dims(gl.arange(0, TILE, COLUMNS), 0)
    for t in range(4):
        ahead = _load_k(
            gl.where(t == 3, next_base, base), gl.where(t == 3, 0, (t + 1) * TILE), K_SCALES
        )
        s = mma_v2(a, k_operand(k[0], k[1], TILE), gl.zeros([16, TILE], gl.float32, MMA))
        if live < 128:
            s = gl.where(column < live - t * TILE, s, float("-inf"))
        scores.index(t).store(s)
        top = gl.maximum(top, s)
        k = ahead
    m = gl.max(top, 1) * factor
    offset = gl.expand_dims(12.0 - m, 1).broadcast_to([16, TILE])
    wide = gl.expand_dims(factor, 1).broadcast_to([16, TILE])
    sums = gl.zeros([16, TILE], gl.float32, MMA)
    o = gl.zeros([16, 128], gl.float32, MMA)
    if UNIT > 1:
        for t in gl.static_range(4):
            v, sums, o = _weigh(t, v, sums, o, scores, wide, offset, base, V_DATA, V_SCALES)
    else:  # few programs, which meet their instructions for the first time
        for t in range(4):
            v, sums, o = _weigh(t, v, sums, o, scores, wide, offset, base, V_DATA, V_SCALES)
    return m, gl.sum(sums, 1), o, k


@gluon.jit
def _start(pages, page, rank, wanted, block_stride, offset):
    """Start of the head's run in the page of the `wanted`-th block; page 0 where there is none."""
    number = gl.sum(gl.where(rank == wanted, page, 0), 0)
    return pages + gl.multiple_of(number.to(gl.int64) * block_stride + offset, 16)


@gluon.jit(do_not_specialize=["num_pages", "rows_per_request", "topk", "units"])
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
    seq_lens,  # int32 [requests]
    rows_per_request,
    topk,
    qk_scale,  # sm_scale * log2(e) * k scale
    part,  # fp32 [rows * kv_heads * units, 16, 128], columns permuted
    part_ml,  # fp32 [2, rows * kv_heads * units, 16]: m, l
    units,
    taken,  # int32 [rows * kv_heads * units]: > 0 where hopper_shared.py has the unit
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_BYTES: gl.constexpr,
    K_SCALES: gl.constexpr,
    V_DATA: gl.constexpr,
    V_SCALES: gl.constexpr,
    SLOTS: gl.constexpr,  # topk or more, 16 or 32
    UNIT: gl.constexpr,
    LEVELS: gl.constexpr,
    SHARING: gl.constexpr,
):
    program = gl.program_id(0)
    unit = program % units
    row_head = program // units
    row = (row_head // KV_HEADS).to(gl.int64)
    head = row_head % KV_HEADS

    slot = gl.arange(0, SLOTS, _SLOTS)
    other = gl.arange(0, SLOTS, _OTHERS)
    at = block_ids + head * ids_head + row * ids_row
    ids = gl.load(at + slot * ids_slot, slot < topk, other=-1)
    ids_other = gl.load(at + other * ids_slot, other < topk, other=-1)
    request = row // rows_per_request
    n = gl.load(seq_lens + request) - rows_per_request + (row % rows_per_request).to(gl.int32) + 1
    causal = (ids >= 0) & (ids * 128 < n)
    page = gl.load(
        table + request * table_row + gl.where(causal, ids, 0).to(gl.int64) * table_column,
        causal,
        other=-1,
    )
    # Ascending blocks, what is no causal block behind them.
    key = gl.expand_dims(gl.where(causal, ids, 0x7FFFFF00 + slot), 1)
    none = (ids_other < 0) | (ids_other * 128 >= n)
    key_other = gl.expand_dims(gl.where(none, 0x7FFFFF00 + other, ids_other), 0)
    rank = gl.sum((key_other < key).to(gl.int32), 1)
    causal = causal & (page >= 0) & (page < num_pages)
    keys = gl.where(causal, gl.minimum(n - ids * 128, 128), 0)
    page = gl.where(causal, page, 0)

    heads = gl.arange(0, 16, Q_ROWS)
    own = (head * GROUP + heads).to(gl.int64)
    a, factor = scaled_query(
        q_ptr + row * q_row, 0, q_head, heads * 0, own, heads < GROUP, qk_scale, 16
    )
    offset = head * HEAD_BYTES
    first = unit * UNIT
    base = _start(pages, page, rank, first, block_stride, offset)
    k = _load_k(base, 0, K_SCALES)
    take = True
    if SHARING:  # the plan is done: what is loaded above it did not write
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
        take = gl.load(taken + program, volatile=True) == 0
    # What is launched next may be set up already: it waits for this grid's end, or needs the plan.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
    )
    if take:
        scores = gl.allocate_shared_memory(gl.float32, [4, 16, TILE], STASH_SCORES)
        stash_o = gl.allocate_shared_memory(gl.float32, [LEVELS, 16, 128], STASH)
        stash_m = gl.allocate_shared_memory(gl.float32, [LEVELS, 16], STASH_ROWS)
        stash_l = gl.allocate_shared_memory(gl.float32, [LEVELS, 16], STASH_ROWS)
        m = gl.full([16], float("-inf"), gl.float32, ROWS)
        total = gl.zeros([16], gl.float32, ROWS)
        o = gl.zeros([16, 128], gl.float32, MMA)
        for i in range(UNIT):
            live = gl.sum(gl.where(rank == first + i, keys, 0), 0)
            next_base = _start(pages, page, rank, first + i + 1, block_stride, offset)
            if live > 0:
                m, total, o, k = _page(
                    a, factor, live, k, base, next_base, scores, K_SCALES, V_DATA, V_SCALES,
                    UNIT,
                )  # fmt: skip
            else:
                m = gl.full([16], float("-inf"), gl.float32, ROWS)
                total = gl.zeros([16], gl.float32, ROWS)
                o = gl.zeros([16, 128], gl.float32, MMA)
                k = _load_k(next_base, 0, K_SCALES)
            if UNIT > 1:
                m, total, o = join(i, m, total, o, stash_m, stash_l, stash_o, UNIT, MMA)
            base = next_base
        h = gl.arange(0, 16, ROWS)
        c = gl.arange(0, 128, COLUMNS)
        gl.store(part_ml + program * 16 + h, m)
        gl.store(part_ml + (gl.num_programs(0) + program) * 16 + h, total)
        at_o = part + program.to(gl.int64) * 2048
        gl.store(at_o + (h[:, None] * 128 + c[None, :]), o, mask=(h < GROUP)[:, None])
