"""Phases 0 to 2 of the exchange on gfx950: the batch, push, be here. README.md: the protocol."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from dcp.exchange_places_kernel import (
    START_TIMES,
    THREADS,
    buffer_at,
    owned_blocks,
    query_at,
    row_range,
)
from dcp.mailbox_layout import SCRUB_WORDS, WORD
from dcp.shard import Site
from rocm_msa.device import mailbox
from rocm_msa.device.memory import global_address
from rocm_msa.device.wave import WAVE, inclusive_sum, lane_id, lane_value, uniform, wave_id
from rocm_msa.ops.flydsl_host import SCORE_WAVES

_MIX = 0x61C88647  # odd: multiples of it are a permutation of 32-bit numbers


@flyc.jit
def survey(a, prefix):
    """Blocks that this rank scores: of the requests before each one into LDS; in all.

    And the digest of the rows' block counts, on which all ranks must agree.
    """
    lane, wave = lane_id(), wave_id()
    total, mark = fx.Int32(0), fx.Int32(0)
    for first in range(0, a.requests + 1, WAVE):
        request = fx.Int32(first) + lane
        known = request < a.requests
        longest = fx.Int32(0)
        for i in range(0, a.rows_per_request, 1):
            row = known.select(request, fx.Int32(0)) * a.rows_per_request + fx.Int32(i)
            _, last, count = row_range(a, row)
            longest = fx.max(longest, last)
            mixed = (count + 1) * ((row * 2 + 1) * fx.Int32(_MIX) | 1)
            mark = mark + known.select(mixed ^ (mixed >> 15), fx.Int32(0))
        owned = known.select(owned_blocks(a, a.rank, longest), fx.Int32(0))
        upto = inclusive_sum(owned)
        if wave == 0:
            # Writer: wave 0. Reader: all waves, after the kernel's first barrier.
            prefix.store(total + upto - owned, offset=request * 4)
        total = total + lane_value(upto, WAVE - 1)
    return total, lane_value(inclusive_sum(mark), WAVE - 1)


@flyc.jit
def first_query(a):
    """The lane's word of the first query that this wave pushes, loaded and not waited for."""
    item, items = _first_item(a), _pushed(a)
    word = fx.Uint32(0)
    if item < items:
        word = _query_word(a, item)
    return word


@flyc.jit
def push(a, word):
    """Hello, and the queries of the heads that this rank pushes, to every rank; word: of
    `first_query`."""
    lane, first, heads = lane_id(), _first_item(a), a.shard.heads_per_rank
    if (first == 0) & (lane < a.ranks):
        there = mailbox.mailbox_of(a, lane).at(a.buffer + fx.Int64(a.places.hello))
        mailbox.post(a, there.at(fx.Int64(a.rank) * WORD), a.digest)
    mailboxes = [mailbox.mailbox_of(a, peer) for peer in range(a.ranks)]
    for item in range(first, _pushed(a), a.workgroups * SCORE_WAVES):
        item = fx.Int32(item)
        if item != first:
            word = _query_word(a, item)
        head = a.rank // a.shard.replicas * heads + item % heads
        to = a.buffer + query_at(a, head, fx.Int64(item // heads)) + fx.Int64(lane * WORD)
        for place in mailboxes:
            mailbox.post(a, place.at(to), word)


def _first_item(a) -> fx.Int32:
    return fx.block_idx.x * SCORE_WAVES + wave_id()


def _pushed(a) -> fx.Int32:
    """How many (row, own head) this rank pushes, in the order of index_q."""
    pushes = a.rank % a.shard.replicas == 0
    return pushes.select(a.requests * a.rows_per_request * a.shard.heads_per_rank, fx.Int32(0))


def _query_word(a, item: fx.Int32) -> fx.Uint32:
    row, own = fx.Int64(item // a.shard.heads_per_rank), item % a.shard.heads_per_rank
    place = global_address(a.index_q).at(row * fx.Int64(a.q_row) + fx.Int64(own * a.q_head))
    return place.load(fx.Uint32, offset=lane_id() * 4, align=4)


@flyc.jit
def scrub(a, launch):
    """Clear a chunk of the buffer that nobody touches now: the last workgroup's threads."""
    if fx.block_idx.x == a.workgroups - 1:
        chunk = (launch >> 2) & fx.Int64(a.chunks - 1)
        place = global_address(a.own).at(buffer_at(a, launch + 2) + chunk * (SCRUB_WORDS * WORD))
        for i in fx.range_constexpr(SCRUB_WORDS // THREADS):
            mailbox.clear(place.at((fx.thread_idx.x + i * THREADS) * WORD))


@flyc.jit
def all_here(a):
    """Wait for the hello of every rank; whether all are here with this rank's digest."""
    lane = lane_id()
    peer = (lane < a.ranks).select(lane, fx.Int32(0))
    place = global_address(a.own).at(a.buffer + fx.Int64(peer * WORD) + a.places.hello)
    found, ok = mailbox.collect(a, [place], [lane < a.ranks], [peer], int(Site.START), START_TIMES)
    digest = fx.Int32(found[0])
    same = fx.Int32(0)  # ranks with this lane's digest
    for other in fx.range_constexpr(a.ranks):
        same = same + (digest == lane_value(digest, other)).select(fx.Int32(1), fx.Int32(0))
    least = same
    odd = fx.Int32(0)
    for step in fx.range_constexpr(a.ranks):
        other = a.ranks - 1 - step
        count = lane_value(same, other)
        fewer = count <= least
        odd = fewer.select(fx.Int32(other), odd)
        least = fewer.select(count, least)
    agreed = fx.Int64(rocdl.ballot(fx.Int64.ir_type, (same != a.ranks).ir_value())) == 0
    if ok & (agreed == False):  # noqa: E712
        culprit = odd
        if fx.const_expr(a.ranks == 2):
            culprit = 1 - a.rank
        mailbox.fail(a, int(Site.SHAPE), uniform(culprit))
    heard = mailbox.hear(a, mailbox.error_words(a))
    return ok & agreed & (heard == False)  # noqa: E712
