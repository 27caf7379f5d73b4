"""Ranks that die, stand still, leave launches out or disagree: a bounded, named error on every
survivor, and never a wrong selection."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dcp.mailbox_layout import ErrorWord
from dcp.shard import Site
from gfx950_emu import Fault, Schedule
from rocm_msa.device.mailbox import MORE_TIMES
from tests.dcp.exchange_group import PATIENCE_MS, SCORES, Case, Group

CYCLES_A_MS = 2_400_000
LENS = (128 * 19 + 3, 0, 128 * 6)
FOUR = Case(lens=LENS)
CASES = [FOUR, Case(lens=LENS, results=SCORES), Case(ranks=2, lens=LENS, rows=2),
         Case(ranks=8, lens=LENS, rows=3)]  # fmt: skip
SCHEDULE = Schedule("random", 5, (1, 300), spin_rounds=1000)


def ids(case: Case) -> str:
    return f"{case.ranks}-{case.results.value}"


def two_launches(case: Case) -> Group:
    group = Group(case)
    group.queue()
    group.queue(layer=1)
    group.forget()
    return group


def run(group: Group, fault: Fault | None = None, schedule: Schedule = SCHEDULE):
    """All launches end, within the bounds of their waits, and nothing is found."""
    report = group.run(schedule, fault)
    report.raise_for_findings()
    launches = len(group.machine.queue) // group.case.ranks + 1
    most = (4 + MORE_TIMES) * PATIENCE_MS * launches + (fault.cycles if fault else 0) / CYCLES_A_MS
    assert report.clock < (most + 1) * CYCLES_A_MS
    return report


def never_wrong(group: Group, lost: int | None = None) -> None:
    """A selection is right, or -1 in all places and the rank has an error; of a rank that died,
    what it did not come to is there too."""
    for rank, error in enumerate(group.errors()):
        wanted, got = group.wanted(rank), group.selected(rank)
        right = (got == wanted).all(-1)
        given_up = (got == -1).all(-1)
        if rank == lost:
            # Its last stores may be lost one by one: right ids, or what was there before.
            assert bool(((got == wanted) | (got == -1) | (got == -7)).all())
            continue
        assert bool((right | given_up).all()), rank
        assert bool(right.all()) or error is not None, rank


def named(group: Group, lost: int, *sites: Site, generation: int | None = None) -> list[ErrorWord]:
    """Every survivor's error, which names `lost`."""
    found = [e for rank, e in enumerate(group.errors()) if rank != lost]
    assert None not in found
    assert {e.peer for e in found} == {lost}, found
    assert not sites or {Site(e.site) for e in found} <= set(sites), found
    assert generation is None or {e.generation for e in found} == {generation}
    assert all(e.rank != lost for e in found)
    return found


# Ranks that die


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_rank_that_never_starts(case):
    group = two_launches(case)
    run(group, Fault("kill", 1, after_instructions=0))
    named(group, 1, Site.START, generation=1)
    assert all(bool((group.selected(r) == -1).all()) for r in range(case.ranks) if r != 1)


