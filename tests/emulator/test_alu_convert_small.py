"""FP8, FP6 and FP4 conversions against ml_dtypes, with FP16_OVFL both ways and all kinds of scale.

What no public text settles is written down as the emulator has it: NaN becomes the largest FP6 or
FP4 value, and the 32 random bits are aligned below the last bit that is kept.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.alu import (
    f,
    h,
    opcode_is_launched,  # noqa: F401
    run,
    same_floats,
)
from tests.emulator.alu_formats import (
    EXACT,
    FORMATS,
    RNG,
    SCALES,
    WORDS,
    cast,
    next_noise,
    pack_six,
    power_of,
    same_codes,
    stochastic,
    unpack_six,
)

OLD = 0xABCD8765
BEFORE = f"v_mov_b32 v20, {OLD:#x}"
CODES = np.arange(256, dtype=np.uint32)


def small_values(codes: np.ndarray, kind: str) -> np.ndarray:
    """Doubles of codes."""
    bits = FORMATS[kind].bits
    unsigned = np.uint8 if bits <= 8 else np.uint16
    values = (codes & ((1 << bits) - 1)).astype(unsigned).view(FORMATS[kind].dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float32).astype(np.float64)


def scales(n: int) -> np.ndarray:
    return np.resize(SCALES, n).astype(np.uint32)


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", ["v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"])
def test_to_fp8(opcode, ovfl):
    kind = opcode[9:12]
    swapped = WORDS[::-1].copy()
    text = f"{opcode} v20, v4, v5\n{opcode} v20, -v5, |v4| op_sel:[0,0,1]"
    got = run(text, [WORDS, swapped], fp16_ovfl=ovfl)[0]
    wants = [EXACT, EXACT[::-1], -EXACT[::-1], np.abs(EXACT)]
    for place, want in enumerate(wants):
        same_codes(got >> 8 * place, cast(want, kind, ovfl), kind)


def test_fp16_ovfl_by_s_setreg():
    text = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_cvt_pk_fp8_f32 v20, v4, v4"
    same_codes(run(text, [WORDS])[0], cast(EXACT, "fp8", True), "fp8")


@pytest.mark.parametrize("opcode", ["v_cvt_f32_fp8", "v_cvt_f32_bf8"])
def test_from_fp8(opcode):
    kind = opcode[-3:]
    want = small_values(CODES, kind).astype(np.float32)
    for place in range(4):
        text = f"{opcode}_sdwa v20, v4 src0_sel:BYTE_{place}" if place else f"{opcode} v20, v4"
        got = run(text, [CODES << 8 * place])[0]
        same_floats(got.view(np.float32), want)


@pytest.mark.parametrize("opcode", ["v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"])
def test_from_fp8_pairs(opcode):
    kind = opcode[-3:]
    want = small_values(CODES, kind).astype(np.float32)
    pairs = CODES | CODES[::-1] << 8
    for text, word in ((f"{opcode} v[20:21], v4", pairs),
                       (f"{opcode}_sdwa v[20:21], v4 src0_sel:WORD_1", pairs << 16)):  # fmt: skip
        out = run(text, [word], 2)
        same_floats(out[0].view(np.float32), want)
        same_floats(out[1].view(np.float32), want[::-1])


NOISE = {"none": 0, "all": 0xFFFFFFFF, "half": 0x80000000, "random": None}


def noise_bits(name: str, n: int) -> np.ndarray:
    if NOISE[name] is None:
        return RNG.integers(0, 2**32, n, np.uint64).astype(np.uint32)
    return np.full(n, NOISE[name], np.uint32)


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("opcode", ["v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32"])
def test_stochastic_fp8(opcode, noise, ovfl):
    """No noise truncates, all of it rounds away from zero; each byte of the destination."""
    kind, bits = opcode[9:12], noise_bits(noise, len(WORDS))
    want = stochastic(EXACT, bits, kind, ovfl)
    for place, select in enumerate(("0,0", "1,0", "0,1", "1,1")):
        got = run(f"{opcode} v20, v4, v5 op_sel:[0,0,{select}]", [WORDS, bits], before=BEFORE,
                  fp16_ovfl=ovfl)[0]  # fmt: skip
        same_codes(got >> 8 * place, want, kind)
        keep = np.uint32(0xFFFFFFFF & ~(0xFF << 8 * place))
        np.testing.assert_array_equal(got & keep, OLD & keep)


def sources_of(wide: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Two rows of doubles and the dwords that hold them as `wide` values."""
    if wide == "f32":
        return EXACT, EXACT[::-1], [WORDS, WORDS[::-1].copy()]
    codes = cast(EXACT, wide, False)
    codes = np.concatenate([codes, np.arange(0, 65536, 5, dtype=np.uint32)])
    x = small_values(codes, wide)
    return x, x[::-1], [codes | codes[::-1] << 16]


