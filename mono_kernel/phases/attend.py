"""Phase attend: the selection of a (row, KV head), and four of its slots, a page a wave.

Every workgroup of the (row, head) finds the same selection: that costs less than a meeting of the
grid. Waves find the best of their share of the candidates, then each the best of all lists.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from mono_kernel.phases import exchange
from mono_kernel.phases.score import row_range
from mono_kernel.plan import LANES, PARTIAL_BYTES, SLOTS_A_TASK, V_BYTES, WAVES
from mono_kernel.shapes import GROUP, HEAD_DIM, MAX_ROWS
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device.memory import global_address
from rocm_msa.device.nvfp4 import copy_table
from rocm_msa.device.topk import ABSENT, order_key, top_candidates
from rocm_msa.device.wave import WAVE, lane_value, uniform
from rocm_msa.ops.flydsl_page import Format, operands, query_pieces
from rocm_msa.ops.flydsl_partial import store_pieces
from rocm_msa.ops.sparse_decode.flydsl_kernel import attend_page

FORM = Format.of(CacheDType.NVFP4)
_KEYS_AT_ONCE = 4  # registers of a lane
_LISTS = WAVES * V_BYTES  # in `work`, beyond the pages


@flyc.jit
def load_main_table(ctx):
    """The main cache's table into LDS; once before the phase's first task."""
    copy_table(global_address(ctx.a.main_table), ctx.table, ctx.thread, LANES)


@flyc.jit
def attend(ctx, task):
    s = ctx.s
    parts = s.topk // SLOTS_A_TASK
    part, item = task % parts, task // parts
    row, head = item % ctx.rows, item // ctx.rows
    request, length, behind = _request_of(ctx, row)
    n, blocks, first, end = row_range(ctx, length, behind, row)
    fx.barrier()  # the task before has read its lists, and the table is there
    chosen = _select(ctx, head, row, blocks, first, end)
    if (part == 0) & (ctx.wave == 0) & (ctx.lane < s.topk):
        place = ctx.scratch("selected").at((head * MAX_ROWS + row) * (4 * s.topk))
        place.store(chosen, offset=ctx.lane * 4)
    mine = ctx.work.at(_LISTS + 8 * s.topk * WAVES + ctx.wave * (4 * s.topk))
    if ctx.lane < s.topk:
        mine.store(chosen, offset=ctx.lane * 4)
    slot = part * SLOTS_A_TASK + ctx.wave
    # Writer and reader: this wave.
    block = uniform(mine.load(fx.Int32, offset=slot * 4))
    x, pieces = _page(ctx, request, row, head, block, n)
    # Writer: this wave. Reader: join, after the grid has met.
    to = fx.Int64((head * MAX_ROWS + row) * s.topk + slot)
    store_pieces(ctx.scratch("part_o").at(to * PARTIAL_BYTES), pieces, ctx.lane)
    if ctx.lane < GROUP:
        ctx.scratch("part_x").at(to * (4 * GROUP)).store(x, offset=ctx.lane * 4)


def _request_of(ctx, row):
    """(request of a row, its keys, the row behind its last), scalars.

    Requests lie in lanes, one round to memory; that of the row is the last that begins by then.
    """
    a = ctx.a
    there = ctx.lane < a.requests
    at = there.select(ctx.lane, fx.Int32(0)) * 4
    length = global_address(a.seq_lens).load(fx.Int32, offset=at)
    begin, behind = (global_address(a.starts).load(fx.Int32, offset=at + i) for i in (0, 4))
    begun = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, (there & (begin <= row)).ir_value()))
    request = fx.Int32(fx.ctpop(begun)) - 1
    return request, lane_value(length, request), lane_value(behind, request)


@flyc.jit
def _select(ctx, head, row, blocks, first, end):
    """In lane i < topk the block of slot i, -1 for none; the contract's order."""
    a, lane, kept = ctx.a, ctx.lane, ctx.s.topk
    at = (fx.Int64(head) * MAX_ROWS + fx.Int64(row)) * fx.Int64(a.max_blocks)
    scores = ctx.scratch("scores").at(at * 4)
    best, ids = fx.Uint32(ABSENT), fx.Int32(-1)
    own = first + ctx.wave * (WAVE * _KEYS_AT_ONCE)
    for begin in range(own, end, fx.Int32(WAVE * _KEYS_AT_ONCE * WAVES)):
        numbers = [fx.Int32(begin) + lane + WAVE * r for r in range(_KEYS_AT_ONCE)]
        keys = _keys(ctx, scores, head, row, numbers, end)
        best, ids = top_candidates([best, *keys], [ids, *numbers], kept)
    lists = ctx.work.at(_LISTS)
    if lane < kept:
        to = (ctx.wave * kept + lane) * 4
        lists.store(best, offset=to)
        lists.store(ids, offset=to + 4 * kept * WAVES)
    # Writer: each wave, its lists. Readers: all waves.
    fx.barrier()
    listed = lane < WAVES * kept
    place = listed.select(lane, fx.Int32(0)) * 4
    key = listed.select(lists.load(fx.Uint32, offset=place), fx.Uint32(ABSENT))
    number = lists.load(fx.Int32, offset=place + 4 * kept * WAVES)
    _, ranked = top_candidates([key], [number], kept)
    # Slots: what is kept, then the ranked ones.
    always = first + blocks - end
    mine = ctx.work.at(_LISTS + 8 * kept * WAVES + ctx.wave * (4 * kept))
    if lane < kept:
        mine.store(ranked, offset=lane * 4)
    place = fx.max(fx.min(lane - always, fx.Int32(kept - 1)), fx.Int32(0))
    after = mine.load(fx.Int32, offset=place * 4)
    before = (lane < first).select(lane, end + lane - first)
    return (lane < always).select(before, after)


