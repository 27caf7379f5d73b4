"""Phase project: the fused QKV and index projection. A task is 16 outputs of all rows."""

from __future__ import annotations

import flydsl.expr as fx

from mono_kernel.phases.ahead import arrived, ask_tile
from mono_kernel.phases.deal import deal, either
from mono_kernel.phases.norm import norm_rows
from mono_kernel.phases.products import Linear, column, gather, tile_at, wave_sums, zeros
from mono_kernel.phases.rows import bf16_words, store_words_if
from mono_kernel.shapes import TILE


def linear_of(ctx, name: str, inputs: int) -> Linear:
    """A linear of the attention."""
    return Linear.of(ctx, name, ctx.s.attention_format, inputs)


def tile_of(ctx, name: str, source: str, inputs: int, task, own: bool):
    """A tile of a linear of the attention, times its row's factor; fp32 x 4 in wave 0.

    own: with the rows in this workgroup's LDS.
    """
    row, _, _ = column(ctx)
    place, factor_at = ctx.operand(source, row, inputs, own)
    linear = tile_at(linear_of(ctx, name, inputs), task)
    (total,) = gather(ctx, wave_sums(ctx, [linear], place, inputs, zeros(1)))
    factor = factor_at.load(fx.Float32)
    return [total[i] * factor for i in range(4)]


def project(ctx) -> None:
    count = fx.Int32(ctx.s.features // TILE)

    def own_rows():
        asked = ask_tile(ctx, linear_of(ctx, "qkv", ctx.s.hidden), ctx.workgroup, count)
        norm_rows(ctx)
        arrived(asked)
        deal(ctx, lambda ctx, task: _project(ctx, task, True), count)

    either(
        ctx.in_place["norm"], own_rows,
        lambda: deal(ctx, lambda ctx, task: _project(ctx, task, False), count),
    )  # fmt: skip


def _project(ctx, task, own: bool) -> None:
    values = tile_of(ctx, "qkv", "normed", ctx.s.hidden, task, own)
    row, live, first = column(ctx)
    at = fx.Int64(row) * (2 * ctx.s.features) + fx.Int64(task * (2 * TILE) + first * 2)
    store_words_if(live & (ctx.wave == 0), ctx.scratch("projected"), at, bf16_words(values))
