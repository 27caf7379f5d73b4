"""What notices that a kernel of the exchange is wrong: replays of several batches under adversarial
schedules, ranks that die or disagree, a rank that reached some of its peers alone.

    noticed(code_object, case)      the first thing that is wrong, or None
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from gfx950_emu import CodeObject, Fault, Schedule
from tests.dcp.exchange_group import PATIENCE_MS, Case, Group

CASE = Case(lens=(128 * 11 + 3, 0, 128 * 4))
HEALTHY = [
    Schedule("random", 1, (1, 40)),
    Schedule("random", 2, (1, 3000)),
    Schedule("starve", 0, (1, 500), starve=(1, None, None)),
    Schedule("priority", 3, (1, 2000)),
    Schedule("round_robin", 0, (1, 1)),
    Schedule("random", 4, (1, 200)),
    Schedule("starve", 5, (1, 300), starve=(None, 1, 0)),
    Schedule("starve", 6, (1, 300), starve=(None, 1, None)),
    Schedule("random", 6, (1, 8)),
    *(Schedule("starve", seed, (1, 200), starve=(None, None, seed)) for seed in range(1, 4)),
]
FAULT = Schedule("random", 5, (1, 300), spin_rounds=1000)
# Two rows whose keys share lines, read by one workgroup, written by two.
SHARED_LINES = Case(ranks=2, heads=2, lens=(128 * 9, 128 * 9))
CYCLES_A_MS = 2_400_000
LOST = 3  # the rank that dies
MOST = 20_000_000  # wave-instructions: a mutant may run for ever


def with_code(group: Group, data: bytes) -> Group:
    """Every launch that is queued runs this code instead."""
    made = CodeObject.from_bytes(data)
    for queued in group.machine.queue:
        queued.code_object, queued.kernel = made, made.kernels[queued.kernel.name]
    group.forget()
    return group


def given_up_or_right(group: Group) -> bool:
    """No survivor's row is anything but right or -1 throughout; LOST is the one that died."""
    return all(
        bool(((group.selected(r) == group.wanted(r)).all(-1) | (group.selected(r) == -1).all(-1))
             .all())
        for r in range(CASE.ranks) if r != LOST
    )  # fmt: skip


def replays(data: bytes, case: Case, rows: tuple[int, ...]) -> Iterator[str]:
    """What is wrong under schedules that all ranks survive."""
    # Three batches for four buffers: what lies in a buffer is another batch's.
    batches = [replace(case, seed=seed, rows=count) for seed, count in enumerate(rows)]
    group = Group(case, replace(case, rows=max(rows)).geometry())
    for layer, batch in enumerate(batches):
        group.queue(batch, layer=layer)
    with_code(group, data)
    for number, schedule in enumerate(HEALTHY, 1):
        group.forget()
        report = group.run(replace(schedule, max_instructions=MOST))
        good = report.ok and set(group.errors()) == {None}
        good = good and not any(group.wrong(batch) for batch in batches)
        if not good or group.generations() != [3 * number + 1] * case.ranks:
            yield f"replay {number}: {report.status} {group.errors()} {report.findings[:1]}"
            return


def faults(data: bytes) -> Iterator[str]:
    """What is wrong when a rank of CASE dies or disagrees."""
    group = Group(CASE)
    group.queue()
    name = group.machine.queue[0].kernel.name
    for fault in (
        Fault("kill", LOST, after_instructions=0),
        Fault("kill", LOST, at=(name, "s_barrier"), arrival=9),
        Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=9),
        Fault("kill", LOST, at=(name, "buffer_wbl2"), arrival=1),
        *(
            Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=n)
            for n in range(2, 26, 3)
        ),
    ):
        group = Group(CASE)
        group.queue()
        group.queue(layer=1)
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST), fault)
        named = [e and e.peer for r, e in enumerate(group.errors()) if r != LOST]
        if not report.ok or named != [LOST] * (CASE.ranks - 1) or not given_up_or_right(group):
            yield f"killed: {report.status} {group.errors()} {report.findings[:1]}"
    for layer, lengths in ((1, None), (0, torch.tensor([12, 0, 3]))):
        group = Group(CASE)
        group.queue(ranks=(0, 1, 3))
        if lengths is not None:
            group.num_blocks[CASE] = lengths.int()
        group.queue(ranks=(2,), layer=layer)
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
        if not report.ok or [e and e.peer for e in group.errors()] != [2] * 4:
            yield f"disagreement: {report.status} {group.errors()} {report.findings[:1]}"


def half_pushed(data: bytes) -> Iterator[str]:
    """LOST was seen by all ranks and gave its queries to rank 0 alone: that one can only wait for
    the others, which wait for LOST, and must hear from them whom they miss."""
    whole = Group(CASE)
    whole.queue()
    with_code(whole, data).run(FAULT)
    group = Group(CASE)
    group.queue(ranks=range(LOST))
    buffer = group.geometry.mailbox["buffer1"].offset
    hello, queries = (group.geometry.buffer[name].offset + buffer for name in ("hello", "queries"))
    count = group.geometry.rows * group.geometry.query_words
    first = queries // 8 + LOST * count
    for rank in range(LOST):
        mine, theirs = group.mailboxes[rank], whole.mailboxes[rank]
        mine[hello // 8 + LOST] = theirs[hello // 8 + LOST]
        if rank == 0:
            mine[first : first + count] = theirs[first : first + count]
    report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
    named = [e and e.peer for e in group.errors()[:LOST]]
    soon = report.clock < 4 * PATIENCE_MS * CYCLES_A_MS  # the others' bound is 2, rank 0's own 12
    if not report.ok or named != [LOST] * LOST or not soon or not given_up_or_right(group):
        yield f"half pushed: {report.status} {group.errors()} {report.findings[:1]}"


def noticed(data: bytes, case: Case = CASE, rows: tuple[int, ...] = (1, 1, 1)) -> str | None:
    """What notices that something is wrong with the code, None for nothing.

    rows: a request, of the three batches that are replayed."""
    try:
        runs = [replays(data, case, rows)]
        runs += [half_pushed(data), faults(data)] if case == CASE else []
        return next(itertools.chain(*runs), None)
    except (AssertionError, ValueError) as error:
        # Host and device disagree, guard words are written; an instruction that is not there.
        return repr(error)