SMALL, WIDE = ("fp8", "bf8", "fp4"), ("f32", "f16", "bf16")
PACK = {f"v_cvt_scalef32_pk_{s}_{w}": (s, w) for s in SMALL for w in WIDE}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", PACK)
def test_scaled_pairs_to_small(opcode, ovfl):
    """Two values divided by the scale's power of two, to one half or byte of the destination."""
    kind, wide = PACK[opcode]
    x, y, words = sources_of(wide)
    scale = scales(len(x))
    with np.errstate(all="ignore"):
        wants = [cast(v / power_of(scale), kind, ovfl) for v in (x, y)]
    registers = ", ".join(f"v{4 + k}" for k in range(len(words) + 1))
    bits = FORMATS[kind].bits
    places = ("0,0", "1,0", "0,1", "1,1") if kind == "fp4" else ("0", "1")
    zeros = "0,0" if kind == "fp4" else ",".join("0" * (len(words) + 1))
    for place, select in enumerate(places):
        got = run(f"{opcode} v20, {registers} op_sel:[{zeros},{select}]", [*words, scale],
                  before=BEFORE, fp16_ovfl=ovfl)[0]  # fmt: skip
        at = place * 2 * bits
        same_codes(got >> at, wants[0], kind)
        same_codes(got >> at + bits, wants[1], kind)
        keep = np.uint32(0xFFFFFFFF & ~(((1 << 2 * bits) - 1) << at))
        np.testing.assert_array_equal(got & keep, OLD & keep)


SCALED_SR = {f"v_cvt_scalef32_sr_{s}_{w}": (s, w) for s in ("fp8", "bf8") for w in WIDE}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("opcode", SCALED_SR)
def test_scaled_stochastic_to_small(opcode, noise):
    kind, wide = SCALED_SR[opcode]
    x, _, words = sources_of(wide)
    bits, scale = noise_bits(noise, len(x)), scales(len(x))
    with np.errstate(all="ignore"):
        for ovfl, place, select in ((False, 0, "0,0"), (True, 1, "1,0"), (False, 3, "1,1")):
            want = stochastic(x / power_of(scale), bits, kind, ovfl)
            got = run(f"{opcode} v20, v4, v5, v6 op_sel:[0,0,{select}]", [words[0], bits, scale],
                      before=BEFORE, fp16_ovfl=ovfl)[0]  # fmt: skip
            same_codes(got >> 8 * place, want, kind)
            keep = np.uint32(0xFFFFFFFF & ~(0xFF << 8 * place))
            np.testing.assert_array_equal(got & keep, OLD & keep)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("opcode", [f"v_cvt_scalef32_sr_pk_fp4_{w}" for w in WIDE])
