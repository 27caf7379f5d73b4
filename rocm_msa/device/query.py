"""A query vector as FP8 operands of matrix products, without rounding it to FP8.

    q 2^s = t0 + t1 2^-STEP + t2 2^-2 STEP ...    each t is E4M3: what the ones before leave, scaled

s makes the largest magnitude lie in [128, 256). A term holds 4 significant bits and the next one 4
more, so two terms are a bf16 value and three an fp16 value, exactly but for what is below 2^-21 of
the largest magnitude. Products with the terms, scaled by 2^-STEP each in the instruction and summed
in one accumulator, give the dot product of q itself.
"""

from __future__ import annotations

import flydsl.expr as fx

from rocm_msa.device.convert import fp8_values, fp8_word
from rocm_msa.device.wave import column_max

STEP = 4
TERMS = {"bf16": 2, "fp16": 3}
_TOP_EXPONENT = 7  # 2^7 <= largest < 2^8
_BIAS, _MANTISSA_BITS = 127, 23


def split_query(values: list, terms: int) -> tuple[list[fx.Vector], fx.Float32]:
    """Of the column that the lanes lane, lane + 16, + 32, + 48 hold together.

    Args:
        values: this lane's fp32 values, a multiple of 4.

    Returns:
        the terms, E4M3 words in the order of `values`; 2^-s, which undoes the scaling. Infinities
        and NaN become NaN.
    """
    largest = values[0].bitcast(fx.Int32) & 0x7FFFFFFF
    for value in values[1:]:
        largest = fx.max(largest, value.bitcast(fx.Int32) & 0x7FFFFFFF)
    exponent = column_max(largest.bitcast(fx.Float32)).bitcast(fx.Int32) >> _MANTISSA_BITS
    # Within what 2^s and 2^-s can hold: zeros and the smallest numbers stay what they are.
    power = fx.max(fx.min(exponent - _BIAS - _TOP_EXPONENT, fx.Int32(126)), fx.Int32(-126))
    up = ((_BIAS - power) << _MANTISSA_BITS).bitcast(fx.Float32)
    down = ((_BIAS + power) << _MANTISSA_BITS).bitcast(fx.Float32)
    words = [[] for _ in range(terms)]
    for i in range(0, len(values), 4):
        rest = [value * up for value in values[i : i + 4]]
        for term in words:
            term.append(fp8_word(rest))
            taken = zip(rest, fp8_values(term[-1]), strict=True)
            rest = [(x - high) * float(1 << STEP) for x, high in taken]
    return [fx.Vector.from_elements(term, fx.Int32) for term in words], down
