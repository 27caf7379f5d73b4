"""The tree in which the softmax sums of a row's pages are joined.

A page gives each query head m (the largest score), l = sum 2^(s - m), o = sum 2^(s - m) v. Two sets
of pages are joined as

    m = max(m0, m1),  l = l0 2^(m0 - m) + l1 2^(m1 - m),  o likewise

in the binary tree over the row's slots, neighbours first; the empty set (m = -inf) changes nothing.
Any aligned 2^i slots may be joined by one program, and the rest here: the same bits, because each
step is the same three operations, so a row's result depends on its list alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights(m0, m1):
    """(m, 2^(m0 - m), 2^(m1 - m)); weights 0 for a set without keys."""
    m = tl.maximum(m0, m1)
    shift = tl.where(m > float("-inf"), m, 0.0)
    return m, tl.exp2(m0 - shift), tl.exp2(m1 - shift)


@triton.jit
def join_sums(x0, w0, x1, w1):
    return tl.fma(x1, w1, x0 * w0)


@triton.jit
def _halve(m, total, o):
    """Joins neighbours: m, total [2 N], o [2 N, D] -> [N], [N, D]."""
    N: tl.constexpr = m.shape[0] // 2
    D: tl.constexpr = o.shape[1]
    m0, m1 = tl.split(tl.reshape(m, (N, 2)))
    l0, l1 = tl.split(tl.reshape(total, (N, 2)))
    o0, o1 = tl.split(tl.permute(tl.reshape(o, (N, 2, D)), (0, 2, 1)))
    m, w0, w1 = weights(m0, m1)
    w1_wide = tl.broadcast_to(w1[:, None], (N, D))
    return m, join_sums(l0, w0, l1, w1), join_sums(o0, w0[:, None], o1, w1_wide)


@triton.jit(do_not_specialize=["units", "programs", "q_heads"])
def merge_kernel(
    part,  # fp32 [rows * kv_heads * units, GROUP_PAD, D], columns as ORDER says
    part_ml,  # fp32 [2, rows * kv_heads * units, GROUP_PAD]: m, l
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
    LEVELS: tl.constexpr,  # log2(UNITS_PAD)
    D: tl.constexpr,
    ORDER: tl.constexpr,  # 0: halves of NVFP4, 1, 2: halves of the others, 3: Hopper's fragments
):
    """One (row, query head): the root of the tree, normalised."""
    if ORDER == 3:
        tl.extra.cuda.gdc_wait()  # launched before the units end: wait for all they wrote
    row = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    u = tl.arange(0, UNITS_PAD)
    first = (row * (q_heads // GROUP) + q_head // GROUP) * units + u
    at = first * GROUP_PAD + q_head % GROUP
    m = tl.load(part_ml + at, mask=u < units, other=float("-inf"))
    total = tl.load(part_ml + programs.to(tl.int64) * GROUP_PAD + at, mask=u < units, other=0.0)
    c = tl.arange(0, D)
    live = m > float("-inf")
    o = tl.load(part + at[:, None] * D + c[None, :], mask=live[:, None], other=0.0)
    for _ in tl.static_range(LEVELS):
        m, total, o = _halve(m, total, o)
    m, total, o = tl.max(m, 0), tl.max(total, 0), tl.reshape(o, (D,))
    has = total > 0
    o *= v_scale
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
