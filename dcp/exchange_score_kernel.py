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
from rocm_msa.device import mailbox
from rocm_msa.device.memory import global_address, global_bytes
from rocm_msa.device.topk import ABSENT, order_key, top_candidates
from rocm_msa.device.wave import WAVE, lane_id, uniform, wave_id
from rocm_msa.ops.flydsl_host import SCORE_WAVES, TILE
from rocm_msa.ops.flydsl_index_score import block_scores, query_operands

KEYS_AT_ONCE = 7  # registers of a lane that selects among its rank's blocks, beside the best


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


@flyc.jit
def score(a, cache, keys, prefix, ok):
    """Score this workgroup's part of the blocks, and send or keep their order keys."""
    part = share(a)
    at = fx.block_idx.x * part
    stop = fx.min(at + part, a.total)
    while (at < stop) & ok:
        request = _request_at(a, prefix, at)
        start = uniform(prefix.load(fx.Int32, offset=request * 4))
        after = uniform(prefix.load(fx.Int32, offset=request * 4 + 4))
        begin, stop_here = at - start, fx.min(after, stop) - start
        own, ok = _columns(a, cache, request)
        if ok:
            sent = _destinations(a, own)
            table_row = fx.Int64(request) * (fx.Int64(cache.table_row) * 4)
            table_row = global_bytes(cache.block_table).at(table_row)
            for k in range(begin + wave_id(), stop_here, SCORE_WAVES):
                k = fx.Int32(k)
                block = k * a.ranks + a.rank
                scores = block_scores(cache, keys, own, table_row, block, masked=False)
                for column in fx.range_constexpr(a.build.tiles):
                    key = order_key(scores[column], fx.Boolean(True))
                    _deliver(a, own.owned[column], sent[column], block, k, key)
        at = start + stop_here
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
    lane = lane_id()
    best_key, best_k = fx.Uint32(ABSENT), fx.Int32(-1)
    for first in range(begin, stop, WAVE * KEYS_AT_ONCE):
        keys, ids = [best_key], [best_k]
        for r in fx.range_constexpr(KEYS_AT_ONCE):
            k = fx.Int32(first) + lane + WAVE * r
            here = k < stop
            key = kept.load(fx.Uint32, offset=fx.Int64(here.select(k, begin)) * 4)
            keys.append(here.select(key, fx.Uint32(ABSENT)))
            ids.append(k)
        best_key, best_k = top_candidates(keys, ids, a.build.topk)
    return best_key, best_k
