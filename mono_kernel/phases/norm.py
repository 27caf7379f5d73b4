"""Phase norm: residual add, Gemma RMSNorm, operands of the fused projection. A task is a row.

Of few rows every workgroup that projects makes the operands for itself (`norm_rows`).
"""

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
    targets,
)
from rocm_msa.device.memory import global_address


@flyc.jit
def norm(ctx, task):
    _norm(ctx, task, False)


@flyc.jit
def norm_rows(ctx):
    """All rows into LDS; the next barrier shows them to all waves."""
    for row in range(fx.Int32(0), ctx.rows, fx.Int32(1)):
        _norm(ctx, fx.Int32(row), True)
    fx.barrier()


def _norm(ctx, row, own: bool) -> None:
    s, spread = ctx.s, Spread(ctx, ctx.s.hidden)
    wide = fx.Int64(row) * (2 * s.hidden)
    hidden, residual = (global_address(p).at(wide) for p in (ctx.a.hidden, ctx.a.residual))
    stream, found = ctx.scratch("stream").at(wide), targets(ctx, "normed", row, s.hidden, own)
    both = [(load_bf16(hidden, at), load_bf16(residual, at)) for at in spread.at]
    x = [rounded([h + r for h, r in zip(*pair, strict=True)]) for pair in both]
    wanted, _ = found[-1]
    for vector, at, live in zip(x, spread.at, spread.live, strict=True):
        store_words_if(live & wanted, stream, at * 2, bf16_words(vector))
    y = normalise(ctx, spread, x, ctx.weights("input_norm"))
    store_operand(ctx, s.attention_format, y, spread.at, spread.live, s.hidden, found)
