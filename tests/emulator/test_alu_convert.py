"""Conversions between 16, 32 and 64-bit numbers against NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.alu import (
    F64,
    U32,
    dwords,
    f,
    flush,
    grid,
    h,
    low,
    opcode_is_launched,  # noqa: F401
    quads,
    run,
    same_floats,
)
from tests.emulator.alu_formats import EXACT, RNG, VALUES, WORDS, cast, same_codes, stochastic

EVERY = np.arange(65536, dtype=np.uint32)
WIDE = np.concatenate(
    [F64, EXACT, RNG.standard_normal(500) * 2.0 ** RNG.integers(-160, 140, 500),
     [2**31 - 0.5, 2.0**31, -(2.0**31) - 0.5, 2.0**32 - 0.5, 2.0**32, -0.5, 1 + 2**-24 + 2**-50]]
)  # fmt: skip


def double(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


def whole(x: np.ndarray, low_end: int, high_end: int) -> np.ndarray:
    """Truncated and saturated; 0 for a NaN."""
    x = np.nan_to_num(double(x), nan=0, posinf=np.inf, neginf=-np.inf)
    return np.trunc(np.clip(x, low_end, high_end)).astype(np.int64)


def int32(x):
    return whole(x, -(2**31), 2**31 - 1)


def uint32(x):
    return whole(x, 0, 2**32 - 1)


FROM_F32 = {
    "v_cvt_u32_f32": uint32,
    "v_cvt_i32_f32": int32,
    "v_cvt_rpi_i32_f32": lambda x: int32(np.floor(double(x) + 0.5)),
    "v_cvt_flr_i32_f32": lambda x: int32(np.floor(double(x))),
}


@pytest.mark.parametrize("opcode", FROM_F32)
def test_f32_to_integer(opcode):
    got = run(f"{opcode} v20, v4", [WORDS])[0]
    np.testing.assert_array_equal(got, low(FROM_F32[opcode](VALUES)))


TO_F32 = {
    "v_cvt_f32_i32": lambda x: x.view(np.int32),
    "v_cvt_f32_u32": lambda x: x,
    **{f"v_cvt_f32_ubyte{k}": lambda x, k=k: x >> 8 * k & 0xFF for k in range(4)},
    "v_cvt_off_f32_i4": lambda x: (((x & 15) ^ 8).astype(np.int64) - 8) / 16,
}


@pytest.mark.parametrize("opcode", TO_F32)
def test_integer_to_f32(opcode):
    values = np.concatenate([U32, WORDS])
    got = run(f"{opcode} v20, v4", [values])[0]
    same_floats(got.view(np.float32), TO_F32[opcode](values).astype(np.float32))


@pytest.mark.parametrize("opcode,oracle", [("v_cvt_i32_f64", int32), ("v_cvt_u32_f64", uint32)])
def test_f64_to_integer(opcode, oracle):
    got = run(f"{opcode} v20, v[4:5]", [*dwords(WIDE)])[0]
    np.testing.assert_array_equal(got, low(oracle(WIDE)))


@pytest.mark.parametrize("opcode,view", [("v_cvt_f64_i32", np.int32), ("v_cvt_f64_u32", np.uint32)])
def test_integer_to_f64(opcode, view):
    out = run(f"{opcode} v[20:21], v4", [WORDS], 2)
    same_floats(quads(out, np.float64), WORDS.view(view).astype(np.float64))


@pytest.mark.parametrize("mode", [0xF0, 0xC0, 0x30])
@pytest.mark.parametrize("opcode", ["v_cvt_f32_f64", "v_cvt_f64_f32"])
def test_f32_and_f64(opcode, mode):
    """Denormals by the mode of their own width."""
    narrow = flush if not mode & 0x10 else np.asarray
    wide = flush if not mode & 0x40 else np.asarray
    with np.errstate(all="ignore"):
        if opcode == "v_cvt_f32_f64":
            got = run(f"{opcode} v20, v[4:5]", [*dwords(WIDE)], mode=mode)[0].view(np.float32)
            same_floats(got, narrow(wide(WIDE).astype(np.float32)))
        else:
            out = run(f"{opcode} v[20:21], v4", [WORDS], 2, mode=mode)
            same_floats(quads(out, np.float64), narrow(VALUES).astype(np.float64))


def half_by_mode(x: np.ndarray, rounding: int, ovfl: bool) -> np.ndarray:
    """f16 of doubles: to nearest, up, down or to zero."""
    with np.errstate(all="ignore"):
        near = x.astype(np.float16)
        target = [near, np.float16(np.inf), np.float16(-np.inf), np.float16(0)][rounding]
        off = near.astype(np.float64)
        wrong = [np.zeros(len(x), bool), off < x, off > x, np.abs(off) > np.abs(x)][rounding]
        r = np.where(wrong, np.nextafter(near, target), near)
        r = np.where(r == 0, np.copysign(r, near), r)
    finite = np.isfinite(x) & ovfl
    return np.where(np.isinf(r) & finite, np.copysign(np.float16(65504), r), r)


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("rounding", [0, 1, 2, 3])
@pytest.mark.parametrize("opcode", ["v_cvt_f16_f32"])
def test_f32_to_f16(opcode, rounding, ovfl):
    got = run(f"{opcode} v20, v4", [WORDS], mode=0xF0 | rounding << 2, fp16_ovfl=ovfl)[0]
    assert not (got >> 16).any()
    same_floats(h(got), half_by_mode(EXACT, rounding, ovfl))


def test_f16_denormals_flush():
    got = run("v_cvt_f16_f32 v20, v4", [WORDS], mode=0x30)[0]
    same_floats(h(got), flush(half_by_mode(EXACT, 0, False)))
    got = run("v_cvt_f32_f16 v20, v4", [EVERY], mode=0x30)[0].view(np.float32)
    same_floats(got, flush(h(EVERY)).astype(np.float32))


PACK_F16 = {"v_cvt_pkrtz_f16_f32": 3, "v_cvt_pk_f16_f32": 0}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", PACK_F16)
def test_packed_f16(opcode, ovfl):
    """To zero or to nearest, whatever MODE's rounding is."""
    swapped = WORDS[::-1].copy()
    got = run(f"{opcode} v20, -v4, |v5|", [WORDS, swapped], mode=0xF4, fp16_ovfl=ovfl)[0]
    rounding = PACK_F16[opcode]
    same_floats(h(got), half_by_mode(-EXACT, rounding, ovfl))
    same_floats(h(got >> 16), half_by_mode(np.abs(EXACT[::-1]), rounding, ovfl))