def test_scaled_stochastic_fp4(opcode, noise):
    """The second value is rounded with v_prng_b32 of the noise."""
    x, y, words = sources_of(opcode.rsplit("_", 1)[1])
    bits, scale = noise_bits(noise, len(x)), scales(len(x))
    first = "v[4:5]" if len(words) == 2 else "v4"
    at = 4 + len(words)
    with np.errstate(all="ignore"):
        wants = [stochastic(x / power_of(scale), bits, "fp4", True),
                 stochastic(y / power_of(scale), next_noise(bits), "fp4", True)]  # fmt: skip
    for place, select in enumerate(("0,0", "1,0", "0,1", "1,1")):
        got = run(f"{opcode} v20, {first}, v{at}, v{at + 1} op_sel:[0,0,{select}]",
                  [*words, bits, scale], before=BEFORE)[0]  # fmt: skip
        for k, want in enumerate(wants):
            same_codes(got >> 8 * place + 4 * k, want, "fp4")
        keep = np.uint32(0xFFFFFFFF & ~(0xFF << 8 * place))
        np.testing.assert_array_equal(got & keep, OLD & keep)


def widened(x: np.ndarray, wide: str, ovfl: bool) -> np.ndarray:
    """f32 of doubles rounded to `wide`."""
    if wide == "f32":
        with np.errstate(all="ignore"):
            return x.astype(np.float32)
    return small_values(cast(x, wide, ovfl and wide == "f16"), wide).astype(np.float32)


def wide_value(got: np.ndarray, wide: str) -> np.ndarray:
    if wide == "f32":
        return got.view(np.float32)
    return h(got).astype(np.float32) if wide == "f16" else f(got << 16)


UNPACK = {f"v_cvt_scalef32_pk_{w}_{s}": (s, w) for s in SMALL for w in WIDE}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", UNPACK)
def test_scaled_pairs_from_small(opcode, ovfl):
    """Two values of a half or byte, times the scale's power of two."""
    kind, wide = UNPACK[opcode]
    code, scale = (v.ravel().copy() for v in np.meshgrid(CODES, SCALES))
    bits = FORMATS[kind].bits
    if bits == 4:
        parts, word = (code & 15, code >> 4), code
    else:
        parts, word = (code, code ^ 0xA5), code | (code ^ 0xA5) << 8
    wants = [widened(small_values(p, kind) * power_of(scale), wide, ovfl) for p in parts]
    selects = ("0,0", "1,0", "0,1", "1,1") if bits == 4 else ("0,0", "1,0")
    d, count = ("v[20:21]", 2) if wide == "f32" else ("v20", 1)
    for place, select in enumerate(selects):
        out = run(f"{opcode} {d}, v4, v5 op_sel:[{select},0]", [word << 2 * bits * place, scale],
                  count, fp16_ovfl=ovfl)  # fmt: skip
        halves = out if wide == "f32" else (out[0], out[0] >> 16)
        for half, want in zip(halves, wants, strict=True):
            same_floats(wide_value(half, wide), want)


ONE = {f"v_cvt_scalef32_{w}_{s}": (s, w) for s in ("fp8", "bf8") for w in ("f32", "f16")}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", ONE)
def test_scaled_byte_from_small(opcode, ovfl):
    kind, wide = ONE[opcode]
    code, scale = (v.ravel().copy() for v in np.meshgrid(CODES, SCALES))
    want = widened(small_values(code, kind) * power_of(scale), wide, ovfl)
    for place, select in enumerate(("0,0", "1,0", "0,1", "1,1")):
        high = wide == "f16" and place % 2
        got = run(f"{opcode} v20, v4, v5 op_sel:[{select},{int(high)}]",
                  [code << 8 * place, scale], before=BEFORE, fp16_ovfl=ovfl)[0]  # fmt: skip
        same_floats(wide_value(got >> 16 if high else got, wide), want)
        if wide == "f16":
            assert (
                h(got if high else got >> 16).view(np.uint16) == (0x8765 if high else 0xABCD)
            ).all()


