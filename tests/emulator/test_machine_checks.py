"""Planted faults are found and named; the same code without the fault is clean."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emu import Checks, DeviceModel, Machine, Schedule, launch
from gfx950_emu.decode import DecodeError
from tests.emulator.assembler import kernel
from tests.emulator.hand_off import hand_off, run_hand_off

START = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
LOAD = START + "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
STORE = "global_store_dword v1, v2, s[6:7]\n"


def go(body: str, n: int = 256, lds: int = 0, **settings):
    code = kernel(body, lds=lds)
    a = np.arange(n, dtype=np.uint32) + 1
    b = np.zeros(n, np.uint32)
    return launch(code, "k", 1, n, [a, b], **settings), a, b


def kinds(report) -> set[str]:
    return {f.kind for f in report.findings}


def test_clean():
    report, a, b = go(LOAD + STORE)
    assert report.ok, report.findings
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("drop", ["vmcnt", "lgkmcnt"])
def test_dropped_wait(drop):
    body = "\n".join(line for line in (LOAD + STORE).splitlines() if drop not in line)
    report, _, _ = go(body)
    found = [f for f in report.findings if f.kind == "register read before its wait"]
    assert found and found[0].kernel == "k" and found[0].text and drop in found[0].detail
    assert not go(body, checks=Checks.ALL & ~Checks.WAIT)[0].findings


def test_overwritten_before_its_wait():
    report, _, _ = go(START + "global_load_dword v2, v1, s[4:5]\nv_mov_b32 v2, 1\n"
                      "s_waitcnt vmcnt(0)\n"
                      + STORE)  # fmt: skip
    assert kinds(report) == {"register overwritten before its wait"}


def test_partial_waits_are_counted():
    body = (
        START
        + """
    global_load_dword v2, v1, s[4:5]
    global_load_dword v3, v1, s[4:5]
    s_waitcnt vmcnt(1)
    v_add_u32 v2, 0, v2
    """
    )
    assert go(body + STORE)[0].ok
    assert kinds(go(body + "v_add_u32 v2, v2, v3\n" + STORE)[0]) == {
        "register read before its wait"
    }


@pytest.mark.parametrize(("later", "ok"), [(62, False), (63, True)])
def test_at_most_63_accesses_are_in_flight(later, ok):
    """vmcnt has 6 bits: the 64th access waits for the first, and LLVM emits no wait for that."""
    accesses = "global_load_dword v2, v1, s[4:5]\n" + "global_store_dword v1, v1, s[6:7]\n" * later
    report, _, _ = go(START + accesses + "v_add_u32 v2, 0, v2\ns_waitcnt vmcnt(0)\n" + STORE)
    assert kinds(report) == (set() if ok else {"register read before its wait"})


LDS = (
    LOAD
    + """
