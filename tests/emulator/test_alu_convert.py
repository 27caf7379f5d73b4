"""Conversions against torch and ml_dtypes, with and without FP16_OVFL."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.test_alu import F16, F32, low, run, same_floats

RNG = np.random.default_rng(7)
BITS = np.concatenate([F32, RNG.integers(0, 2**32, 1000, np.uint32).astype(np.uint32)])
# Near the formats' ranges, where rounding, denormals and overflow happen.
NEAR = (RNG.standard_normal(4000) * np.exp2(RNG.integers(-20, 20, 4000))).astype(np.float32)
TIES = np.arange(-520, 520, dtype=np.float32) / 16
EDGES = np.float32([448, 464, 465, 480, 57344, 61440, 61441, 65504, 65520, 1e-9])
VALUES = np.concatenate([BITS.view(np.float32), NEAR, TIES, EDGES])
WORDS = VALUES.view(np.uint32)
FP8 = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}
HIGHEST = {"fp8": 448.0, "bf8": 57344.0}


def to_fp8(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    with np.errstate(all="ignore"):
        if saturate:
            x = np.where(np.isnan(x), x, np.clip(x, -HIGHEST[kind], HIGHEST[kind]))
        return x.astype(FP8[kind])


def same_codes(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.view(want.dtype).astype(np.float32)), nan)
    np.testing.assert_array_equal(got[~nan], want.view(np.uint8)[~nan])


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("kind", FP8)
def test_to_fp8(kind, ovfl):
    swapped = WORDS[::-1].copy()
    text = f"v_cvt_pk_{kind}_f32 v20, v4, v5\nv_cvt_pk_{kind}_f32 v20, v5, v4 op_sel:[0,0,1]"
    got = run(text, [WORDS, swapped], fp16_ovfl=ovfl)[0]
    a, b = to_fp8(VALUES, kind, ovfl), to_fp8(VALUES[::-1], kind, ovfl)
    for place, want in enumerate((a, b, b, a)):
        same_codes((got >> 8 * place & 0xFF).astype(np.uint8), want)


def test_fp16_ovfl_by_s_setreg():
    text = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_cvt_pk_fp8_f32 v20, v4, v4"
    got = run(text, [WORDS])[0]
    same_codes((got & 0xFF).astype(np.uint8), to_fp8(VALUES, "fp8", True))


@pytest.mark.parametrize("kind", FP8)
def test_from_fp8(kind):
    codes = np.arange(256, dtype=np.uint32)
    want = codes.astype(np.uint8).view(FP8[kind]).astype(np.float32)
    packed = codes | codes[::-1] << 8
    same_floats(run(f"v_cvt_f32_{kind} v20, v4", [packed])[0].view(np.float32), want)
    got = run(f"v_cvt_f32_{kind}_sdwa v20, v4 src0_sel:BYTE_1", [packed])[0]
    same_floats(got.view(np.float32), want[::-1])
    got = run(f"v_cvt_pk_f32_{kind} v[20:21], v4", [packed], 2)
    same_floats(got[0].view(np.float32), want)
    same_floats(got[1].view(np.float32), want[::-1])
    for name, k in (("1.0", 1.0), ("0.5", 0.5), ("4.0", 4.0)):
        got = run(f"v_cvt_scalef32_pk_f32_{kind} v[20:21], v4, {name}", [packed], 2)
        same_floats(got[0].view(np.float32), want * np.float32(k))
        got = run(f"v_cvt_scalef32_f32_{kind} v20, v4, {name} op_sel:[1,0,0]", [packed])[0]
        same_floats(got.view(np.float32), want[::-1] * np.float32(k))


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("scale", [1.0, 8.0, 0.125, 3.0])
@pytest.mark.parametrize("kind", FP8)
def test_scaled_to_fp8(kind, scale, ovfl):
    """Only the scale's exponent counts: 3.0 divides by 2."""
    s = np.full(len(WORDS), scale, np.float32).view(np.uint32)
    text = f"v_cvt_scalef32_pk_{kind}_f32 v20, v4, v5, v6 op_sel:[0,0,0,1]"
    got = run(text, [WORDS, WORDS[::-1].copy(), s], fp16_ovfl=ovfl)[0]
    power = 2.0 ** np.floor(np.log2(scale))
    with np.errstate(all="ignore"):
        exact = VALUES.astype(np.float64) / power
        # A double rounding from float64 through ml_dtypes is none: it rounds once.
        want = exact
        if ovfl:
            want = np.where(np.isnan(want), want, np.clip(want, -HIGHEST[kind], HIGHEST[kind]))
        want = want.astype(FP8[kind])
    same_codes((got >> 16 & 0xFF).astype(np.uint8), want)
    assert not (got & 0xFFFF).any()


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
FP4 = np.concatenate([FP4, -FP4])


