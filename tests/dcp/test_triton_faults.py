"""Faults of ranks in the Triton exchange: bounded waits, the right name on every rank that lives.

Whatever happens, a row that is written is right or all -1, and a rank with an error stays so.
"""

import pytest
import torch

pytest.importorskip("triton")

from dcp.mailbox_layout import ErrorWord
from dcp.plan import Results
from dcp.shard import Site
from gfx950_emu import Checks, CodeObject, Fault, Schedule
from gfx950_emu.elf import Elf
from tests.dcp.emulated_ranks import Ranks
from tests.dcp.triton_cases import Case, check, queue, without
from tests.emulator.mutate import mutants

slow = pytest.mark.slow
CASE = Case((700, 0, 129), rows=2)
SOON = 1  # ms of patience


def start(ranks: int = 2, form: Results = Results.CANDIDATES, **how):
    group = Ranks(CASE.geometry(ranks))
    return group, queue(group, CASE, form=form, patience_ms=SOON, **how)


def right_or_nothing(group, case, outs, ranks=None):
    """Each row is one rank's selection, -1 in all places, or not written."""
    for rank, out in zip(ranks or range(len(outs)), outs, strict=True):
        own = group.shard(rank).own_heads
        want = case.alone[own.start : own.stop]
        good = (out == want).all(-1) | (out == -1).all(-1) | (out >= 10**6).all(-1)
        assert good.all(), (rank, out, want)


def test_a_rank_that_never_starts():
    group, outs = start(only=range(1))
    report = group.run()
    report.raise_for_findings()
    assert group.errors()[0] == ErrorWord(Site.START, peer=1, rank=0, generation=1)
    assert (outs[0] == -1).all()
    # From then on launches end without work, and the first error stays.
    group.machine.queue.clear()
    again = queue(group, CASE, form=Results.CANDIDATES, patience_ms=SOON)
    group.run().raise_for_findings()
    assert group.errors() == [ErrorWord(Site.START, peer=1, rank=0, generation=1)] * 2
    assert all((out == -1).all() for out in again)
    assert group.generations() == [3, 2]


def test_a_rank_that_comes_late_is_awaited():
    group = Ranks(CASE.geometry(2))
    outs = queue(group, CASE, form=Results.CANDIDATES, delays={1: 2000})
    check(group, CASE, outs, group.run(Schedule("random", 1, (1, 500))))


def test_a_rank_that_left_a_launch_out():
    """The next layer's batch looks the same."""
    group, _ = start(layer=1, only=range(1))
    outs = queue(group, CASE, form=Results.CANDIDATES, patience_ms=SOON, layer=2, only=range(1, 2))
    group.run().raise_for_findings()
    first, second = group.errors()
    assert {first.site, second.site} == {Site.SHAPE}
    assert (first.rank, first.peer) in ((0, 1), (1, 0)) and first.generation == 1
    assert (outs[0] == -1).all()


@pytest.mark.parametrize(
    "other",
    [
        without(CASE, lens=(700, 0)),
        without(CASE, kept=(4, 1, 1)),
        without(CASE, lens=(700, 128, 129)),  # the host's facts are the same
    ],
    ids=["requests", "init_blocks", "num_blocks"],
)
def test_a_rank_with_another_batch(other):
    group, outs = start(only=range(1))
    outs += queue(group, other, form=Results.CANDIDATES, patience_ms=SOON, only=range(1, 2))
    group.run(Schedule("random", 2, (1, 900))).raise_for_findings()
    assert {e.site for e in group.errors()} == {Site.SHAPE}
    assert all((out == -1).all() for out in outs)


def test_the_odd_one_out_of_four_is_named():
    group = Ranks(CASE.geometry(4))
    outs = []
    for rank in range(4):
        layer = 7 if rank == 2 else 3
        outs += queue(group, CASE, form=Results.SCORES, patience_ms=SOON, layer=layer,
                      only=range(rank, rank + 1))  # fmt: skip
    group.run().raise_for_findings()
    assert all(e.site == Site.SHAPE for e in group.errors())
    assert {e.peer for e in group.errors()} == {2}


def killed(seed: int, ranks: int, form: Results, apart: int = 900) -> Site | None:
    """Kill rank 1 after some instructions; what the others then say."""
    group, outs = start(ranks, form)
    instructions = 200 + seed * apart
    fault = Fault("kill", 1, after_instructions=instructions)
    report = group.run(Schedule("random", seed, (1, 2000)), fault)
    report.raise_for_findings()
    right_or_nothing(group, CASE, outs)
    sites = set()
    for rank, error in enumerate(group.errors()):
        if rank == 1:
            continue
        whole = torch.equal(outs[rank], CASE.alone[list(group.shard(rank).own_heads)])
        assert error is not None or whole, (instructions, rank)
        if error is not None:
            assert (error.peer, error.generation) == (1, 1), error
            sites.add(Site(error.site))
    return min(sites, default=None)


def test_a_rank_that_is_killed():
    found = {killed(seed, 2, Results.CANDIDATES) for seed in (0, 1, 2, 3, 4, 9, 12, 15, 18, 60)}
    assert {Site.START, Site.QUERIES, Site.RESULTS} <= found, found


@slow
@pytest.mark.parametrize(("ranks", "form"), [(2, Results.SCORES), (4, Results.CANDIDATES)])
def test_a_rank_that_is_killed_anywhere(ranks, form):
    found = {killed(seed, ranks, form) for seed in range(60)}
    # The queries of few rows are soon sent.
    found |= {killed(seed, ranks, form, 60) for seed in range(15, 45)}
    assert {Site.START, Site.QUERIES, Site.RESULTS} <= found, found


# Without a protection: found


def mutated(group: Ranks, chosen) -> int:
    """Apply every mutation that `chosen` names to all queued launches at once; how many."""
    (compiled,) = group.compiled.values()
    original = compiled.code_object
    kernel = CodeObject.from_bytes(original).kernels[compiled.kernel]
    text, data, count = Elf(original).section(".text").offset, bytearray(original), 0
    for mutant in filter(chosen, mutants(original, kernel)):
        start = text + mutant.instruction.pc
        place = slice(start, start + mutant.instruction.size)
        data[place] = mutant.code_object[place]
        count += 1
    changed = CodeObject.from_bytes(bytes(data))
    for queued in group.machine.queue:
        queued.code_object, queued.kernel = changed, changed.kernels[compiled.kernel]
    return count


def _of(change: str, *starts: str):
    return lambda m: m.change.startswith(change) and m.instruction.text.startswith(starts)


PROTECTIONS = {
    "system scope of loads": _of("sc1 cleared", "global_load", "buffer_load"),
    "system scope of stores": _of("sc1 cleared", "global_store", "buffer_store"),
    "release of own keys": _of("dropped", "buffer_wbl2"),
    "acquire of own keys": _of("dropped", "buffer_inv"),
    "waits for memory": _of("dropped", "s_waitcnt vmcnt"),
}


def _shows(protection: str | None, seed: int) -> bool:
    """Whether a launch without a protection, where caches keep what they may, goes wrong."""
    group, outs = start(grid=4)
    group.machine.checks |= Checks.HELD
    if protection:
        assert mutated(group, PROTECTIONS[protection]) > 0
    report = group.run(Schedule("random", seed, (1, 3000)))
    right = all(
        torch.equal(out, CASE.alone[list(group.shard(rank).own_heads)])
        for rank, out in enumerate(outs)
    )
    return bool(report.findings or any(group.errors()) or not right)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_missing_protection_is_found(protection):
    assert not _shows(None, 0)
    assert any(_shows(protection, seed) for seed in range(50))
