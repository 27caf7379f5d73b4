"""Phase route: the post-attention norm and the router's logits, fp32.

A task is a row, whose operand it writes, or an expert, whose logits of all rows it computes. Both
norm the rows themselves: a meeting of the grid between them would cost more.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.rows import (
    VECTOR,
    Spread,
    block_sum,
    load_bf16,
    normalise,
    store_if,
    store_operand,
    targets,
)
from rocm_msa.device.memory import global_address


@flyc.jit
def route(ctx, task):
    if task < ctx.rows:
        _operand(ctx, task)
    else:
        _logits(ctx, task - ctx.rows)


def _normed(ctx, spread: Spread, row) -> list[list]:
    """bf16 values of a row's norm."""
    place = global_address(ctx.a.residual_out).at(fx.Int64(row) * (2 * ctx.s.hidden))
    x = [load_bf16(place, at) for at in spread.at]
    return normalise(ctx, spread, x, ctx.weights("post_norm"))


@flyc.jit
def _operand(ctx, row):
    s, spread = ctx.s, Spread(ctx, ctx.s.hidden)
    values = _normed(ctx, spread, row)
    found = targets(ctx, "post", row, s.hidden, False)
    store_operand(ctx, "terms", values, spread.at, spread.live, s.hidden, found)


@flyc.jit
def _logits(ctx, expert):
    s, spread = ctx.s, Spread(ctx, ctx.s.hidden)
    router = ctx.weights("router").at(fx.Int64(expert) * (4 * s.hidden))
    weights = []
    for at, live in zip(spread.at, spread.live, strict=True):
        both = [router.load(fx.Float32, 4, offset=at * 4 + 16 * i) for i in (0, 1)]
        vector = [both[i // 4][i % 4] for i in range(VECTOR)]
        weights.append([live.select(w, fx.Float32(0.0)) for w in vector])
    for row in range(fx.Int32(0), ctx.rows, fx.Int32(1)):
        row = fx.Int32(row)
        dot = fx.Float32(0.0)
        for vector, ws in zip(_normed(ctx, spread, row), weights, strict=True):
            for x, w in zip(vector, ws, strict=True):
                dot = fx.fma(x, w, dot)
        total = block_sum(ctx, dot)
        at = fx.Int64(row * s.experts + expert) * 4
        store_if(ctx.thread == 0, ctx.scratch("logits"), at, total)
