"""Steps in a row, wraps of generations, and ranks that die, lag or stay away, in the emulator."""

from __future__ import annotations

import pickle

import pytest
import torch

from gfx950_emu import Fault, Schedule
from mono_kernel import plan
from mono_kernel.faults import MonoError, decode, meeting_site, site_name, sum_site
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import PATIENCE, RANDOM, Group
from tests.mono_kernel.steps import Step

RANKS = 4
CYCLES_A_MS = 2_400_000


def group_of(lens=(642, 129), per=2, **options) -> Group:
    return Group(Step("mxfp4", RANKS, list(lens), per, seed=4, **options))


def test_error_words():
    word = 5 << 56 | 3 << 48 | 2 << 40 | 1 << 32 | 77
    error = decode(word)
    assert (error.rank, error.peer, error.site, error.generation) == (2, 3, 5, 77)
    assert str(decode(word - (1 << 64))) == str(error)
    assert "between phases attend and join" in str(error)
    assert decode(0) is None
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and isinstance(again, MonoError)
    sites = [meeting_site(n) for n in range(plan.HAND_OFFS)] + [sum_site(p) for p in plan.SITES]
    assert len({site_name(site) for site in sites}) == len(sites) == max(sites) < 256
    assert "for rank 1 at the sum over ranks in phase down" in str(
        MonoError(0, 1, sum_site("down"), 9)
    )


@pytest.mark.slow
def test_steps_in_a_row_over_block_and_list_edges():
    """2046 keys and on: the 17th block begins, whose newest tokens this very launch inserts."""
    group = group_of((2045, 126), 2, room=16)
    for _ in range(5):
        group.run()
        regions.check(group)
        group.next()


@pytest.mark.slow
@pytest.mark.parametrize("generation", [2**31 - 2, 2**32 - 2, 2**33 + 5])
def test_wraps(generation):
    """Tags have 31 bits of the generation, flags all of it."""
    group = group_of((130,), 1, room=8)
    for r in group.ranks:
        r.memory.state[:8].view(torch.int64)[0] = generation
    for _ in range(4):
        group.run()
        regions.check(group)
        group.next()
    assert int(group.ranks[0].memory.state[:8].view(torch.int64)) == generation + 4


def test_words_of_rows_that_nobody_has_are_sent_in_turns():
    """Launch g sends the batch's rows, and of row g mod 16 the tile g / 16 mod tiles."""
    group = group_of((130,), 1)
    tiles = group.build.hidden // 16
    launch = 16 * (2 * tiles + 3) + 5
    for r in group.ranks:
        r.memory.state[:8].view(torch.int64)[0] = launch
    group.run()
    for site in plan.SITES:
        region = plan.mailbox_layout(group.build)[site]
        for box in group.boxes:
            words = box[region.offset : region.end].view(torch.int64).view(RANKS, tiles, 4, 4, 16)
            sent = (words >> 32 & 0x7FFFFFFF) == launch
            assert sent[..., 0].all() and sent[:, 3, :, :, 5].all()
            assert sent.sum() == RANKS * 16 * (tiles + 1)


def faulty(group: Group, fault: Fault, schedule: Schedule = RANDOM):
    machine = group.machine(schedule)
    machine.inject(fault)
    return machine.run()


def check_named(group: Group, culprit: int) -> None:
    """Every survivor's word names the rank that is gone, and the launch ended."""
    for rank, error in enumerate(group.errors()):
        if rank == culprit:
            continue
        assert error is not None, rank
        assert error.peer == culprit and error.generation == 1, (rank, str(error))
        assert error.site in [sum_site(site) for site in plan.SITES], str(error)


def test_a_rank_that_stays_away_is_named_by_all():
    group = group_of((130,), 1)
    report = faulty(group, Fault("kill", 2, after_instructions=0))
    assert not report.findings, report.findings
    check_named(group, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_dies_anywhere(seed):
    """Unless it died after its last word, all others end with an error that names it."""
    group = group_of((642,), 2)
    total = group.machine(RANDOM).run().launches[0]
    count = sum(total.instructions.values())
    group = group_of((642,), 2)
    fault = Fault.draw(seed, RANKS, count)
    report = faulty(group, fault, Schedule("random", seed, (1, 500)))
    assert not report.findings, report.findings
    errors = [e for rank, e in enumerate(group.errors()) if rank != fault.rank]
    if any(errors):
        check_named(group, fault.rank)
    else:
        found = [r for rank, r in enumerate(group.ranks) if rank != fault.rank]
        assert not any(r.hidden_out.isnan().any() for r in found)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2000, 20000, 60000])
def test_a_rank_that_lags_changes_nothing(at):
    cycles = PATIENCE * CYCLES_A_MS // 2
    group = group_of()
    report = faulty(group, Fault("delay", 1, after_instructions=at, cycles=cycles))
    report.raise_for_findings()
    assert group.errors() == [None] * RANKS
    regions.check(group)


def test_later_launches_end_at_once_and_say_the_same():
    group = group_of((130,), 1)
    faulty(group, Fault("kill", 0, after_instructions=0))
    before = [str(error) for error in group.errors()]
    report = group.machine(RANDOM).run()
    assert not report.findings, report.findings
    assert [str(error) for error in group.errors()][1:] == before[1:]
    assert report.clock < PATIENCE * CYCLES_A_MS
