"""Waits for writers outside of the machine: in real time, before the virtual clock jumps ahead.

Two machines in two threads share memory, as two processes would that map the same pages.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gfx950_emu import Schedule, launch
from tests.emulator.assembler import kernel

LANES = 64
# mine, theirs: a 64-bit word a lane, (round * lane, round). A round ends when theirs has its tag.
# out: how often a lane's payload was not that of its round.
EXCHANGE = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx4 s[8:11], s[0:1], 0x10
v_lshlrev_b32 v1, 3, v0
v_lshlrev_b32 v8, 2, v0
v_mov_b32 v7, 0
s_waitcnt lgkmcnt(0)
s_mov_b32 s11, 1
round:
v_mul_lo_u32 v2, v0, s11
v_mov_b32 v3, s11
global_store_dwordx2 v1, v[2:3], s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
poll:
s_sleep 1
global_load_dwordx2 v[4:5], v1, s[6:7] sc0 sc1
s_waitcnt vmcnt(0)
v_cmp_gt_u32 vcc, s11, v5
s_cbranch_vccnz poll
v_mul_lo_u32 v6, v0, v5
v_cmp_ne_u32 vcc, v4, v6
v_addc_co_u32 v7, vcc, 0, v7, vcc
s_add_u32 s11, s11, 1
s_cmp_le_u32 s11, s10
s_cbranch_scc1 round
global_store_dword v8, v7, s[8:9]
"""


def side(words: np.ndarray, rank: int, rounds: int, schedule: Schedule):
    out = np.full(LANES, 99, np.uint32)
    mine, theirs = words[rank], words[1 - rank]
    report = launch(kernel(EXCHANGE), "k", 1, LANES, [mine, theirs, out, rounds], schedule=schedule)
    return report, out


@pytest.mark.parametrize("kind", ["round_robin", "random", "priority"])
def test_two_machines_exchange_words(kind):
    rounds, words = 300, np.zeros((2, LANES), np.uint64)
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(side, words, rank, rounds, Schedule(kind, rank, outside_s=300.0))
            for rank in range(2)
        ]
        for done in sides:
            report, wrong = done.result(timeout=600)
            assert report.ok, report.findings
            assert not wrong.any()
    assert np.array_equal(words[0] & 0xFFFFFFFF, np.arange(LANES) * rounds)
    assert np.array_equal(words[1] >> 32, np.full(LANES, rounds))


@pytest.mark.parametrize("outside_s", [0.0, 0.05])
def test_nobody_outside_writes(outside_s):
    report, _ = side(np.zeros((2, LANES), np.uint64), 0, 1, Schedule(outside_s=outside_s))
    assert report.status == "deadlock"


def test_a_negative_time_is_refused():
    with pytest.raises(ValueError, match=r"outside_s: expected >= 0, got -1"):
        Schedule(outside_s=-1)
