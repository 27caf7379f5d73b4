"""One workgroup writes and raises a flag, another polls it and reads: the text of such kernels."""

from __future__ import annotations

import numpy as np

from gfx950_emu import Checks, Report, Schedule, launch
from tests.emulator.assembler import kernel

READ = "global_load_dword v5, v1, s[4:5]\ns_waitcnt vmcnt(0)"


def hand_off(write: str, acquire: str = "", *, early: str = "", read: str = READ) -> str:
    """Assembly of two workgroups, lane 0 of each.

    s[4:5] and s[6:7] are the first two arguments; v1 holds 0, v2 1, v3 42. Workgroup 0 runs
    `write`, which must raise the flag at s[4:5] + 256. Workgroup 1 polls it at agent scope, runs
    `acquire` and `read`, and stores v5 to s[6:7]. Both run `early` first.
    """
    return f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_mov_b32 v1, 0
    v_mov_b32 v2, 1
    v_mov_b32 v3, 42
    s_mov_b64 exec, 1
    s_cmp_eq_u32 s2, 0
    s_waitcnt lgkmcnt(0)
    {early}
    s_cbranch_scc0 reader
    {write}
    s_endpgm
    reader:
    global_load_dword v4, v1, s[4:5] offset:256 sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s8, v4
    s_cmp_eq_u32 s8, 1
    s_cbranch_scc0 reader
    {acquire}
    {read}
    global_store_dword v1, v5, s[6:7]
    """


def run_hand_off(text: str, schedule: Schedule, checks: Checks = Checks.ALL) -> tuple[Report, int]:
    """The report, and what the reader got. The data starts at a multiple of 512 bytes."""
    raw, got = np.zeros(256, np.uint32), np.zeros(16, np.uint32)
    shared = raw[-raw.ctypes.data % 512 // 4 :][:128]
    report = launch(kernel(text), "k", 2, 64, [shared, got], schedule=schedule, checks=checks)
    assert report.status == "finished"
    return report, int(got[0])
