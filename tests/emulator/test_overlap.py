"""Loads that overwrite the registers of their own address, some lanes out of range."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.test_buffers import LANE, go

UINT_32_32_32_32 = 14 << 15 | 4 << 12 | 4 | 5 << 3 | 6 << 6 | 7 << 9


@pytest.mark.parametrize(
    ("load", "records", "kept"),
    [
        ("buffer_load_dwordx4 v[2:5], v3, s[12:15], 0 offen", 512, LANE < 32),
        ("buffer_load_format_xyzw v[2:5], v3, s[12:15], 0 offen", 512, LANE < 32),
        ("global_load_dwordx4 v[2:5], v3, s[4:5]", 0, LANE >= 0),
    ],
)
def test_a_load_over_its_address(load, records, kept):
    a = np.random.default_rng(3).integers(1, 2**32, (64, 4)).astype(np.uint32)
    out = np.zeros_like(a)
    body = f"{load}\ns_waitcnt vmcnt(0)\nv_lshlrev_b32 v6, 4, v0\n"
    store = "global_store_dwordx4 v6, v[2:5], s[6:7]\n"
    report = go(body + store, a, out, records=records, word3=UINT_32_32_32_32)
    report.raise_for_findings()
    np.testing.assert_array_equal(out[kept], a[kept])
    assert not out[~kept].any()
