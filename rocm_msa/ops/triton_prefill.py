"""Device helpers of the prefill kernels: whole pages as matrix operands, query tiles, requests.

A page side is `[tokens, head_dim]` in the order of head_dim, decoded once and used for 64 or more
query rows. FAST takes inline assembly of NVIDIA (sm_90) where there is some; a decoded value is
then the true one times a power of two, which `factor` names:

    NVFP4   an E2M1 code moved to the top of its exponent field is the number times 2^-14 (fp16) or
            2^-126 (bf16); times its scale (bf16: times 2^119 as well) it is exact in either type
    FP8     the chip's own conversion to fp16

All forms agree to the bit but for the factor. KIND: 0 NVFP4, 1 FP8, 2 bf16. Codes that are NaN in
their format read as 0. Byte offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.triton_common import e2m1_half, e4m3_value

LOG2E = 1.4426950408889634


def factor(kind: int, op: tl.dtype, fast: bool) -> float:
    """What `page_side` multiplies true values by."""
    if not fast or kind != 0:
        return 1.0
    return 2.0**-7 if op is tl.bfloat16 else 2.0**-14


def operands(q: torch.Tensor, kind: int) -> tuple[tl.dtype, tl.dtype, int, int]:
    """(type of K, type of V, parts of a query, parts of a probability) for `product`.

    K and V lose nothing in their types; a query neither, in so many parts; a probability is rounded
    to 16 bits, or to 2^-22 where the result has more than 8 bits. On the CPU all are fp32: Triton's
    interpreter has no bf16 product.
    """
    if not q.is_cuda:
        return tl.float32, tl.float32, 1, 1
    v = tl.bfloat16 if kind == 2 else tl.float16
    if q.dtype is torch.bfloat16:
        return tl.bfloat16, v, 1, 1
    p = 3 if kind == 2 else 2
    if q.dtype is torch.float16:
        return (tl.bfloat16, v, 2, 2) if kind == 2 else (tl.float16, v, 1, 1)
    return tl.bfloat16, v, 3, p


def register_limit(registers: int | None) -> dict[str, int]:
    """Launch option for a limit of registers a lane; on NVIDIA alone there is one."""
    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def _unpack(product: str, down: int, mask: str, scale: str) -> str:
    """Eight E2M1 codes of a word times their E4M3 scale -> four pairs of 16-bit floats, in order.

    $0..$3 results, $4 the word, $5 the scale in its lowest byte. Codes p and p + 4 lie 16 bits
    apart: both are brought to the top of their halves, the sign stays, three bits move `down` to
    the exponent.
    """
    steps = [
        "{ .reg .b32 s, w, m, a, b, c, d; .reg .b16 h; .reg .pred n;",
        "and.b32 m, $5, 0x7F; setp.eq.u32 n, m, 0x7F;",
        "prmt.b32 s, $5, $5, 0; cvt.u16.u32 h, s; cvt.rn.f16x2.e4m3x2 s, h;",
        scale,
        "selp.b32 s, 0, s, n;",
    ]
    for name, up in (("d", 0), ("c", 4), ("b", 8), ("a", 12)):
        word = "$4" if up == 0 else "w"
        if up:
            steps.append(f"shl.b32 w, $4, {up};")
        steps.append(f"shr.u32 m, {word}, {down}; and.b32 m, m, {mask};")
        steps.append(f"lop3.b32 m, {word}, 0x80008000, m, 0xEA; {product} {name}, m, s;")
    for at, (low, high, half) in enumerate(
        (("a", "b", 0x5410), ("c", "d", 0x5410), ("a", "b", 0x7632), ("c", "d", 0x7632))
    ):
        steps.append(f"prmt.b32 ${at}, {low}, {high}, {half:#x};")
    return " ".join([*steps, "}"])


_NVFP4_F16 = tl.constexpr(_unpack("mul.rn.f16x2", 3, "0x0E000E00", ""))
# The fp16 scale as bf16 times 2^119: exponent field + 231, mantissa to its new place; 0 stays 0.
_NVFP4_BF16 = tl.constexpr(
    _unpack(
        "mul.rn.bf16x2",
        6,
        "0x01C001C0",
        "setp.eq.or.u32 n, m, 0, n; shr.u32 s, s, 3; add.u32 s, s, 0x73807380;",
    )
)

# Four E4M3 bytes of a word, NaN codes -> 0.
_CLEAN = """and.b32 t, $4, 0x7F7F7F7F; add.u32 t, t, 0x01010101; and.b32 t, t, 0x80808080;
shr.u32 u, t, 7; sub.u32 u, t, u; or.b32 t, t, u; not.b32 t, t; and.b32 t, $4, t;"""
_FP8_F16 = tl.constexpr(
    "{ .reg .b32 t, u; .reg .b16 l, h;"
    + _CLEAN
    + """ mov.b32 {l, h}, t;
