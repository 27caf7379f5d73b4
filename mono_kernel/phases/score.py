"""Phase score: index scores of every candidate, as the op index_score_decode finds them.

A wave takes blocks of a request for all its rows and index heads; requests start at different
workgroups (plan.score_blocks). Candidates of the request's last row are scored: they hold those of
all its rows, each of which is full where it is one, so that no score needs a mask.

Every workgroup makes the index queries for itself, from the projection: it need not meet those that
insert. With the exchange a rank scores its part of the blocks for the index heads of all ranks.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from mono_kernel.phases import exchange
from mono_kernel.phases.insert import write_head
from mono_kernel.plan import LANES, TOKENS_A_WAVE, WAVES
from mono_kernel.shapes import HEAD_DIM, MAX_ROWS
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device.memory import Bytes, global_address
from rocm_msa.device.nvfp4 import copy_table
from rocm_msa.ops.flydsl_index_score import Keys, columns, score_block

_KIND = SimpleNamespace(kind="nvfp4", query="bf16")


def span(ctx, request):
    """(keys of a request, its first row, the row behind its last), scalars."""
    a, at = ctx.a, fx.Int64(request) * 4
    length = global_address(a.seq_lens).uniform(fx.Int32, offset=at)
    starts = global_address(a.starts)
    return length, starts.uniform(fx.Int32, offset=at), starts.uniform(fx.Int32, offset=at + 4)


def row_range(ctx, length, behind, row):
    """(keys that a row sees, its causal blocks, kept first, end of candidates).

    length: keys of its request, whose last row is `behind` - 1; a row from there on is padding.
    The row's candidates are the blocks [first, end); 0..first - 1 and end..blocks - 1 are kept.
    """
    s, a = ctx.s, ctx.a
    n = (row < behind).select(fx.max(length - (behind - 1 - row), fx.Int32(0)), fx.Int32(0))
    blocks = fx.min((n + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS, a.max_blocks)
    first = fx.min(fx.Int32(s.init_blocks), blocks)
    return n, blocks, first, fx.max(blocks - s.local_blocks, first)


@flyc.jit
def score(ctx):
    s, a = ctx.s, ctx.a
    copy_table(global_address(a.index_table), ctx.table, ctx.thread, LANES)
    queries = _mine(ctx, "own_q", s.index_heads)
    _own_queries(ctx, queries)
    # Writers and readers, of the table and of the queries: all waves of this workgroup.
    rocdl.s_waitcnt(vmcnt=0)
    fx.barrier()
    if fx.const_expr(s.exchange):
        own, queries = queries, _mine(ctx, "all_q", s.scored_heads)
        exchange.share_queries(ctx, own, queries)
        exchange.scrub(ctx)
    keys = Keys(_KIND.kind, ctx.table)
    row = s.scored_heads * HEAD_DIM * 2
    arguments = SimpleNamespace(
        index_q=ctx.pointer(queries, fx.Uint32), q_row=fx.Int64(row),
        q_head=fx.Int64(HEAD_DIM * 2), heads=s.scored_heads, factor=a.index_factor,
        pages=ctx.pointer(global_address(a.index_pages), fx.Uint32),
        block_stride=a.index_stride, num_pages=a.index_blocks,
        table_column=fx.Int64(1), out=ctx.pointer(ctx.scratch("scores"), fx.Float32),
        out_head=fx.Int64(a.max_blocks) * MAX_ROWS, out_row=fx.Int64(a.max_blocks),
        out_block=fx.Int64(1),
    )  # fmt: skip
    waves = ctx.workgroups * WAVES
    mine = ctx.workgroup * WAVES + ctx.wave + waves * MAX_ROWS
    for request in range(fx.Int32(0), a.requests, fx.Int32(1)):
        request = fx.Int32(request)
        length, _, behind = span(ctx, request)
        _, _, _, end = row_range(ctx, length, behind, behind - 1)
        if fx.const_expr(s.exchange):
            end = exchange.owned(ctx, end)
        begin = (mine - request * WAVES) % waves
        if begin < end:
            _score_request(ctx, arguments, keys, request, begin, end)


@flyc.jit
def _own_queries(ctx, place):
    s, heads = ctx.s, ctx.s.index_heads
    groups = (ctx.rows + (TOKENS_A_WAVE - 1)) // TOKENS_A_WAVE
    for task in range(ctx.wave, groups * heads, fx.Int32(WAVES)):
        task = fx.Int32(task)
        head = task % heads + (s.q_heads + 2 * s.kv_heads)
        write_head(ctx, place, head, task // heads * TOKENS_A_WAVE)


@flyc.jit
def _score_request(ctx, a, keys, request, begin, end):
    """This wave's blocks of a request."""
    length, first_row, behind = span(ctx, request)
    tiles = ctx.s.scored_heads  # of 16 (row, head) pairs: as many as 16 rows need
    pairs = (behind - first_row) * ctx.s.scored_heads
    first_length = length - (behind - 1 - first_row)
    own = columns(_KIND, tiles, a, fx.Int64(first_row), first_length, pairs)
    at = fx.Int64(request) * fx.Int64(ctx.a.max_blocks) * 4
    table_row = global_address(ctx.a.block_table).at(at)
    if fx.const_expr(ctx.s.exchange):
        first, ends = fx.Int32(ctx.s.init_blocks), _ends(ctx, length, behind)
        to = exchange.destinations(ctx, first_row, pairs, first, ends)
        for number in range(begin, end, ctx.workgroups * WAVES):
            block = fx.Int32(number) * ctx.s.tp + ctx.a.rank
            exchange.send_scores(ctx, a, keys, own, to, table_row, block)
    else:
        for block in range(begin, end, ctx.workgroups * WAVES):
            score_block(a, keys, own, table_row, fx.Int32(block), masked=False)


def _ends(ctx, length, behind):
    """The end of the candidates of each row of a request, a value that may differ by lane."""
    return lambda row: row_range(ctx, length, behind, row)[-1]


def _mine(ctx, name: str, heads: int) -> Bytes:
    """This workgroup's queries of so many heads a row."""
    at = fx.Int64(ctx.workgroup) * (2 * MAX_ROWS * heads * HEAD_DIM)
    return ctx.scratch(name).at(at)
