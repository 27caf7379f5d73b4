"""v_div_scale, v_div_fmas and the divisions that LLVM expands with them, in f32 and f64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import alu_float as af
from tests.emulator.alu import (
    F32,
    F64,
    dwords,
    f,
    grid,
    opcode_is_launched,  # noqa: F401
    quads,
    run,
    same_floats,
)

RNG = np.random.default_rng(11)


def pairs(dtype) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators: edges, all exponents, quotients near both ends of the range."""
    edges = [f(x) for x in grid(F32, 2)] if dtype is np.float32 else grid(F64, 2)
    info = np.finfo(dtype)
    low, high = info.minexp - info.nmant, info.maxexp

    def numbers(exponents):
        significands = RNG.uniform(1, 2, len(exponents)) * RNG.choice([-1, 1], len(exponents))
        with np.errstate(all="ignore"):
            return np.ldexp(significands.astype(dtype), exponents).astype(dtype)

    a, b = (RNG.integers(low, high, 4000) for _ in range(2))
    near = RNG.integers(low, high, 4000)
    quotient = RNG.choice([low, info.minexp, high, 0], 4000) + RNG.integers(-3, 4, 4000)
    num = np.concatenate([edges[0], numbers(a), numbers(near)])
    den = np.concatenate([edges[1], numbers(b), numbers(near - quotient)])
    return num, den


F32_DIVISION = """
v_div_scale_f32 v8, vcc, v5, v5, v4
v_div_scale_f32 v9, vcc, v4, v5, v4
v_rcp_f32 v10, v8
v_fma_f32 v11, -v8, v10, 1.0
v_fma_f32 v10, v11, v10, v10
v_mul_f32 v11, v9, v10
v_fma_f32 v12, -v8, v11, v9
v_fma_f32 v11, v12, v10, v11
v_fma_f32 v8, -v8, v11, v9
v_div_fmas_f32 v8, v8, v10, v11
v_div_fixup_f32 v20, v8, v5, v4
"""
F64_DIVISION = """
v_div_scale_f64 v[8:9], s[12:13], v[6:7], v[6:7], v[4:5]
v_rcp_f64 v[10:11], v[8:9]
v_fma_f64 v[12:13], -v[8:9], v[10:11], 1.0
v_fma_f64 v[10:11], v[10:11], v[12:13], v[10:11]
v_fma_f64 v[12:13], -v[8:9], v[10:11], 1.0
v_fma_f64 v[10:11], v[10:11], v[12:13], v[10:11]
v_div_scale_f64 v[12:13], vcc, v[4:5], v[6:7], v[4:5]
v_mul_f64 v[14:15], v[12:13], v[10:11]
v_fma_f64 v[8:9], -v[8:9], v[14:15], v[12:13]
v_div_fmas_f64 v[8:9], v[8:9], v[10:11], v[14:15]
v_div_fixup_f64 v[20:21], v[8:9], v[6:7], v[4:5]
"""


def test_f32_division_is_ieee():
    num, den = pairs(np.float32)
    with np.errstate(all="ignore"):
        want = num / den
    got = run(F32_DIVISION, [num.view(np.uint32), den.view(np.uint32)])[0]
    same_floats(got.view(np.float32), want)


def test_f64_division_is_ieee():
    num, den = pairs(np.float64)
    with np.errstate(all="ignore"):
        want = num / den
    got = run(F64_DIVISION, [*dwords(num), *dwords(den)], 2)
    same_floats(quads(got, np.float64), want)


@pytest.mark.parametrize("num,den", [(2.0**127, 2.0**-149), (2.0**127, -(2.0**-100))])
def test_overflow_is_infinite_or_as_the_mode_rounds(num, den):
    """The sequence's own steps overflow to a NaN: v_div_fixup makes an overflow of it."""
    words = [np.float32([num]).view(np.uint32), np.float32([den]).view(np.uint32)]
    got = run(F32_DIVISION, words)[0].view(np.float32)
    assert got[0] == np.copysign(np.inf, den)
    got = run("v_mov_b32 v8, 0x7fc00000\nv_div_fixup_f32 v20, v8, v5, v4", words, mode=0xF3)[0]
    assert got.view(np.float32)[0] == np.copysign(np.finfo(np.float32).max, np.float32(den))


