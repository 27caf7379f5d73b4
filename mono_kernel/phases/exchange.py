"""The index exchange: ranks share the scan of the index cache, each scores blocks for all heads.

    block b of a request is scored by rank b mod P, for the index heads of all ranks
    queries     each rank sends its index queries to all ranks, itself too
    results     each score goes to the ranks whose head it is for, as it is found

Where several ranks hold a head (`kv_replicas`, neighbours), their queries have the same bits: the
first one sends them.

Words as in reduce.py: value and tag in one, no fence. Every word of results that is sent is waited
for in the same launch. Two buffers take turns, and a launch clears a part of the other one: nobody
writes there before the next launch, which no rank begins without this rank's words of `output`.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from mono_kernel import plan
from mono_kernel.faults import exchange_site
from mono_kernel.phases.deal import deal_waves
from mono_kernel.phases.reduce import NUMBER, TIMES
from mono_kernel.plan import LANES, QUERY_WORDS, SCRUB_WORDS, WAVES
from mono_kernel.shapes import MAX_ROWS
from rocm_msa.device import mailbox
from rocm_msa.device.memory import Bytes, global_address
from rocm_msa.device.wave import WAVE
from rocm_msa.ops.flydsl_index_score import block_scores

_AT_ONCE = 4  # queries that a wave waits for together
assert QUERY_WORDS == WAVE


def _offset(ctx, name: str) -> int:
    return plan.mailbox_layout(ctx.s)[name].offset


def _result_at(ctx, launch, head, row, block) -> fx.Int64:
    """Offset in a mailbox of the score of one of the owner's heads. launch: 0 or 1, its buffer."""
    run = fx.Int64((launch * ctx.s.index_heads + head) * MAX_ROWS + row)
    word = run * fx.Int64(ctx.a.most_blocks) + fx.Int64(block)
    return word * mailbox.WORD + _offset(ctx, "results")


def share_queries(ctx, own: Bytes, found: Bytes) -> None:
    """Send this rank's index queries, and wait for those of all ranks.

    own: [rows, index_heads, 128] of this workgroup; found: [rows, scored_heads, 128], likewise.
    """
    deal_waves(ctx, lambda pair: _send(ctx, own, pair), fx.Int32(MAX_ROWS * ctx.s.index_heads))
    _take(ctx, found)
    # Writers and readers: all waves of this workgroup.
    rocdl.s_waitcnt(vmcnt=0)
    fx.barrier()


@flyc.jit
def _send(ctx, own, pair):
    """A query of the batch's rows and, in turns, of one other, whose words are read by nobody."""
    s, end = ctx.s, ctx.a
    row, head = pair // s.index_heads, pair % s.index_heads
    mine = end.rank % s.kv_replicas == 0
    if mine & ((row < ctx.rows) | (row == (end.tag & (MAX_ROWS - 1)))):
        present = fx.min(row, ctx.rows - 1)
        at = (present * s.index_heads + head) * QUERY_WORDS + ctx.lane
        word = own.load(fx.Uint32, offset=at * 4)
        at = ((end.rank * MAX_ROWS + row) * s.index_heads + head) * QUERY_WORDS + ctx.lane
        for other in fx.range_constexpr(s.tp):
            peer = (end.rank + 1 + other) % s.tp
            box = mailbox.mailbox_of(end, peer).at(_offset(ctx, "queries"))
            mailbox.post(end, box.at(at * mailbox.WORD), word)


