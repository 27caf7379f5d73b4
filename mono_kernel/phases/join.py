"""Phase join: the slots of a row as the op sparse_decode joins them, and the operand of the output
projection. A task is a row. Of each KV head a thread has eight dims of one query head.

Of few rows every workgroup of the output projection joins for itself (`join_rows`).
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.attend import FORM
from mono_kernel.phases.rows import rounded, store_operand, targets
from mono_kernel.plan import PARTIAL_BYTES, WAVES
from mono_kernel.shapes import GROUP, HEAD_DIM, MAX_ROWS
from rocm_msa.device.wave import rcp
from rocm_msa.ops.flydsl_partial import NONE, load_eight, merge, merge_place, merging_waves

_DIMS, _TILE_DIMS = 8, 16
assert merging_waves(FORM) == WAVES


@flyc.jit
def join(ctx, task):
    _join(ctx, task, False)


@flyc.jit
def join_rows(ctx):
    """All rows into LDS; the next barrier shows them to all waves."""
    for row in range(fx.Int32(0), ctx.rows, fx.Int32(1)):
        _join(ctx, fx.Int32(row), True)
    fx.barrier()


def _join(ctx, row, own: bool) -> None:
    s, at = ctx.s, merge_place(ctx.wave, ctx.lane)
    mine = at.head < s.group
    values, places = [], []
    for head in fx.range_constexpr(s.kv_heads):
        top, total, sums = _merge_slots(ctx, row, head, at)
        factor = (top > NONE).select(ctx.a.v_factor * rcp(total), fx.Float32(0.0))
        values.append(rounded([x * factor for x in sums]))
        number = mine.select(at.head, fx.Int32(0)) + head * s.group
        places.append(number * HEAD_DIM + at.tile * _TILE_DIMS + at.half * _DIMS)
    found = targets(ctx, "attended", row, s.attended, own)
    store_operand(
        ctx, s.attention_format, values, places, [mine] * s.kv_heads, s.attended, found
    )  # fmt: skip


def _merge_slots(ctx, row, head, at):
    """(largest x, sum of the weights, eight weighted sums) of a row and KV head."""
    s = ctx.s
    first = (head * MAX_ROWS + row) * s.topk
    weights = ctx.scratch("part_x").at(first * (4 * GROUP) + at.head * 4)
    parts = ctx.scratch("part_o").at(fx.Int64(first) * PARTIAL_BYTES)
    x = [weights.load(fx.Float32, offset=slot * 4 * GROUP) for slot in range(s.topk)]
    return merge(x, lambda slot: load_eight(FORM, parts, at, slot * PARTIAL_BYTES))
