"""Exact top-k of a wave's keys, in rank order.

A key is a uint32 that orders like its score: higher first, ties to the lower position, 0 for "no
element". Position: 64 r + lane of register r. All of a wave's lanes take part.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from rocm_msa.device.wave import TO_LATER_LANES, WAVE, lane_id, lane_value, with_lane

ABSENT = 0
_LARGEST_ID = 2**31 - 1
NAN_KEY = 1  # below -inf, whose key is 0x007FFFFF


def order_key(score, present):
    """The key of a float32: monotone, -0 equal to +0, NaN below -inf; ABSENT when not `present`."""
    bits = (score == 0.0).select(fx.Int32(0), score.bitcast(fx.Int32))
    flip = (bits >> 31) | fx.Int32(-(1 << 31))  # all bits of a negative, the sign bit otherwise
    key = fx.Uint32(bits ^ flip)
    key = (score == score).select(key, fx.Uint32(NAN_KEY))
    return present.select(key, fx.Uint32(ABSENT))


def top_positions(keys: list, count: int):
    """The `count` <= 64 best of the wave's `keys` (one list entry a register).

    Returns:
        (key, position): lane i holds those of rank i; ABSENT and -1 from where no element is left.
    """
    lane = lane_id()
    places = [lane + WAVE * r for r in range(len(keys))]
    best_key, best_place = fx.Uint32(ABSENT), fx.Int32(-1)
    for i in range(count):
        head = keys[0]
        for key in keys[1:]:
            head = fx.Uint32(fx.max(head, key))
        top = _wave_max(head)
        place = fx.Int32(-1)
        for r in reversed(range(len(keys))):
            lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, (keys[r] == top).ir_value()))
            first = fx.Int32(fx.cttz(lanes)) + WAVE * r
            place = (lanes != fx.Uint64(0)).select(first, place)
        place = (top != fx.Uint32(ABSENT)).select(place, fx.Int32(-1))
        mine = lane == i
        best_key = mine.select(top, best_key)
        best_place = mine.select(place, best_place)
        keys = [
            (at == place).select(fx.Uint32(ABSENT), key)
            for key, at in zip(keys, places, strict=True)
        ]
    return best_key, best_place


@flyc.jit
def top_candidates(keys, ids, count):
    """The `count` <= 64 best of the wave's (key, id) pairs: highest key, then the lower id.

    Each lane sorts its own pairs; then the wave takes the best of the lanes' first ones, again and
    again.

    Args:
        keys, ids: of each register; ids >= 0 and distinct where the key is not ABSENT.

    Returns:
        (key, id): lane i holds those of rank i; ABSENT and -1 from where no element is left.
    """
    best_key, best_id = fx.Uint32(ABSENT), fx.Int32(-1)
    pairs = _sorted([pair_of(key, one) for key, one in zip(keys, ids, strict=True)])
    left = fx.Vector.from_elements(pairs, fx.Uint64)
    for rank in range(0, count, 1):  # a loop at run time: unrolled it would be most of a kernel
        high, low = fx.Uint32(left[0] >> 32), fx.Uint32(left[0])
        top = _wave_max(high)
        first = high == top
        lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, first.ir_value()))
        if (lanes & (lanes - fx.Uint64(1))) != fx.Uint64(0):  # several have this key
            first = first & (low == _wave_max(first.select(low, fx.Uint32(0))))
            lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, first.ir_value()))
        winner = fx.Int32(fx.cttz(lanes)) & (WAVE - 1)
        complement = fx.Int32(lane_value(low, winner))
        found = fx.Int32(_LARGEST_ID) - complement
        found = (top != fx.Uint32(ABSENT)).select(found, fx.Int32(-1))
        best_key = with_lane(best_key, fx.Int32(rank), top)
        best_id = with_lane(best_id, fx.Int32(rank), found)
        mine = lane_id() == winner
        rest = []
        for r in fx.range_constexpr(len(keys)):
            after = left[r + 1] if r + 1 < len(keys) else fx.Uint64(ABSENT)
            rest.append(mine.select(after, left[r]))
        left = fx.Vector.from_elements(rest, fx.Uint64)
    return best_key, best_id


def pair_of(key: fx.Uint32, one: fx.Int32) -> fx.Uint64:
    """Key and id as one number that orders like the rank; ABSENT for an absent key."""
    low = fx.Uint32(fx.Int32(_LARGEST_ID) - one)
    low = (key != fx.Uint32(ABSENT)).select(low, fx.Uint32(0))
    return (fx.Uint64(key) << 32) | fx.Uint64(low)


def pair_parts(pair: fx.Uint64):
    """(key, id) of `pair_of`; ABSENT and -1 for no pair."""
    key = fx.Uint32(pair >> 32)
    one = fx.Int32(_LARGEST_ID) - fx.Int32(fx.Uint32(pair))
    return key, (key != fx.Uint32(ABSENT)).select(one, fx.Int32(-1))


def _sorted(values: list) -> list:
    """A lane's values, the largest first, by Batcher's odd-even merges."""
    values, count = list(values), len(values)
    width = 1 << (count - 1).bit_length()
    for size in _powers(width):
        for step in reversed(_powers(size * 2)):
            for start in range(step % size, width - step, 2 * step):
                for i in range(start, min(start + step, count - step)):
                    if i // (2 * size) == (i + step) // (2 * size):
                        a, b = values[i], values[i + step]
                        values[i], values[i + step] = (a < b).select(b, a), (a < b).select(a, b)
    return values


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... below `limit`."""
    return [1 << i for i in range((limit - 1).bit_length())]


def _wave_max(key: fx.Uint32) -> fx.Uint32:
    """Maximum of the 64 lanes, in a scalar register: one v_max_u32_dpp a step."""
    for control, rows in TO_LATER_LANES:
        zero, bits = fx.Uint32(0).ir_value(), key.ir_value()
        moved = rocdl.update_dpp(fx.Int32.ir_type, zero, bits, control, rows, 0xF, False)
        key = fx.Uint32(fx.max(key, fx.Uint32(moved)))
    last = fx.Int32(WAVE - 1).ir_value()
    return fx.Uint32(rocdl.readlane(fx.Int32.ir_type, key.ir_value(), last))
