"""Sums and exchanges within groups of lanes, and the Gemma RMSNorm of a vector spread over one.

A group is 1, 2, 4, 8 or 16 neighbouring lanes that hold one vector.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl

# DPP controls, in order, that take a lane to lane ^ distance within a row of 16.
_EXCHANGE = {1: (0xB1,), 2: (0x4E,), 4: (0x141, 0x1B), 8: (0x128,)}


def exchange(x, distance: int):
    """The value of lane ^ distance (1, 2, 4 or 8); 32 bits. All those lanes must be active."""
    kind, word, bits = x.dtype, fx.Int32.ir_type, x.bitcast(fx.Int32).ir_value()
    for control in _EXCHANGE[distance]:
        # Every lane gets a value: what the register held before does not matter.
        bits = rocdl.update_dpp(word, llvm.mlir_poison(word), bits, control, 0xF, 0xF, True)
    return fx.Int32(bits).bitcast(kind)


def group_sum(x: fx.Float32, lanes: int) -> fx.Float32:
    """Sum over each group of `lanes` lanes, in all of them: a pairwise tree, nearest first."""
    distance = 1
    while distance < lanes:
        x = x + exchange(x, distance)
        distance *= 2
    return x


def rsqrt(x: fx.Float32) -> fx.Float32:
    """1 / sqrt(x) (v_rsq_f32), within 1 ulp."""
    kind = fx.Float32.ir_type
    return fx.Float32(llvm.call_intrinsic(kind, "llvm.amdgcn.rsq.f32", [x.ir_value()], [], []))


def gemma_norm(x: fx.Vector, w: fx.Vector, eps: fx.Float32, lanes: int) -> fx.Vector:
    """x * rsqrt(mean(x^2) + eps) * (1 + w) of a vector whose lane holds `x` and the weights `w`.

    fp32 Vectors of 2^n values; two share an instruction. The products are rounded one by one, in
    this order; only the order of the sum is free.
    """
    count = x.numel
    squares = x * x
    parts = [squares[i] for i in range(count)]
    while len(parts) > 1:
        half = len(parts) // 2
        both = [fx.Vector.from_elements(p, fx.Float32) for p in (parts[:half], parts[half:])]
        total = both[0] + both[1]
        parts = [total[i] for i in range(half)]
    mean = group_sum(parts[0], lanes) * fx.Float32(1.0 / (lanes * count))
    factor = fx.Vector.filled(count, rsqrt(mean + eps), fx.Float32)
    return x * factor * (w + fx.Vector.filled(count, 1.0, fx.Float32))