v_mov_b32 v3, v1
ds_write_b32 v3, v2
{wait}
{barrier}
v_xor_b32 v4, 0x100, v1
ds_read_b32 v2, v4
s_waitcnt lgkmcnt(0)
"""
    + STORE
)


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("random", 3, (1, 5)),
                                      Schedule("random", 4, (1, 100000))])  # fmt: skip
def test_lds_race(schedule):
    good = LDS.format(wait="s_waitcnt lgkmcnt(0)", barrier="s_barrier")
    report, a, b = go(good, lds=1024, schedule=schedule)
    assert report.ok, report.findings
    np.testing.assert_array_equal(b, a[np.arange(256) ^ 64])
    no_barrier = LDS.format(wait="s_waitcnt lgkmcnt(0)", barrier="")
    assert "LDS race" in kinds(go(no_barrier, lds=1024, schedule=schedule)[0])
    no_wait = LDS.format(wait="", barrier="s_barrier")
    assert "LDS race" in kinds(go(no_wait, lds=1024, schedule=schedule)[0])


def test_lds_bounds_and_uninitialised_lds():
    report, _, _ = go(LOAD + "v_add_u32 v3, 0x3fc, v1\nds_write_b32 v3, v2\n" + STORE,
                      lds=1024)  # fmt: skip
    assert "LDS access out of bounds" in kinds(report)
    report, _, _ = go(LOAD + "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\n" + STORE, lds=1024)
    assert kinds(report) == {"uninitialised value stored"}


def test_out_of_bounds_store_is_found_and_not_done():
    code = kernel(LOAD + "v_add_u32 v1, 4, v1\n" + STORE)
    memory = np.zeros(128, np.uint32)
    a, b = np.ones(64, np.uint32), memory[:64]
    report = launch(code, "k", 1, 64, [a, b])
    (found,) = report.findings
    assert found.kind == "write outside of any writable buffer" and found.lane == 63
    assert found.address == b.ctypes.data + 256 and memory[64] == 0


def test_read_only_buffer():
    code = kernel(LOAD + STORE)
    b = np.zeros(64, np.uint32)
    b.flags.writeable = False
    report = launch(code, "k", 1, 64, [np.ones(64, np.uint32), b])
    assert kinds(report) == {"write outside of any writable buffer"}


@pytest.mark.parametrize(
    ("body", "number"),
    [("v_mov_b32 v64, v0", 64), ("ds_read_b128 v[62:65], v0", 65), ("v_add_u32 v1, v0, v70", 70)],
)
def test_registers_beyond_what_the_descriptor_declares(body, number):
    with pytest.raises(DecodeError, match=f"register {number}, .* declares 64"):
        launch(kernel(body, vgprs=64), "k", 1, 64, [])


def test_uninitialised_registers():
    assert kinds(go(START + "v_add_u32 v2, v9, v1\n" + STORE)[0]) == {"uninitialised value stored"}
    assert kinds(go(LOAD + "v_add_u32 v1, v9, v1\n" + STORE)[0]) >= {
        "uninitialised value in an address"
    }
    branch = LOAD + "s_cmp_eq_u32 s40, 0\ns_cbranch_scc1 1\ns_nop 0\n" + STORE
    assert kinds(go(branch)[0]) == {"branch on an uninitialised value"}
    assert go(branch, checks=Checks.ALL & ~Checks.UNINIT)[0].ok
    # Lanes switched off may hold anything, and a selection drops what it does not take.
    select = LOAD + "v_cmp_ne_u32 vcc, 0, v2\nv_cndmask_b32 v2, v9, v2, vcc\n" + STORE
    assert go(select)[0].ok
    # The lower half of a 64-bit sum does not depend on the upper half of what is added.
    mad = LOAD + "v_mov_b32 v10, v2\nv_mad_u64_u32 v[12:13], s[8:9], v2, v2, v[10:11]\n"
    assert go(mad + "v_mov_b32 v2, v12\n" + STORE)[0].ok
    assert kinds(go(mad + "v_mov_b32 v2, v13\n" + STORE)[0]) == {"uninitialised value stored"}


def test_stores_are_late():
    """A flag without a wait may be seen before the data: two waves of two workgroups."""
    wrong = {"s_waitcnt vmcnt(0)": 0, "": 0}
    for wait in wrong:
        data = "global_store_dword v1, v3, s[4:5] sc1"
        flag = "global_store_dword v1, v2, s[4:5] offset:256 sc1"
        read = "global_load_dword v5, v1, s[4:5] sc1\ns_waitcnt vmcnt(0)"
        body = hand_off(f"{data}\n{wait}\n{flag}", read=read)
        for seed in range(40):
            wrong[wait] += run_hand_off(body, Schedule("random", seed, (1, 20)))[1] != 42
    assert wrong["s_waitcnt vmcnt(0)"] == 0 and wrong[""] > 0


DMA = (
    START
    + """
s_mov_b32 m0, 0
global_load_lds_dword v1, s[4:5]
{wait}
ds_read_b32 v2, v1
s_waitcnt lgkmcnt(0)
"""
    + STORE
)


def test_lds_dma():
    report, a, b = go(DMA.format(wait="s_waitcnt vmcnt(0)"), 64, 1024)
    assert report.ok, report.findings
    np.testing.assert_array_equal(a, b)
    assert "LDS read before the LDS DMA was waited for" in kinds(
        go(DMA.format(wait=""), 64, 1024)[0]
    )


def test_barrier_divergence():
    body = (
        LOAD
        + """
    v_readfirstlane_b32 s8, v0
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 1
    s_endpgm
    s_barrier
    """
    )
    report, _, _ = go(body + STORE)
    assert "barrier divergence" in kinds(report)


GRID_BARRIER = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dword s8, s[0:1], 0x10
v_mov_b32 v1, 0
v_mov_b32 v2, 1
s_mov_b64 exec, 1
s_waitcnt lgkmcnt(0)
global_atomic_add v3, v1, v2, s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
poll:
s_sleep 1
global_load_dword v3, v1, s[4:5] sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s9, v3
s_cmp_lt_u32 s9, s8
s_cbranch_scc1 poll
"""
SMALL = DeviceModel(xcds=2, cus_per_xcd=2)


