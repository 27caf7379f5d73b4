"""Small float formats for oracles: casts of ml_dtypes, saturation, stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.emulator.alu import F32

RNG = np.random.default_rng(7)
BITS = np.concatenate([F32, RNG.integers(0, 2**32, 1000, np.uint64).astype(np.uint32)])
# Near the formats' ranges, where rounding, denormals and overflow happen.
NEAR = (RNG.standard_normal(4000) * np.exp2(RNG.integers(-20, 20, 4000))).astype(np.float32)
TIES = np.arange(-520, 520, dtype=np.float32) / 16
EDGES = np.float32(
    [448, 464, 465, 480, 57344, 61440, 61441, 65504, 65519, 65520, 65536, -70000, 1e-9, 2**-24,
     2**-25, 2**-25 * 1.0001, 6.1e-5, 5.97e-8, -3e-8, 7.5, -7.75, 28, 30, 6, 6.9, 7]
)  # fmt: skip
VALUES = np.concatenate([BITS.view(np.float32), NEAR, TIES, EDGES])
WORDS = VALUES.view(np.uint32)
with np.errstate(invalid="ignore"):  # signalling NaNs
    EXACT = VALUES.astype(np.float64)


@dataclass(frozen=True)
class Small:
    """`low`: the exponent of the smallest normal number; `mantissa`: its stored bits."""

    dtype: type
    bits: int
    mantissa: int
    low: int
    largest: float
    special: bool  # has a NaN (and an infinity, when that is not the same code)


FORMATS = {
    "fp8": Small(ml_dtypes.float8_e4m3fn, 8, 3, -6, 448.0, True),
    "bf8": Small(ml_dtypes.float8_e5m2, 8, 2, -14, 57344.0, True),
    "fp6": Small(ml_dtypes.float6_e2m3fn, 6, 3, 0, 7.5, False),
    "bf6": Small(ml_dtypes.float6_e3m2fn, 6, 2, -2, 28.0, False),
    "fp4": Small(ml_dtypes.float4_e2m1fn, 4, 1, 0, 6.0, False),
    "f16": Small(np.float16, 16, 10, -14, 65504.0, True),
    "bf16": Small(ml_dtypes.bfloat16, 16, 7, -126, float(ml_dtypes.finfo("bfloat16").max), True),
}
# Only the exponent of a scale counts: sign and mantissa do not; 0 stands for 2^-127.
SCALES = np.concatenate(
    [np.float32([1, 0.5, 8, 3, -4, 2**-20, 1e30, 1e-38, 2**127]).view(np.uint32),
     np.array([0x00400000, 0, 0x7F800000, 0x7FC00000], np.uint32)]
)  # fmt: skip


def power_of(scale: np.ndarray) -> np.ndarray:
    """2^(exponent field - 127) of f32 codes; NaN for the field 255."""
    field = (scale >> 23 & 0xFF).astype(np.int64)
    return np.where(field == 255, np.nan, np.ldexp(1.0, field - 127))


def codes_of(x: np.ndarray) -> np.ndarray:
    """Bits of values of a small dtype."""
    return x.view({1: np.uint8, 2: np.uint16}[x.dtype.itemsize]).astype(np.uint32)


def cast(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """Codes nearest to the doubles `x`. Saturation keeps NaN, in f16 and bf16 infinities, too; FP6
    and FP4 have neither and take the largest magnitude."""
    small = FORMATS[kind]
    saturate = saturate or not small.special
    if saturate:
        kept = ~np.isfinite(x) if small.bits == 16 else np.isnan(x)
        x = np.where(kept, x, np.clip(x, -small.largest, small.largest))
    if not small.special:
        x = np.where(np.isnan(x), np.copysign(small.largest, x), x)
    with np.errstate(all="ignore"):
        return codes_of(x.astype(small.dtype))


def stochastic(x: np.ndarray, noise: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """Codes of the doubles `x`, rounded away from zero when noise / 2^32 and the fraction of a
    step that is cut off reach 1 together."""
    small = FORMATS[kind]
    finite = np.isfinite(x)
    magnitude = np.where(finite, np.abs(x), 0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, small.low)
    step = np.ldexp(1.0, exponent - small.mantissa)
    whole = np.floor(magnitude / step)
    up = (magnitude / step - whole) * 2.0**32 >= 2.0**32 - noise.astype(np.float64)
    rounded = np.copysign((whole + (up & (noise > 0))) * step, x)
    over = np.abs(rounded) > small.largest
    beyond = small.largest if saturate or not small.special else np.inf
    rounded = np.where(over, np.copysign(beyond, x), rounded)
    return cast(np.where(finite, rounded, x), kind, saturate)


def next_noise(noise: np.ndarray) -> np.ndarray:
    """v_prng_b32: what the second value of a packed stochastic conversion is rounded with."""
    return (noise << np.uint32(1)) ^ np.where(noise >> 31, np.uint32(197), np.uint32(0))


def same_codes(got: np.ndarray, want: np.ndarray, kind: str) -> None:
    """Equal codes; any NaN for a NaN."""
    small = FORMATS[kind]
    got = got & np.uint32((1 << small.bits) - 1)
    unsigned = np.uint8 if small.bits <= 8 else np.uint16

    def is_nan(codes):
        return np.isnan(codes.astype(unsigned).view(small.dtype).astype(np.float32))

    nan = is_nan(want)
    np.testing.assert_array_equal(is_nan(got), nan)
    np.testing.assert_array_equal(got[~nan], want[~nan])


def pack_six(codes: np.ndarray) -> np.ndarray:
    """[6, n] dwords of [32, n] six-bit codes, the first in the lowest bits."""
    total = sum(codes[k].astype(object) << 6 * k for k in range(32))
    return np.array([[int(t) >> 32 * k & 0xFFFFFFFF for t in total] for k in range(6)], np.uint32)


def unpack_six(words: np.ndarray) -> np.ndarray:
    """[32, n] six-bit codes of [6, n] dwords."""
    total = sum(words[k].astype(object) << 32 * k for k in range(6))
    return np.array([[int(t) >> 6 * k & 63 for t in total] for k in range(32)], np.uint32)
