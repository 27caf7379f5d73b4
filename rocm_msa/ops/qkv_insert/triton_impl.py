"""qkv_insert in Triton, one launch: norm, RoPE, rounding, quantisation and paged insertion.

A program owns TOKENS tokens of one head of [q | k | v | index_q | index_k]; a query head is stored
in `q` or `index_q`, a key or value head goes into its page. The heads behind q are launched first:
those that are quantised take longest. The operations and their order are the
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
from rocm_msa.ops.qkv_insert.plan import Tuning, select
from rocm_msa.ops.triton_common import bf16_values, fp8_bytes, nvfp4_bytes
from rocm_msa.ops.triton_host import Geometry, scale, target_of


@triton.jit
def _dims(COLUMNS: tl.constexpr, HALF: tl.constexpr):
    """head_dim index of each column of the first of the two parts, see insert_kernel."""
    c = tl.arange(0, COLUMNS)
    return c // HALF * (2 * HALF) + c % HALF


@triton.jit
def _store_values(
    x,  # fp32 [TOKENS, COLUMNS], already rounded to the activation dtype
    base,  # uint8 pointers [TOKENS] to the head's run in each token's page
    token,  # int64 [TOKENS] in the page
    live,  # bool [TOKENS]
    g,
    first: tl.constexpr,  # head_dim index of column 0
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
):
    """Encode and store columns that lie in runs of HALF in each 2 HALF of head_dim."""
    TOKENS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    keep = live[:, None]
    if KIND == 0:
        data, scales = nvfp4_bytes(x, g, TOKENS, COLUMNS)
        at = base + token * (D // 2) + (DATA + first // 2)
        i = _dims(COLUMNS // 2, HALF // 2)
        tl.store(at[:, None] + i[None, :], data, mask=keep)
        at = base + token * (D // 16) + (SCALES + first // 16)
        i = _dims(COLUMNS // 16, HALF // 16)
        tl.store(at[:, None] + i[None, :], scales, mask=keep)
    elif KIND == 1:
        at = base + token * D + (DATA + first)
        tl.store(at[:, None] + _dims(COLUMNS, HALF)[None, :], fp8_bytes(x, g), mask=keep)
    else:
        at = (base + token * (2 * D) + (DATA + 2 * first)).to(tl.pointer_type(tl.bfloat16))
        tl.store(at[:, None] + _dims(COLUMNS, HALF)[None, :], bf16_values(x), mask=keep)


@triton.jit
def _insert(
    a,  # fp32 [TOKENS, D / 2] each, already rounded to the activation dtype
    b,
    slots,  # int64 [TOKENS]
    live,  # bool [TOKENS]
    pages,
    block_stride,
    num_pages,
    g,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
):
    live = live & (slots >= 0) & (slots < num_pages * 128)
    slots = tl.where(live, slots, 0)
    base = pages + slots // 128 * block_stride
    token = slots % 128
    if HALF % 16 == 0:
        _store_values(a, base, token, live, g, 0, DATA, SCALES, D, HALF, KIND)
        _store_values(b, base, token, live, g, HALF, DATA, SCALES, D, HALF, KIND)
    else:  # a scale's 16 values lie in both parts
        x = tl.join(tl.reshape(a, (TOKENS, D // (2 * HALF), HALF)),
                    tl.reshape(b, (TOKENS, D // (2 * HALF), HALF)))  # fmt: skip
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (TOKENS, D))
        _store_values(x, base, token, live, g, 0, DATA, SCALES, D, D, KIND)


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
    OTHERS: tl.constexpr = 2 * KV + (INDEX + 1 if INDEX > 0 else 0)
    place = tl.program_id(1)
    head = tl.where(place < OTHERS, Q + place, place - OTHERS)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    t = t.to(tl.int64)
    HALF: tl.constexpr = ROTARY // 2
    # head_dim in two parts: a = [0, HALF) of each 2 HALF, b = the rest, partners in the rotation.
    d = _dims(D // 2, HALF)
    at = qkv + t[:, None] * qkv_row + (head * D + d).to(tl.int64)[None, :] * qkv_column
    keep = live[:, None]
    a = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(at + HALF * qkv_column, mask=keep, other=0.0).to(tl.float32)
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
        wa = 1.0 + tl.load(weights + d).to(tl.float32)
        wb = 1.0 + tl.load(weights + d + HALF).to(tl.float32)
        norm = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a = a * norm * wa[None, :]
        b = b * norm * wb[None, :]
        position = tl.load(positions + t, mask=live, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), max_position - 1)
        turned = (tl.arange(0, D // 2) < HALF)[None, :]
        angles = cos_sin + position[:, None] * cos_sin_row + d[None, :] * cos_sin_column
        cos = tl.load(angles, mask=keep & turned, other=1.0).to(tl.float32)
        sin = tl.load(angles + HALF * cos_sin_column, mask=keep & turned, other=0.0)
        sin = sin.to(tl.float32)
        turned_a = a * cos - b * sin
        turned_b = b * cos + a * sin
        a, b = tl.where(turned, turned_a, a), tl.where(turned, turned_b, b)
    rounded_a, rounded_b = a.to(qkv.dtype.element_ty), b.to(qkv.dtype.element_ty)
    a, b = rounded_a.to(tl.float32), rounded_b.to(tl.float32)
    if head < Q:
        to = q_out + (t[:, None] * Q + head) * D + d[None, :]
        tl.store(to, rounded_a, mask=keep)
        tl.store(to + HALF, rounded_b, mask=keep)
    elif head < Q + 2 * KV:
        slots = tl.load(main_slots + t, mask=live, other=-1).to(tl.int64)
        if is_v:
            base = main_pages + (head - Q - KV) * MAIN_HEAD
            _insert(
                a, b, slots, live, base, main_stride, main_pages_count, v_scale,
                V_DATA, V_SCALES, D, HALF, MAIN, TOKENS,
            )  # fmt: skip
        else:
            base = main_pages + (head - Q) * MAIN_HEAD
            _insert(
                a, b, slots, live, base, main_stride, main_pages_count, k_scale,
                0, K_SCALES, D, HALF, MAIN, TOKENS,
            )  # fmt: skip
    elif head < Q + 2 * KV + INDEX:
        to = index_q_out + (t[:, None] * INDEX + (head - Q - 2 * KV)) * D + d[None, :]
        tl.store(to, rounded_a, mask=keep)
        tl.store(to + HALF, rounded_b, mask=keep)
    else:
        slots = tl.load(index_slots + t, mask=live, other=-1).to(tl.int64)
        _insert(
            a, b, slots, live, index_pages, index_stride, index_pages_count,
            index_scale, 0, INDEX_SCALES, D, HALF, INDEX_KIND, TOKENS,
        )  # fmt: skip


def run(
    qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """See api.py. `tuning` is for tests and benchmarks."""
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
    t = tuning or select(tokens, target_of(qkv))
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