SIX = ("fp6", "bf6")
FROM_SIX = {f"v_cvt_scalef32_pk32_{w}_{s}": (s, w) for s in SIX for w in WIDE}


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", FROM_SIX)
def test_scaled_from_six_bits(opcode, ovfl):
    """32 codes of six bits, the first in the lowest ones."""
    kind, wide = FROM_SIX[opcode]
    codes = np.arange(32 * 64, dtype=np.uint32).reshape(32, 64) * 13 % 64
    scale = scales(64)
    wants = widened(small_values(codes, kind) * power_of(scale), wide, ovfl)
    count = 32 if wide == "f32" else 16
    out = run(f"{opcode} v[40:{39 + count}], v[4:9], v10", [*pack_six(codes), scale], count,
              vgprs=128, first_out=40, fp16_ovfl=ovfl)  # fmt: skip
    for k in range(32):
        word = out[k] if wide == "f32" else out[k // 2] >> 16 * (k % 2)
        same_floats(wide_value(word, wide), wants[k])


TO_SIX = {
    **{f"v_cvt_scalef32_2xpk16_{s}_f32": (s, "f32") for s in SIX},
    **{f"v_cvt_scalef32_pk32_{s}_{w}": (s, w) for s in SIX for w in ("f16", "bf16")},
    **{f"v_cvt_scalef32_sr_pk32_{s}_{w}": (s, w) for s in SIX for w in WIDE},
}


def rows_of_32(wide: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """[32, n] doubles and the dwords that hold them, one value after the other."""
    x, _, words = sources_of(wide)
    n = len(x) // 32
    x = x[: 32 * n].reshape(32, n)
    rows = (words[0][: 32 * n] & (0xFFFFFFFF if wide == "f32" else 0xFFFF)).reshape(32, n)
    return x, list(rows if wide == "f32" else rows[::2] | rows[1::2] << 16)


@pytest.mark.parametrize("opcode", TO_SIX)
def test_scaled_to_six_bits(opcode):
    """Two sources of 16 values alternate; stochastic forms go on with v_prng_b32 for each value."""
    kind, wide = TO_SIX[opcode]
    x, words = rows_of_32(wide)
    scale = scales(x.shape[1])
    with np.errstate(all="ignore"):
        exact = x / power_of(scale)
    last = 4 + len(words)
    if "2xpk16" in opcode:
        names, inputs = f"v[4:19], v[20:35], v{last}", [*words[::2], *words[1::2], scale]
    else:
        names, inputs = f"v[4:{last - 1}], v{last}", [*words, scale]
    if "_sr_" not in opcode:
        out = run(f"{opcode} v[40:45], {names}", inputs, 6, vgprs=128, first_out=40)
        for k, got in enumerate(unpack_six(out)):
            same_codes(got, cast(exact[k], kind, True), kind)
        return
    for name in NOISE:
        bits = noise_bits(name, x.shape[1])
        out = run(f"{opcode} v[40:45], {names}, v{last + 1}", [*words, bits, scale], 6, vgprs=128,
                  first_out=40)  # fmt: skip
        for k, got in enumerate(unpack_six(out)):
            same_codes(got, stochastic(exact[k], bits, kind, True), kind)
            bits = next_noise(bits)


@pytest.mark.parametrize("text,kind,wide", [
    ("v_cvt_sr_fp8_f32 v20, v4, v5", "fp8", "f32"), ("v_cvt_sr_f16_f32 v20, v4, v5", "f16", "f32"),
    ("v_cvt_scalef32_sr_bf8_f16 v20, v4, v5, 1.0", "bf8", "f16"),
    ("v_cvt_scalef32_sr_pk_fp4_bf16 v20, v4, v5, 1.0", "fp4", "bf16")])  # fmt: skip
def test_stochastic_rounding_is_fair(text, kind, wide):
    """Over evenly spread noise a value is rounded up as often as its fraction of a step says."""
    noise = (np.arange(4096, dtype=np.uint64) << np.uint64(20)).astype(np.uint32)
    for value in (1.03, -1.7, 0.77, 5.3):
        code = cast(np.full(4096, value), wide, False) if wide != "f32" else (
            np.full(4096, value, np.float32).view(np.uint32))  # fmt: skip
        exact = float(small_values(code[:1], wide)[0]) if wide != "f32" else float(f(code)[0])
        got = small_values(run(text, [code, noise])[0], kind)
        step = 2.0 ** (np.floor(np.log2(abs(exact))) - FORMATS[kind].mantissa)
        assert len(set(got)) <= 2 and abs(got.mean() - exact) <= step / 2048
