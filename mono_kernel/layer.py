"""The layer as one kernel: the schedule. README.md is the table of its phases."""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel import plan
from mono_kernel.faults import meeting_site
from mono_kernel.layer_gfx950 import Build
from mono_kernel.phases.ahead import BEHIND
from mono_kernel.phases.attend import attend, load_main_table
from mono_kernel.phases.choose import VERDICT_AT
from mono_kernel.phases.context import Context
from mono_kernel.phases.deal import deal, deal_from_the_end, run_if
from mono_kernel.phases.experts import down, up
from mono_kernel.phases.insert import insert
from mono_kernel.phases.join import join
from mono_kernel.phases.norm import norm
from mono_kernel.phases.output import output
from mono_kernel.phases.project import project
from mono_kernel.phases.reduce import TIMES
from mono_kernel.phases.route import route
from mono_kernel.phases.score import score
from mono_kernel.shapes import TILE
from rocm_msa import flydsl_compile
from rocm_msa.device import mailbox
from rocm_msa.device.memory import global_address
from rocm_msa.device.wave import Scalars, uniform
from rocm_msa.flydsl_compile import Compiled

# Bound of a wait for this rank's own workgroups, in units of `patience`: more than that of a wait
# for peers, so that who misses a peer reports it.
_MEET_TIMES = 2 * (TIMES + mailbox.MORE_TIMES)


@flyc.jit
def meet(ctx, number, well, wanted):
    """The grid meets behind phase `number`: what any workgroup stored before may be loaded after.

    Meanwhile the waves that do not wait ask for weights (ahead.py). Where it is not `wanted`,
    nothing happens.

    Returns:
        whether all came, the same in all waves: a workgroup goes on or gives up as a whole.
    """
    end, verdict = ctx.a, ctx.list.at(VERDICT_AT)
    ask = BEHIND.get(plan.PHASE_NAMES[number], lambda ctx: None)
    if well & wanted:
        flags = global_address(end.state).at(
            end.places.flags + number * (plan.MAX_WORKGROUPS * mailbox.WORD)
        )
        mailbox.raise_flag(end, flags.at(fx.Int64(ctx.workgroup) * mailbox.WORD))
        if ctx.wave == 0:
            there = mailbox.await_flags(
                end, flags, fx.Int32(0), ctx.workgroups - 1, meeting_site(number), _MEET_TIMES
            )
            verdict.store(there.select(fx.Int32(1), fx.Int32(0)))
        else:
            ask(ctx)
        # Writer: wave 0, whose fence emptied this unit's cache for all. Readers: all waves.
        fx.barrier()
        well = uniform(verdict.load(fx.Int32)) != 0
    return well


def _context(build: Build, a: SimpleNamespace) -> Context:
    """The arguments, and this rank's end of the launch's hand-offs."""
    a.ranks, a.places = build.tp, SimpleNamespace(**{r.name: r.offset for r in plan.state_layout()})
    a.own = mailbox.own_mailbox(a.addresses, a.rank)
    state = Scalars({"state": a.state}).state
    a.tag = mailbox.tag_of(mailbox.generation(state, a.places.generation))
    return Context(build, Scalars(vars(a)))


