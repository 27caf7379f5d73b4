"""Partial NeoX RoPE of a vector spread over a group of lanes, neighbouring values in a lane.

first half of the rotary part     a cos - b sin
second half                       b cos + a sin          the rest of the vector stays
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl

_SWIZZLE_ALL, _SWIZZLE_XOR = 0x1F, 10  # ds_swizzle_b32: lanes kept, where the XOR mask lies


def rotate(
    x: fx.Vector, cos: fx.Vector, sin: fx.Vector, part: fx.Int32, half_lanes: int
) -> fx.Vector:
    """Rotate the fp32 values of lane `part` of a group; for its rotary lanes, all of them active.

    cos, sin     of this lane's angles: lane `part` and lane `part ^ half_lanes` have the same
    half_lanes   lanes that hold one half of the rotary part: a power of two, at most 16
    """
    count = x.numel
    pattern = half_lanes << _SWIZZLE_XOR | _SWIZZLE_ALL
    other = [_swizzle(x[i], pattern) for i in range(count)]
    product = fx.Vector.from_elements(other, fx.Float32) * sin
    second = (part & half_lanes) != 0
    sign = second.select(fx.Float32(1.0), fx.Float32(-1.0))
    # The product with 1 or -1 is exact: rounded once, as a subtraction or an addition is.
    return fx.fma(product, fx.Vector.filled(count, sign, fx.Float32), x * cos)


def _swizzle(x: fx.Float32, pattern: int) -> fx.Float32:
    """Exchange over the LDS crossbar: no LDS memory, and the vector ALU stays free."""
    word, bits = fx.Int32.ir_type, x.bitcast(fx.Int32).ir_value()
    moved = rocdl.ds_swizzle(word, bits, fx.Int32(pattern).ir_value())
    return fx.Int32(moved).bitcast(fx.Float32)
