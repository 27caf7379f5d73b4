"""LDS: exchanges, counters, places by lane, and atomics through flat addresses."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emu import launch
from tests.emulator.assembler import kernel

LANE = np.arange(64)
FILL = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_lshlrev_b32 v2, 3, v0
v_lshlrev_b32 v3, 4, v0
v_add_u32 v10, 0x100, v0
v_add_u32 v11, 0x200, v0
v_add_u32 v12, 0x300, v0
v_add_u32 v13, 0x400, v0
s_waitcnt lgkmcnt(0)
ds_write_b128 v3, v[10:13]
s_waitcnt lgkmcnt(0)
"""  # a lane's four dwords: 0x100, 0x200, 0x300, 0x400 + lane
DUMP = """
ds_read_b128 v[40:43], v3
s_waitcnt lgkmcnt(0)
v_add_u32 v3, 0x400, v3
global_store_dwordx4 v3, v[40:43], s[6:7]
"""
BEFORE = np.stack([0x100 * n + LANE for n in (1, 2, 3, 4)], 1)


def go(body: str, result: int = 0, findings: bool = True, n: int = 64):
    """(v20.. of each lane, LDS as [lane, 4]) after `body`; `result` dwords from v20."""
    store = "".join(
        f"v_add_u32 v4, {256 * k}, v1\nglobal_store_dword v4, v{20 + k}, s[6:7]\n"
        for k in range(result)
    )
    out = np.zeros(512, np.uint32)
    code = kernel(FILL + body + "\ns_waitcnt vmcnt(0) lgkmcnt(0)\n" + store + DUMP, lds=1024)
    report = launch(code, "k", 1, n, [out, out])
    if findings:
        report.raise_for_findings()
    return out[: 64 * result].reshape(result, 64), out[256:].reshape(64, 4)


def test_exchange_of_two_places():
    old, lds = go("ds_wrxchg2_rtn_b32 v[20:21], v3, v10, v11 offset0:2 offset1:3", 2)
    want = BEFORE.copy()
    want[:, 2], want[:, 3] = BEFORE[:, 0], BEFORE[:, 1]
    np.testing.assert_array_equal(old, BEFORE.T[2:])
    np.testing.assert_array_equal(lds, want)
    old, lds = go("ds_wrxchg2_rtn_b64 v[20:23], v3, v[10:11], v[12:13] offset0:1 offset1:0", 4)
    np.testing.assert_array_equal(old, BEFORE.T[[2, 3, 0, 1]])
    np.testing.assert_array_equal(lds, BEFORE[:, [2, 3, 0, 1]])


@pytest.mark.parametrize("bits", [32, 64])
def test_exchange_in_strides_of_64(bits):
    """One lane: 64 elements apart."""
    size, n = bits // 8, bits // 32
    a, b = ("v30", "v31") if n == 1 else ("v[30:31]", "v[32:33]")
    old, lds = go(f"""
    v_mov_b32 v30, 1
    v_mov_b32 v31, 2
    v_mov_b32 v32, 3
    v_mov_b32 v33, 4
    v_mov_b32 v5, 0
    v_mov_b32 v20, 0
    s_mov_b64 exec, 1
    ds_wrxchg2st64_rtn_b{bits} v[20:{19 + 2 * n}], v5, {a}, {b} offset1:1
    s_mov_b64 exec, -1
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v20, v20
    """, 1)  # fmt: skip
    assert old[0, 0] == 0x100
    flat = lds.ravel()
    assert list(flat[:n]) == list(range(1, n + 1))
    assert list(flat[16 * size : 16 * size + n]) == list(range(n + 1, 2 * n + 1))