cvt.rn.f16x2.e4m3x2 t, l; mov.b32 {$0, $1}, t;
cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {$2, $3}, t; }"""
)
# Exponent and mantissa at the bf16's places are the number times 2^-120, which the product undoes.
_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 t, u, s, a, b;"
    + _CLEAN
    + """ mov.b32 u, 0x7B807B80; prmt.b32 a, t, 0, 0x1404; prmt.b32 b, t, 0, 0x3424;
and.b32 s, a, 0x80008000; and.b32 a, a, 0x7F007F00; shr.u32 a, a, 4; or.b32 a, a, s;
mul.rn.bf16x2 a, a, u; mov.b32 {$0, $1}, a;
and.b32 s, b, 0x80008000; and.b32 b, b, 0x7F007F00; shr.u32 b, b, 4; or.b32 b, b, s;
mul.rn.bf16x2 b, b, u; mov.b32 {$2, $3}, b; }"""
)


@triton.jit
def product(x, y, PARTS: tl.constexpr, onto=None):
    """fp32 x . y of `x [M, K]` and `y [K, N]`, added onto `onto`.

    x is taken as a sum of PARTS values of y's type.
    """
    if PARTS == 1:
        return tl.dot(x.to(y.dtype), y, acc=onto)
    rest = x.to(tl.float32)
    part = rest.to(y.dtype)
    s = tl.dot(part, y, acc=onto)
    for _ in tl.static_range(PARTS - 1):
        rest -= part.to(tl.float32)
        part = rest.to(y.dtype)
        s = tl.dot(part, y, acc=s)
    return s


@triton.jit
def page_side(
    base,  # uint8 pointer to the head's run in the page
    token,  # int32 [T]
    keep,  # bool [T]: the others read as 0
    DATA: tl.constexpr,  # byte offset of the side's data
    SCALES: tl.constexpr,  # byte offset of its block scales
    D: tl.constexpr,
    KIND: tl.constexpr,
    OP: tl.constexpr,  # operand type
    FAST: tl.constexpr,
    CLEAN: tl.constexpr,  # whether NaN and infinities of bf16 pages become 0
):
    """OP `[T, D]`: the vectors of `token`, without the global scale, times `factor`."""
    T: tl.constexpr = token.shape[0]
    mask = keep[:, None]
    if KIND == 0 and FAST:
        w = tl.arange(0, D // 8)
        at = (base + DATA).to(tl.pointer_type(tl.int32)) + token[:, None] * (D // 8) + w[None, :]
        word = tl.load(at, mask=mask, other=0)
        g = tl.arange(0, D // 32)  # two scales at a time: a layout that is near the words'
        s_at = (base + SCALES).to(tl.pointer_type(tl.uint16)) + token[:, None] * (D // 32)
        scale = tl.load(s_at + g[None, :], mask=mask, other=0).to(tl.int32)
        scale = tl.broadcast_to(scale[:, :, None], (T, D // 32, 4)).reshape(T, D // 8)
        scale = scale >> ((w & 2) * 4)[None, :]
        if OP is tl.bfloat16:
            pair = tl.inline_asm_elementwise(
                _NVFP4_BF16, "=r,=r,=r,=r,r,r", [word, scale], (tl.int32,) * 4, True, 1
            )
            two: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        else:
            pair = tl.inline_asm_elementwise(
                _NVFP4_F16, "=r,=r,=r,=r,r,r", [word, scale], (tl.int32,) * 4, True, 1
            )
            two: tl.constexpr = (tl.float16, tl.float16)
        pairs = tl.join(tl.join(pair[0], pair[2]), tl.join(pair[1], pair[3]))
        pairs = tl.reshape(pairs, (T, D // 2))
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], two, True, 1
        )
        both = tl.reshape(tl.join(low, high), (T, D))
        # moves nothing: Triton 3.6 fails on a matrix operand that is a reshape with so few columns
        both = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [both], both.dtype, True, 2)
        return both.to(OP)
    elif KIND == 1 and FAST:
        w = tl.arange(0, D // 4)
        at = (base + DATA).to(tl.pointer_type(tl.int32)) + token[:, None] * (D // 4) + w[None, :]
        word = tl.load(at, mask=mask, other=0)
        if OP is tl.bfloat16:
            e = tl.inline_asm_elementwise(
                _FP8_BF16, "=h,=h,=h,=h,r", [word], (tl.bfloat16,) * 4, True, 1
            )
        else:
            e = tl.inline_asm_elementwise(
                _FP8_F16, "=h,=h,=h,=h,r", [word], (tl.float16,) * 4, True, 1
            )
        both = tl.join(tl.join(e[0], e[2]), tl.join(e[1], e[3]))
        return tl.reshape(both, (T, D)).to(OP)
    elif KIND == 0:
        i = tl.arange(0, D // 2)
        byte = tl.load(base + DATA + token[:, None] * (D // 2) + i[None, :], mask=mask, other=0)
        group = tl.arange(0, D // 16)
        s_at = base + SCALES + token[:, None] * (D // 16) + group[None, :]
        scale = e4m3_value(tl.load(s_at, mask=mask, other=0).to(tl.int32)).to(tl.float16)
        scale = tl.broadcast_to(scale[:, :, None], (T, D // 16, 8)).reshape(T, D // 2)
        code = byte.to(tl.uint16)
        both = tl.join(e2m1_half(code & 0xF) * scale, e2m1_half(code >> 4) * scale)
        return tl.reshape(both, (T, D)).to(OP)
    elif KIND == 1:
        i = tl.arange(0, D)
        code = tl.load(base + DATA + token[:, None] * D + i[None, :], mask=mask, other=0)
        return e4m3_half(code.to(tl.uint16)).to(OP)
    elif not CLEAN:
        i = tl.arange(0, D)
        at = (base + DATA).to(tl.pointer_type(tl.bfloat16)) + token[:, None] * D + i[None, :]
        return tl.load(at, mask=mask, other=0.0).to(OP)
    else:
        i = tl.arange(0, D)
        at = (base + DATA).to(tl.pointer_type(tl.int16)) + token[:, None] * D + i[None, :]
        bits = tl.load(at, mask=mask, other=0)
        bits = tl.where((bits & 0x7F80) == 0x7F80, 0, bits).to(tl.int16)
        return bits.to(tl.bfloat16, bitcast=True).to(OP)


@triton.jit
def e4m3_half(code):
    """fp16 of E4M3 bytes `code` uint16 0..255; the NaN codes give 0."""
    code = tl.where((code & 0x7F) == 0x7F, 0, code).to(tl.uint16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)  # the number * 2^-8
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def find_tile(tile, cu_seqlens, requests, rows, TOKENS: tl.constexpr):
    """(request, first token, end) of a tile of TOKENS tokens that never crosses requests.

    Request r owns the tiles from cu_seqlens[r] // TOKENS + r on, and what follows the last request
    counts as one more, so that rows // TOKENS + requests + 1 tiles are enough for any lengths; some
    are empty (first >= end).
    """
    low = tile * 0
    high = low + requests
    steps = 0
    while (1 << steps) < requests + 1:
        steps += 1
    for _ in range(steps):  # the last request whose first tile is <= tile
        middle = (low + high + 1) // 2
        before = tl.load(cu_seqlens + middle) // TOKENS + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    begin = tl.load(cu_seqlens + low)
    end = tl.load(cu_seqlens + low + 1, mask=low < requests, other=0)
    end = tl.where(low < requests, end, rows)
    return low, begin + (tile - (begin // TOKENS + low)) * TOKENS, end