def _keys(ctx, scores, head, row, blocks: list, end) -> list:
    """Order keys of a row's blocks, a list of each lane; none from `end` on."""
    here = [block < end for block in blocks]
    safe = [there.select(block, end - 1) for block, there in zip(blocks, here, strict=True)]
    if ctx.s.exchange:
        values = exchange.collect_scores(ctx, head, row, safe, here)
    else:
        values = [scores.load(fx.Float32, offset=fx.Int64(block) * 4) for block in safe]
    return [order_key(value, there) for value, there in zip(values, here, strict=True)]


def _page(ctx, request, row, head, block, n):
    """Partial result of this wave's page (flydsl_partial.py); of none for block -1."""
    a = ctx.a
    known = (block >= 0) & (block < a.max_blocks)
    safe = known.select(block, fx.Int32(0))
    at = (fx.Int64(request) * fx.Int64(a.max_blocks) + fx.Int64(safe)) * 4
    number = global_address(a.block_table).uniform(fx.Int32, offset=at)
    known = known & (number >= 0) & (number < a.main_blocks)
    live = fx.min(n - block * BLOCK_TOKENS, fx.Int32(BLOCK_TOKENS))
    live = known.select(live, fx.Int32(0))
    page = global_address(a.main_pages).at(
        fx.Int64(known.select(number, fx.Int32(0))) * a.main_stride
        + fx.Int64(head * FORM.page.head_bytes)
    )
    terms, factor = _query(ctx, row, head)
    v_lds = ctx.work.at(ctx.wave * V_BYTES)
    return attend_page(FORM, page, 0, live, terms, factor, ctx.table, v_lds, ctx.lane)


def _query(ctx, row, head):
    """Operands of the group's queries, and what their products are scaled by."""
    s = ctx.s
    # Heads beyond the group repeat its last one; join leaves them out.
    number = head * s.group + fx.min(ctx.lane % GROUP, fx.Int32(s.group - 1))
    place = ctx.scratch("q").at(fx.Int64(row * s.q_heads + number) * (2 * HEAD_DIM))
    pieces, scale = query_pieces("bf16", FORM, place, ctx.lane)
    each = len(pieces) // FORM.terms
    terms = [operands(FORM, pieces[i * each : (i + 1) * each]) for i in range(FORM.terms)]
    return terms, scale * ctx.a.score_factor