@pytest.mark.parametrize("part", [0.02, 0.06, 0.12, 0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_rank_that_dies_on_the_way(case, part):
    probe = two_launches(case)
    each = run(probe).launches[1].executed
    group = two_launches(case)
    run(group, Fault("kill", 1, after_instructions=int(part * each)))
    named(group, 1)
    never_wrong(group, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_rank_that_dies_anywhere(case):
    most = 2 * run(two_launches(case)).launches[0].executed
    for seed in range(150):
        group = two_launches(case)
        fault = Fault.draw(seed, case.ranks, most)
        run(group, fault, Schedule("random", seed, (1, 300), spin_rounds=1000))
        never_wrong(group, fault.rank)
        # A rank that was through with its last launch hears of it at the next one.
        group.machine.queue = [q for q in group.machine.queue if q.rank != fault.rank]
        run(group)
        named(group, fault.rank)


@pytest.mark.parametrize("arrival,sites", [
    (1, {Site.START, Site.QUERIES}),  # before its first message
    (3, {Site.START, Site.QUERIES}), (7, {Site.QUERIES, Site.START, Site.RESULTS}),
])  # fmt: skip
def test_a_rank_that_dies_while_it_pushes(arrival, sites):
    """Some ranks have its queries, others do not; all name the dead one, not each other."""
    for case in CASES:
        group = two_launches(case)
        name = group.machine.queue[0].kernel.name
        run(group, Fault("kill", 0, at=(name, "global_store_dwordx2"), arrival=arrival))
        named(group, 0, *sites, generation=1)
        never_wrong(group, 0)


def test_a_rank_that_dies_after_all_was_sent():
    """The others have what they need; the next launch misses it."""
    for case in CASES:
        group = Group(case)
        group.queue()
        group.forget()
        name, waves = group.machine.queue[0].kernel.name, case.grid * 4
        fault = Fault("kill", 1, at=(name, "s_endpgm"), arrival=waves)
        run(group, fault)
        assert set(group.errors()) == {None}
        never_wrong(group, 1)
        group.machine.queue = [q for q in group.machine.queue if q.rank != 1]
        group.forget()
        run(group)
        named(group, 1, Site.START, generation=2)
        assert all(bool((group.selected(r) == -1).all()) for r in range(case.ranks) if r != 1)


def test_after_an_error_launches_end_at_once():
    group = two_launches(FOUR)
    run(group, Fault("kill", 3, after_instructions=0))
    before = group.errors()
    group.machine.queue = [q for q in group.machine.queue if q.rank != 3]
    group.forget()
    report = run(group)
    assert report.clock < CYCLES_A_MS  # nobody waits any more
    assert group.errors() == before  # the first error stays
    assert all(bool((group.selected(r) == -1).all()) for r in range(3))


# Ranks that are late


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_rank_that_is_late_but_within_the_bound(case):
    group = two_launches(case)
    run(group, Fault("delay", 1, after_instructions=100, cycles=PATIENCE_MS * CYCLES_A_MS // 2))
    assert set(group.errors()) == {None}
    assert group.wrong() == []


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_rank_that_is_too_late(case):
    """It finds out when it comes, and selects nothing either."""
    group = two_launches(case)
    run(group, Fault("delay", 1, after_instructions=20, cycles=9 * PATIENCE_MS * CYCLES_A_MS))
    named(group, 1, Site.START, generation=1)
    assert group.errors()[1] is not None and group.errors()[1].peer == 1
    assert all(bool((group.selected(r) == -1).all()) for r in range(case.ranks))


# Ranks that disagree


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_leaves_a_launch_out(ranks):
    """The next layer looks the same but for its name. With more than two ranks the rank itself
    is told that it is the odd one."""
    case = Case(ranks=ranks, lens=LENS)
    lost, others = ranks - 1, range(ranks - 1)
    group = Group(case)
    group.queue()
    group.queue(ranks=others, layer=1)
    group.queue(layer=2)
    group.forget()
    run(group)
    errors = group.errors()
    assert None not in errors
    assert {Site(e.site) for e in errors} == {Site.SHAPE}
    assert {e.generation for e in errors} == {2}
    assert all(e.peer != e.rank or ranks > 2 for e in errors)
    assert ranks == 2 or {e.peer for e in errors} == {lost}
    assert all(bool((group.selected(r) == -1).all()) for r in range(ranks))


def test_a_rank_that_leaves_the_last_launch_out():
    group = Group(FOUR)
    group.queue()
    group.queue(ranks=(0, 1, 3), layer=1)
    run(group)
    named(group, 2, Site.START, generation=2)


OTHER = {
    "a request less": replace(FOUR, lens=LENS[:2]),
    "other rows": replace(FOUR, rows=2),
    "other kept blocks": replace(FOUR, init=1),
    "other form": replace(FOUR, results=SCORES),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_rank_with_another_batch(what):
    group = Group(FOUR, replace(FOUR.geometry(spare_rows=9), slots=9))
    group.queue(FOUR, ranks=(0, 1, 3))
    group.queue(OTHER[what], ranks=(2,))
    group.forget()
    run(group)
    errors = group.errors()
    assert None not in errors
    assert {(Site(e.site), e.peer) for e in errors} == {(Site.SHAPE, 2)}
    for rank in range(4):
        assert bool((group.selected(rank, OTHER[what] if rank == 2 else FOUR) == -1).all())


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_with_other_lengths(seed):
    """What only the device knows: one row's count of blocks is another on one rank."""
    chance = random.Random(seed)
    case = Case(lens=(128 * 5, 0, 128 * 7, 128 * 2), rows=2)
    group = Group(case)
    group.queue(ranks=(0, 2, 3))
    mine = group.num_blocks.pop(case).clone()
    row = chance.randrange(len(mine))
    mine[row] = chance.choice([n for n in range(8) if n != int(mine[row])])
    group.num_blocks[case] = mine
    group.queue(ranks=(1,))
    group.forget()
    run(group)
    assert {(Site(e.site), e.peer) for e in group.errors()} == {(Site.SHAPE, 1)}
    assert all(bool((group.selected(r) == -1).all()) for r in range(4))


def test_exchanged_counts_are_found_too():
    """Two rows' counts in the other order are another batch."""
    case = Case(lens=(128 * 5, 128 * 7))
    group = Group(case)
    group.queue(ranks=(0, 1, 2))
    group.num_blocks[case] = torch.tensor([7, 5], dtype=torch.int32)
    group.queue(ranks=(3,))
    run(group)
    assert {(Site(e.site), e.peer) for e in group.errors()} == {(Site.SHAPE, 3)}
