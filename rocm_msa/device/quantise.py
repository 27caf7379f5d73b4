"""Encoding fp32 values as the caches' bytes: the steps of rocm_msa/formats, bit for bit.

Every division is IEEE's. NaN becomes 0 with its sign, infinities the largest value: a cache holds
no NaN. A lane has some values in order; words come in memory order, the first value lowest.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl

from rocm_msa.device.convert import bf16_word, fp8_values, fp8_word
from rocm_msa.device.norm import exchange
from rocm_msa.device.wave import maximum

E2M1_MAX, E4M3_MAX = 6.0, 448.0
BF16_MAX = 3.3895313892515355e38
GROUP = 16  # NVFP4 values that share a scale
_SIGN, _MAGNITUDE = -(2**31), 2**31 - 1


def nvfp4(values: list, g: fx.Float32) -> tuple[fx.Uint32, fx.Int32]:
    """8 values -> (8 nibbles, scale byte); lanes 2 i and 2 i + 1 share a group of 16.

    The matrix unit's conversion takes powers of two only for its scale: the division by g * scale
    comes first, the conversion with scale 1 rounds to nearest even.
    """
    sizes = _magnitudes(values)
    top = sizes[0]
    for m in sizes[1:]:
        top = maximum(top, m)
    top = maximum(top, exchange(top, 1))
    unscaled = fx.minnumf(top / 6.0 / g, fx.Float32(E4M3_MAX))
    zero = fx.Float32(0.0)
    code = fp8_word([unscaled, zero, zero, zero])
    step = fp8_values(code)[0] * g
    step = (step == 0.0).select(fx.Float32(float("inf")), step)
    word = fx.Int32(0).ir_value()
    one = fx.Float32(1.0).ir_value()
    for byte in range(4):
        pair = values[2 * byte : 2 * byte + 2]
        a, b = (
            _signed(fx.minnumf(m / step, fx.Float32(E2M1_MAX)), x)
            for m, x in zip(sizes[2 * byte : 2 * byte + 2], pair, strict=True)
        )
        word = rocdl.cvt_scalef32_pk_fp4_f32(
            fx.Int32.ir_type, word, a.ir_value(), b.ir_value(), one, byte
        )
    return fx.Uint32(word), code


def fp8(values: list, g: fx.Float32) -> list:
    """4 n values -> n words of E4M3 bytes."""
    limit = fx.Float32(E4M3_MAX)
    scaled = [
        _signed(fx.minnumf(m / g, limit), x)
        for m, x in zip(_magnitudes(values), values, strict=True)
    ]
    return [fx.Uint32(fp8_word(scaled[i : i + 4])) for i in range(0, len(values), 4)]


def bf16(values: list) -> list:
    """2 n values -> n words of finite bf16."""
    limit = fx.Float32(BF16_MAX)
    finite = [
        _signed(fx.minnumf(m, limit), x) for m, x in zip(_magnitudes(values), values, strict=True)
    ]
    return [fx.Uint32(bf16_word(*finite[i : i + 2])) for i in range(0, len(values), 2)]


def _magnitudes(values: list) -> list:
    """|x|, and 0 for NaN."""
    return [maximum(_bits(x, _MAGNITUDE), fx.Float32(0.0)) for x in values]


def _bits(x: fx.Float32, mask: int) -> fx.Float32:
    return (x.bitcast(fx.Int32) & fx.Int32(mask)).bitcast(fx.Float32)


def _signed(size: fx.Float32, x: fx.Float32) -> fx.Float32:
    """`size` >= 0 with the sign bit of x."""
    sign = x.bitcast(fx.Int32) & fx.Int32(_SIGN)
    return (size.bitcast(fx.Int32) | sign).bitcast(fx.Float32)
