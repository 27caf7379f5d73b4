"""Sparse matrix instructions of every shape against NumPy: index sets, their choice, the sums."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gfx950_emu.decode import opcodes
from tests.emulator.alu import run
from tests.emulator.test_mfma import LANE, TYPES, pack_back, pack_registers, raw, registers

NAME = re.compile(r"v_smfmac_([fi]32)_(\d+)x(\d+)x(\d+)_(\w+)")
ALL = [n for n in opcodes() if n.startswith("v_smfmac")]


def matrices(name: str, seed: int):
    """Kept values [m, k / 2], their places in each four [m, k / 2], B [k, n], sizes."""
    out, m, n, k, kinds = NAME.fullmatch(name).groups()
    m, n, k = int(m), int(n), int(k)
    a_kind, _, b_kind = kinds.partition("_")
    rng = np.random.default_rng(seed)
    kept = rng.integers(-4, 5, (m, k // 2)).astype(TYPES[a_kind])
    b = rng.integers(-4, 5, (k, n)).astype(TYPES[b_kind or a_kind])
    pairs = np.array([(x, y) for x in range(4) for y in range(x + 1, 4)])
    places = pairs[rng.integers(0, len(pairs), (m, k // 4))].reshape(m, k // 2)
    return kept, places, b, (m, n, k, np.float32 if out == "f32" else np.int32)


def dense(kept: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A [m, k] of its kept values."""
    m, half = kept.shape
    a = np.zeros((m, 2 * half))
    place = np.arange(half) // 2 * 4 + places
    np.put_along_axis(a, place, kept.astype(np.float64), 1)
    return a


def test_all_shapes_are_there():
    """Every one that LLVM's assembler accepts for gfx950."""
    assert len(ALL) == 28


@pytest.mark.parametrize("name", ALL)
def test_shape(name):
    kept, places, b, (m, n, k, result) = matrices(name, len(name))
    length = k * m // 64  # dense elements of a lane
    row, group = LANE % m, LANE // m
    half = group[:, None] * (length // 2) + np.arange(length // 2)
    left = pack_registers(*raw(kept[row[:, None], half]))
    right = pack_registers(*raw(b[group[:, None] * length + np.arange(length), row[:, None]]))
    code = np.zeros(64, np.uint64)
    for j in range(length // 2):
        code |= places[row, half[:, j]].astype(np.uint64) << np.uint64(2 * j)
    want = 3 + dense(kept, places) @ b.astype(np.float64)
    count = m * n // 64
    r = np.arange(count)
    d_row = (8 * (r // 4) if m == 32 else 0 * r) + 4 * (LANE[:, None] // m) + r % 4
    a0, b0 = 4, 4 + len(left)
    d = f"v[20:{19 + count}]"
    text = f"{name} {d}, {registers(a0, left)}, {registers(b0, right)}, v{b0 + len(right)}"
    three = "3.0" if result == np.float32 else "3"
    before = "\n".join(f"v_mov_b32 v{20 + j}, {three}" for j in range(count))
    sets = 32 // length
    other = np.random.default_rng(1).integers(0, 2**32, 64).astype(np.uint64)
    choices = [(0, s, s) for s in range(sets)] + [(1, sets - 1, 0)]
    for cbsz, abid, chosen in choices:  # the other sets hold something else
        shift = np.uint64(chosen * length)
        mask = np.uint64((1 << length) - 1) << shift
        index = (other & ~mask) | (code << shift & mask)
        tail = (f" cbsz:{cbsz}" if cbsz else "") + (f" abid:{abid}" if abid else "")
        got = run(text + tail, [left, right, index.astype(np.uint32)], count, before, vgprs=128)
        np.testing.assert_array_equal(
            pack_back(got, count, result), want[d_row, LANE[:, None] % n].astype(result)
        )


def test_what_is_not_kept_is_not_multiplied():
    """An infinity opposite to a place that A leaves out gives no NaN."""
    name = "v_smfmac_f32_16x16x32_f16"
    kept, places, b, (m, n, _, _) = matrices(name, 0)
    places[:] = np.tile([0, 1], places.shape[1] // 2)
    b[3::4] = np.inf
    row, group = LANE % m, LANE // m
    left = pack_registers(*raw(kept[row[:, None], group[:, None] * 4 + np.arange(4)]))
    right = pack_registers(*raw(b[group[:, None] * 8 + np.arange(8), row[:, None]]))
    got = run(f"{name} v[20:23], v[4:5], v[6:9], v10", [left, right, np.full(64, 0x44)], 4)
    finite = np.where(np.isinf(b), 0, b).astype(np.float64)
    d_row = 4 * (LANE[:, None] // 16) + np.arange(4)
    want = (dense(kept, places) @ finite)[d_row, LANE[:, None] % n]
    np.testing.assert_array_equal(pack_back(got, 4, np.float32), want.astype(np.float32))
