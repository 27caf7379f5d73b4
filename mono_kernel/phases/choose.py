"""The experts of each row, and those in use, from the logits: by every workgroup for itself.

LDS `choice`: int32 [16 rows, 8] experts, -1 for none, then fp32 [16, 8] their weights. LDS `list`:
the experts in use, ascending, then at COUNT_AT their number. Both stay for the phases after `up`.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from mono_kernel.plan import LANES, WAVES
from mono_kernel.shapes import MAX_CHOSEN, MAX_EXPERTS, MAX_ROWS
from rocm_msa.device.topk import order_key, top_positions
from rocm_msa.device.wave import WAVE, exp2, lane_value, rcp, uniform

LOG2E = 1.4426950408889634
COUNT_AT = 4 * MAX_EXPERTS
VERDICT_AT = COUNT_AT + 4  # of the last meeting of the grid
_WEIGHTS = 4 * MAX_ROWS * MAX_CHOSEN


def sigmoid(x: fx.Float32) -> fx.Float32:
    return rcp(exp2(x * fx.Float32(-LOG2E)) + 1.0)


@flyc.jit
def choose(ctx):
    """Fill `choice` and `list`; all waves, with barriers inside."""
    if ctx.thread < MAX_ROWS * MAX_CHOSEN:
        ctx.choice.store(fx.Int32(-1), offset=ctx.thread * 4)
        ctx.choice.store(fx.Float32(0.0), offset=ctx.thread * 4 + _WEIGHTS)
    fx.barrier()
    for row in range(ctx.wave, ctx.rows, fx.Int32(WAVES)):
        _choose_row(ctx, fx.Int32(row))
    # Writers: the wave of each row. Readers: all waves.
    fx.barrier()
    _list_experts(ctx)


@flyc.jit
def _choose_row(ctx, row):
    s, lane = ctx.s, ctx.lane
    logits, bias = ctx.scratch("logits").at(row * (4 * s.experts)), ctx.weights("bias")
    keys = []
    for r in fx.range_constexpr(-(-s.experts // WAVE)):
        expert = lane + WAVE * r
        present = expert < s.experts
        at = present.select(expert, fx.Int32(0)) * 4
        score = sigmoid(logits.load(fx.Float32, offset=at))
        keys.append(order_key(score + bias.load(fx.Float32, offset=at), present))
    _, place = top_positions(keys, s.chosen)
    place = fx.max(place, fx.Int32(0))
    score = sigmoid(logits.load(fx.Float32, offset=place * 4))
    total = lane_value(score, 0)
    for i in fx.range_constexpr(1, s.chosen):
        total = total + lane_value(score, i)
    weight = score / total * fx.Float32(s.routed_scale)
    if lane < s.chosen:
        at = (row * MAX_CHOSEN + lane) * 4
        ctx.choice.store(place, offset=at)
        ctx.choice.store(weight, offset=at + _WEIGHTS)
        if ctx.workgroup == 0:  # for whoever inspects a step
            at = (row * s.chosen + lane) * 4
            ctx.scratch("chosen").store(place, offset=at)
            ctx.scratch("chosen_weights").store(weight, offset=at)


@flyc.jit
def _list_experts(ctx):
    expert, s = ctx.thread, ctx.s
    used = fx.Boolean(False)
    for row in fx.range_constexpr(MAX_ROWS):
        for part in fx.range_constexpr(-(-s.chosen // 4)):
            four = ctx.choice.load(fx.Int32, 4, offset=(row * MAX_CHOSEN + 4 * part) * 4)
            for i in fx.range_constexpr(4):
                used = used | (four[i] == expert)
    lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, used.ir_value()))
    # Writer: each wave, its number of experts. Readers: all waves.
    ctx.work.store(fx.Int32(fx.ctpop(lanes)), offset=ctx.wave * 4)
    fx.barrier()
    before, count = fx.Int32(0), fx.Int32(0)
    for w in fx.range_constexpr(WAVES):
        mine = ctx.work.load(fx.Int32, offset=4 * w)
        before = before + (ctx.wave > w).select(mine, fx.Int32(0))
        count = count + mine
    below = lanes & ((fx.Uint64(1) << fx.Uint64(fx.Uint32(ctx.lane))) - fx.Uint64(1))
    at = before + fx.Int32(fx.ctpop(below))
    if used:
        ctx.list.store(expert, offset=at * 4)
    if ctx.thread == 0:
        ctx.list.store(count, offset=COUNT_AT)
    fx.barrier()


def in_use(ctx) -> fx.Int32:
    """Number of experts in use."""
    return uniform(ctx.list.load(fx.Int32, offset=COUNT_AT))


def listed(ctx, number) -> fx.Int32:
    return uniform(ctx.list.load(fx.Int32, offset=number * 4))


def slot_of(ctx, row, expert):
    """(slot, weight, whether) of an expert in this lane's row; slot 0 and weight 0 without it."""
    slot, weight, taken = fx.Int32(0), fx.Float32(0.0), fx.Boolean(False)
    for i in range(ctx.s.chosen):
        at = (row * MAX_CHOSEN + i) * 4
        same = ctx.choice.load(fx.Int32, offset=at) == expert
        slot = same.select(fx.Int32(i), slot)
        weight = same.select(ctx.choice.load(fx.Float32, offset=at + _WEIGHTS), weight)
        taken = taken | same
    return slot, weight, taken


assert MAX_EXPERTS <= LANES