@pytest.mark.parametrize("kind", ["round_robin", "random", "priority", "starve"])
def test_grid_barrier_and_residency(kind):
    code = kernel(GRID_BARRIER, lds=64 * 1024)
    schedule = Schedule(kind, 5, (1, 300), starve=(None, 0, None))
    for groups, fits in ((8, True), (9, False)):  # two of 64 KiB on each of four CUs
        counter, unused = np.zeros(16, np.uint32), np.zeros(16, np.uint32)
        report = launch(code, "k", groups, 64, [counter, unused, groups], device=SMALL,
                        schedule=schedule)  # fmt: skip
        if fits:
            assert report.ok, report.findings
            continue
        assert report.status == "deadlock"
        assert kinds(report) == {"deadlock", "workgroups that never became resident"}
        assert any("1 workgroups wait while 8 are resident" in str(f) for f in report.findings)


def test_deadlock_at_a_barrier_names_who_waits():
    body = """
    v_readfirstlane_b32 s8, v0
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 poll
    s_barrier
    s_endpgm
    poll:
    s_sleep 1
    s_branch poll
    """
    report, _, _ = go(body, 128)
    assert report.status == "deadlock"
    assert {f.detail.split(" after")[0] for f in report.findings} == {
        "polling or running",
        "at a barrier",
    }


def test_timeouts_see_the_virtual_clock():
    body = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_memrealtime s[10:11]
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
    poll:
    s_sleep 1
    global_load_dword v3, v1, s[4:5] sc1
    s_memrealtime s[12:13]
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_sub_u32 s12, s12, s10
    s_cmp_lt_u32 s12, 0x5f5e100
    s_cbranch_scc1 poll
    v_mov_b32 v2, 7
    global_store_dword v1, v2, s[6:7]
    """
    report, _, b = go(body, 64)
    assert report.ok, report.findings
    assert b[0] == 7 and report.executed < 50_000_000


def test_misaligned_atomic():
    report, _, _ = go(LOAD + "v_add_u32 v3, 2, v1\nv_mov_b32 v4, 1\n"
                      "global_atomic_add v3, v4, s[6:7] offset:0\n", 32)  # fmt: skip
    assert "misaligned access" in kinds(report)


def test_same_seed_same_report():
    code = kernel(LDS.format(wait="s_waitcnt lgkmcnt(0)", barrier=""), lds=1024)
    reports = []
    a, b = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    for _ in range(2):
        b[:] = 0
        reports.append(launch(code, "k", 4, 256, [a, b], schedule=Schedule("random", 11, (1, 50))))
    first, second = reports
    assert first.launches == second.launches and first.clock == second.clock
    assert [str(f) for f in first.findings] == [str(f) for f in second.findings]


def test_a_killed_rank_is_a_deadlock_of_the_others():
    code = kernel(GRID_BARRIER)
    counter = np.zeros(16, np.uint32)
    for killed, status in ((False, "finished"), (True, "deadlock")):
        counter[:] = 0
        machine = Machine()
        for rank in range(2):
            machine.launch(code, "k", 2, 64, [counter, counter, 4], rank=rank)
        if killed:
            machine.kill_rank(1)
        assert machine.run().status == status


def test_streams_and_replay():
    code = kernel(LOAD + "v_add_u32 v2, 1, v2\n" + STORE)
    a, b, c = np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    machine = Machine()
    machine.launch(code, "k", 1, 64, [a, b])
    machine.launch(code, "k", 1, 64, [b, c])
    machine.launch(code, "k", 1, 64, [c, a])
    for n in (1, 2, 3):
        assert machine.run().ok
        assert (a == 3 * n).all()
