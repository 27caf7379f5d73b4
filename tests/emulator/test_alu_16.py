"""Vector instructions on one 16-bit float or integer a lane."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import alu_float as af
from tests.emulator.alu import (
    F16,
    U32,
    flush,
    grid,
    h,
    low,
    opcode_is_launched,  # noqa: F401
    run,
    same_floats,
    sources,
)

KEPT, FLUSHED = 0xF0, 0x30
BEFORE = "v_mov_b32 v20, 0xabcd8765"
# These keep the half that they do not write; the others put zeros there.
KEEP = {
    *(f"v_{name}_f16" for name in ("fma", "mad", "min3", "max3", "med3", "div_fixup")),
    *(f"v_{name}_{t}16" for name in ("mad", "min3", "max3", "med3") for t in "iu"),
    "v_sat_pk_u8_i16",
}  # fmt: skip


def doubled(function):
    """Computed in double and rounded once."""
    return lambda *a: function(*(x.astype(np.float64) for x in a)).astype(np.float16)


def mad(a, b, c):
    return a * b + c  # the product is rounded, too


FLOAT = {
    "v_add_f16": (2, lambda a, b: a + b),
    "v_sub_f16": (2, lambda a, b: a - b),
    "v_subrev_f16": (2, lambda a, b: b - a),
    "v_mul_f16": (2, lambda a, b: a * b),
    "v_min_f16": (2, af.pick(True, ieee=True)),
    "v_max_f16": (2, af.pick(False, ieee=True)),
    "v_fma_f16": (3, af.fma),
    "v_fma_legacy_f16": (3, af.fma),
    "v_mad_f16": (3, mad),
    "v_mad_legacy_f16": (3, mad),
    "v_min3_f16": (3, af.pick3(True, ieee=True)),
    "v_max3_f16": (3, af.pick3(False, ieee=True)),
    "v_med3_f16": (3, af.median(ieee=True)),
    "v_div_fixup_f16": (3, lambda q, d, n: af.fixup(q, d, n, None)),
    "v_div_fixup_legacy_f16": (3, lambda q, d, n: af.fixup(q, d, n, None)),
    "v_rcp_f16": (1, doubled(lambda a: 1 / a)),
    "v_rsq_f16": (1, doubled(lambda a: 1 / np.sqrt(a))),
    "v_sqrt_f16": (1, doubled(np.sqrt)),
    "v_log_f16": (1, doubled(np.log2)),
    "v_exp_f16": (1, doubled(np.exp2)),
    "v_sin_f16": (1, af.turns(np.sin)),
    "v_cos_f16": (1, af.turns(np.cos)),
    "v_floor_f16": (1, np.floor),
    "v_ceil_f16": (1, np.ceil),
    "v_trunc_f16": (1, np.trunc),
    "v_rndne_f16": (1, np.rint),
    "v_fract_f16": (1, af.fraction),
    "v_frexp_mant_f16": (1, af.mantissa),
}
EVERY = np.arange(65536, dtype=np.uint32)
INFINITE_QUOTIENT = ("v_div_fixup_f16", "v_div_fixup_legacy_f16")


def kept_half(opcode: str, shift: int) -> int:
    if shift:
        return 0x8765
    return 0xABCD0000 if opcode in KEEP else 0


def saturate(want: np.ndarray, finite: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(want) & finite, np.copysign(np.float16(65504), want), want)


@pytest.mark.parametrize("settings", [
    {}, {"mode": FLUSHED}, {"fp16_ovfl": True}], ids=["plain", "flushed", "ovfl"])  # fmt: skip
@pytest.mark.parametrize("opcode", FLOAT)
def test_f16(opcode, settings):
    """All codes for one source, edges for more. FP16_OVFL: no overflow of finite numbers; a
    division by zero and the logarithm of zero stay infinite."""
    count, oracle = FLOAT[opcode]
    inputs = grid(F16, count) if count > 1 else [EVERY]
    change = flush if "mode" in settings else np.asarray
    values = [change(h(x)) for x in inputs]
    with np.errstate(all="ignore"):
        want = change(oracle(*values))
    if "fp16_ovfl" in settings and opcode not in INFINITE_QUOTIENT:
        finite = np.all([np.isfinite(v) for v in values], axis=0)
        if count == 1:
            finite &= values[0] != 0
        want = saturate(want, finite)
    got = run(f"{opcode} v20, {sources(count)}", inputs, before=BEFORE, **settings)[0]
    np.testing.assert_array_equal(got & np.uint32(0xFFFF0000), kept_half(opcode, 0))
    same_floats((got & 0xFFFF).astype(np.uint16).view(np.float16), want)


@pytest.mark.parametrize("ovfl", [False, True])
@pytest.mark.parametrize("opcode", ["v_ldexp_f16"])
def test_ldexp_f16(opcode, ovfl):
    x, n = (v.ravel().copy() for v in np.meshgrid(
        F16, np.array([0, 1, -1, 10, -24, 30, -40, 32767, -32768])))  # fmt: skip
    with np.errstate(all="ignore"):
        want = np.ldexp(h(x).astype(np.float64), n).astype(np.float16)
    if ovfl:
        want = saturate(want, np.isfinite(h(x)))
    # The exponent is the low half of its register.
    exponent = low(n) & np.uint32(0xFFFF) | np.uint32(0x70000)
    got = run(f"{opcode} v20, v4, v5", [x, exponent], fp16_ovfl=ovfl)[0]
    same_floats(got.astype(np.uint16).view(np.float16), want)


@pytest.mark.parametrize("opcode", ["v_frexp_exp_i16_f16"])
def test_frexp_exponent_f16(opcode):
    got = run(f"{opcode} v20, v4", [EVERY])[0].astype(np.uint16).view(np.int16)
    np.testing.assert_array_equal(got, af.exponent(h(EVERY)))


def test_signalling_nans_lose_without_ieee():
    a, b = grid(F16, 2)
    for name, smaller in (("v_min_f16", True), ("v_max_f16", False)):
        got = run(f"{name} v20, v4, v5", [a, b], ieee=False)[0]
        same_floats(got.astype(np.uint16).view(np.float16), af.pick(smaller)(h(a), h(b)))


def test_f16_modifiers():
    a, b = grid(F16, 2)

    def result(text, **settings):
        return run(text, [a, b], **settings)[0].astype(np.uint16).view(np.float16)

    with np.errstate(all="ignore"):
        total = -h(a) + np.abs(h(b))
        same_floats(result("v_add_f16_e64 v20, -v4, |v5|"), total)
        same_floats(result("v_add_f16_e64 v20, -v4, |v5| clamp"), af.clamp(total))
        text = "v_add_f16_e64 v20, -v4, |v5| mul:4"
        same_floats(result(text), total)  # denormals kept, IEEE mode: ignored
        scaled = flush(flush(-flush(h(a)) + np.abs(flush(h(b)))) * np.float16(4))
        same_floats(result(text, mode=FLUSHED, ieee=False), scaled + np.float16(0))


def s16(x):
    return x.astype(np.uint16).view(np.int16).astype(np.int64)


def u16(x):
    return (x & 0xFFFF).astype(np.int64)


def middle(read):
    return lambda *x: np.median([read(v) for v in x], 0).astype(np.int64)


def of_three(pick, read):
    return lambda a, b, c: pick(pick(read(a), read(b)), read(c))


INTEGER = {
    "v_add_u16": (2, lambda a, b: u16(a) + u16(b)),
    "v_sub_u16": (2, lambda a, b: u16(a) - u16(b)),
    "v_subrev_u16": (2, lambda a, b: u16(b) - u16(a)),
    "v_mul_lo_u16": (2, lambda a, b: u16(a) * u16(b)),
    "v_lshlrev_b16": (2, lambda a, b: u16(b) << (u16(a) & 15)),
    "v_lshrrev_b16": (2, lambda a, b: u16(b) >> (u16(a) & 15)),
    "v_ashrrev_i16": (2, lambda a, b: s16(b) >> (u16(a) & 15)),
    "v_max_u16": (2, lambda a, b: np.maximum(u16(a), u16(b))),
    "v_min_u16": (2, lambda a, b: np.minimum(u16(a), u16(b))),
    "v_max_i16": (2, lambda a, b: np.maximum(s16(a), s16(b))),
    "v_min_i16": (2, lambda a, b: np.minimum(s16(a), s16(b))),
    "v_add_i16": (2, lambda a, b: s16(a) + s16(b)),
    "v_sub_i16": (2, lambda a, b: s16(a) - s16(b)),
    "v_mad_u16": (3, lambda a, b, c: u16(a) * u16(b) + u16(c)),
    "v_mad_i16": (3, lambda a, b, c: s16(a) * s16(b) + s16(c)),
    "v_mad_legacy_u16": (3, lambda a, b, c: u16(a) * u16(b) + u16(c)),
    "v_mad_legacy_i16": (3, lambda a, b, c: s16(a) * s16(b) + s16(c)),
    "v_max3_i16": (3, of_three(np.maximum, s16)),
    "v_min3_i16": (3, of_three(np.minimum, s16)),
    "v_max3_u16": (3, of_three(np.maximum, u16)),
    "v_min3_u16": (3, of_three(np.minimum, u16)),
    "v_med3_i16": (3, middle(s16)),
    "v_med3_u16": (3, middle(u16)),
    "v_sat_pk_u8_i16": (1, lambda a: np.clip(s16(a & 0xFFFF), 0, 255)
                        | np.clip(s16(a >> 16), 0, 255) << 8),
}  # fmt: skip


@pytest.mark.parametrize("opcode", INTEGER)
def test_16_bit_integer(opcode):
    count, oracle = INTEGER[opcode]
    inputs = grid(U32, count)
    want = (oracle(*inputs) & 0xFFFF).astype(np.uint32)
    got = run(f"{opcode} v20, {sources(count)}", inputs, before=BEFORE)[0]
    np.testing.assert_array_equal(got, want | np.uint32(kept_half(opcode, 0)))


SATURATED = ["v_add_u16", "v_sub_u16", "v_subrev_u16", "v_add_i16", "v_sub_i16", "v_mad_u16",
             "v_mad_i16"]  # fmt: skip


@pytest.mark.parametrize("opcode", SATURATED)
def test_16_bit_clamp(opcode):
    count, oracle = INTEGER[opcode]
    inputs = grid(U32, count)
    least = -32768 if "i16" in opcode else 0
    want = np.clip(oracle(*inputs), least, least + 65535) & 0xFFFF
    got = run(f"{opcode}_e64 v20, {sources(count)} clamp", inputs)[0]
    np.testing.assert_array_equal(got, want)


OP_SEL = [n for n in (*FLOAT, *INTEGER) if {**FLOAT, **INTEGER}[n][0] == 3 and "legacy" not in n]


@pytest.mark.parametrize("opcode", OP_SEL)
def test_op_sel(opcode):
    """op_sel picks halves of the sources; its last bit writes the high half, the low one stays."""
    count, oracle = {**FLOAT, **INTEGER}[opcode]
    inputs = grid(F16 if opcode in FLOAT else U32 & np.uint32(0xFFFF), count)
    a, b, c = inputs
    halves = [a << 16 | b, b, c << 16 | a]
    text = f"{opcode} v20, v4, v5, v6 op_sel:[1,0,1,1]"
    got = run(text, halves, before=BEFORE)[0]
    np.testing.assert_array_equal(got & 0xFFFF, kept_half(opcode, 16))
    with np.errstate(all="ignore"):
        if opcode in FLOAT:
            want = oracle(*map(h, inputs))
            same_floats((got >> 16).astype(np.uint16).view(np.float16), want)
        else:
            np.testing.assert_array_equal(got >> 16, oracle(*inputs) & 0xFFFF)


@pytest.mark.parametrize("opcode", ["v_mad_u32_u16", "v_mad_i32_i16"])
def test_mixed_width_multiply_add(opcode):
    a, b, c = grid(U32, 3)
    read = u16 if "u16" in opcode else s16
    for select, x, y in (("", a, b), (" op_sel:[1,1,0,0]", a >> 16, b >> 16)):
        got = run(f"{opcode} v20, v4, v5, v6{select}", [a, b, c])[0]
        np.testing.assert_array_equal(got, low(read(x) * read(y) + c.astype(np.int64)))


@pytest.mark.parametrize("opcode", ["v_pack_b32_f16"])
def test_pack(opcode):
    a, b = grid(U32, 2)
    got = run(f"{opcode} v20, v4, v5", [a, b])[0]
    np.testing.assert_array_equal(got, (a & 0xFFFF) | b << 16)
    got = run(f"{opcode} v20, v4, v5 op_sel:[1,1,0]", [a, b])[0]
    np.testing.assert_array_equal(got, a >> 16 | b & np.uint32(0xFFFF0000))
