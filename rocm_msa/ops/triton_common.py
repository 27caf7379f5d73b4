"""Device helpers shared by the Triton kernels: page addressing, decoding and encoding of values.

A page side is read as two halves `a`, `b` of head_dim, each `[tokens, head_dim / 2]`, so that no
value changes its place in registers:

    NVFP4       a = even head_dim (low nibbles), b = odd head_dim (high nibbles)
    FP8, bf16   a = the first half of head_dim,  b = the second

KIND is 0 for NVFP4, 1 for FP8, 2 for bf16, 3 and 4
for FP8 and bf16 on NVIDIA from sm_89 on. Decoded values are exact in every operand type they are
asked for, but for bf16 pages in fp16: the kernels use fp32 there. Codes that are NaN in their
format read as 0. Byte offsets are 64-bit. Needs head_dim / 2 to be a power of two >= 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

_RNE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small number to an integer


@triton.jit
def half_dims(D: tl.constexpr, KIND: tl.constexpr):
    """head_dim index of each column of the two halves."""
    i = tl.arange(0, D // 2)
    if KIND == 0:
        return 2 * i, 2 * i + 1
    return i, i + D // 2


@triton.jit
def e4m3_value(code):
    """fp32 of E4M3 bytes `code` int32 0..255; the NaN codes give 0."""
    magnitude = code & 0x7F
    bits = (magnitude << 20) + (120 << 23)
    normal = bits.to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, 0.0, value)
    return tl.where(code >= 128, -value, value)


@triton.jit
def e4m3_code(x):
    """E4M3 byte, nearest even, of fp32 `x` with |x| <= 448, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = bits.to(tl.float32, bitcast=True) * 512.0 + _RNE
    small = small.to(tl.int32, bitcast=True) & 0xF
    return tl.where(bits < 0x3C800000, small, rounded) | sign


@triton.jit
def e2m1_half(code):
    """fp16 of E2M1 codes `code` uint16 0..15."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)  # the number * 2^-14
    return bits.to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def e4m3_half(code):
    """fp16 of E4M3 codes `code` uint16 0..255; the NaN codes give 0."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)  # the number * 2^-8
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, 0.0, value)


@triton.jit
def finite_bf16(bits):
    """bf16 of its bits uint16, and 0 where it is infinite or NaN."""
    bits = tl.where((bits & 0x7F80) == 0x7F80, 0, bits).to(tl.uint16)
    return bits.to(tl.bfloat16, bitcast=True)


# A NaN code of E4M3 is 0x7F, an infinite or NaN bf16 has all exponent bits: adding 1 below them in
# the value without its sign carries into the sign, which prmt spreads over a mask.
_E4M3_PTX = tl.constexpr("""{
.reg .b32 t; .reg .b16 lo, hi;
and.b32 t, $2, 0x7F7F7F7F;
add.u32 t, t, 0x01010101;
prmt.b32 t, t, t, 0xBA98;
lop3.b32 t, $2, t, t, 0x30;
mov.b32 {lo, hi}, t;
cvt.rn.f16x2.e4m3x2 $0, lo;
cvt.rn.f16x2.e4m3x2 $1, hi;
}""")
_BF16_PTX = tl.constexpr("""{
.reg .b32 t;
and.b32 t, $1, 0x7F807F80;
add.u32 t, t, 0x00800080;
prmt.b32 t, t, t, 0xBB99;
lop3.b32 $0, $1, t, t, 0x30;
}""")


