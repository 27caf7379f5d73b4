"""Bytes by level of kernels whose bytes are known exactly, spinning and occupancy."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emu import DeviceModel, Machine, Schedule, launch
from tests.emulator.assembler import kernel

LINE = 128
START = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_lshl_b32 s8, s2, 10
v_add_u32 v1, s8, v1
s_waitcnt lgkmcnt(0)
"""  # v1: byte of the lane's dword; 256 lanes a workgroup
ARGUMENTS = LINE  # the argument block's line, which each scalar load reads
XCDS = DeviceModel().xcds


def aligned(dwords: int) -> np.ndarray:
    raw = np.zeros(dwords + LINE // 4, np.uint32)
    return raw[-raw.ctypes.data % LINE // 4 :][:dwords]


def traffic(body: str, groups: int, dwords: int, lds: int = 0) -> dict[str, dict[str, int]]:
    a, b = aligned(dwords), aligned(dwords)
    report = launch(kernel(START + body, lds=lds), "k", groups, 256, [a, b])
    assert report.ok, report.findings
    return report.launches[0].traffic


def levels(lanes, instructions, l1, l2, hbm) -> dict[str, dict[str, int]]:
    names = ("lanes", "instructions", "l1", "l2", "hbm")
    pairs = (lanes, instructions, l1, l2, hbm)
    return {n: {"read": p[0], "written": p[1]} for n, p in zip(names, pairs, strict=True)}


def test_copy():
    groups = 16  # each on a CU of its own, two on each XCD
    size, waves = groups * 1024, groups * 4
    got = traffic(
        "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v2, s[6:7]",
        groups, groups * 256,
    )  # fmt: skip
    assert got == levels(
        (size + 16 * waves, size),
        (size + ARGUMENTS * waves, size),
        (size + ARGUMENTS * groups, size),
        (size + ARGUMENTS * XCDS, size),
        (size + ARGUMENTS, size),
    )


@pytest.mark.parametrize("times", [1, 5])
def test_every_workgroup_reads_the_same_buffer(times):
    groups, size = 24, 1024
    again = "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n" * times
    got = traffic("v_lshlrev_b32 v1, 2, v0\n" + again, groups, 256)
    waves = groups * 4
    assert got == levels(
        (times * groups * size + 16 * waves, 0),
        (times * groups * size + ARGUMENTS * waves, 0),
        (groups * (size + ARGUMENTS), 0),
        (XCDS * (size + ARGUMENTS), 0),
        (size + ARGUMENTS, 0),
    )


@pytest.mark.parametrize("stride", [128, 256, 512])
def test_strided(stride):
    """One dword a line or less: a line for each lane, at every level."""
    got = traffic(
        f"v_mul_u32_u24 v1, {stride}, v0\nglobal_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
        "global_store_dword v1, v2, s[6:7]",
        1, 256 * stride // 4,
    )  # fmt: skip
    lines = 256 * LINE
    assert got["lanes"] == {"read": 256 * 4 + 4 * 16, "written": 256 * 4}
    assert got["instructions"] == {"read": lines + 4 * ARGUMENTS, "written": lines}
    for level in ("l1", "l2", "hbm"):
        assert got[level] == {"read": lines + ARGUMENTS, "written": lines}


def test_an_access_that_straddles_two_lines():
    got = traffic(
        "s_mov_b64 exec, 1\nglobal_load_dwordx4 v[4:7], v1, s[4:5] offset:120\ns_waitcnt vmcnt(0)\n"
        "global_store_dwordx4 v1, v[4:7], s[6:7] offset:112",
        1, 1024,
    )  # fmt: skip
    # Four waves, 256 bytes apart: each touches both lines of its own read, one of its write.
    assert got["instructions"] == {"read": 4 * (2 * LINE + ARGUMENTS), "written": 4 * LINE}
    assert got["hbm"] == {"read": 4 * 2 * LINE + ARGUMENTS, "written": 4 * LINE}


def test_atomics_go_both_ways():
    got = traffic("v_mov_b32 v1, 0\nv_mov_b32 v2, 1\nglobal_atomic_add v1, v2, s[6:7]", 8, 256)
    assert got == levels(
        (8 * 256 * 4 + 32 * 16, 8 * 256 * 4),
        (32 * (LINE + ARGUMENTS), 32 * LINE),
        (8 * (LINE + ARGUMENTS), 8 * LINE),
        (8 * (LINE + ARGUMENTS), 8 * LINE),
        (LINE + ARGUMENTS, LINE),
    )


def test_lds_dma_and_buffers_are_reads():
    dma = traffic(
        "v_readfirstlane_b32 s9, v1\ns_mov_b32 m0, s9\nglobal_load_lds_dword v1, s[4:5]\n"
        "s_waitcnt vmcnt(0)\ns_barrier",
        1, 256, lds=1024,
    )  # fmt: skip
    buffer = traffic(
        "s_movk_i32 s6, 0x400\ns_mov_b32 s7, 0x27000\nbuffer_load_dword v2, v1, s[4:7], 0 offen\n"
        "s_waitcnt vmcnt(0)",
        1, 256,
    )  # fmt: skip
    assert dma == buffer
    assert dma["hbm"] == {"read": 1024 + ARGUMENTS, "written": 0}


def test_each_launch_counts_for_itself():
    code = kernel(START + "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)")
    a = aligned(512)
    machine = Machine()
    for groups in (1, 2):
        machine.launch(code, "k", groups, 256, [a, a])
    first, second = machine.run().launches
    assert first.traffic["hbm"]["read"] == 1024 + ARGUMENTS
    assert second.traffic["hbm"]["read"] == 2048 + ARGUMENTS
    assert second.hbm_bytes == 2048 + ARGUMENTS
    assert machine.run().launches == (first, second)


def test_spinning_is_told_from_work():
    """One workgroup waits for the other: only its loop's instructions are spin."""
    body = """
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc0 work
    s_mov_b64 exec, 1
    v_mov_b32 v1, 0
    poll:
    s_sleep 1
    global_load_dword v2, v1, s[6:7] sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s9, v2
    s_cmp_eq_u32 s9, 0
    s_cbranch_scc1 poll
    s_endpgm
    work:
    s_movk_i32 s9, 100
    loop:
    s_sub_u32 s9, s9, 1
    s_cmp_lg_u32 s9, 0
    s_cbranch_scc1 loop
    s_mov_b64 exec, 1
    v_mov_b32 v1, 0
    v_mov_b32 v2, 1
    global_store_dword v1, v2, s[6:7] sc1
    """
    a, b = aligned(512), aligned(512)
    report = launch(kernel(START + body), "k", 2, 64, [a, b], schedule=Schedule(quantum=(7, 7)))
    assert report.ok, report.findings
    (one,) = report.launches
    opcodes = one.instructions
    rounds = opcodes["s_sleep"]
    assert one.counters["spin"] == 6 * rounds and rounds > 10
    # START twice, each branch's own instructions, the loop of 3, and s_endpgm.
    assert one.useful == 2 * (5 + 2) + (2 + 1) + (1 + 3 * 100 + 4 + 1)
    assert one.executed == one.useful + 6 * rounds


@pytest.mark.parametrize(
    "vgprs,lds,waves,occupancy",
    [(64, 0, 1, 8), (128, 0, 4, 4), (72, 0, 4, 7), (64, 64 * 1024, 1, 1), (64, 40 * 1024, 8, 8)],
)
def test_occupancy(vgprs, lds, waves, occupancy):
    report = launch(kernel("s_nop 0", vgprs=vgprs, lds=lds), "k", 1, 64 * waves, [])
    assert report.launches[0].occupancy == occupancy
