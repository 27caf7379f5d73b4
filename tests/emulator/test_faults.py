"""Ranks that die or stand still part-way: what the others make of it, and that it replays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gfx950_emu import Fault, Machine, Schedule, launch
from tests.emulator.assembler import kernel
from tests.emulator.corpus import BY_NAME
from tests.emulator.kernels_allreduce import WAIT_TICKS
from tests.emulator.test_machine_checks import GRID_BARRIER
from tests.emulator.test_machine_corpus import differences, queue

CYCLES_A_TICK = 24  # of the 100 MHz clock
TIMEOUT = CYCLES_A_TICK * WAIT_TICKS
RANDOM = Schedule("random", 5, (1, 300), spin_rounds=1000)
TARGET, STATUS = 1, 3


def go(name: str, *faults: Fault, launches: int = 1):
    """Of all-reduces one after another: the report, the last one's arguments by rank, and what
    differs from PyTorch."""
    case = BY_NAME[name]
    machine = Machine(schedule=RANDOM)
    for seed in range(launches):
        args = case.make_args(seed)
        expected = case.expected(args)
        queue(machine, case, args)
    for fault in faults:
        machine.inject(fault)
    return machine.run(), args, differences(case, args, expected)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("lost", [0, 3])
def test_bounded_waits_end_and_name_the_dead_rank(ranks, lost):
    report, args, wrong = go(
        f"flydsl_allreduce_words_{ranks}", Fault("kill", lost, after_instructions=0)
    )
    assert report.ok, report.findings  # the survivors' kernels end
    assert report.clock > TIMEOUT
    status = [int(a[STATUS]) for a in args]
    assert status == [0 if rank == lost else lost + 1 for rank in range(ranks)]
    assert {rank for rank, _, _ in wrong} == set(range(ranks))
    assert report.faults == (
        f"rank {lost} was killed at cycle 0, after 0 of its instructions and 0 of its launches",
    )


@pytest.mark.parametrize("ranks", [4, 8])
def test_unbounded_waits_are_a_deadlock_of_the_survivors(ranks):
    report, _, _ = go(f"flydsl_allreduce_flags_{ranks}", Fault("kill", 2, after_instructions=10))
    assert report.status == "deadlock"
    found = [f for f in report.findings if f.kind == "deadlock"]
    assert {f.rank for f in found} == set(range(ranks)) - {2}
    assert all(f.kernel == f"allreduce_flags_{ranks}" and f.text and f.pc for f in found)
    assert any("polling" in f.detail for f in found)
    assert any("at a barrier" in f.detail for f in found)
    with pytest.raises(AssertionError, match=r"rank 2 was killed at cycle .* after 10 of its"):
        report.raise_for_findings()


@pytest.mark.parametrize("ranks", [4, 8])
def test_killed_ahead_of_its_flag(ranks):
    """The data is out, the flag is not; one workgroup of two is enough."""
    name = f"allreduce_flags_{ranks}"
    for where, survive in (("buffer_wbl2", False), ("s_endpgm", None)):
        report, _, wrong = go(f"flydsl_{name}", Fault("kill", 1, at=(name, where)))
        assert "was killed" in report.faults[0]
        if survive is None:
            assert report.status in ("finished", "deadlock")
        else:
            assert report.status == "deadlock" and wrong


def test_killed_after_all_was_sent():
    """The last of the rank's waves dies at its end: the others have all they need."""
    for name, waves in (("allreduce_flags_4", 8), ("allreduce_words_4", 8)):
        fault = Fault("kill", 1, at=(name, "s_endpgm"), arrival=waves)
        report, _, wrong = go(f"flydsl_{name}", fault)
        assert report.ok, report.findings
        assert {rank for rank, _, _ in wrong} <= {1}


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_fault_replays(seed):
    case = BY_NAME["flydsl_allreduce_words_4"]
    args = case.make_args(0)
    machine = Machine(schedule=Schedule("random", seed, (1, 50), spin_rounds=1000))
    queue(machine, case, args)
    fault = Fault.draw(seed, 4, 200)
    assert fault == Fault.draw(seed, 4, 200)
    machine.inject(fault)
    results = []
    for _ in range(2):
        for position in (TARGET, STATUS):
            for a in args:
                a[position].zero_()
        for mailbox in args[0][2].tensors:
            mailbox.zero_()
        results.append((machine.run(), [a[STATUS].clone() for a in args]))
    (first, statuses), (second, again) = results
    assert first == second and statuses == again
    assert first.ok, first.findings
    assert {int(s) for s in statuses} <= {0, fault.rank + 1}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("seconds,late", [(0.5, False), (1.5, True)])
