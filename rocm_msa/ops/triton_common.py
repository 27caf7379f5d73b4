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


# Four E4M3 codes of %IN -> pairs lo, hi of halves or bf16. A NaN code of E4M3 is 0x7F, an infinite
# or NaN bf16 has all exponent bits: adding 1 below them in the value without its sign carries into
# the sign, which prmt spreads over a mask. In bf16 the code's fields, moved to their places, are
# the number * 2^-120.
_E4M3_FINITE = """{
.reg .b32 t, z, lo, hi; .reg .b16 a, b;
and.b32 t, %IN, 0x7F7F7F7F;
add.u32 t, t, 0x01010101;
prmt.b32 t, t, t, 0xBA98;
lop3.b32 t, %IN, t, t, 0x30;
"""
_E4M3_TO_FP16 = """
mov.b32 {a, b}, t;
cvt.rn.f16x2.e4m3x2 lo, a;
cvt.rn.f16x2.e4m3x2 hi, b;
"""
_E4M3_TO_BF16 = """
prmt.b32 lo, t, 0, 0x1404;
prmt.b32 hi, t, 0, 0x3424;
shr.u32 t, lo, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 lo, lo, 0x80008000, t, 0xEA;
shr.u32 t, hi, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 hi, hi, 0x80008000, t, 0xEA;
mov.b32 t, 0x7B807B80;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 lo, lo, t, z;
fma.rn.bf16x2 hi, hi, t, z;
"""


def _e4m3_ptx(convert: str, code: str, store: str) -> tl.constexpr:
    return tl.constexpr((_E4M3_FINITE + convert).replace("%IN", code) + store + "}")


_PAIRS = "mov.b32 $0, lo; mov.b32 $1, hi;"
_SINGLES = "mov.b32 {$0, $1}, lo; mov.b32 {$2, $3}, hi;"
_FP16_OF_BYTES = _e4m3_ptx(_E4M3_TO_FP16, "$2", _PAIRS)
_BF16_OF_BYTES = _e4m3_ptx(_E4M3_TO_BF16, "$2", _PAIRS)
_FP16_OF_WORDS = _e4m3_ptx(_E4M3_TO_FP16, "$4", _SINGLES)
_BF16_OF_WORDS = _e4m3_ptx(_E4M3_TO_BF16, "$4", _SINGLES)
_BF16_PTX = tl.constexpr("""{
.reg .b32 t;
and.b32 t, $1, 0x7F807F80;
add.u32 t, t, 0x00800080;
prmt.b32 t, t, t, 0xBB99;
lop3.b32 $0, $1, t, t, 0x30;
}""")


@triton.jit
def _e4m3_values(codes, OP: tl.constexpr):
    """E4M3 bytes on sm_89 and later; the NaN codes give 0."""
    BF16: tl.constexpr = OP == tl.bfloat16  # noqa: SIM300 - capitals are no constants here
    values = tl.inline_asm_elementwise(
        _BF16_OF_BYTES if BF16 else _FP16_OF_BYTES, "=r,=r,r", [codes],
        dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return values.to(OP)


@triton.jit
def e4m3_words(words, OP: tl.constexpr):
    """The same of codes in int32 `[T, N]`, four a word: `[T, 4 N]`."""
    T: tl.constexpr = words.shape[0]
    N: tl.constexpr = words.shape[1]
    BF16: tl.constexpr = OP == tl.bfloat16  # noqa: SIM300 - capitals are no constants here
    e = tl.inline_asm_elementwise(
        _BF16_OF_WORDS if BF16 else _FP16_OF_WORDS, "=h,=h,=h,=h,r", [words],
        dtype=(tl.bfloat16 if BF16 else tl.float16,) * 4, is_pure=True, pack=1,
    )  # fmt: skip
    values = tl.join(tl.join(e[0], e[2]), tl.join(e[1], e[3]))
    return tl.reshape(values, (T, 4 * N)).to(OP)


@triton.jit
def _finite_pairs(x):
    """bf16 `x`, and 0 where it is infinite or NaN, on NVIDIA."""
    return tl.inline_asm_elementwise(
        _BF16_PTX, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def page_bytes(
    base,  # uint8 pointer to the head's run in the page
    tokens,  # int32 [T]
    DATA: tl.constexpr,  # byte offset of the side's data
    SCALES: tl.constexpr,  # byte offset of its block scales
    D: tl.constexpr,
    KIND: tl.constexpr,
):
    """What `halves_of` reads `tokens`' vectors from: codes and scales, or the two halves."""
    i = tl.arange(0, D // 2)
    if KIND == 0:
        group = tl.arange(0, D // 16)
        codes = tl.load(base + DATA + tokens[:, None] * (D // 2) + i[None, :])
        return codes, tl.load(base + SCALES + tokens[:, None] * (D // 16) + group[None, :])
    elif KIND == 1 or KIND == 3:
        at = base + DATA + tokens[:, None] * D + i[None, :]
        return tl.load(at), tl.load(at + D // 2)
    elif KIND == 4:
        at = (base + DATA).to(tl.pointer_type(tl.bfloat16)) + tokens[:, None] * D + i[None, :]
        return tl.load(at), tl.load(at + D // 2)
    else:
        at = (base + DATA).to(tl.pointer_type(tl.uint16)) + tokens[:, None] * D + i[None, :]
        return tl.load(at), tl.load(at + D // 2)


@triton.jit
def halves_of(x, y, D: tl.constexpr, KIND: tl.constexpr, OP: tl.constexpr):
    """The two halves of vectors that page_bytes read, without the global scale: OP `[T, D / 2]`.

    Whatever the page holds, the values are finite: weighed with 0 they add nothing.
    """
    if KIND == 0:
        T: tl.constexpr = x.shape[0]
        code = x.to(tl.uint16)
        scale = e4m3_half(y.to(tl.uint16))
        scale = tl.broadcast_to(scale[:, :, None], (T, D // 16, 8)).reshape(T, D // 2)
        return (e2m1_half(code & 0xF) * scale).to(OP), (e2m1_half(code >> 4) * scale).to(OP)
    elif KIND == 3:
        return _e4m3_values(x, OP), _e4m3_values(y, OP)
    elif KIND == 4:
        return _finite_pairs(x).to(OP), _finite_pairs(y).to(OP)
    elif KIND == 1:
        return e4m3_half(x.to(tl.uint16)).to(OP), e4m3_half(y.to(tl.uint16)).to(OP)
    else:
        return finite_bf16(x).to(OP), finite_bf16(y).to(OP)


@triton.jit
def page_halves(
    base, tokens, DATA: tl.constexpr, SCALES: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """halves_of page_bytes."""
    x, y = page_bytes(base, tokens, DATA, SCALES, D, KIND)
    return halves_of(x, y, D, KIND, OP)


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
