"""The index exchange inside the layer: bit for bit what ranks find that scan everything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gfx950_emu import Fault, Schedule
from mono_kernel import plan
from mono_kernel.faults import exchange_site, site_name
from mono_kernel.shapes import Shape
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.errors import ConfigError
from tests.launcher.emulated import SCHEDULES
from tests.mono_kernel import regions
from tests.mono_kernel.cases import small_shape
from tests.mono_kernel.emulated import MAX_BLOCKS, RANDOM, Group
from tests.mono_kernel.steps import RAGGED, Step

SAME = ("index_q", "selected", "residual_out", "hidden_out")


def group_of(tp: int, lens, per: int, exchange: bool = True, **how) -> Group:
    return Group(Step("mxfp4", tp, lens, per, seed=len(lens), exchange=exchange, **how))


def check(tp: int, lens, per: int, schedule: Schedule = RANDOM, **how) -> None:
    group, alone = (group_of(tp, lens, per, exchange, **how) for exchange in (True, False))
    group.run(schedule)
    regions.check(group)
    alone.run()
    for name in SAME:
        for rank in range(tp):
            got, want = (g.region(name, rank).view(torch.uint8) for g in (group, alone))
            assert torch.equal(got, want), (name, rank)


def test_four_ranks():
    """21 blocks of one request, fewer than ranks of another, and of rows, too."""
    check(4, [2690, 129], [1, 3])


def test_two_ranks_hold_each_head():
    """As eight ranks do of M3's four. Both take their head's scores of each block from one rank."""
    check(4, [2690, 129], [1, 3], kv_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (4, 4), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("lens", "per"), [([642, 129], 2), ([0, 3000], 8), ([130] * 16, 1), RAGGED]
)
def test_batches(tp, kv_heads, lens, per):
    check(tp, lens, per, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_schedules(schedule, kv_heads):
    check(2, [2690, 129], 2, schedule, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("generation", [1, 2**31 - 3, 2**32 - 2])
def test_steps_in_a_row(generation, kv_heads):
    """Buffers that take turns, requests that grow, and a wrap of the tags."""
    group = group_of(4, [2046, 250], 2, room=12, kv_heads=kv_heads)
    for r in group.ranks:
        r.memory.state[:8].view(torch.int64)[0] = generation
    for _ in range(6):
        group.run()
        regions.check(group)
        group.next()


@pytest.mark.slow
def test_old_results_are_cleared_in_turns():
    """Words that no batch writes are gone after every part of both buffers had its turn."""
    group = group_of(2, [130], 1)
    where = plan.mailbox_layout(group.build, MAX_BLOCKS)["results"]
    words = where.nbytes // 8
    parts = -(-words // 2 // plan.SCRUB_WORDS)
    for box in group.boxes:
        box[where.offset : where.end].fill_(0x55)
    for _ in range(2 * parts + 1):
        group.run()
    for box in group.boxes:
        left = box[where.offset : where.end].view(torch.int64)
        assert not (left == 0x5555555555555555).any()


def test_a_rank_that_stays_away_is_named():
    group = group_of(4, [2690, 129], 1)
    machine = group.machine(RANDOM)
    machine.inject(Fault("kill", 2, after_instructions=0))
    assert not machine.run().findings
    for rank, error in enumerate(group.errors()):
        if rank != 2:
            assert error.peer == 2 and error.site == exchange_site("queries"), str(error)
            assert "index exchange's queries" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_dies_anywhere(seed):
    group = group_of(4, [2690, 129], 1)
    count = sum(group.machine(RANDOM).run().launches[0].instructions.values())
    group = group_of(4, [2690, 129], 1)
    fault = Fault.draw(seed, 4, count)
    machine = group.machine(Schedule("random", seed, (1, 500)))
    machine.inject(fault)
    report = machine.run()
    assert not report.findings, report.findings
    errors = [e for rank, e in enumerate(group.errors()) if rank != fault.rank]
    assert not any(errors) or all(e is not None and e.peer == fault.rank for e in errors)


# Plan


def test_places_and_sites():
    shape = small_shape(4, exchange=True)
    assert shape.name != small_shape(4).name and shape.scored_heads == 4
    layout = plan.mailbox_layout(shape, 100)
    assert layout["queries"].nbytes == 8 * 4 * 16 * 64
    assert layout["results"].nbytes == 8 * 2 * 16 * 100
    # Only the last region depends on the number of blocks.
    assert [r.offset for r in layout] == [r.offset for r in plan.mailbox_layout(shape, 7)]
    names = {site_name(exchange_site(part)) for part in plan.EXCHANGED}
    assert len(names) == 2 and all("index exchange" in name for name in names)


def test_who_can_share():
    """M3's four index heads, on ranks of their own or two a head."""
    for tp in (2, 4, 8):
        sharing = Shape.of(MINIMAX_M3, tp).sharing()
        assert sharing.exchange and sharing.scored_heads == 4
    with pytest.raises(ConfigError, match="tp with exchange: expected > 1, got 1"):
        dataclasses.replace(Shape.of(MINIMAX_M3, 1), exchange=True)
    more = dataclasses.replace(Shape.of(MINIMAX_M3, 2), kv_heads=3, index_heads=3, q_heads=48)
    with pytest.raises(ConfigError, match="scored_heads: expected <= 4, of all ranks, got 6"):
        dataclasses.replace(more, exchange=True)
    assert more.sharing() is None


def test_it_pays_for_long_contexts():
    shape = dataclasses.replace(Shape.of(MINIMAX_M3, 4), exchange=True)
    found = [plan.exchange_threshold(shape, n, n) for n in (1, 4, 16)]
    assert found == sorted(found, reverse=True) and 64 < found[-1] < found[0] < 8192
    # More rows of a request read no page again, and send more words.
    assert plan.exchange_threshold(shape, 1, 4) > found[0]


def test_a_batch_wider_than_the_mailboxes_is_refused():
    group = group_of(2, [130], 1)
    group.ranks[0].memory = dataclasses.replace(group.ranks[0].memory, max_blocks=2)
    with pytest.raises(ValueError, match=r"block_table.shape\[1\]: expected <= 2 "):
        group.arguments(0)
