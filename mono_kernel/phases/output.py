"""Phase output: the output projection, summed over ranks, on the residual stream.

A task is 16 outputs of all rows.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.deal import deal, either
from mono_kernel.phases.join import join_rows
from mono_kernel.phases.products import column
from mono_kernel.phases.project import tile_of
from mono_kernel.phases.reduce import across_ranks
from mono_kernel.phases.rows import bf16_words, rounded, store_words_if
from mono_kernel.shapes import TILE
from rocm_msa.device.convert import bf16_values
from rocm_msa.device.memory import global_address


def output(ctx) -> None:
    count = fx.Int32(ctx.s.hidden // TILE)

    def own_rows():
        join_rows(ctx)
        deal(ctx, lambda ctx, task: _output(ctx, task, True), count)

    either(
        ctx.in_place["join"], own_rows,
        lambda: deal(ctx, lambda ctx, task: _output(ctx, task, False), count),
    )  # fmt: skip


@flyc.jit
def _output(ctx, task, own: bool):
    values = tile_of(ctx, "output", "attended", ctx.s.attended, task, own)
    if ctx.wave == 0:
        total = rounded(across_ranks(ctx, "output", task, values))
        row, live, first = column(ctx)
        at = fx.Int64(row) * (2 * ctx.s.hidden) + fx.Int64(task * (2 * TILE) + first * 2)
        words = ctx.scratch("stream").load(fx.Uint32, 2, offset=at, align=8)
        stream = [x for i in (0, 1) for x in bf16_values(words[i])]
        out = bf16_words([x + t for x, t in zip(stream, total, strict=True)])
        store_words_if(live, global_address(ctx.a.residual_out), at, out)
