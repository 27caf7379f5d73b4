"""Phase 5 of the exchange on gfx950: merge what all ranks sent, select. README.md: the protocol."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from dcp.exchange_places_kernel import RESULT_TIMES, owned_blocks, result_at, row_range
from dcp.mailbox_layout import WORD
from dcp.shard import Site
from rocm_msa.device import mailbox, topk_rows
from rocm_msa.device.memory import global_address
from rocm_msa.device.topk import ABSENT, top_candidates
from rocm_msa.device.wave import ROW, WAVE, lane_id, uniform, wave_id
from rocm_msa.ops.flydsl_host import SCORE_WAVES

SCORES_AT_ONCE = 2  # registers of a lane that selects among all ranks' scores


@flyc.jit
def select(a, ok):
    """Merge what all ranks sent for the own heads, and write the selection."""
    lane, heads, topk = lane_id(), a.shard.heads_per_rank, a.build.topk
    items = a.requests * a.rows_per_request * heads
    first = fx.block_idx.x * SCORE_WAVES + wave_id()
    for item in range(first, items, a.workgroups * SCORE_WAVES):
        item = fx.Int32(item)
        row, own = fx.Int64(item // heads), item % heads
        init, last, count = row_range(a, row)
        init, last, count = uniform(init), uniform(last), uniform(count)
        ranked = fx.Int32(-1)
        if ok:
            if fx.const_expr(a.sends_scores):
                ranked, ok = _merge_scores(a, own, row, init, last)
            else:
                ranked, ok = _merge_candidates(a, own, row, init, last)
        # Blocks that are kept by construction: [0, init) and [last, count).
        always = init + count - last
        kept = (lane < init).select(lane, last + lane - init)
        rows = a.requests * a.rows_per_request
        target = global_address(a.out).at((fx.Int64(own) * fx.Int64(rows) + row) * (topk * 4))
        if lane < fx.min(always, fx.Int32(topk)):
            target.store(ok.select(kept, fx.Int32(-1)), offset=lane * 4)
        if lane < topk - always:
            target.store(ok.select(ranked, fx.Int32(-1)), offset=(always + lane) * 4)
    return ok


@flyc.jit
def _merge_candidates(a, own, row, init, last):
    """(rank-ordered ids by lane, whether all came) of every rank's best blocks."""
    lane, topk = lane_id(), a.build.topk
    listed = a.ranks * topk
    places, wanted, peers = [], [], []
    for r in fx.range_constexpr(-(-listed // WAVE)):
        at = lane + WAVE * r
        inside = at < listed
        sender = inside.select(at // topk, fx.Int32(0))
        place = (
            global_address(a.own)
            .at(a.buffer + result_at(a, own, sender, row))
            .at((at % topk) * WORD)
        )
        some = inside & (owned_blocks(a, sender, init) < owned_blocks(a, sender, last))
        places += [place, place.at(topk * WORD)]
        wanted += [some, some]
        peers += [sender, sender]
    found, ok = mailbox.collect(a, places, wanted, peers, int(Site.RESULTS), RESULT_TIMES)
    keys = [
        some.select(key, fx.Uint32(ABSENT))
        for some, key in zip(wanted[::2], found[::2], strict=True)
    ]
    ids = [fx.Int32(word) for word in found[1::2]]
    if fx.const_expr(topk == ROW):
        # A row of lanes is what one rank sent, in rank order.
        return topk_rows.best_of_rows(topk_rows.merge_all(topk_rows.lists(keys, ids)))[1], ok
    _, best = top_candidates(keys, ids, topk)
    return best, ok


@flyc.jit
def _merge_scores(a, own, row, init, last):
    """(rank-ordered ids by lane, whether all came) of all blocks' scores."""
    lane, ok = lane_id(), fx.Boolean(True)
    best_key, best, rows = fx.Uint32(ABSENT), fx.Int32(-1), topk_rows.no_pairs()
    for first in range(init, last, WAVE * SCORES_AT_ONCE):
        places, wanted, peers, ids = [], [], [], []
        for r in fx.range_constexpr(SCORES_AT_ONCE):
            block = fx.Int32(first) + lane + WAVE * r
            here = block < last
            block = here.select(block, init)
            sender = block % a.ranks
            place = global_address(a.own).at(a.buffer + result_at(a, own, sender, row))
            places.append(place.at((block // a.ranks) * WORD))
            wanted.append(here)
            peers.append(sender)
            ids.append(block)
        if ok:
            found, ok = mailbox.collect(a, places, wanted, peers, int(Site.RESULTS), RESULT_TIMES)
            keys = [
                here.select(key, fx.Uint32(ABSENT)) for here, key in zip(wanted, found, strict=True)
            ]
            if fx.const_expr(a.build.topk <= ROW):
                rows = topk_rows.merge_all([*topk_rows.sorted_rows(keys, ids), rows])
            else:
                best_key, best = top_candidates([best_key, *keys], [best, *ids], a.build.topk)
    if fx.const_expr(a.build.topk <= ROW):
        _, best = topk_rows.best_of_rows(rows)
    return best, ok
