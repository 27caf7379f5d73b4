"""Matrix products of one wave, D[16, 16] = A[16, K] B[K, 16] + C, in the operand order of gfx950.

With row = lane % 16 and g = lane // 16 (0..3), a lane holds

    A         row `row` of A: the values of k named below     B   column `row` of B, the same k
    C, D      column `row` of D, rows 4 g .. 4 g + 3: fp32 x 4

    mfma_fp8        K 128   k = 16 g .. 16 g + 15, then 64 + 16 g .. 64 + 16 g + 15: 32 bytes
    mfma_fp4_fp8    K 128   A: k = 32 g .. 32 g + 31: 16 bytes, low nibble first; B as mfma_fp8
    mfma_bf16       K  32   k = 8 g .. 8 g + 7: 16 bytes

A product over k does not care for the order of k: with FP8 or bf16 on both sides any 32 (8) values
may lie in a lane, as long as A and B agree lane group by lane group. Mixed operands and scales by
block need the order above. To get D^T, swap A and B.

Scales by block (OCP MX): the E8M0 byte of the block k = 32 g .. 32 g + 31 of a row lies in lane
group g, whichever values that group holds.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl

TILE = 16
K_FP8, K_BF16 = 128, 32
FP8_WORDS = 8  # dwords a lane of an FP8 operand; FP4 and bf16 operands take 4
_E4M3, _E2M1 = 0, 4  # format codes of the instruction
_UNIT_SCALE = 127  # E8M0


def zeros() -> fx.Vector:
    """C = 0: fp32 x 4."""
    return fx.Vector.filled(4, 0.0, fx.Float32)


def mfma_fp8(a, b, c, b_exponent: int = 0) -> fx.Vector:
    """E4M3 x E4M3 2^b_exponent, K = 128; a, b: 8 words (Int32 or Uint32 Vector)."""
    return _f8f6f4(a, b, c, _E4M3, _E4M3, b_exponent)


def mfma_fp4_fp8(a, b, c) -> fx.Vector:
    """E2M1 x E4M3, K = 128; a: 4 words, b: 8 words."""
    return _f8f6f4(a, b, c, _E2M1, _E4M3)


def mfma_mx(a, b, c, a_scale: fx.Int32, b_exponent: int = 0) -> fx.Vector:
    """A with E8M0 scales by block x E4M3 2^b_exponent, K = 128.

    a: 8 words of E4M3 or 4 of E2M1; a_scale: in its low byte the scale of the lane's block.
    """
    kind = _E4M3 if a.numel == FP8_WORDS else _E2M1
    return _f8f6f4(a, b, c, kind, _E4M3, b_exponent, a_scale)


def mfma_bf16(a, b, c) -> fx.Vector:
    """bf16 x bf16, K = 32; a, b: 4 words of two values."""
    operands = [x.bitcast(fx.BFloat16).ir_value() for x in (a, b)]
    kind = fx.Vector.make_type(4, fx.Float32)
    return fx.Vector(rocdl.mfma_f32_16x16x32_bf16(kind, [*operands, c.ir_value()]))


def _f8f6f4(
    a, b, c, kind_a: int, kind_b: int, b_exponent: int = 0, a_scale: fx.Int32 | None = None
) -> fx.Vector:
    kind = fx.Vector.make_type(4, fx.Float32)
    # Constant zero scales stand for the instruction without scales.
    scales = [0, 0, 0, 0]
    if b_exponent or a_scale is not None:
        unit = fx.Int32(_UNIT_SCALE)
        scale_a = unit if a_scale is None else a_scale
        scale_b = fx.Int32(_UNIT_SCALE + b_exponent)
        scales = [0, scale_a.ir_value(), 0, scale_b.ir_value()]  # the lowest byte of each
    operands = [a.ir_value(), b.ir_value(), c.ir_value(), kind_a, kind_b, *scales]
    return fx.Vector(rocdl.mfma_scale_f32_16x16x128_f8f6f4(kind, operands))