@pytest.mark.parametrize("num,den", [(2.0**1023, 2.0**-1074), (-(2.0**1023), 2.0**-900)])
def test_overflow_of_f64(num, den):
    words = [*dwords(np.float64([num])), *dwords(np.float64([den]))]
    assert quads(run(F64_DIVISION, words, 2), np.float64)[0] == np.copysign(np.inf, num)


@pytest.mark.parametrize("scaled", ["numerator", "denominator"])
@pytest.mark.parametrize("opcode", ["v_div_scale_f32"])
def test_scale_f32(opcode, scaled):
    num, den = pairs(np.float32)
    first = 4 if scaled == "numerator" else 5
    text = f"{opcode} v20, vcc, v{first}, v5, v4\nv_cndmask_b32 v21, 0, 1, vcc"
    out = run(text, [num.view(np.uint32), den.view(np.uint32)], 2)
    want, vcc = af.div_scale(num if first == 4 else den, den, num)
    same_floats(out[0].view(np.float32), want)
    np.testing.assert_array_equal(out[1], vcc)


@pytest.mark.parametrize("scaled", ["numerator", "denominator"])
@pytest.mark.parametrize("opcode", ["v_div_scale_f64"])
def test_scale_f64(opcode, scaled):
    num, den = pairs(np.float64)
    first = "v[4:5]" if scaled == "numerator" else "v[6:7]"
    text = f"{opcode} v[20:21], vcc, {first}, v[6:7], v[4:5]\nv_cndmask_b32 v22, 0, 1, vcc"
    out = run(text, [*dwords(num), *dwords(den)], 3)
    want, vcc = af.div_scale(num if scaled == "numerator" else den, den, num)
    same_floats(quads(out, np.float64), want)
    np.testing.assert_array_equal(out[2], vcc)


def fmas_sources(values: np.ndarray, view) -> list[np.ndarray]:
    """Triples, without those whose sum over- or underflows before it is scaled: nothing says
    whether it does in hardware, and no division has them."""
    triples = grid(values, 3)
    with np.errstate(all="ignore"):
        total = af.fma(*map(view, triples))
        finite = np.all([np.isfinite(view(v)) for v in triples], axis=0)
        exact_zero = (view(triples[0]) * view(triples[1]) == 0) & (view(triples[2]) == 0)
        keep = ~finite | exact_zero | (np.isfinite(total) & (total != 0) & ~af.denormal(total))
    return [v[keep] for v in triples]


@pytest.mark.parametrize("opcode", ["v_div_fmas_f32"])
def test_fmas_f32(opcode):
    values = fmas_sources(F32, f)
    for vcc, oracle in (("0", af.fma), ("-1", af.div_fmas)):
        got = run(f"s_mov_b64 vcc, {vcc}\n{opcode} v20, v4, v5, v6", values)[0]
        with np.errstate(all="ignore"):
            same_floats(got.view(np.float32), oracle(*map(f, values)))


@pytest.mark.parametrize("opcode", ["v_div_fmas_f64"])
def test_fmas_f64(opcode):
    values = fmas_sources(F64, np.asarray)
    inputs = [row for v in values for row in dwords(v)]
    for vcc, oracle in (("0", af.fma), ("-1", af.div_fmas)):
        text = f"s_mov_b64 vcc, {vcc}\n{opcode} v[20:21], v[4:5], v[6:7], v[8:9]"
        with np.errstate(all="ignore"):
            same_floats(quads(run(text, inputs, 2), np.float64), oracle(*values))
