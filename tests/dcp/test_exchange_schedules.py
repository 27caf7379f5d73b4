"""Adversarial schedules, replays, generations at every wrap, stale words: always the same bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dcp.mailbox_layout import BUFFERS, SCRUB_WORDS, TAG_PERIOD, Geometry, tag
from gfx950_emu import Schedule
from tests.dcp.exchange_group import CANDIDATES, SCORES, Case, Group

LENS = (128 * 19 + 3, 0, 128 * 6)
CASES = [
    Case(lens=LENS),
    Case(lens=LENS, results=SCORES),
    Case(ranks=2, lens=LENS, rows=2),
    Case(ranks=8, lens=LENS, rows=3),
]
RANDOM = Schedule("random", 5, (1, 2000))


def schedules(count: int, ranks: int) -> list[Schedule]:
    """Different ones: in turn, random bursts short and long, priorities, everybody starved once."""
    found = [Schedule("round_robin", 0, (1, 1)), Schedule("round_robin", 0, (100_000, 100_000))]
    found += [Schedule("starve", 0, (1, 500), starve=(r, None, None)) for r in range(ranks)]
    for seed in range(count):
        chance = random.Random(seed)
        kind = chance.choice(["random", "random", "priority", "starve"])
        most = chance.choice([8, 300, 5000, 100_000])
        who = (chance.randrange(ranks), chance.choice([None, 0, 1]), chance.choice([None, 0, 3]))
        starve = {"starve": who} if kind == "starve" else {}
        found.append(Schedule(kind, seed, (1, most), **starve))
    return found[:count]


def replay(group: Group, schedule: Schedule = RANDOM, cases=()) -> None:
    """Run what is queued once more, and compare."""
    group.forget()
    group.run(schedule).raise_for_findings()
    assert set(group.errors()) == {None}, schedule
    for case in cases or [group.case]:
        assert group.wrong(case) == [], schedule


def under_schedules(case: Case, count: int) -> None:
    """One group for all schedules: each is another launch on the same memory."""
    group = Group(case)
    group.queue()
    for schedule in schedules(count, case.ranks):
        replay(group, schedule)
    assert group.generations() == [count + 1] * case.ranks


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.ranks}-{c.results.value}")
def test_schedules(case):
    under_schedules(case, 15)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.ranks}-{c.results.value}")
def test_many_schedules(case):
    under_schedules(case, 260)


# Replays


def shorten(group: Group, seed: int) -> None:
    """Other lengths for every case, some of them none."""
    for number, (case, blocks) in enumerate(group.num_blocks.items()):
        chance = random.Random(1000 * seed + number)
        most = [-(-n // 128) for n in case.lens]
        for request, widest in enumerate(most):
            n = 128 * chance.choice([0, widest, chance.randint(0, widest)])
            rows = [max(0, n - case.rows + i + 1) for i in range(case.rows)]
            part = slice(request * case.rows, (request + 1) * case.rows)
            blocks[part] = torch.tensor([-(-x // 128) for x in rows])


def replays(count: int) -> None:
    """A recorded list of layers, batches that shrink and grow from launch to launch."""
    big = Case(lens=(128 * 40, 128 * 3, 128 * 17, 0, 128), rows=2)
    small = Case(lens=(128 * 5,))
    scores = Case(lens=(128 * 20, 128 * 2), results=SCORES)
    geometry = replace(big.geometry(), result_words=64)
    group = Group(big, geometry)
    for layer, case in enumerate((big, small, scores, big, scores)):
        group.queue(case, layer=layer)
    for seed in range(count):
        shorten(group, seed)
        replay(group, Schedule("random", seed, (1, 3000)), (big, small, scores))
    assert group.generations() == [5 * count + 1] * 4


def test_replays_with_changing_lengths():
    replays(8)


@pytest.mark.slow
def test_two_hundred_replays():
    replays(200)


# Generations and stale words


@pytest.mark.parametrize("before", [4, 2**31, 2**32, 3 * 2**31, 2**33, 2**63], ids=hex)
def test_generations_just_below_every_wrap(before):
    case = CASES[0]
    for results in (CANDIDATES, SCORES) if before <= 2**32 else (CANDIDATES,):
        group = Group(replace(case, results=results), generation=before - 3)
        group.queue()
        for seed in range(6):
            replay(group, Schedule("random", seed, (1, 2000)))
        last = before + 3 if before < 2**63 else before + 3 - 2**64
        assert group.generations() == [last] * 4


def stale_words(geometry: Geometry, generation: int, seed: int) -> torch.Tensor:
    """Words as earlier launches left them: any tag but those of launches to come, any payload."""
    chance = random.Random(seed)
    ago = [1, 2, 3, 4, 5, 8, 12, 1 << 16, (1 << 31) - 1000]
    tags = [tag(generation - n) for n in ago] + [0]
    count = geometry.mailbox.nbytes // 8
    words = [
        (chance.choice(tags) << 32 | chance.choice([0, 0xFFFFFFFF, chance.getrandbits(32)]))
        for _ in range(count)
    ]
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in words])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.ranks}-{c.results.value}")
def test_stale_words_of_an_earlier_run(case):
    for seed, generation in enumerate((10**6, 2**31 + 3)):
        stale = stale_words(case.geometry(), generation, seed)
        group = Group(case, generation=generation, stale=stale)
        group.queue()
        for i in range(3):
            replay(group, Schedule("random", i, (1, 2000)))


def test_every_word_is_cleared_in_time():
    """After four times as many launches as chunks no word is older, whatever the batches were."""
    case = Case(ranks=2, heads=2, lens=(0,))
    geometry = replace(case.geometry(), rows=20)
    chunks = geometry.scrub_chunks
    assert chunks >= 4
    group = Group(case, geometry, generation=1000, stale=stale_words(geometry, 1000, 1))
    group.queue()
    first = geometry.mailbox["buffer0"].offset // 8
    for _ in range(4 * chunks - 1):
        replay(group)
    assert all(int((m[first:] != 0).sum()) > SCRUB_WORDS // 2 for m in group.mailboxes)
    replay(group)
    launches = {tag(1000 + n) for n in range(4 * chunks)}
    for mailbox in group.mailboxes:
        left = {int(w) >> 32 & 0xFFFFFFFF for w in mailbox[first:] if int(w)}
        assert left <= launches


@pytest.mark.parametrize("rows", [1, 64, 512, 4096])
def test_clearing_covers_each_buffer(rows):
    geometry = Geometry(4, 4, rows, 2048)
    geometry.check_tags()
    chunks = geometry.scrub_chunks
    assert geometry.buffer.nbytes == chunks * SCRUB_WORDS * 8 and chunks & (chunks - 1) == 0
    for start in (1, 2**31 - 7, 2**63 + 5):
        cleared = {((g + 2) % BUFFERS, (g >> 2) % chunks) for g in range(start, start + 4 * chunks)}
        assert len(cleared) == BUFFERS * chunks


def test_a_mailbox_that_outlives_its_tags_is_refused():
    geometry = Geometry(2, 2, 1 << 30, 2048)
    assert BUFFERS * geometry.scrub_chunks < TAG_PERIOD
    with pytest.raises(ValueError, match="mailbox: expected fewer words"):
        Geometry(2, 2, 1 << 34, 2048).check_tags()


def test_a_new_group_on_the_memory_of_one_that_failed():
    """The generation is beyond all of the old ones; the errors are cleared."""
    case = CASES[0]
    old = Group(case)
    old.queue()
    replay(old)
    old.queue(ranks=range(3), layer=1)  # rank 3 leaves it out: words of a launch that failed
    old.run(RANDOM)
    assert None not in old.errors()[:3]
    group = Group(case, generation=max(old.generations()) + 4)
    first = group.geometry.mailbox["buffer0"].offset // 8
    for mine, left in zip(group.mailboxes, old.mailboxes, strict=True):
        mine[first:] = left[first:]
    group.queue()
    for _ in range(5):
        replay(group)