def test_wrap_compare_and_conditional():
    old, lds = go("v_mov_b32 v30, 0x120\nds_wrap_rtn_b32 v20, v3, v30, v12", 1)
    np.testing.assert_array_equal(old[0], BEFORE[:, 0])
    first = BEFORE[:, 0]
    np.testing.assert_array_equal(
        lds[:, 0], np.where(first >= 0x120, first - 0x120, first + BEFORE[:, 2])
    )
    # -0.0 equals 0.0: the comparison is one of doubles
    _, lds = go("""
    v_mov_b32 v30, 0
    v_mov_b32 v31, 0
    v_bfrev_b32 v33, 1
    v_mov_b32 v32, 0
    ds_write_b64 v3, v[30:31]
    ds_cmpst_f64 v3, v[32:33], v[12:13]
    """)  # fmt: skip
    np.testing.assert_array_equal(lds[:, :2], BEFORE[:, 2:])
    old, lds = go("""
    v_or_b32 v30, 0x80000000, v12
    v_mov_b32 v31, 7
    ds_condxchg32_rtn_b64 v[20:21], v3, v[30:31]
    """, 2)  # fmt: skip
    np.testing.assert_array_equal(old, BEFORE.T[:2])
    np.testing.assert_array_equal(lds[:, 0], BEFORE[:, 2])
    np.testing.assert_array_equal(lds[:, 1], BEFORE[:, 1])


@pytest.mark.parametrize("name,sign", [("append", 1), ("consume", -1)])
def test_counters(name, sign):
    """All active lanes get the old value; the counter moves by their number."""
    old, lds = go(f"""
    s_movk_i32 m0, 0x20
    v_mov_b32 v20, 0
    s_mov_b64 exec, 0xff
    ds_{name} v20 offset:16
    s_mov_b64 exec, -1
    """, 1)  # fmt: skip
    at = 3 * 4  # dword 0x30 / 4
    start = BEFORE.ravel()[at]
    assert list(old[0]) == [start] * 8 + [0] * 56
    assert lds.ravel()[at] == start + sign * 8


def test_places_by_lane():
    old, lds = go("""
    s_movk_i32 m0, 0x100
    ds_read_addtid_b32 v20 offset:16
    s_waitcnt lgkmcnt(0)
    v_add_u32 v30, 1, v20
    ds_write_addtid_b32 v30 offset:16
    """, 1)  # fmt: skip
    part = slice(0x110 // 4, 0x110 // 4 + 64)
    np.testing.assert_array_equal(old[0], BEFORE.ravel()[part])
    np.testing.assert_array_equal(lds.ravel()[part], BEFORE.ravel()[part] + 1)


FLAT = """
s_mov_b64 s[8:9], src_shared_base
v_mov_b32 v6, v3
v_mov_b32 v7, s9
"""


def test_flat_atomics_on_lds():
    old, lds = go(FLAT + "flat_atomic_add v20, v[6:7], v11 sc0", 1)
    np.testing.assert_array_equal(old[0], BEFORE[:, 0])
    np.testing.assert_array_equal(lds[:, 0], BEFORE[:, 0] + BEFORE[:, 1])
    _, lds = go(FLAT + "flat_atomic_swap_x2 v[6:7], v[12:13] offset:8\n")
    np.testing.assert_array_equal(lds, BEFORE)
    _, lds = go(FLAT + "v_mov_b32 v6, 0\nflat_atomic_add v[6:7], v0")  # all lanes, one place
    assert lds[0, 0] == 0x100 + LANE.sum()


def test_flat_atomics_of_several_waves_do_not_race_but_stores_do():
    body = FLAT.replace("v_mov_b32 v6, v3", "v_mov_b32 v6, 0")
    for access, kinds in (("flat_atomic_add v[6:7], v0", set()),
                          ("flat_store_dword v[6:7], v0", {"LDS race"})):  # fmt: skip
        # Wave 0 clears the place; the barrier is behind it.
        start = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_mov_b32 v5, 0
        s_waitcnt lgkmcnt(0)
        v_readfirstlane_b32 s10, v0
        s_cmp_eq_u32 s10, 0
        s_cbranch_scc0 1f
        ds_write_b32 v5, v5
        s_waitcnt lgkmcnt(0)
        1:
        s_barrier
        """.replace("1f", "over").replace("1:", "over:")
        code = kernel(start + body + access, lds=64)
        report = launch(code, "k", 1, 256, [np.zeros(4, np.uint32)] * 2)
        assert {f.kind for f in report.findings} == kinds