@triton.jit
def _e4m3_values(codes):
    """fp16 of E4M3 bytes on sm_89 and later; the NaN codes give 0."""
    return tl.inline_asm_elementwise(
        _E4M3_PTX, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def _finite_pairs(x):
    """bf16 `x`, and 0 where it is infinite or NaN, on NVIDIA."""
    return tl.inline_asm_elementwise(
        _BF16_PTX, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def page_halves(
    base,  # uint8 pointer to the head's run in the page
    tokens,  # int32 [T]
    DATA: tl.constexpr,  # byte offset of the side's data
    SCALES: tl.constexpr,  # byte offset of its block scales
    D: tl.constexpr,
    KIND: tl.constexpr,
    OP: tl.constexpr,  # operand type
):
    """The two halves of `tokens`' vectors, without the global scale: OP `[T, D / 2]` each.

    Whatever the page holds, the values are finite: weighed with 0 they add nothing.
    """
    i = tl.arange(0, D // 2)
    if KIND == 0:
        T: tl.constexpr = tokens.shape[0]
        code = tl.load(base + DATA + tokens[:, None] * (D // 2) + i[None, :]).to(tl.uint16)
        group = tl.arange(0, D // 16)
        at = base + SCALES + tokens[:, None] * (D // 16) + group[None, :]
        scale = e4m3_half(tl.load(at).to(tl.uint16))
        scale = tl.broadcast_to(scale[:, :, None], (T, D // 16, 8)).reshape(T, D // 2)
        a = e2m1_half(code & 0xF) * scale
        b = e2m1_half(code >> 4) * scale
        return a.to(OP), b.to(OP)
    elif KIND == 3:
        at = base + DATA + tokens[:, None] * D + i[None, :]
        return _e4m3_values(tl.load(at)).to(OP), _e4m3_values(tl.load(at + D // 2)).to(OP)
    elif KIND == 4:
        at = (base + DATA).to(tl.pointer_type(tl.bfloat16)) + tokens[:, None] * D + i[None, :]
        return _finite_pairs(tl.load(at)).to(OP), _finite_pairs(tl.load(at + D // 2)).to(OP)
    elif KIND == 1:
        at = base + DATA + tokens[:, None] * D + i[None, :]
        a = e4m3_half(tl.load(at).to(tl.uint16))
        b = e4m3_half(tl.load(at + D // 2).to(tl.uint16))
        return a.to(OP), b.to(OP)
    else:
        at = (base + DATA).to(tl.pointer_type(tl.uint16)) + tokens[:, None] * D + i[None, :]
        return finite_bf16(tl.load(at)).to(OP), finite_bf16(tl.load(at + D // 2)).to(OP)


@triton.jit
def nvfp4_bytes(x, g, ROWS: tl.constexpr, D: tl.constexpr):
    """Encode fp32 `x [ROWS, D]`: data bytes `[ROWS, D / 2]`, scale bytes `[ROWS, D / 16]`.

    The steps of formats/nvfp4.py, one fp32 operation each.
    """
    m = tl.abs(x)
    m = tl.where(m == m, m, 0.0)
    m = tl.reshape(m, (ROWS, D // 16, 16))
    top = tl.max(m, 2)
    six = tl.full((ROWS, D // 16), 6.0, tl.float32)
    u = tl.div_rn(tl.div_rn(top, six), tl.zeros_like(top) + g)
    code = e4m3_code(tl.minimum(u, 448.0))
    step = e4m3_value(code) * g
    step = tl.broadcast_to(step[:, :, None], (ROWS, D // 16, 16))
    none = step == 0.0
    q = tl.where(none, 0.0, tl.div_rn(m, tl.where(none, 1.0, step)))
    q = tl.reshape(q, (ROWS, D))
    e = tl.minimum(q * 2.0 + _RNE, q + (_RNE + 2.0))
    e = tl.minimum(tl.minimum(e, q * 0.5 + (_RNE + 4.0)), _RNE + 7.0)
    bits = e.to(tl.int32, bitcast=True) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(bits & 0xF, (ROWS, D // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), code.to(tl.uint8)


@triton.jit
def fp8_bytes(x, g):
    """Encode fp32 `x` as E4M3 bytes: nearest even, saturating, NaN -> 0 with its sign."""
    zero = (x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    y = tl.where(x == x, tl.div_rn(x, tl.zeros_like(x) + g), zero)
    return e4m3_code(tl.minimum(tl.maximum(y, -448.0), 448.0)).to(tl.uint8)


@triton.jit
def bf16_values(x):
    """bf16 of fp32 `x`, NaN -> 0 with its sign, infinities -> the largest finite value."""
    zero = (x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    y = tl.where(x == x, x, zero)
    y = tl.minimum(tl.maximum(y, -3.3895313892515355e38), 3.3895313892515355e38)
    bits = y.to(tl.int32, bitcast=True)  # rounded here: Triton's interpreter truncates
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(
    do_not_specialize=["requests", "tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "seq_lens"],
)
def rows_kernel(
    cu_seqlens,  # int32 [requests + 1]
    seq_lens,  # int32 [requests]
    out,  # int32 [2, tokens]: request, causal length
    requests,
    tokens,
    BLOCK: tl.constexpr,
):
    """Request and causal length of each token of a varlen batch; padding has length 0."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + requests
    steps = 0
    while (1 << steps) < requests + 1:
        steps += 1
    for _ in range(steps):  # the first request that ends beyond t
        middle = (low + high) // 2
        beyond = tl.load(cu_seqlens + 1 + middle, mask=middle < requests, other=2147483647) > t
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, tl.minimum(middle + 1, requests))
    live = high < requests
    request = tl.where(live, high, tl.maximum(requests - 1, 0))
    end = tl.load(cu_seqlens + 1 + request, mask=live, other=0)
    n = tl.load(seq_lens + request, mask=live, other=0) - end + t + 1
    n = tl.where(live, tl.maximum(n, 0), 0)
    tl.store(out + t, request, mask=t < tokens)
    tl.store(out + tokens + t, n, mask=t < tokens)
