"""Attention of several rows at once over the blocks that they share, Hopper (NVFP4 pages).

A program of R warps owns (tile of R rows, KV head, unit) where the plan of sharing.py says that
the rows selected the same pages. Every warp decodes its part of a page into shared memory; warp r
multiplies the 16 query heads of row r with all of it. The arithmetic of a row is
that of hopper.py, bit for bit: the warpgroup's matrix instructions add as the warp's
do (the tests hold them against each other).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from rocm_msa.ops.sparse_decode.hopper import STASH, STASH_ROWS, join
from rocm_msa.ops.triton_hopper import k_values, load_k, load_v, query_rows, v_values

_PAGE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.constexpr_function
def _accumulators(rows: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [rows, 1], [16, 128, 16])


@gluon.constexpr_function
def _queries(rows: int) -> gl.BlockedLayout:
    return gl.BlockedLayout([1, 8], [2, 16], [rows, 1], [1, 0])


@gluon.jit
def _quarters(x):
    """`[M, 128]` -> four `[M, 32]` of neighbouring columns."""
    x = x.reshape([x.shape[0], 2, 2, 32]).permute(0, 3, 1, 2)
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _start(pages, page, block_stride, offset):
    return pages + gl.multiple_of(page.to(gl.int64) * block_stride + offset, 16)


@gluon.jit
def _load_k(start, K_SCALES: gl.constexpr, TOKENS: gl.constexpr, R: gl.constexpr):
    words = start.to(gl.pointer_type(gl.int32))
    return load_k(words, (start + K_SCALES).to(gl.pointer_type(gl.int16)), TOKENS, R)


@gluon.jit
def _wide(x):
    return gl.expand_dims(x, 1).broadcast_to([x.shape[0], 128])


@gluon.jit(do_not_specialize=["topk", "units"])
def shared_kernel(
    q_ptr,  # [rows, q_heads, 128]
    q_row,
    q_head,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    qk_scale,  # sm_scale * log2(e) * k scale
    part,  # fp32 [rows * kv_heads * units, 16, 128], columns permuted
    part_ml,  # fp32 [2, rows * kv_heads * units, 16]: m, l
    units,
    tile_rows,  # int32 [rows, R]: rows of the tile that the row leads, or -1
    slot_keys,  # int32 [rows * kv_heads, R, SLOTS]: keys that count, blocks ascending
    leads,  # int32 [rows * kv_heads * units]: > 0 where the row leads a tile that has the unit
    work,  # int32 [rows * kv_heads * units, UNIT]: pages
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_BYTES: gl.constexpr,
    K_SCALES: gl.constexpr,
    V_DATA: gl.constexpr,
    V_SCALES: gl.constexpr,
    SLOTS: gl.constexpr,
    UNIT: gl.constexpr,
    LEVELS: gl.constexpr,
    R: gl.constexpr,  # rows a tile = warps
):
    M: gl.constexpr = 16 * R
    TOKENS: gl.constexpr = 128 // R  # that a warp decodes
    ACC: gl.constexpr = _accumulators(R)
    LINES: gl.constexpr = gl.SliceLayout(1, ACC)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    Q: gl.constexpr = _queries(R)
    program = gl.program_id(0)
    unit = program % units
    leader_head = program // units
    head = leader_head % KV_HEADS
    if gl.load(leads + program, volatile=True) > 0:
        line = gl.arange(0, M, LINES)
        rows = gl.load(tile_rows + (leader_head // KV_HEADS) * R + line // 16)
        query = gl.arange(0, M, gl.SliceLayout(1, Q))
        q_rows = gl.load(tile_rows + (leader_head // KV_HEADS) * R + query // 16)
        own = (head * GROUP + query % 16).to(gl.int64)
        alive = (q_rows >= 0) & (query % 16 < GROUP)
        q, factor = query_rows(q_ptr, q_row, q_head, q_rows.to(gl.int64), own, alive, qk_scale, Q)
        a = gl.allocate_shared_memory(gl.float16, [M, 128], _PAGE, q)
        factor = gl.convert_layout(factor, LINES)
        stash_o = gl.allocate_shared_memory(gl.float32, [LEVELS, M, 128], STASH)
        stash_m = gl.allocate_shared_memory(gl.float32, [LEVELS, M], STASH_ROWS)
        stash_l = gl.allocate_shared_memory(gl.float32, [LEVELS, M], STASH_ROWS)
        m = gl.full([M], float("-inf"), gl.float32, LINES)
        total = gl.zeros([M], gl.float32, LINES)
        o = gl.zeros([M, 128], gl.float32, ACC)
        zero = gl.zeros([M, 128], gl.float32, ACC)
        mine = slot_keys + (leader_head * (R * SLOTS) + line // 16 * SLOTS + unit * UNIT)
        entry = work + program.to(gl.int64) * UNIT
        start = _start(pages, gl.load(entry), block_stride, head * HEAD_BYTES)
        words, scales = _load_k(start, K_SCALES, TOKENS, R)
        for slot in range(UNIT):
            even, odd, s_even, s_odd = load_v(
                (start + V_DATA).to(gl.pointer_type(gl.int32)), start + V_SCALES, TOKENS, R
            )
            live = gl.load(mine + slot)
            following = gl.load(entry + gl.minimum(slot + 1, UNIT - 1))
            k = gl.allocate_shared_memory(
                gl.float16, [128, 128], _PAGE, k_values(words, scales, TOKENS, R).permute(1, 0)
            )
            fence_async_shared()
            s = warpgroup_mma(a, k.permute((1, 0)), zero, use_acc=False)
            if gl.min(live, 0) < 128:
                column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, ACC)), 0)
                s = gl.where(column < gl.expand_dims(live, 1), s, float("-inf"))
            m = gl.max(s, 1) * factor
            offset = 12.0 - gl.where(live > 0, m, 0.0)
            p = gl.exp2(gl.fma(s, _wide(factor), _wide(offset)))
            p0, p1, p2, p3 = _quarters(p)
            total = gl.convert_layout(gl.sum(p0 + p1 + p2 + p3, 1), LINES)
            p = gl.convert_layout(p.to(gl.float16), OPERAND)
            v = gl.allocate_shared_memory(
                gl.float16, [128, 128], _PAGE,
                v_values(even, odd, s_even, s_odd, 128).permute(1, 0),
            )  # fmt: skip
            start = _start(pages, following, block_stride, head * HEAD_BYTES)
            words, scales = _load_k(start, K_SCALES, TOKENS, R)
            fence_async_shared()
            o = warpgroup_mma(p, v.permute((1, 0)), zero, use_acc=False)
            if UNIT > 1:
                m, total, o = join(slot, m, total, o, stash_m, stash_l, stash_o, UNIT, ACC)
        column = gl.arange(0, 128, gl.SliceLayout(0, ACC))
        to = (rows * KV_HEADS + head) * units + unit
        gl.store(part_ml + to * 16 + line % 16, m, mask=rows >= 0)
        gl.store(part_ml + (gl.num_programs(0) + to) * 16 + line % 16, total, mask=rows >= 0)
        at = (to.to(gl.int64) * 16 + line % 16) * 128
        keep = (rows >= 0) & (line % 16 < GROUP)
        gl.store(part + (at[:, None] + column[None, :]), o, mask=gl.expand_dims(keep, 1))
    if program == 0:  # the grid ends after the one before it: the merge may wait for this one alone
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
