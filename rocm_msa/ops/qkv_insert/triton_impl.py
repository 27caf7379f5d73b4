"""qkv_insert in Triton, one launch: norm, RoPE, rounding, quantisation and paged insertion.

A program owns TOKENS tokens of one head of [q | k | v | index_q | index_k]; a query head is stored
in `q` or `index_q`, a key or value head goes into its page. The operations and their order are the
reference's, without fused multiply-adds (`enable_fp_fusion=False`), but for the order of the sum of
squares: a result may differ from the reference's in the last bit of the activation dtype, and a
stored byte then is that of the other value. The encoding is a function of the rounded value, bit
for bit that of formats/. Slots outside of the cache are ignored; two tokens with one slot race.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.errors import expect
from rocm_msa.ops.qkv_insert.plan import select
from rocm_msa.ops.triton_common import bf16_values, fp8_bytes, nvfp4_bytes
from rocm_msa.ops.triton_host import Geometry, scale


@triton.jit
def _insert(
    x,  # fp32 [TOKENS, D], already rounded to the activation dtype
    slots,  # int64 [TOKENS]
    live,  # bool [TOKENS]
    pages,
    block_stride,
    num_pages,
    g,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
):
    live = live & (slots >= 0) & (slots < num_pages * 128)
    slots = tl.where(live, slots, 0)
    base = pages + slots // 128 * block_stride
    token = slots % 128
    if KIND == 0:
        data, scales = nvfp4_bytes(x, g, TOKENS, D)
        i, group = tl.arange(0, D // 2), tl.arange(0, D // 16)
        at = base + token * (D // 2) + DATA
        tl.store(at[:, None] + i[None, :], data, mask=live[:, None])
        at = base + token * (D // 16) + SCALES
        tl.store(at[:, None] + group[None, :], scales, mask=live[:, None])
    elif KIND == 1:
        at = base + token * D + DATA
        tl.store(at[:, None] + tl.arange(0, D)[None, :], fp8_bytes(x, g), mask=live[:, None])
    else:
        at = (base + token * (2 * D) + DATA).to(tl.pointer_type(tl.bfloat16))
        tl.store(at[:, None] + tl.arange(0, D)[None, :], bf16_values(x), mask=live[:, None])


@triton.jit
def _rope(x, cos, sin, D: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr):
    """The first 2 HALF of `x [TOKENS, D]` turned: pairs (i, i + HALF), as parts [part, 2, HALF]."""
    PARTS: tl.constexpr = D // (2 * HALF)
    parts = tl.permute(tl.reshape(x, (TOKENS, PARTS, 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(parts)
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = (tl.arange(0, PARTS) == 0)[None, :, None]
    turned_a = tl.where(first, a * cos - b * sin, a)
    turned_b = tl.where(first, b * cos + a * sin, b)
    parts = tl.permute(tl.join(turned_a, turned_b), (0, 1, 3, 2))
    return tl.reshape(parts, (TOKENS, D))


@triton.jit(do_not_specialize=["tokens", "main_pages_count", "index_pages_count", "max_position"])
def insert_kernel(
    qkv,  # [tokens, columns]
    qkv_row,
    qkv_column,
    tokens,
    weights_q,  # [D] each
    weights_k,
    weights_index_q,
    weights_index_k,
    eps,
    cos_sin,  # [max_position, ROTARY]
    cos_sin_row,
    cos_sin_column,
    max_position,
    positions,  # [tokens] int32 or int64
    main_slots,
    index_slots,
    main_pages,
    main_stride,
    main_pages_count,
    k_scale,
    v_scale,
    index_pages,
    index_stride,
    index_pages_count,
    index_scale,
    q_out,  # [tokens, Q, D]
    index_q_out,  # [tokens, INDEX, D]
    Q: tl.constexpr,
    KV: tl.constexpr,
    INDEX: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_HEAD: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_DATA: tl.constexpr,
    V_SCALES: tl.constexpr,
    INDEX_KIND: tl.constexpr,
    INDEX_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    t = t.to(tl.int64)
    d = tl.arange(0, D)
    HALF: tl.constexpr = ROTARY // 2
    at = qkv + t[:, None] * qkv_row + (head * D).to(tl.int64) * qkv_column
    x = tl.load(at + d[None, :] * qkv_column, mask=live[:, None], other=0.0).to(tl.float32)
    is_v = (head >= Q + KV) & (head < Q + 2 * KV)
    if not is_v:
        weights = weights_q
        if head >= Q:
            weights = weights_k
        if INDEX > 0:
            if head >= Q + 2 * KV:
                weights = weights_index_q
            if head >= Q + 2 * KV + INDEX:
                weights = weights_index_k
        w = 1.0 + tl.load(weights + d).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * w[None, :]
        position = tl.load(positions + t, mask=live, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), max_position - 1)
        angle = tl.arange(0, HALF)
        angles = cos_sin + position[:, None] * cos_sin_row + angle[None, :] * cos_sin_column
        cos = tl.load(angles, mask=live[:, None], other=1.0).to(tl.float32)
        sin = tl.load(angles + HALF * cos_sin_column, mask=live[:, None], other=0.0)
        x = _rope(x, cos, sin.to(tl.float32), D, HALF, TOKENS)
    rounded = x.to(qkv.dtype.element_ty)
    x = rounded.to(tl.float32)
    if head < Q:
        to = q_out + (t[:, None] * Q + head) * D + d[None, :]
        tl.store(to, rounded, mask=live[:, None])
    elif head < Q + 2 * KV:
        slots = tl.load(main_slots + t, mask=live, other=-1).to(tl.int64)
        if is_v:
            base = main_pages + (head - Q - KV) * MAIN_HEAD
            _insert(
                x, slots, live, base, main_stride, main_pages_count, v_scale,
                V_DATA, V_SCALES, D, MAIN, TOKENS,
            )  # fmt: skip
        else:
            base = main_pages + (head - Q) * MAIN_HEAD
            _insert(
                x, slots, live, base, main_stride, main_pages_count, k_scale,
                0, K_SCALES, D, MAIN, TOKENS,
            )  # fmt: skip
    elif head < Q + 2 * KV + INDEX:
        to = index_q_out + (t[:, None] * INDEX + (head - Q - 2 * KV)) * D + d[None, :]
        tl.store(to, rounded, mask=live[:, None])
    else:
        slots = tl.load(index_slots + t, mask=live, other=-1).to(tl.int64)
        _insert(
            x, slots, live, index_pages, index_stride, index_pages_count,
            index_scale, 0, INDEX_SCALES, D, INDEX_KIND, TOKENS,
        )  # fmt: skip


def run(
    qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See api.py."""
    tokens, dim = qkv.shape[0], heads.head_dim
    q = torch.empty(tokens, heads.q, dim, dtype=qkv.dtype, device=qkv.device)
    index_q = None
    if heads.index:
        index_q = torch.empty(tokens, heads.index, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q, index_q
    half = heads.rotary_dim // 2
    if half & (half - 1):
        wanted = "twice a power of two"
        raise NotImplementedError(expect("heads.rotary_dim on triton", wanted, heads.rotary_dim))
    main = Geometry.of(main_cache)
    index = Geometry.of(index_cache) if heads.index else main
    index_pages = index_cache if heads.index else main_cache
    t = select(tokens)
    count = heads.q + 2 * heads.kv + (heads.index + 1 if heads.index else 0)
    norm_weights = [norms.q, norms.k, norms.index_q, norms.index_k]
    norm_weights = [norms.q if w is None else w.contiguous() for w in norm_weights]
    insert_kernel[(triton.cdiv(tokens, t.tokens), count)](
        qkv, *qkv.stride(), tokens, *norm_weights, float(norms.eps),
        cos_sin, *cos_sin.stride(), cos_sin.shape[0], positions.contiguous(),
        main_slots.contiguous(), (index_slots if heads.index else main_slots).contiguous(),
        main_cache.pages, main_cache.block_stride, main_cache.num_blocks,
        scale(main_cache, "k"), scale(main_cache, "v"),
        index_pages.pages, index_pages.block_stride, index_pages.num_blocks,
        scale(index_pages, "k"), q, q if index_q is None else index_q,
        Q=heads.q, KV=heads.kv, INDEX=heads.index, D=dim, ROTARY=heads.rotary_dim,
        MAIN=main.kind, MAIN_HEAD=main.head_bytes, K_SCALES=main.k_scales, V_DATA=main.v_data,
        V_SCALES=main.v_scales, INDEX_KIND=index.kind, INDEX_SCALES=index.k_scales,
        TOKENS=t.tokens, num_warps=t.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q, index_q
