"""Matrix instructions of every shape against NumPy; f8f6f4 in every pair of formats."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from gfx950_emu.decode import MFMA, opcodes
from tests.emulator.alu import run

NAME = re.compile(r"v_mfma_([fi]\d+)_(\d+)x(\d+)x(\d+)_(?:(\d+)b_)?(\w+)")
TYPES = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8,
    "f64": np.float64, "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2,
}  # fmt: skip
PLAIN = [
    n for n, o in opcodes().items()
    if o.family == MFMA and "f8f6f4" not in n and not n.startswith("v_smfmac")
]  # fmt: skip
FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float6_e2m3fn,
           ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn]  # fmt: skip
BITS = [8, 8, 6, 6, 4]
LANE = np.arange(64)


def pack_registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """[64 lanes, n codes] -> [dwords, 64], the first code in the lowest bits."""
    total = codes.shape[1] * bits
    flat = np.zeros((64, total), np.uint8)
    for b in range(bits):
        flat[:, b::bits] = codes.astype(np.uint64) >> np.uint64(b) & np.uint64(1)
    words = np.packbits(flat, axis=1, bitorder="little")
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4)))
    return np.ascontiguousarray(words).view(np.uint32).T


def raw(values: np.ndarray) -> tuple[np.ndarray, int]:
    bits = 8 * values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}"), bits


def registers(first: int, rows: np.ndarray) -> str:
    return f"v[{first}:{first + len(rows) - 1}]" if len(rows) > 1 else f"v{first}"


@pytest.mark.parametrize("name", PLAIN)
def test_shape(name):
    out, m, n, k, blocks, kinds = NAME.fullmatch(name).groups()
    m, n, k, blocks = int(m), int(n), int(k), int(blocks or 1)
    a_kind, _, b_kind = kinds.partition("_")
    b_kind = b_kind or a_kind
    rng = np.random.default_rng(5)
    a = rng.integers(-4, 5, (blocks, m, k)).astype(TYPES[a_kind])
    b = rng.integers(-4, 5, (blocks, k, n)).astype(TYPES[b_kind])
    result = {"f32": np.float32, "i32": np.int32, "f64": np.float64}[out]
    want = (a.astype(np.float64) @ b.astype(np.float64)).astype(result)
    each = m * k * blocks // 64
    if out == "f64" and m == 4:
        block, row, group = LANE // 4 % 4, LANE % 4, LANE // 16
    else:
        groups = k // each
        block, row, group = LANE // m // groups, LANE % m, LANE // m % groups
    place = group[:, None] * each + np.arange(each)
    left = pack_registers(*raw(a[block[:, None], row[:, None], place]))
    right = pack_registers(*raw(b[block[:, None], place, row[:, None]]))
    count = m * n * blocks // 64
    r = np.arange(count)
    if out == "f64":
        d_row = LANE[:, None] // 16 + (4 * r if m == 16 else 0 * r)
        d_block = np.broadcast_to(block[:, None] if m == 4 else 0, d_row.shape)
    elif m == 4:
        d_row, d_block = np.broadcast_to(r, (64, 4)), np.broadcast_to(LANE[:, None] // 4, (64, 4))
    else:
        one = m * n // 64
        inner = r % one
        d_row = (8 * (inner // 4) if m == 32 else 0 * inner) + 4 * (LANE[:, None] // m) + inner % 4
        d_block = np.broadcast_to(r // one, d_row.shape)
    column = np.broadcast_to(LANE[:, None] % n, d_row.shape)
    width = count * (2 if out == "f64" else 1)
    d = f"v[20:{19 + width}]" if width > 1 else "v20"
    text = f"{name} {d}, {registers(4, left)}, {registers(4 + len(left), right)}, {d}"
    got = run(text, [left, right], width, vgprs=128)
    product = pack_back(got, count, result)
    np.testing.assert_array_equal(product, want[d_block, d_row, column])


def pack_back(rows: np.ndarray, count: int, dtype) -> np.ndarray:
    return np.ascontiguousarray(rows.T).view(dtype)[:, :count]


def operand(code: int, rows: int, k: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Values [rows, k] of a format, and the registers of the operand."""
    codes = rng.integers(0, 1 << BITS[code], (rows, k)).astype(np.uint8)
    values = codes.view(FORMATS[code]).astype(np.float64)
    codes = np.where(np.isfinite(values), codes, 0).astype(np.uint8)
    values = codes.view(FORMATS[code]).astype(np.float64)
    if code == 1:  # E5M2 spans too much for an exact f32 sum
        codes = (codes & 0x80) | (0x30 + (codes & 0x0F))
        values = codes.view(FORMATS[code]).astype(np.float64)
    group, n = LANE[:, None] // rows, np.arange(32)
    if code < 2:
        place = np.where(n < 16, 16 * group + n, k // 2 + 16 * group + n - 16)
    else:
        place = 32 * group + n
    return values, pack_registers(codes[LANE[:, None] % rows, place], BITS[code])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("m,k", [(16, 128), (32, 64)])
@pytest.mark.parametrize("b_code", range(5))
@pytest.mark.parametrize("a_code", range(5))
def test_f8f6f4(a_code, b_code, m, k, scaled):
    rng = np.random.default_rng(a_code * 5 + b_code)
    a, left = operand(a_code, m, k, rng)
    b, right = operand(b_code, m, k, rng)
    name, tail, inputs = f"v_mfma_f32_{m}x{m}x{k}_f8f6f4", "", [left, right]
    at = 4 + len(left) + len(right)
    if scaled:
        scales = rng.integers(124, 131, (2, m, k // 32))
        words = rng.integers(0, 256, (2, 4, 64))
        for side, byte in ((0, 1), (1, 2)):  # chosen by op_sel and op_sel_hi
            words[side, byte] = scales[side][LANE % m, LANE // m]
        inputs += [pack_registers(words[side].T, 8) for side in (0, 1)]
        name = name.replace("v_mfma", "v_mfma_scale")
        tail = f", v{at}, v{at + 1} op_sel:[1,0,0] op_sel_hi:[0,1,0]"
        factor = np.exp2(scales.astype(np.float64) - 127).repeat(32, 2)
        a, b = a * factor[0], b * factor[1]
    d = m * m // 64
    text = (
        f"{name} v[{32}:{31 + d}], {registers(4, left)}, {registers(4 + len(left), right)}, 0{tail}"
        f" cbsz:{a_code} blgp:{b_code}"
    )
    moves = "\n".join(f"v_mov_b32 v{20 + r}, v{32 + r}" for r in range(min(d, 12)))
    got = run(f"{text}\ns_nop 15\n{moves}", inputs, min(d, 12), vgprs=128).view(np.float32)
    want = a @ b.T
    for r in range(len(got)):
        row = (8 * (r // 4) if m == 32 else 0) + 4 * (LANE // m) + r % 4
        scale = np.abs(a) @ np.abs(b).T
        assert (np.abs(got[r] - want[row, LANE % m]) <= 1e-5 * scale[row, LANE % m] + 1e-30).all()


def test_accumulation_starts_at_c_and_agprs_hold_it():
    rng = np.random.default_rng(1)
    a, b = (
        rng.standard_normal((16, 4)).astype(np.float32),
        rng.standard_normal((4, 16)).astype(np.float32),
    )
    left = a[LANE % 16, LANE // 16].view(np.uint32)
    right = b[LANE // 16, LANE % 16].view(np.uint32)
    text = "\n".join([
        *(f"v_accvgpr_write_b32 a{r}, {2.0 ** (r - 1)}" for r in range(4)),
        "s_nop 1",
        "v_mfma_f32_16x16x4_f32 a[0:3], v4, v5, a[0:3]",
        "s_nop 10",
        *(f"v_accvgpr_read_b32 v{20 + r}, a{r}" for r in range(4)),
    ])  # fmt: skip
    got = run(text, [left, right], 4, vgprs=72, accum=64).view(np.float32)
    for r in range(4):
        want = 2.0 ** (r - 1) + (a.astype(np.float64) @ b)[4 * (LANE // 16) + r, LANE % 16]
        np.testing.assert_allclose(got[r], want, rtol=1e-5, atol=1e-5)
