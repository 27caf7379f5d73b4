"""Where things lie and who owns them, as traced code of the exchange's phases on gfx950.

`a` is a launch: device/mailbox.py's `end` with the kernel's arguments, `buffer`, `total`; the whole
is a `wave.Scalars`, since the phases together need more scalar registers than there are.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.expr as fx

from dcp.exchange_gfx950 import QUERY_WORDS, Build
from dcp.mailbox_layout import BUFFERS, SCRUB_WORDS, WORD, Geometry
from rocm_msa.device import mailbox
from rocm_msa.device.memory import Bytes, global_address
from rocm_msa.device.wave import WAVE
from rocm_msa.ops.flydsl_host import SCORE_WAVES

THREADS = SCORE_WAVES * WAVE
# Bounds of the waits in units of the launch's patience: who misses a message itself reports first.
START_TIMES, QUERY_TIMES, OWN_TIMES, RESULT_TIMES = 1, 2, 3, 4


def places(build: Build) -> SimpleNamespace:
    """Offsets that do not depend on how much fits into the memory."""
    small = Geometry(build.ranks, build.heads, 1, 1, build.topk, QUERY_WORDS)
    state, found = small.state, SimpleNamespace()
    for name in ("generation", "error", "arrivals", "flags", "keys"):
        setattr(found, name, state[name].offset)
    found.buffers = small.mailbox["buffer0"].offset
    found.hello, found.queries = small.buffer["hello"].offset, small.buffer["queries"].offset
    return found


def row_range(a, row) -> tuple[fx.Int32, fx.Int32, fx.Int32]:
    """(init, last, nb) of a row: its candidates are the blocks [init, last)."""
    count = global_address(a.num_blocks).load(fx.Int32, offset=fx.Int64(row) * 4)
    count = fx.max(fx.min(count, a.max_blocks), fx.Int32(0))
    init = fx.min(a.init_blocks, count)
    return init, fx.max(count - a.local_blocks, init), count


def owned_blocks(a, rank, blocks):
    """How many of the first `blocks` blocks a rank scores."""
    return fx.max(blocks - rank + (a.ranks - 1), fx.Int32(0)) // a.ranks


def query_at(a, head, row: fx.Int64) -> fx.Int64:
    """Offset in a buffer of the query of (head, row)."""
    return (fx.Int64(head) * fx.Int64(a.max_rows) + row) * (QUERY_WORDS * WORD) + a.places.queries


def result_at(a, own_head, sender, row: fx.Int64) -> fx.Int64:
    """Offset in a buffer of what `sender` found for (own head, row)."""
    index = (fx.Int64(own_head) * a.ranks + fx.Int64(sender)) * fx.Int64(a.max_rows) + row
    queries = fx.Int64(a.max_rows) * (a.shard.heads * QUERY_WORDS * WORD)
    return index * (fx.Int64(a.result_words) * WORD) + queries + a.places.queries


def buffer_at(a, number: fx.Int64) -> fx.Int64:
    """Offset in a mailbox of the buffer of launch `number`."""
    return (number & (BUFFERS - 1)) * (fx.Int64(a.chunks) * (SCRUB_WORDS * WORD)) + a.places.buffers


def share(a) -> fx.Int32:
    """Blocks of a workgroup's part."""
    return fx.max((a.total + a.workgroups - 1) // a.workgroups, fx.Int32(1))


def first_owner(a, head):
    return head // a.shard.heads_per_rank * a.shard.replicas


def targets(a, head, row: fx.Int64) -> list[Bytes]:
    """Where this rank's results of (head, row) go: in the mailbox of each owner."""
    at = a.buffer + result_at(a, head % a.shard.heads_per_rank, a.rank, row)
    first = first_owner(a, head)
    return [mailbox.mailbox_of(a, first + i).at(at) for i in range(a.shard.replicas)]


def kept_keys(a, head, row: fx.Int64) -> Bytes:
    """This rank's keys of (head, row), uint32 [slots]."""
    index = (fx.Int64(head) * fx.Int64(a.max_rows) + row) * fx.Int64(a.slots)
    return global_address(a.state).at(index * 4 + a.places.keys)
