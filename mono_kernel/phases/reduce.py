"""Sum over ranks of a tile of outputs, inside the launch: value and tag in one word of a mailbox.

Each rank sends its part to all ranks, itself too, and adds all parts in rank order: the same bits
everywhere.
Sent are the batch's rows and, in turns, one tile of another: no word of a mailbox is older than
16 x tiles launches, so that its tag cannot come again.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel import plan
from mono_kernel.faults import sum_site
from mono_kernel.shapes import TILE
from rocm_msa.device import mailbox
from rocm_msa.device.memory import global_address
from rocm_msa.device.wave import WAVE

TIMES = 1  # bound of a wait for a peer, in units of `patience`
_OUTPUTS = 4  # a lane
NUMBER = (1 << 31) - 1  # of a launch, within its tag


def across_ranks(ctx, name: str, task, values: list) -> list:
    """The sums of a wave's tile over all ranks; one wave of the workgroup calls it.

    name: the site, of plan.SITES. values: fp32, outputs 4 g + r of row lane % 16.
    """
    s, end = ctx.s, ctx.a
    if s.tp == 1:
        return values
    tiles, first = s.hidden // TILE, plan.mailbox_layout(s)[name].offset
    row = ctx.lane % TILE
    live = row < ctx.rows
    turn = end.tag & NUMBER
    sent = live | ((row == (turn & (TILE - 1))) & (task == turn // TILE % tiles))

    def places(box, sender) -> list:
        at = (fx.Int64(sender * tiles + task) * _OUTPUTS * WAVE + fx.Int64(ctx.lane)) * mailbox.WORD
        run = box.at(at + first)
        return [run.at(r * WAVE * mailbox.WORD) for r in range(_OUTPUTS)]

    for other in range(s.tp):
        peer = (end.rank + 1 + other) % s.tp
        _send(end, sent, places(mailbox.mailbox_of(end, peer), end.rank), values)
    own = global_address(end.own)
    peers, found = [], []
    for sender in range(s.tp):
        found += places(own, fx.Int32(sender))
        peers += [fx.Int32(sender)] * _OUTPUTS
    wanted = [live] * len(found)
    words, _ = mailbox.collect(end, found, wanted, peers, sum_site(name), TIMES)
    parts = [word.bitcast(fx.Float32) for word in words]
    totals = parts[:_OUTPUTS]
    for sender in range(1, s.tp):
        part = parts[_OUTPUTS * sender :][:_OUTPUTS]
        totals = [t + p for t, p in zip(totals, part, strict=True)]
    return totals


@flyc.jit
def _send(end, sent, places, values):
    """Writer: this lane, on this rank. Reader: the same lane, on the peer. System scope."""
    if sent:
        for place, value in zip(places, values, strict=True):
            mailbox.post(end, place, value.bitcast(fx.Uint32))