def _run(build: Build, a: SimpleNamespace) -> None:
    ctx = _context(build, a)
    groups = -(-build.heads // plan.WAVES)
    tokens = (ctx.rows + (plan.TOKENS_A_WAVE - 1)) // plan.TOKENS_A_WAVE
    slots = ctx.rows * (build.kv_heads * (build.topk // plan.SLOTS_A_TASK))
    tiles = fx.Int32(build.hidden // TILE)
    phases = {
        "norm": lambda: deal(ctx, norm, ctx.rows),
        "project": lambda: project(ctx),
        "insert": lambda: deal_from_the_end(ctx, insert, tokens * groups),
        "score": lambda: score(ctx),
        "attend": lambda: (load_main_table(ctx), deal(ctx, attend, slots)),
        "join": lambda: deal(ctx, join, ctx.rows),
        "output": lambda: output(ctx),
        "route": lambda: deal(ctx, route, ctx.rows + build.experts),
        "up": lambda: up(ctx),
        "down": lambda: deal(ctx, down, tiles),
    }
    well = fx.Boolean(True)
    always = fx.Boolean(True)
    in_place = {name: ctx.in_place.get(name, ~always) for name in plan.PHASE_NAMES}
    for number, name in enumerate(plan.PHASE_NAMES[: build.phases]):
        if number:
            well = meet(ctx, number - 1, well, ~in_place[plan.PHASE_NAMES[number - 1]])
        # What the next phase does for itself is no phase of its own.
        run = well & ~in_place[name] if name in ("norm", "join") else well
        run_if(run, phases[name])
    mailbox.arrive(ctx.a, ctx.workgroups)


def compile_kernel(build: Build) -> Compiled:
    @flyc.kernel(name=build.symbol)
    def kernel(
        hidden: fx.Pointer,  # bf16 [rows, hidden]
        residual: fx.Pointer,
        hidden_out: fx.Pointer,
        residual_out: fx.Pointer,
        weights: fx.Pointer,  # weights.weight_layout
        scratch: fx.Pointer,  # plan.scratch_layout
        main_pages: fx.Pointer,
        main_stride: fx.Int64,  # bytes
        main_blocks: fx.Int32,
        k_scale: fx.Float32,
        v_scale: fx.Float32,
        score_factor: fx.Float32,  # softmax scale, K's factor, log2(e)
        v_factor: fx.Float32,
        main_table: fx.Pointer,  # the NVFP4 table of the main cache
        index_pages: fx.Pointer,
        index_stride: fx.Int64,
        index_blocks: fx.Int32,
        index_scale: fx.Float32,
        index_factor: fx.Float32,
        index_table: fx.Pointer,
        expert_table: fx.Pointer,  # of NVFP4 weights
        block_table: fx.Pointer,  # int32 [requests, max_blocks]
        max_blocks: fx.Int32,
        seq_lens: fx.Pointer,  # int32 [requests]
        starts: fx.Pointer,  # int32 [requests + 1], first rows
        positions: fx.Pointer,  # int64 [rows]
        main_slots: fx.Pointer,
        index_slots: fx.Pointer,
        requests: fx.Int32,
        rows: fx.Int32,
        most_rows: fx.Int32,  # of a request
        cos_sin: fx.Pointer,  # fp32 [max_position, rotary_dim]
        max_position: fx.Int32,
        addresses: fx.Pointer,  # int64 [ranks + 1]
        state: fx.Pointer,  # plan.state_layout
        rank: fx.Int32,
        patience: fx.Int32,  # milliseconds
        workgroups: fx.Int32,
        most_blocks: fx.Int32,  # that the mailboxes were laid out for
    ):
        a = SimpleNamespace(
            hidden=hidden, residual=residual, hidden_out=hidden_out, residual_out=residual_out,
            weights=weights, scratch=scratch, main_pages=main_pages, main_stride=main_stride,
            main_blocks=main_blocks, k_scale=k_scale, v_scale=v_scale, score_factor=score_factor,
            v_factor=v_factor, main_table=main_table, index_pages=index_pages,
            index_stride=index_stride, index_blocks=index_blocks, index_scale=index_scale,
            index_factor=index_factor, index_table=index_table, expert_table=expert_table,
            block_table=block_table, max_blocks=max_blocks, seq_lens=seq_lens, starts=starts,
            positions=positions, main_slots=main_slots, index_slots=index_slots, requests=requests,
            rows=rows, most_rows=most_rows, cos_sin=cos_sin, max_position=max_position,
            addresses=addresses, state=state, rank=rank, patience=patience, workgroups=workgroups,
            most_blocks=most_blocks,
        )  # fmt: skip
        _run(build, a)

    return flydsl_compile.compile_kernel(kernel, plan.LANES, hints={"waves_per_eu": 1})
