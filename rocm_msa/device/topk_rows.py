"""The 16 best of (key, id) pairs in the wave's rows of 16 lanes: bitonic networks, no loop.

A pair is one number that orders like the rank (device/topk.py): the higher key, then the lower id.
A list is a row whose lane i holds the pair of rank i; absent pairs come last. Every step compares a
lane with one partner, and the lower lane of the two keeps the better pair:

    sort      steps over mirrored groups of 2, 4, 8, 16 lanes, each with its half-cleaners
    merge     of two lists the better of ranks i and 15 - i: the 16 best, once up and once down;
              half-cleaners over 8, 4, 2, 1 lanes put them in order
"""

from __future__ import annotations

import flydsl.expr as fx

from rocm_msa.device.topk import ABSENT, pair_of, pair_parts
from rocm_msa.device.wave import (
    HALF_MIRROR,
    MIRROR,
    QUAD_MIRROR,
    QUAD_SWAP_1,
    QUAD_SWAP_2,
    ROW_SWAP_8,
    dpp,
    lane_id,
    swap_rows,
)

# Partner of a lane: the DPP controls that reach it, one after the other.
_REACH = {
    1: (QUAD_SWAP_1,),
    2: (QUAD_SWAP_2,),
    3: (QUAD_MIRROR,),
    4: (HALF_MIRROR, QUAD_MIRROR),
    7: (HALF_MIRROR,),
    8: (ROW_SWAP_8,),
    15: (MIRROR,),
}
_CLEAN = (8, 4, 2, 1)
_SORT = (1, 3, 1, 7, 2, 1, 15, 4, 2, 1)


def sorted_rows(keys: list, ids: list) -> list:
    """A list in each row, of each register: pairs, fx.Uint64.

    Args:
        keys, ids: of each register; ids >= 0 and distinct where the key is not ABSENT.
    """
    return [_steps(pair, _SORT) for pair in lists(keys, ids)]


def lists(keys: list, ids: list) -> list:
    """Of registers whose rows are lists already: pairs."""
    return [pair_of(key, one) for key, one in zip(keys, ids, strict=True)]


def merge_rows(first: fx.Uint64, second: fx.Uint64) -> fx.Uint64:
    """The list of the best of two registers' lists, row by row."""
    return _steps(_better(first, _moved(second, 15)), _CLEAN)


def merge_all(found: list) -> fx.Uint64:
    """The same of any number of registers: neighbours first, for what does not wait for another."""
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=False)
        found = [merge_rows(*two) for two in pairs] + found[len(found) // 2 * 2 :]
    return found[0]


def best_of_rows(pairs: fx.Uint64):
    """(key, id): lane i < 16 holds those of rank i of the four rows' lists; ABSENT and -1 from
    where no pair is left. The other rows hold the same."""
    for rows in (2, 1):
        high, low = fx.Uint32(pairs >> 32), fx.Uint32(pairs)
        halves = zip(swap_rows(high, rows), swap_rows(low, rows), strict=True)
        pairs = merge_rows(*(_joined(*half) for half in halves))
    return pair_parts(pairs)


def no_pairs() -> fx.Uint64:
    """An empty list."""
    return fx.Uint64(ABSENT)


def _better(a: fx.Uint64, b: fx.Uint64) -> fx.Uint64:
    return (a < b).select(b, a)


def _moved(pair: fx.Uint64, partner: int) -> fx.Uint64:
    """The pair of lane ^ partner."""
    high, low = fx.Uint32(pair >> 32), fx.Uint32(pair)
    for control in _REACH[partner]:
        high, low = dpp(high, control), dpp(low, control)
    return _joined(high, low)


def _joined(high: fx.Uint32, low: fx.Uint32) -> fx.Uint64:
    return (fx.Uint64(high) << 32) | fx.Uint64(low)


def _steps(pair: fx.Uint64, partners) -> fx.Uint64:
    lane = lane_id()
    for partner in partners:
        other = _moved(pair, partner)
        upper = (lane & (1 << (partner.bit_length() - 1))) != 0
        pair = ((pair < other) ^ upper).select(other, pair)
    return pair