def test_a_delayed_rank(ranks, seconds, late):
    """Shorter than the others' patience: nobody notices. Longer: they say who was late."""
    cycles = int(seconds * 2.4e9)
    fault = Fault("delay", 1, after_instructions=5, cycles=cycles)
    report, args, wrong = go(f"flydsl_allreduce_words_{ranks}", fault)
    assert report.ok, report.findings
    assert report.clock >= cycles
    status = [int(a[STATUS]) for a in args]
    assert status == [2 if late and rank != 1 else 0 for rank in range(ranks)]
    assert bool(wrong) == late
    report, _, wrong = go(f"flydsl_allreduce_flags_{ranks}", fault)  # these wait for ever
    assert report.ok and not wrong


def test_at_a_time_and_in_the_middle_of_a_wait():
    """Rank 0 stands still before it sends; while the others wait for it rank 3 dies."""
    faults = (
        Fault("delay", 0, after_instructions=1, cycles=TIMEOUT // 2),
        Fault("kill", 3, at_cycle=TIMEOUT // 4),
    )
    report, args, wrong = go("flydsl_allreduce_words_4", *faults)
    assert report.ok, report.findings
    assert f"killed at cycle {TIMEOUT // 4}," in report.faults[1]
    assert {rank for rank, _, _ in wrong} == {3}  # its words were sent before
    assert [int(a[STATUS]) for a in args] == [0] * 4


def test_between_launches():
    fault = Fault("kill", 1, after_launches=1)
    report, args, _ = go("flydsl_allreduce_words_4", fault, launches=2)
    assert report.ok, report.findings
    assert [x.executed > 0 for x in report.launches] == [True] * 5 + [False, True, True]
    assert [int(a[STATUS]) for a in args] == [2, 0, 2, 2]
    delayed = dataclasses.replace(fault, action="delay", cycles=10**6)
    report, args, wrong = go("flydsl_allreduce_words_4", delayed, launches=2)
    assert report.ok and not wrong and "1 of its launches" in report.faults[0]


def test_places_by_line_and_pc():
    code = BY_NAME["flydsl_allreduce_flags_4"].compile()
    where = "kernels_allreduce.py:"
    name = code.kernel
    fault = Fault("kill", 0, at=(name, "buffer_wbl2"))
    report, _, _ = go("flydsl_allreduce_flags_4", fault)
    polls = next(f for f in report.findings if f.kind == "deadlock" and "polling" in f.detail)
    assert where in polls.line
    for at in (polls.line, polls.pc):
        report, _, _ = go("flydsl_allreduce_flags_4", Fault("kill", 0, at=(name, at), arrival=3))
        assert "rank 0 was killed" in report.faults[0]
    with pytest.raises(ValueError, match="no instruction of kernel 'nothing'"):
        go("flydsl_allreduce_flags_4", Fault("kill", 0, at=("nothing", 0)))


def test_a_fault_that_never_happens_is_said():
    report, _, wrong = go("flydsl_allreduce_words_4", Fault("kill", 0, at_cycle=10**15))
    assert report.ok and not wrong
    assert report.faults == ("rank 0 was to be killed, the run ended before",)


@pytest.mark.parametrize(
    "fields,text",
    [
        ({"action": "stop", "after_launches": 1}, "fault action 'stop'"),
        ({"action": "kill"}, "exactly one of"),
        ({"action": "kill", "after_launches": 1, "at_cycle": 1}, "exactly one of"),
        ({"action": "delay", "at_cycle": 1}, "a delay needs them"),
        ({"action": "kill", "at_cycle": 1, "cycles": 5}, "a delay needs them"),
        ({"action": "kill", "at_cycle": 1, "arrival": 2}, "fault arrival"),
    ],
)
def test_bad_faults(fields, text):
    with pytest.raises(ValueError, match=text):
        Fault(rank=0, **fields)


def test_a_launch_that_is_late_is_no_deadlock():
    """The other ranks poll for it, without a clock."""
    code = kernel(GRID_BARRIER.replace("s[4:5] sc1", "s[4:5] sc0 sc1"))
    counter, machine = np.zeros(16, np.uint32), Machine()
    for rank in range(2):
        machine.launch(code, "k", 2, 64, [counter, counter, 4], rank=rank, delay=10**7 * rank)
    machine.run().raise_for_findings()


def test_stores_of_a_killed_rank_may_be_lost():
    """By chance, and the same chance for the same seed."""
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    s_nop 0
    """
    code, seen = kernel(body), []
    for seed in range(20):
        a = np.zeros(64, np.uint32)
        fault = Fault("kill", 0, at=("k", "s_nop"))
        schedule = Schedule("random", seed, (1, 100))
        report = launch(code, "k", 1, 64, [a], schedule=schedule, faults=[fault])
        assert report.ok
        seen.append(int(a.sum()))
    assert set(seen) == {0, 64}
