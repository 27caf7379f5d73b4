"""Weights asked for before they are needed: a word of each line, which then lies in the XCD's L2.

A workgroup asks for what it will take itself, while it would only wait: behind a meeting's flag,
or beside the rows' norm. Nothing is computed with the words; every product loads its operands as if
nobody had asked.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

from mono_kernel.phases.choose import in_use, listed
from mono_kernel.phases.products import Linear, tile_at
from mono_kernel.plan import AHEAD_EXPERTS, LANES
from mono_kernel.shapes import MAX_ROWS, TILE
from rocm_msa.device.memory import Bytes, loads_are_issued

LINE = 128


def ask(ctx, place: Bytes, nbytes: int, waves: int = LANES // 64) -> list:
    """Loads of a word of each of the lines, shared out among the last `waves` waves."""
    lanes, lines = 64 * waves, -(-nbytes // LINE)
    first, found = ctx.thread - (LANES - lanes), []
    for begin in range(0, lines, lanes):
        line = fx.min(first + begin, fx.Int32(lines - 1))
        found.append(place.load(fx.Uint32, offset=line * LINE))
    loads_are_issued()
    return found


def arrived(words: list) -> None:
    """Wait for what was asked for."""
    for word in words:
        llvm.inline_asm(None, [word.ir_value()], "; arrived $0", "v", has_side_effects=True)


def ask_tile(ctx, linear: Linear, number, count, waves: int = LANES // 64, tiles: int = 1) -> list:
    """Of tile `number` of a linear, or its last one; `tiles` in a row."""
    one = tile_at(linear, fx.min(number, count - 1))
    found = ask(ctx, one.data, tiles * linear.tile_bytes, waves)
    if linear.scales is not None:
        found += ask(ctx, one.scales, tiles * linear.tile_scale_bytes, waves)
    return found


# Behind a meeting's flag: waves 1, 2, 3, while wave 0 waits for the grid.

_WAITING = 3


def ask_output(ctx) -> None:
    """Of the output projection, this workgroup's first two tasks."""
    s, count = ctx.s, fx.Int32(ctx.s.hidden // TILE)
    linear, asked = Linear.of(ctx, "output", s.attention_format, s.attended), []
    for i in (0, 1):
        number = ctx.workgroup + ctx.workgroups * i
        asked += ask_tile(ctx, linear, number, count, _WAITING)
    arrived(asked)


def ask_router(ctx) -> None:
    """Of the router, the expert of this workgroup's first task beyond the rows."""
    s = ctx.s
    expert = (ctx.workgroup + ctx.workgroups * MAX_ROWS - ctx.rows) % ctx.workgroups
    expert = fx.min(expert, fx.Int32(s.experts - 1))
    router = ctx.weights("router").at(fx.Int64(expert) * (4 * s.hidden))
    arrived(ask(ctx, router, 4 * s.hidden, _WAITING))


def ask_shared_up(ctx) -> None:
    """Of the shared expert, this workgroup's first task."""
    s = ctx.s
    if s.shared:
        linear, count = Linear.of(ctx, "shared_up", s.shared_format, s.hidden), s.shared // TILE
        number = fx.min(ctx.workgroup, fx.Int32(count - 1)) * 2
        arrived(ask_tile(ctx, linear, number, fx.Int32(2 * count), _WAITING, tiles=2))


@flyc.jit
def ask_down(ctx):
    """Of each expert in use, and of the shared one, this workgroup's first two tasks."""
    s, tiles = ctx.s, ctx.s.hidden // TILE
    linear = Linear.of(ctx, "down", s.routed_format, s.intermediate)
    for number in range(fx.Int32(0), fx.min(in_use(ctx), fx.Int32(AHEAD_EXPERTS)), fx.Int32(1)):
        first = tile_at(linear, listed(ctx, fx.Int32(number)) * tiles)
        arrived(_two(ctx, first))
    if fx.const_expr(s.shared > 0):
        arrived(_two(ctx, Linear.of(ctx, "shared_down", s.shared_format, s.shared)))


def _two(ctx, linear: Linear) -> list:
    count, found = fx.Int32(ctx.s.hidden // TILE), []
    for i in (0, 1):
        number = ctx.workgroup + ctx.workgroups * i
        found += ask_tile(ctx, linear, number, count, _WAITING)
    return found


BEHIND = {"score": ask_output, "attend": ask_router, "route": ask_shared_up, "up": ask_down}
"""phase -> what is asked for behind its meeting."""