@pytest.mark.parametrize("opcode", ["v_cvt_pk_bf16_f32"])
def test_packed_bf16(opcode):
    """Rounded once, infinite on overflow, with FP16_OVFL too."""
    for settings in ({}, {"fp16_ovfl": True}):
        got = run(f"{opcode} v20, v4, v5", [WORDS, WORDS[::-1].copy()], **settings)[0]
        with np.errstate(all="ignore"):
            brain = VALUES.astype(ml_dtypes.bfloat16).astype(np.float32)
        same_floats(f(got << 16), brain)
        same_floats(f(got & np.uint32(0xFFFF0000)), brain[::-1])


@pytest.mark.parametrize("opcode", ["v_cvt_f32_f16", "v_cvt_f32_bf16"])
def test_16_bits_to_f32(opcode):
    want = h(EVERY).astype(np.float32) if opcode == "v_cvt_f32_f16" else f(EVERY << 16)
    got = run(f"{opcode} v20, v4", [EVERY | 0x12340000])[0]
    same_floats(got.view(np.float32), want)
    text = f"{opcode}_sdwa v20, v4 dst_sel:DWORD dst_unused:UNUSED_PRESERVE src0_sel:WORD_1"
    same_floats(run(text, [EVERY << 16])[0].view(np.float32), want)


HALF_TO_INTEGER = {
    "v_cvt_u16_f16": lambda x: whole(x, 0, 65535),
    "v_cvt_i16_f16": lambda x: whole(x, -32768, 32767),
    "v_cvt_norm_i16_f16": lambda x: signed_norm(x),
    "v_cvt_norm_u16_f16": lambda x: unsigned_norm(x),
}


def signed_norm(x: np.ndarray) -> np.ndarray:
    x = np.nan_to_num(double(x), nan=0, posinf=1, neginf=-1)
    return np.rint(np.clip(x, -1, 1) * 32767).astype(np.int64)


def unsigned_norm(x: np.ndarray) -> np.ndarray:
    x = np.nan_to_num(double(x), nan=0, posinf=1, neginf=0)
    return np.rint(np.clip(x, 0, 1) * 65535).astype(np.int64)


