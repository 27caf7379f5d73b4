"""Dealing the tasks of a phase to the grid."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.plan import WAVES


@flyc.jit
def deal(ctx, phase, count):
    """The workgroup's tasks of a phase."""
    for task in range(ctx.workgroup, count, ctx.workgroups):
        phase(ctx, fx.Int32(task))


@flyc.jit
def deal_from_the_end(ctx, phase, count):
    """As `deal`, the last workgroup first: beside a phase that `deal` deals."""
    for task in range(ctx.workgroups - 1 - ctx.workgroup, count, ctx.workgroups):
        phase(ctx, fx.Int32(task))


@flyc.jit
def deal_waves(ctx, phase, count):
    """As `deal`, of tasks that a wave does."""
    first = ctx.workgroup * WAVES + ctx.wave
    for task in range(first, count, ctx.workgroups * WAVES):
        phase(fx.Int32(task))


@flyc.jit
def run_if(condition, phase):
    if condition:
        phase()


@flyc.jit
def either(condition, phase, other):
    if condition:
        phase()
    else:
        other()
