"""A wave: 64 lanes in lockstep, in rows of 16. Reductions without LDS, hardware transcendentals.

Matrix operands and results of 16x16 tiles give a lane the column lane % 16, so the four lanes of a
column are lane, lane + 16, + 32, + 48: one in each row.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl

WAVE = 64
ROW = 16
# DPP controls that exchange lanes within a row, and between them reach all 16.
QUAD_SWAP_1, QUAD_SWAP_2 = 0xB1, 0x4E  # quad_perm [1, 0, 3, 2] and [2, 3, 0, 1]
QUAD_MIRROR, HALF_MIRROR, MIRROR = 0x1B, 0x141, 0x140  # of 4, 8, 16 lanes
ROW_SWAP_8 = 0x128  # row_ror:8
# DPP control and row mask: lanes 1, 2, 4, 8 before in a row, then the last lane of the rows before.
TO_LATER_LANES = ((0x111, 15), (0x112, 15), (0x114, 15), (0x118, 15), (0x142, 0xA), (0x143, 0xC))


def lane_id() -> fx.Int32:
    """0..63, for workgroups of one dimension."""
    return fx.thread_idx.x % WAVE


def wave_id() -> fx.Int32:
    """The wave's number in its workgroup, in a scalar register."""
    return uniform(fx.thread_idx.x // WAVE)


def uniform(value):
    """The first active lane's value in a scalar register (v_readfirstlane), 32 bits."""
    return type(value)(rocdl.readfirstlane(value.dtype.ir_type, value.ir_value()))


def lane_value(value, lane):
    """The value of a lane, an int or a scalar, in a scalar register (v_readlane), 32 bits."""
    lane = lane if isinstance(lane, int) else lane.ir_value()
    return type(value)(rocdl.readlane(value.dtype.ir_type, value.ir_value(), lane))


def with_lane(value, lane: fx.Int32, new):
    """`value` with that of one lane, a scalar, replaced by a scalar (v_writelane), 32 bits."""
    kind = value.dtype
    bits = [x.bitcast(fx.Int32).ir_value() for x in (new, lane, value)]
    name = "llvm.amdgcn.writelane.i32"
    return fx.Int32(llvm.call_intrinsic(fx.Int32.ir_type, name, bits, [], [])).bitcast(kind)


class Scalars:
    """Scalars that lie in the lanes of one vector register and are read where they are used.

    For kernels with more arguments than scalar registers: `kept.name` is a v_readlane, which the
    compiler does not move out of loops. 64-bit numbers and pointers take two lanes; a pointer is
    read as an Int64. Other values are given back as they are.
    """

    def __init__(self, values: dict) -> None:
        word, places, at = fx.Int32(0), {}, 0
        for name, value in values.items():
            if isinstance(value, fx.Pointer):
                value = fx.Int64(llvm.ptrtoint(fx.Int64.ir_type, value.llvm_ptr))
            if not hasattr(value, "bitcast"):
                places[name] = value
                continue
            kind, wide = value.dtype, value.dtype.width == 64
            parts = [value] if not wide else [fx.Int32(value), fx.Int32(value >> 32)]
            for i, part in enumerate(parts):
                word = with_lane(word, fx.Int32(at + i), part.bitcast(fx.Int32))
            places[name] = (kind, at, wide)
            at += len(parts)
        assert at <= WAVE, f"{at} words"
        self.__dict__.update(_places=places, _word=word)

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in self._places:
            raise AttributeError(name)
        place = self._places[name]
        if not isinstance(place, tuple):
            return place
        kind, at, wide = place
        low = lane_value(self._word, at)
        if not wide:
            return low.bitcast(kind)
        return (fx.Int64(lane_value(self._word, at + 1)) << 32) | fx.Int64(fx.Uint32(low))


def high_product(a: fx.Uint32, b: fx.Uint32) -> fx.Uint32:
    """The upper 32 bits of a * b (v_mul_hi_u32)."""
    return fx.Uint32((fx.Uint64(fx.Uint32(a)) * fx.Uint64(fx.Uint32(b))) >> 32)


def exp2(x: fx.Float32) -> fx.Float32:
    """2^x (v_exp_f32): within 1 ulp, subnormal results flushed, exp2(-inf) = 0."""
    return _f32("llvm.amdgcn.exp2.f32", x)


def log2(x: fx.Float32) -> fx.Float32:
    """Base-2 logarithm (v_log_f32): within 1 ulp, no subnormal inputs, log2(0) = -inf."""
    return _f32("llvm.amdgcn.log.f32", x)


def rcp(x: fx.Float32) -> fx.Float32:
    """1 / x (v_rcp_f32), within 1 ulp."""
    return _f32("llvm.amdgcn.rcp.f32", x)


def maximum(x: fx.Float32, y: fx.Float32) -> fx.Float32:
    """The larger (v_max_f32, v_max3_f32); a NaN loses."""
    return fx.Float32(llvm.intr_maxnum(x.ir_value(), y.ir_value()))


def magnitude(x: fx.Float32) -> fx.Float32:
    """|x|: an operand's modifier."""
    return fx.Float32(llvm.intr_fabs(x.ir_value()))


def column_max(x: fx.Float32) -> fx.Float32:
    """Maximum of the four lanes of a column, in all four."""
    return _across_rows(x, maximum)


def column_sum(x: fx.Float32) -> fx.Float32:
    """Sum of the four lanes of a column, in all four."""
    return _across_rows(x, lambda a, b: a + b)


def column_reduce(x, combine):
    """Combine the four lanes of a column, in all four; `combine` commutes and associates."""
    return _across_rows(x, combine)


def row_reduce(x, combine):
    """Combine the 16 lanes of a row, in all of them; `combine` commutes and associates."""
    for control in (QUAD_SWAP_1, QUAD_SWAP_2, HALF_MIRROR, MIRROR):
        x = combine(x, dpp(x, control))
    return x


def wave_max(x: fx.Float32) -> fx.Float32:
    """Maximum of the 64 lanes, in all of them."""
    return _across_rows(row_reduce(x, maximum), maximum)


def wave_sum(x: fx.Float32) -> fx.Float32:
    """Sum of the 64 lanes, in all of them; the order of the additions is fixed."""
    return _across_rows(row_reduce(x, lambda a, b: a + b), lambda a, b: a + b)


def wave_any(condition: fx.Boolean) -> fx.Boolean:
    """Whether a condition holds in any active lane, as a scalar."""
    mask = rocdl.ballot(fx.Int64.ir_type, condition.ir_value())
    return fx.Int64(mask) != 0


def wave_or(x: fx.Int32) -> fx.Int32:
    """Bitwise OR of the 64 lanes, in all of them."""
    return _across_rows(row_reduce(x, lambda a, b: a | b), lambda a, b: a | b)


def inclusive_sum(x: fx.Int32) -> fx.Int32:
    """In lane i the sum of lanes 0 .. i: one v_add_u32_dpp a step."""
    for control, rows in TO_LATER_LANES:
        zero, bits = fx.Int32(0).ir_value(), x.ir_value()
        x = x + fx.Int32(rocdl.update_dpp(fx.Int32.ir_type, zero, bits, control, rows, 0xF, False))
    return x


def dpp(x, control: int):
    """The value of the lane that a DPP control names, for 32 bits."""
    kind, bits = x.dtype, x.bitcast(fx.Int32).ir_value()
    moved = rocdl.update_dpp(fx.Int32.ir_type, bits, bits, control, 0xF, 0xF, True)
    return fx.Int32(moved).bitcast(kind)


def swap_rows(x, rows: int):
    """(a, b): in every lane the values of the lower and the upper of two halves, 32 bits.

    The halves are `rows` rows each, 1 or 2, side by side: v_permlane16_swap or v_permlane32_swap of
    x with itself.
    """
    swap = {1: rocdl.permlane16_swap, 2: rocdl.permlane32_swap}[rows]
    kind, bits = x.dtype, x.bitcast(fx.Int32).ir_value()
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    both = swap(pair, bits, bits, False, False)
    word = fx.Int32.ir_type
    a, b = (fx.Int32(llvm.extractvalue(word, both, [i])).bitcast(kind) for i in (0, 1))
    return a, b


def _f32(intrinsic: str, x: fx.Float32) -> fx.Float32:
    return fx.Float32(llvm.call_intrinsic(fx.Float32.ir_type, intrinsic, [x.ir_value()], [], []))


def _across_rows(x, combine):
    for rows in (2, 1):
        x = combine(*swap_rows(x, rows))
    return x