@pytest.mark.parametrize("opcode", HALF_TO_INTEGER)
def test_f16_to_integer(opcode):
    got = run(f"{opcode} v20, v4", [EVERY], before="v_mov_b32 v20, 0xabcd8765")[0]
    np.testing.assert_array_equal(got & 0xFFFF, HALF_TO_INTEGER[opcode](h(EVERY)) & 0xFFFF)
    assert (got >> 16 == (0xABCD if "norm" in opcode else 0)).all()


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", ["v_cvt_f16_u16", "v_cvt_f16_i16"])
def test_16_bit_integer_to_f16(opcode, ovfl):
    view = np.uint16 if "u16" in opcode else np.int16
    exact = EVERY.astype(np.uint16).view(view).astype(np.float64)
    got = run(f"{opcode} v20, v4", [EVERY], fp16_ovfl=ovfl)[0]
    same_floats(h(got), half_by_mode(exact, 0, ovfl))


NORM = {
    "v_cvt_pknorm_i16_f32": signed_norm, "v_cvt_pknorm_u16_f32": unsigned_norm,
    "v_cvt_pknorm_i16_f16": signed_norm, "v_cvt_pknorm_u16_f16": unsigned_norm,
}  # fmt: skip


@pytest.mark.parametrize("opcode", NORM)
def test_packed_norms(opcode):
    unit = RNG.uniform(-1.1, 1.1, 3000).astype(np.float32)
    if opcode.endswith("f32"):
        codes = np.concatenate([WORDS, unit.view(np.uint32)])
        view = f
    else:
        codes, view = EVERY, h
    other = codes[::-1].copy()
    got = run(f"{opcode} v20, v4, v5", [codes, other])[0]
    np.testing.assert_array_equal(got & 0xFFFF, NORM[opcode](view(codes)) & 0xFFFF)
    np.testing.assert_array_equal(got >> 16, NORM[opcode](view(other)) & 0xFFFF)
    if view is h:
        got = run(f"{opcode} v20, v4, v5 op_sel:[1,1,0]", [codes << 16, other << 16])[0]
        np.testing.assert_array_equal(got & 0xFFFF, NORM[opcode](h(codes)) & 0xFFFF)
        np.testing.assert_array_equal(got >> 16, NORM[opcode](h(other)) & 0xFFFF)


@pytest.mark.parametrize("opcode", ["v_cvt_pk_u8_f32"])
def test_packed_byte(opcode):
    """The source, truncated and saturated, as one byte of the third source."""
    place = np.resize(np.array([0, 1, 2, 3, 6], np.uint32), len(WORDS))
    old = np.resize(U32, len(WORDS))
    got = run(f"{opcode} v20, v4, v5, v6", [WORDS, place, old])[0]
    shift = 8 * (place & 3)
    want = old & ~(np.uint32(0xFF) << shift) | whole(VALUES, 0, 255).astype(np.uint32) << shift
    np.testing.assert_array_equal(got, want)


NOISE = {"none": 0, "all": 0xFFFFFFFF, "half": 0x80000000}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    "opcode,kind", [("v_cvt_sr_f16_f32", "f16"), ("v_cvt_sr_bf16_f32", "bf16")]
)
def test_stochastic_16_bits(opcode, kind, noise, ovfl):
    """No noise truncates, all of it rounds away from zero, half of it to nearest (ties away)."""
    bits = np.full(len(WORDS), NOISE[noise], np.uint32)
    text = f"{opcode} v20, v4, v5\n{opcode} v21, -v4, v5 op_sel:[0,0,1]"
    out = run(text, [WORDS, bits], 2, before="v_mov_b32 v20, 0xabcd8765\nv_mov_b32 v21, v20",
              fp16_ovfl=ovfl)  # fmt: skip
    saturate = ovfl and kind == "f16"
    x = EXACT
    same_codes(out[0], stochastic(x, bits, kind, saturate), kind)
    same_codes(out[1] >> 16, stochastic(-x, bits, kind, saturate), kind)
    assert (out[0] >> 16 == 0xABCD).all() and (out[1] & 0xFFFF == 0x8765).all()


def test_the_oracles_agree():
    """Casts of doubles round once; stochastic rounding keeps values that are exact."""
    a, b = grid(np.float64([1, 3, 5, 7, 9, 11]), 2)
    just_over_a_tie = np.float64([1 + 2**-11 + 2**-40, -(1 + 2**-11 + 2**-40)])
    np.testing.assert_array_equal(cast(just_over_a_tie, "f16", False), [0x3C01, 0xBC01])
    for kind in ("f16", "bf16"):
        values = cast(a + b / 2**12, kind, False)
        back = h(values) if kind == "f16" else f(values << 16)
        again = stochastic(
            back.astype(np.float64), np.full(len(a), 2**32 - 1, np.uint32), kind, False
        )
        np.testing.assert_array_equal(again, values)
