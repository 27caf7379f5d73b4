"""Undefined values by dword: what a compiler may leave undefined is not reported."""

from __future__ import annotations

import pytest

from tests.emulator.test_machine_checks import LOAD, STORE, go, kinds


@pytest.mark.parametrize(
    ("instruction", "alone"),
    [
        ("v_mov_b64 v[4:5], v[{0}]", (0, 1)),
        ("v_lshlrev_b64 v[4:5], 3, v[{0}]", (0,)),
        ("v_lshrrev_b64 v[4:5], 3, v[{0}]", (1,)),
        ("v_ashrrev_i64 v[4:5], 3, v[{0}]", (1,)),
        ("v_lshl_add_u64 v[4:5], v[{0}], 2, v[{0}]", (0,)),
        ("v_mad_u64_u32 v[4:5], vcc, v1, v1, v[{0}]", (0,)),
        ("v_mad_i64_i32 v[4:5], vcc, v1, v1, v[{0}]", (0,)),
    ],
)
def test_dwords_of_a_64_bit_result(instruction, alone):
    """`alone`: the result's dwords that depend on nothing but the same dword of the sources."""
    for dword, pair in ((0, "2:3"), (1, "10:11")):  # the defined one
        code = LOAD + "v_mov_b32 v11, v2\n" + instruction.format(pair) + "\nv_mov_b32 v2, v"
        same, other = (kinds(go(f"{code}{4 + d}\n{STORE}")[0]) for d in (dword, 1 - dword))
        assert same == (set() if dword in alone else {"uninitialised value stored"})
        assert other == {"uninitialised value stored"}
