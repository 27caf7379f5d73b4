"""Phases up and down: the routed experts in use and the shared one.

up      a task is a tile of 16 activations of one expert: gate and up of all rows, SwiGLU, stored
        for the rows that go through the expert
down    a task is 16 outputs of all rows: the experts in use one after another, each row's share
        by its weight; the sum over ranks
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.phases.choose import choose, in_use, listed, sigmoid, slot_of
from mono_kernel.phases.products import Linear, column, gather, tile_at, wave_sums, zeros
from mono_kernel.phases.reduce import across_ranks
from mono_kernel.phases.rows import bf16_words, rounded, store_words_if, terms
from mono_kernel.plan import LANES
from mono_kernel.shapes import TILE
from mono_kernel.weights import GLOBALS, LUT_FOLD
from rocm_msa.device.memory import global_address
from rocm_msa.device.nvfp4 import copy_table

_GATE, _UP, _DOWN = range(GLOBALS)


@flyc.jit
def up(ctx):
    s = ctx.s
    if fx.const_expr("nvfp4" in (s.routed_format, s.shared_format)):
        # Stays for `down`.
        copy_table(global_address(ctx.a.expert_table), ctx.table, ctx.thread, LANES)
    choose(ctx)
    row, live, _ = column(ctx)
    tiles = s.intermediate // TILE
    routed = in_use(ctx) * tiles
    if fx.const_expr(s.shared > 0):
        shared = Linear.of(ctx, "shared_up", s.shared_format, s.hidden)
        for tile in range(ctx.workgroup, fx.Int32(s.shared // TILE), ctx.workgroups):
            tile = fx.Int32(tile)
            factor = factors(ctx, "shared_factors", fx.Int32(0))
            _activate(ctx, tile_at(shared, tile * 2), factor, tile, fx.Int32(s.chosen), live)
    linear = Linear.of(ctx, "up", s.routed_format, s.hidden)
    # The task numbers go on after those of the shared expert.
    first = (ctx.workgroup - s.shared // TILE) % ctx.workgroups
    first = (first < 0).select(first + ctx.workgroups, first)
    for task in range(first, routed, ctx.workgroups):
        task = fx.Int32(task)
        expert, tile = listed(ctx, task // tiles), task % tiles
        slot, _, taken = slot_of(ctx, row, expert)
        pair = tile_at(linear, (expert * tiles + tile) * 2)
        _activate(ctx, pair, factors(ctx, "factors", expert), tile, slot, live & taken)


def factors(ctx, name: str, expert) -> list:
    """What products with an expert's gate, up and down are multiplied by."""
    kind = ctx.s.routed_format if name == "factors" else ctx.s.shared_format
    if kind != "nvfp4":
        return [fx.Float32(1.0)] * GLOBALS
    place = ctx.weights(name).at(expert * (4 * GLOBALS))
    unfold = fx.Float32(2.0**-LUT_FOLD)
    return [place.load(fx.Float32, offset=4 * i) * unfold for i in range(GLOBALS)]


@flyc.jit
def _activate(ctx, linear, factor, tile, slot, stores):
    """One tile of an expert; `linear` begins with its gate tile, its up tile follows."""
    s = ctx.s
    row, _, first = column(ctx)
    place = ctx.scratch("post").at(fx.Int64(row) * (2 * s.hidden))
    pair = [linear, tile_at(linear, fx.Int32(1))]
    gate, more = gather(ctx, wave_sums(ctx, pair, place, s.hidden, zeros(2)))
    scale = ctx.scratch("post_factor").load(fx.Float32, offset=row * 4)
    limit = fx.Float32(s.limit)
    values = []
    for i in fx.range_constexpr(4):
        g = fx.minnumf(gate[i] * (scale * factor[_GATE]), limit)
        u = fx.maxnumf(fx.minnumf(more[i] * (scale * factor[_UP]), limit), fx.Float32(-s.limit))
        values.append(g * sigmoid(g * fx.Float32(s.alpha)) * (u + s.beta))
    up_scale = fx.Float32(2.0**s.active_exponent)
    high, low = terms([x * up_scale for x in rounded(values)])
    at = fx.Int64(row * s.slots + slot) * (2 * s.widest) + fx.Int64(tile * TILE + first)
    active = ctx.scratch("active")
    for plane, words in ((0, high), (s.widest, low)):
        store_words_if(stores & (ctx.wave == 0), active.at(plane), at, words)


@flyc.jit
def down(ctx, task):
    s = ctx.s
    row, live, first = column(ctx)
    tiles = s.hidden // TILE
    active = ctx.scratch("active").at(fx.Int64(row) * (2 * s.slots * s.widest))
    linear = Linear.of(ctx, "down", s.routed_format, s.intermediate)
    total = zeros(1)[0]
    for number in range(fx.Int32(0), in_use(ctx), fx.Int32(1)):
        expert = listed(ctx, fx.Int32(number))
        slot, weight, taken = slot_of(ctx, row, expert)
        # A row without the expert multiplies its slot 0, and drops the result.
        place = active.at(fx.Int64(slot) * (2 * s.widest))
        (part,) = wave_sums(
            ctx, [tile_at(linear, expert * tiles + task)], place, s.widest, zeros(1)
        )
        weight = weight * factors(ctx, "factors", expert)[_DOWN]
        total = total + _if_taken(taken, part, weight)
    if fx.const_expr(s.shared > 0):
        shared = tile_at(Linear.of(ctx, "shared_down", s.shared_format, s.shared), task)
        place = active.at(2 * s.chosen * s.widest)
        (part,) = wave_sums(ctx, [shared], place, s.widest, zeros(1))
        factor = factors(ctx, "shared_factors", fx.Int32(0))[_DOWN]
        total = total + part * fx.Vector.filled(4, factor, fx.Float32)
    (total,) = gather(ctx, [total])
    undo = fx.Float32(2.0**-s.active_exponent)
    if ctx.wave == 0:
        values = across_ranks(ctx, "down", task, [total[i] * undo for i in range(4)])
        at = fx.Int64(row) * (2 * s.hidden) + fx.Int64(task * (2 * TILE) + first * 2)
        store_words_if(live, global_address(ctx.a.hidden_out), at, bf16_words(values))


def _if_taken(taken, part, weight) -> fx.Vector:
    zero = fx.Float32(0.0)
    return fx.Vector.from_elements(
        [taken.select(part[i] * weight, zero) for i in range(4)], fx.Float32
    )
