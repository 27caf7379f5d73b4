"""Phase norm: residual add, Gemma RMSNorm, operands of the fused projection. A task is a row."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.rows import (
    Spread,
    bf16_words,
    load_bf16,
    normalise,
    rounded,
    store_operand,
    store_words_if,
)
from rocm_msa.device.memory import global_address


@flyc.jit
def norm(ctx, task):
    s, spread = ctx.s, Spread(ctx, ctx.s.hidden)
    wide = fx.Int64(task) * (2 * s.hidden)
    hidden, residual = (global_address(p).at(wide) for p in (ctx.a.hidden, ctx.a.residual))
    stream = ctx.scratch("stream").at(wide)
    both = [(load_bf16(hidden, at), load_bf16(residual, at)) for at in spread.at]
    x = [rounded([h + r for h, r in zip(*pair, strict=True)]) for pair in both]
    for vector, at, live in zip(x, spread.at, spread.live, strict=True):
        store_words_if(live, stream, at * 2, bf16_words(vector))
    y = normalise(ctx, spread, x, ctx.weights("input_norm"))
    store_operand(
        ctx, s.attention_format, y, spread.at, spread.live,
        ctx.scratch("normed").at(wide), s.hidden, ctx.scratch("normed_factor").at(task * 4),
    )  # fmt: skip
