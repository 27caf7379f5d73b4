"""Phase project: the fused QKV and index projection. A task is 16 outputs of all rows."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.products import Linear, column, gather, tile_at, wave_sums, zeros
from mono_kernel.phases.rows import bf16_words, store_words_if
from mono_kernel.shapes import TILE


def tile_of(ctx, name: str, source: str, inputs: int, task):
    """A tile of a linear of the attention, times its row's factor; fp32 x 4 in wave 0."""
    row, _, _ = column(ctx)
    linear = tile_at(Linear.of(ctx, name, ctx.s.attention_format, inputs), task)
    place = ctx.scratch(source).at(fx.Int64(row) * (2 * inputs))
    (total,) = gather(ctx, wave_sums(ctx, [linear], place, inputs, zeros(1)))
    factor = ctx.scratch(f"{source}_factor").load(fx.Float32, offset=row * 4)
    return [total[i] * factor for i in range(4)]


@flyc.jit
def project(ctx, task):
    values = tile_of(ctx, "qkv", "normed", ctx.s.hidden, task)
    row, live, first = column(ctx)
    at = fx.Int64(row) * (2 * ctx.s.features) + fx.Int64(task * (2 * TILE) + first * 2)
    store_words_if(live & (ctx.wave == 0), ctx.scratch("projected"), at, bf16_words(values))
