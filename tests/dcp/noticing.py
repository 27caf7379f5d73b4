"""What notices that a kernel of the exchange is wrong: replays of several batches under adversarial
schedules, ranks that die or disagree, a rank that reached some of its peers alone.

    noticed(code_object, case)      the first thing that is wrong, or None
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dcp.mailbox_layout import ErrorWord
from dcp.shard import Site
from gfx950_emu import Checks, CodeObject, Fault, Schedule
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
# As CASE is compiled, several blocks a wave.
LONG = Case(lens=(128 * 61, 128 * 30 + 5), rows=4, grid=1)
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


def replays(data: bytes, case: Case, rows: tuple[int, ...], schedules: list) -> Iterator[str]:
    """What is wrong under schedules that all ranks survive."""
    # Three batches for four buffers: what lies in a buffer is another batch's.
    batches = [replace(case, seed=seed, rows=count) for seed, count in enumerate(rows)]
    group = Group(case, replace(case, rows=max(rows)).geometry())
    for layer, batch in enumerate(batches):
        group.queue(batch, layer=layer)
    with_code(group, data)
    for number, schedule in enumerate(schedules, 1):
        group.forget()
        # Caches that hold what they ever held, every other time: from the second run on.
        group.machine.checks = Checks.ALL | Checks.HELD * (number % 2 == 0)
        report = group.run(replace(schedule, max_instructions=MOST))
        good = report.ok and set(group.errors()) == {None}
        good = good and not any(group.wrong(batch) for batch in batches)
        if not good or group.generations() != [3 * number + 1] * case.ranks:
            yield f"replay {number}: {report.status} {group.errors()} {report.findings[:1]}"
            return


def faults(data: bytes, stores: Sequence[int]) -> Iterator[str]:
    """What is wrong when a rank of CASE dies, also before the so-manieth stores, or disagrees."""
    group = Group(CASE)
    group.queue()
    name = group.machine.queue[0].kernel.name
    for fault in (
        Fault("kill", LOST, after_instructions=0),
        Fault("kill", LOST, at=(name, "s_barrier"), arrival=9),
        Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=9),
        Fault("kill", LOST, at=(name, "buffer_wbl2"), arrival=1),
        *(Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=n) for n in stores),
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
    group.machine.checks = Checks.ALL | Checks.HELD
    report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
    named = [e and e.peer for e in group.errors()[:LOST]]
    soon = report.clock < 4 * PATIENCE_MS * CYCLES_A_MS  # the others' bound is 2, rank 0's own 12
    if not report.ok or named != [LOST] * LOST or not soon or not given_up_or_right(group):
        yield f"half pushed: {report.status} {group.errors()} {report.findings[:1]}"


def longer(data: bytes) -> Iterator[str]:
    """Several blocks of two requests for each wave: one after another, asked for ahead."""
    group = Group(LONG)
    group.queue()
    report = with_code(group, data).run(replace(HEALTHY[0], max_instructions=MOST))
    if not report.ok or group.wrong():
        yield f"longer: {report.status} {group.errors()} {report.findings[:1]}"


def slow_peer(data: bytes) -> Iterator[str]:
    """LOST stands still before it pushes, or before it sends results, and goes on: all others have
    looked for its words in vain meanwhile, with caches that hold what was looked at."""
    for where, arrival in (("s_barrier", 4 * CASE.grid), ("buffer_wbl2", 1)):
        group = Group(CASE)
        group.machine.checks = Checks.ALL | Checks.HELD
        group.queue()
        fault = Fault("delay", LOST, at=(group.machine.queue[0].kernel.name, where),
                      arrival=arrival, cycles=PATIENCE_MS * CYCLES_A_MS // 2)  # fmt: skip
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST), fault)
        if not report.ok or group.wrong() or set(group.errors()) != {None}:
            yield f"slow peer: {report.status} {group.errors()} {report.findings[:1]}"


def word_short(data: bytes) -> Iterator[str]:
    """Of what LOST sent before it died all is there but one word of each message, whichever it is:
    that one is waited for."""
    whole = Group(CASE)
    whole.queue()
    with_code(whole, data).run(FAULT)
    buffer = whole.geometry.buffer
    queries, results = buffer["queries"], buffer["results"]
    words, listed = whole.geometry.query_words, whole.geometry.result_words
    one_head = whole.geometry.rows * words
    # A lane looks at `words / 4` words of a query, and at a key and an id of a list.
    short = [(Site.QUERIES, range(queries.offset // 8 + LOST * one_head + i,
                                  queries.offset // 8 + (LOST + 1) * one_head, words // 4))
             for i in range(words // 4)]  # fmt: skip
    one_list = whole.geometry.rows * listed
    first = results.offset // 8 + LOST * one_list
    short += [(Site.RESULTS, [first + row * listed + i for row in range(len(CASE.lens))])
              for i in (3, CASE.topk + 3)]  # fmt: skip
    start = whole.geometry.mailbox["buffer1"].offset // 8
    for site, missing in short:
        group = Group(CASE)
        group.queue(ranks=range(LOST))
        for mine, theirs in zip(group.mailboxes[:LOST], whole.mailboxes, strict=False):
            for at, count in (
                (buffer["hello"].offset // 8 + LOST, 1),
                (queries.offset // 8 + LOST * one_head, one_head),
                (first, one_list if site is Site.RESULTS else 0),
            ):
                mine[start + at : start + at + count] = theirs[start + at : start + at + count]
            mine[[start + at for at in missing]] = 0
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
        named = [e and (e.site, e.peer) for e in group.errors()[:LOST]]
        if not report.ok or named != [(site, LOST)] * LOST or not given_up_or_right(group):
            yield f"a word short: {report.status} {group.errors()} {report.findings[:1]}"


def late(data: bytes) -> Iterator[str]:
    """Rank 0 looks for reports, stands still until it is missed, and finds all that it waits for:
    it hears of its being missed before it scores."""
    group = Group(CASE)
    group.queue()
    name = group.machine.queue[0].kernel.name
    waves = 4 * CASE.grid
    fault = Fault("delay", 0, at=(name, "s_barrier"), arrival=waves,
                  cycles=3 * PATIENCE_MS * CYCLES_A_MS)  # fmt: skip
    report = with_code(group, data).run(replace(FAULT, max_instructions=MOST), fault)
    words = set(group.errors())
    told = {int(m[group.geometry.mailbox["errors"].offset // 8]) for m in group.mailboxes}
    given_up = all(bool((group.selected(rank) == -1).all()) for rank in range(CASE.ranks))
    missed = [e and (e.peer, e.word) for e in words]
    if not report.ok or not given_up or missed != [(0, word) for word in told]:
        yield f"late: {report.status} {group.errors()} {told} {report.findings[:1]}"


def told_before(data: bytes) -> Iterator[str]:
    """Rank 0 finds another rank's report when it begins: all ranks end with that very word, and it
    sends nothing of the launch."""
    word = ErrorWord(Site.RESULTS, LOST, 1, 1)
    group = Group(CASE)
    group.queue()
    group.forget()
    errors = group.geometry.mailbox["errors"].offset // 8
    group.mailboxes[0][errors + 1] = word.word
    report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
    buffer = group.geometry.mailbox["buffer1"].offset + group.geometry.buffer["queries"].offset
    first = buffer // 8
    count = group.geometry.rows * group.geometry.query_words
    quiet = all(not mailbox[first : first + count].any() for mailbox in group.mailboxes)
    given_up = all(bool((group.selected(rank) == -1).all()) for rank in range(CASE.ranks))
    told = [int(m[errors]) == word.word for m in group.mailboxes]
    good = report.ok and group.errors() == [word] * CASE.ranks and all(told)
    if not good or not quiet or not given_up:
        yield f"told before: {report.status} {group.errors()} {told} {report.findings[:1]}"


def noticed(
    data: bytes, case: Case = CASE, rows: tuple[int, ...] = (1, 1, 1), *, every: bool = True,
    words: bool = False,
) -> str | None:  # fmt: skip
    """What notices that something is wrong with the code, None for nothing.

    rows: a request, of the three batches that are replayed. every: all schedules and faults, or a
    third of them. words: messages that lack one word, too.
    """
    try:
        runs = [replays(data, case, rows, HEALTHY if every else HEALTHY[::3])]
        stores = range(2, 26, 3) if every else (2, 14)
        if case == CASE:
            runs += [longer(data), slow_peer(data), told_before(data), late(data)]
            runs += [half_pushed(data), faults(data, stores)]
        runs += [word_short(data)] * words
        return next(itertools.chain(*runs), None)
    except (AssertionError, ValueError) as error:
        # Host and device disagree, guard words are written; an instruction that is not there.
        return repr(error)
