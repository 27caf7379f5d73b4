"""Phases 3 and 4 of the exchange on gfx950: score this rank's blocks, send what the owners need.

A workgroup takes an equal part of the blocks that this rank scores, in the order of the requests;
its waves take them in turns. README.md: the protocol.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from dcp.exchange_gfx950 import QUERY_WORDS
from dcp.exchange_places_kernel import (
    OWN_TIMES,
    QUERY_TIMES,
    first_owner,
    kept_keys,
    owned_blocks,
    query_at,
    row_range,
    share,
    targets,
)
from dcp.mailbox_layout import WORD
from dcp.shard import Site
from rocm_msa.device import mailbox, topk_rows
from rocm_msa.device.memory import global_address, global_bytes, loads_are_issued
from rocm_msa.device.topk import ABSENT, order_key, top_candidates
from rocm_msa.device.wave import ROW, WAVE, lane_id, uniform, wave_id
from rocm_msa.ops.flydsl_host import SCORE_WAVES, TILE
from rocm_msa.ops.flydsl_index_score import (
    asked_for,
    block_ahead,
    nothing_asked_for,
    page_of,
    query_operands,
    scores_of,
)

KEYS_AT_ONCE = 4  # registers of a lane that selects among its rank's blocks, beside the best


@flyc.jit
def _request_at(a, prefix, position):
    """The request whose blocks hold place `position` < total of all that this rank scores."""
    lane, before = lane_id(), fx.Int32(0)
    for first in range(0, a.requests, WAVE):
        request = fx.Int32(first) + lane
        start = prefix.load(fx.Int32, offset=request * 4)
        begun = (request < a.requests) & (start <= position)
        lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, begun.ir_value()))
        before = before + fx.Int32(fx.ctpop(lanes))
    return uniform(before - 1)


def _columns(a, cache, request):
    """The lane's column in each tile, from the mailbox: operands, factors, where results go."""
    own = SimpleNamespace(queries=[], factors=[], owned=[], rows=[], heads=[])
    lane, all_there = lane_id(), fx.Boolean(True)
    pairs = a.rows_per_request * a.shard.heads
    for tile in fx.range_constexpr(a.build.tiles):
        pair = lane % TILE + tile * TILE
        mine = pair < pairs
        pair = mine.select(pair, fx.Int32(0))  # a column of nobody repeats column 0
        head = pair % a.shard.heads
        row = fx.Int64(request * a.rows_per_request + pair // a.shard.heads)
        part = QUERY_WORDS // (WAVE // TILE)
        place = global_address(a.own).at(a.buffer + query_at(a, head, row))
        place = place.at((lane // TILE) * (part * WORD))
        places = [place.at(WORD * i) for i in range(part)]
        pusher, every = first_owner(a, head), fx.Boolean(True)
        words, there = mailbox.collect(
            a, places, [every] * part, [pusher] * part, int(Site.QUERIES), QUERY_TIMES
        )
        all_there = all_there & there
        vectors = [fx.Vector.from_elements(words[i : i + 4], fx.Uint32) for i in range(0, part, 4)]
        operands, undo = query_operands(a.build.kind, a.build.query, vectors)
        own.queries.append(operands)
        own.factors.append(undo * cache.factor)
        own.owned.append(mine & (lane < TILE))
        own.rows.append(row)
        own.heads.append(head)
    return own, all_there


def part_of(a) -> tuple[fx.Int32, fx.Int32]:
    """(this wave's first place, the end) among the blocks that this rank scores."""
    part = share(a)
    at = fx.block_idx.x * part
    return at + wave_id(), fx.min(at + part, a.total)


def _block_at(a, cache, prefix, position):
    """(request, its first place, the id of the block at `position`, its page's number)."""
    request = _request_at(a, prefix, position)
    start = uniform(prefix.load(fx.Int32, offset=request * 4))
    block = (position - start) * a.ranks + a.rank
    place = fx.Int64(request) * fx.Int64(cache.table_row) + fx.Int64(block)
    number = global_bytes(cache.block_table).uniform(fx.Int32, offset=place * 4)
    return request, start, number


@flyc.jit
def first_page(a, cache, prefix):
    """The number of the page of this wave's first block, -1 when it has none."""
    at, stop = part_of(a)
    number = fx.Int32(-1)
    if at < stop:
        _, _, number = _block_at(a, cache, prefix, at)
    return number


@flyc.jit
def ask_for_first(a, cache, keys, number):
    """Ask for the keys of the wave's first block, in page `number`.

    They depend on no other rank, and come while its messages are on their way.
    """
    at, stop = part_of(a)
    held = nothing_asked_for(keys)
    if at < stop:
        held = asked_for(keys, page_of(cache, number))
        loads_are_issued()
    return held


@flyc.jit
def score(a, cache, keys, prefix, number, held, ok):
    """Score this wave's blocks, every SCORE_WAVES'th of the workgroup's part, and send or keep
    their order keys. number, held: of `first_page` and `ask_for_first`."""
    at, stop = part_of(a)
    while (at < stop) & ok:
        request = _request_at(a, prefix, at)
        start = uniform(prefix.load(fx.Int32, offset=request * 4))
        after = uniform(prefix.load(fx.Int32, offset=request * 4 + 4))
        end = fx.min(after, stop)
        # The wave's first block of a later request; without one its last block comes again, from
        # a cache.
        beyond = at + (end - at + (SCORE_WAVES - 1)) // SCORE_WAVES * SCORE_WAVES
        beyond = (beyond < stop).select(beyond, beyond - SCORE_WAVES)
        _, _, number_beyond = _block_at(a, cache, prefix, beyond)
        own, ok = _columns(a, cache, request)
        if ok:
            sent = _destinations(a, own)
            table_row = fx.Int64(request) * (fx.Int64(cache.table_row) * 4)
            table_row = global_bytes(cache.block_table).at(table_row)
            for place in range(at, end, SCORE_WAVES):
                k = fx.Int32(place) - start
                block = k * a.ranks + a.rank
                more = k + SCORE_WAVES < end - start
                later = more.select(block + SCORE_WAVES * a.ranks, block)
                following = table_row.uniform(fx.Int32, offset=fx.Int64(later) * 4)
                following = more.select(following, number_beyond)
                best, held = block_ahead(
                    keys, page_of(cache, number), held, own.queries, page_of(cache, following)
                )
                scores = scores_of(cache, number, best, own)
                number = following
                for column in fx.range_constexpr(a.build.tiles):
                    key = order_key(scores[column], fx.Boolean(True))
                    _deliver(a, own.owned[column], sent[column], block, k, key)
        at = at + (end - at + (SCORE_WAVES - 1)) // SCORE_WAVES * SCORE_WAVES
    return ok


def _destinations(a, own: SimpleNamespace) -> list:
    """Of each column: its row's candidates, and the first word of its results or keys."""
    found = []
    for head, row in zip(own.heads, own.rows, strict=True):
        if a.sends_scores:
            init, last, _ = row_range(a, row)
            found.append((init, last, targets(a, head, row)))
        else:
            found.append((None, None, [kept_keys(a, head, row)]))
    return found


@flyc.jit
def _deliver(a, owned, sent, block, k, key):
    """One column's key of this rank's k-th block."""
    init, last, places = sent
    if fx.const_expr(a.sends_scores):
        if owned & (block >= init) & (block < last):
            for place in places:
                mailbox.post(a, place.at(fx.Int64(k) * WORD), key)
    else:
        if owned:
            # Bulk data; published by raise_flag.
            places[0].store(key, offset=fx.Int64(k) * 4)


@flyc.jit
def send_candidates(a, prefix, ok):
    """The best blocks of this rank, of every (row, head), to the owners."""
    lane, heads, topk = lane_id(), a.shard.heads, a.build.topk
    part = share(a)
    items = a.requests * a.rows_per_request * heads
    first = fx.block_idx.x * SCORE_WAVES + wave_id()
    flags = global_address(a.state).at(a.places.flags)
    for item in range(first, items, a.workgroups * SCORE_WAVES):
        item = fx.Int32(item)
        row, head = item // heads, item % heads
        init, last, _ = row_range(a, row)
        begin, stop = uniform(owned_blocks(a, a.rank, init)), uniform(owned_blocks(a, a.rank, last))
        if ok & (begin < stop):
            request = row // a.rows_per_request
            start = uniform(prefix.load(fx.Int32, offset=request * 4))
            ok = mailbox.await_flags(
                a, flags, (start + begin) // part, (start + stop - 1) // part,
                int(Site.RESULTS), OWN_TIMES,
            )  # fmt: skip
            if ok:
                kept = kept_keys(a, head, fx.Int64(row))
                key, k = _best_of_kept(a, kept, begin, stop)
                block = (k >= 0).select(k * a.ranks + a.rank, fx.Int32(-1))
                if lane < topk:
                    for place in targets(a, head, fx.Int64(row)):
                        mailbox.post(a, place.at(lane * WORD), key)
                        mailbox.post(a, place.at((lane + topk) * WORD), block)
    return ok


@flyc.jit
def _best_of_kept(a, kept, begin, stop):
    """The `topk` best of this rank's blocks [begin, stop) of one (row, head): (key, k) by lane."""
    best_key, best_k, best = fx.Uint32(ABSENT), fx.Int32(-1), topk_rows.no_pairs()
    for first in range(begin, stop, WAVE * KEYS_AT_ONCE):
        keys, ids = _keys_of_lanes(kept, fx.Int32(first), begin, stop)
        if fx.const_expr(a.build.topk <= ROW):
            best = topk_rows.merge_all([*topk_rows.sorted_rows(keys, ids), best])
        else:
            keys, ids = [best_key, *keys], [best_k, *ids]
            best_key, best_k = top_candidates(keys, ids, a.build.topk)
    if fx.const_expr(a.build.topk <= ROW):
        best_key, best_k = topk_rows.best_of_rows(best)
    return best_key, best_k


def _keys_of_lanes(kept, first, begin, stop):
    """(keys, k) of KEYS_AT_ONCE registers: blocks `first` and on, ABSENT from `stop` on."""
    keys, ids = [], []
    for r in range(KEYS_AT_ONCE):
        k = first + lane_id() + WAVE * r
        here = k < stop
        key = kept.load(fx.Uint32, offset=fx.Int64(here.select(k, begin)) * 4)
        keys.append(here.select(key, fx.Uint32(ABSENT)))
        ids.append(k)
    return keys, ids