def to_fp4(x: np.ndarray) -> np.ndarray:
    """Nearest, ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(np.nan_to_num(x, nan=6.0, posinf=6.0, neginf=-6.0)), 6.0)
    distance = np.abs(magnitude[:, None] - FP4[None, :8])
    best = distance.min(1, keepdims=True)
    tied = distance == best
    code = np.where(tied & (np.arange(8) % 2 == 0), 1, 0).argmax(1)
    code = np.where((tied & (np.arange(8) % 2 == 0)).any(1), code, tied.argmax(1))
    return (code | np.signbit(x).astype(int) << 3).astype(np.uint32)


def test_fp4():
    x = VALUES[np.isfinite(VALUES)]
    got = run("v_cvt_scalef32_pk_fp4_f32 v20, v4, v5, 2.0 op_sel:[0,0,1,0]",
              [x.view(np.uint32), x[::-1].copy().view(np.uint32)])[0]  # fmt: skip
    np.testing.assert_array_equal(got >> 8 & 15, to_fp4(x.astype(np.float64) / 2))
    np.testing.assert_array_equal(got >> 12 & 15, to_fp4(x[::-1].astype(np.float64) / 2))
    codes = np.arange(256, dtype=np.uint32)
    for place, select in enumerate(("0,0", "1,0", "0,1", "1,1")):
        word = codes << 8 * place
        got = run(f"v_cvt_scalef32_pk_f32_fp4 v[20:21], v4, 4.0 op_sel:[{select},0]", [word], 2)
        same_floats(got[0].view(np.float32), (FP4[codes & 15] * 4).astype(np.float32))
        same_floats(got[1].view(np.float32), (FP4[codes >> 4] * 4).astype(np.float32))


@pytest.mark.parametrize(
    "kind,dtype", [("fp6", ml_dtypes.float6_e2m3fn), ("bf6", ml_dtypes.float6_e3m2fn)]
)
def test_fp6_round_trip(kind, dtype):
    codes = RNG.integers(0, 64, (32, 64)).astype(np.uint32)
    bits = sum(codes[n].astype(object) << 6 * n for n in range(32))
    words = np.array([[int(b) >> 32 * k & 0xFFFFFFFF for b in bits] for k in range(6)], np.uint32)
    got = run(f"v_cvt_scalef32_pk32_f32_{kind} v[20:51], v[4:9], 2.0", list(words), 32, vgprs=128)
    want = codes.astype(np.uint8).view(dtype).astype(np.float32) * 2
    same_floats(got.view(np.float32), want)
    halves = want.astype(np.float16).view(np.uint16).astype(np.uint32)
    packed = halves[0::2] | halves[1::2] << 16
    text = f"v_cvt_scalef32_pk32_{kind}_f16 v[20:25], v[4:19], 2.0"
    got = run(text, list(packed), 6, vgprs=128)
    zero = want == 0  # -0 keeps its sign
    assert zero.any()
    np.testing.assert_array_equal(got, words)


def test_16_bit_formats():
    with np.errstate(all="ignore"):
        half = VALUES.astype(np.float16)
        brain = VALUES.astype(ml_dtypes.bfloat16)
    got = run("v_cvt_f16_f32 v20, v4", [WORDS])[0]
    same_floats(got.astype(np.uint16).view(np.float16), half)
    got = run("v_cvt_pk_f16_f32 v20, v4, v4", [WORDS])[0]
    same_floats((got >> 16).astype(np.uint16).view(np.float16), half)
    got = run("v_cvt_pk_bf16_f32 v20, v4, v4", [WORDS])[0]
    same_floats(((got & 0xFFFF) << 16).view(np.float32), brain.astype(np.float32))
    for name, mode in (("v_cvt_pkrtz_f16_f32", 0),):
        finite = np.isfinite(VALUES) & (np.abs(VALUES) < 65504)
        got = run(f"{name} v20, v4, v4", [WORDS])[0].astype(np.uint16).view(np.float16)[finite]
        exact = VALUES[finite].astype(np.float64)
        assert (np.abs(got.astype(np.float64)) <= np.abs(exact)).all()
        step = np.nextafter(
            got, np.copysign(np.float16(np.inf), exact.astype(np.float32)).astype(np.float16)
        )
        assert (np.abs(step.astype(np.float64)) > np.abs(exact)).all(), mode
    every = np.arange(65536, dtype=np.uint32)
    same_floats(run("v_cvt_f32_f16 v20, v4", [every])[0].view(np.float32),
                every.astype(np.uint16).view(np.float16).astype(np.float32))  # fmt: skip
    same_floats(
        run("v_cvt_f32_bf16 v20, v4", [every])[0].view(np.float32), (every << 16).view(np.float32)
    )


def test_integers_and_floats():
    x = VALUES.astype(np.float64)
    clean = np.nan_to_num(x, nan=0.0)
    got = run("v_cvt_i32_f32 v20, v4", [WORDS])[0]
    np.testing.assert_array_equal(
        got, low(np.trunc(np.clip(clean, -(2**31), 2**31 - 1)).astype(np.int64))
    )
    got = run("v_cvt_u32_f32 v20, v4", [WORDS])[0]
    np.testing.assert_array_equal(got, low(np.trunc(np.clip(clean, 0, 2**32 - 1)).astype(np.int64)))
    same_floats(
        run("v_cvt_f32_i32 v20, v4", [WORDS])[0].view(np.float32),
        WORDS.view(np.int32).astype(np.float32),
    )
    same_floats(run("v_cvt_f32_u32 v20, v4", [WORDS])[0].view(np.float32), WORDS.astype(np.float32))
    for k in range(4):
        same_floats(run(f"v_cvt_f32_ubyte{k} v20, v4", [WORDS])[0].view(np.float32),
                    (WORDS >> 8 * k & 0xFF).astype(np.float32))  # fmt: skip
    out = run("v_cvt_f64_f32 v[20:21], v4\nv_cvt_f32_f64 v22, v[20:21]", [WORDS], 3)
    same_floats(out[2].view(np.float32), VALUES)
    h = F16.astype(np.uint16).view(np.float16).astype(np.float32)
    got = run("v_cvt_i16_f16 v20, v4", [F16])[0].astype(np.uint16).view(np.int16)
    np.testing.assert_array_equal(
        got, np.trunc(np.clip(np.nan_to_num(h, nan=0), -32768, 32767)).astype(np.int16)
    )


def test_stochastic_rounding_is_fair():
    """The mean over evenly spread noise is the value."""
    noise = (np.arange(4096, dtype=np.uint64) << np.uint64(20)).astype(np.uint32)
    x = np.full(4096, 1.03, np.float32)
    got = run("v_cvt_sr_fp8_f32 v20, v4, v5", [x.view(np.uint32), noise])[0]
    values = (got & 0xFF).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert set(values) == {1.0, 1.125} and abs(values.mean() - 1.03) < 1e-3
