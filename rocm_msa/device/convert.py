"""Conversions between fp32, E4M3 and bf16, in packed words. Rounding is to nearest even."""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.rocdl.inline_asm import cvt_pk_bf16_f32


def fp8_word(values) -> fx.Int32:
    """Four fp32 -> four E4M3 bytes, the first lowest. |x| <= 448 is the caller's business."""
    # Both halves are written; what they are written over is a value that ends here, if it does.
    word = values[0].bitcast(fx.Int32).ir_value()
    for high in (False, True):
        a, b = (x.ir_value() for x in values[2 * high : 2 * high + 2])
        word = rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, a, b, word, high)
    return fx.Int32(word)


def fp8_values(word: fx.Int32) -> list[fx.Float32]:
    """Four E4M3 bytes -> fp32."""
    return [both[i] for both in _fp8_pairs(word) for i in (0, 1)]


def _fp8_pairs(word: fx.Int32) -> list[fx.Vector]:
    pair = fx.Vector.make_type(2, fx.Float32)
    return [
        fx.Vector(rocdl.cvt_pk_f32_fp8(pair, word.ir_value(), high), (2,), fx.Float32)
        for high in (False, True)
    ]


def bf16_word(a: fx.Float32, b: fx.Float32) -> fx.Int32:
    """Two fp32 -> two bf16 in a word, the first low (v_cvt_pk_bf16_f32)."""
    return fx.Int32(cvt_pk_bf16_f32(a, b))


def bf16_values(word: fx.Uint32) -> list[fx.Float32]:
    """Two bf16 -> fp32: exact."""
    return [(word << 16).bitcast(fx.Float32), (word & fx.Uint32(0xFFFF0000)).bitcast(fx.Float32)]


def f16_values(word: fx.Uint32) -> list[fx.Float32]:
    """Two fp16 -> fp32: exact."""
    both = fx.Vector.from_elements([word], fx.Uint32).bitcast(fx.Float16)
    return [both[i].to(fx.Float32) for i in (0, 1)]


def f16_word(a: fx.Float32, b: fx.Float32) -> fx.Int32:
    """Two fp32 -> two fp16 in a word, the first low (v_cvt_pk_f16_f32)."""
    both = fx.Vector.from_elements([a, b], fx.Float32).to(fx.Float16)
    return both.bitcast(fx.Int32)[0]


def fp8_two_terms(groups: list[list]) -> list[list]:
    """x = hi + lo, both E4M3, of groups of four fp32: [words of hi, words of lo].

    hi is x rounded, lo what is left, rounded: |x - hi - lo| <= 2^-8 |x| where lo is normal.
    |x| <= 448.
    """
    high = [fp8_word(group) for group in groups]
    low = []
    for group, word in zip(groups, high, strict=True):
        rest = []
        for i, rounded in enumerate(_fp8_pairs(word)):
            # As pairs, two subtractions are one instruction.
            both = fx.Vector.from_elements(group[2 * i : 2 * i + 2], fx.Float32) - rounded
            rest += [both[0], both[1]]
        low.append(fp8_word(rest))
    return [high, low]