@flyc.jit
def _take(ctx, found):
    s, end = ctx.s, ctx.a
    box = global_address(end.own).at(_offset(ctx, "queries"))
    count = ctx.rows * s.scored_heads
    for first in range(ctx.wave, count, fx.Int32(WAVES * _AT_ONCE)):
        pairs, places, wanted, peers = [], [], [], []
        for i in fx.range_constexpr(_AT_ONCE):
            pair = fx.Int32(first) + WAVES * i
            there = pair < count
            pair = there.select(pair, fx.Int32(0))
            row, head = pair // s.scored_heads, pair % s.scored_heads
            peer, own_head = head // s.index_heads * s.kv_replicas, head % s.index_heads
            at = ((peer * MAX_ROWS + row) * s.index_heads + own_head) * QUERY_WORDS + ctx.lane
            places.append(box.at(at * mailbox.WORD))
            pairs.append(pair)
            wanted.append(there)
            peers.append(peer)
        words, _ = mailbox.collect(end, places, wanted, peers, exchange_site("queries"), TIMES)
        for i in fx.range_constexpr(_AT_ONCE):
            if wanted[i]:
                found.store(words[i], offset=(pairs[i] * QUERY_WORDS + ctx.lane) * 4)


def owned(ctx, blocks):
    """How many of the first `blocks` blocks this rank scores."""
    return fx.max(blocks - ctx.a.rank + (ctx.s.tp - 1), fx.Int32(0)) // ctx.s.tp


def destinations(ctx, first_row, pairs, first, ends) -> list:
    """Of the lane's column in each tile: (places of block 0, first candidate, their end); nothing
    is sent of a column that is nobody's. ends: of the candidates of a row."""
    s, found = ctx.s, []
    launch = ctx.a.tag & 1
    for tile in range(s.scored_heads):
        pair = ctx.lane % MAX_ROWS + tile * MAX_ROWS
        mine = (pair < pairs) & (ctx.lane < MAX_ROWS)
        pair = mine.select(pair, fx.Int32(0))
        row, head = first_row + pair // s.scored_heads, pair % s.scored_heads
        owner = head // s.index_heads * s.kv_replicas
        boxes = [mailbox.mailbox_of(ctx.a, owner + i) for i in range(s.kv_replicas)]
        at = _result_at(ctx, launch, head % s.index_heads, row, fx.Int32(0))
        found.append(([box.at(at) for box in boxes], mine.select(first, fx.Int32(0)),
                      mine.select(ends(row), fx.Int32(0))))  # fmt: skip
    return found


def send_scores(ctx, a, keys, own, to, table_row, block) -> None:
    """Score a block for all columns and tell the owners of the heads."""
    scores = block_scores(a, keys, own, table_row, block, masked=False)
    for (places, first, end), score in zip(to, scores, strict=True):
        for place in places:
            _post_if(ctx, (block >= first) & (block < end), place, block, score)


@flyc.jit
def _post_if(ctx, condition, place, block, score):
    if condition:
        mailbox.post(ctx.a, place.at(fx.Int64(block) * mailbox.WORD), score.bitcast(fx.Uint32))


def collect_scores(ctx, head, row, blocks: list, wanted: list) -> list:
    """Scores of a row's blocks, a list of each lane, as their ranks have sent them."""
    box, launch = global_address(ctx.a.own), ctx.a.tag & 1
    places = [box.at(_result_at(ctx, launch, head, row, block)) for block in blocks]
    peers = [block % ctx.s.tp for block in blocks]
    words, _ = mailbox.collect(ctx.a, places, wanted, peers, exchange_site("results"), TIMES)
    return [word.bitcast(fx.Float32) for word in words]


@flyc.jit
def scrub(ctx):
    """Clear a part of the other launch's results: in turns, all of them."""
    words = fx.Int64(ctx.a.most_blocks) * (ctx.s.index_heads * MAX_ROWS)
    parts = fx.Int32((words + (SCRUB_WORDS - 1)) >> (SCRUB_WORDS.bit_length() - 1))
    part = (ctx.a.tag & NUMBER) // 2 % parts
    if ctx.workgroup == ctx.workgroups - 1:
        box = global_address(ctx.a.own)
        start = _result_at(ctx, 1 - (ctx.a.tag & 1), fx.Int32(0), fx.Int32(0), fx.Int32(0))
        for i in fx.range_constexpr(SCRUB_WORDS // LANES):
            word = fx.Int64(part) * SCRUB_WORDS + fx.Int64(ctx.thread + LANES * i)
            if word < words:
                mailbox.clear(box.at(start + word * mailbox.WORD))
