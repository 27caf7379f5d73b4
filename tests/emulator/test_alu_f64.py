"""Vector instructions on 64-bit floats against NumPy, with denormals kept and flushed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import alu_float as af
from tests.emulator.alu import (
    F64,
    dwords,
    flush,
    grid,
    low,
    opcode_is_launched,  # noqa: F401
    quads,
    run,
    same_floats,
    sources,
)

KEPT, FLUSHED = 0xF0, 0x30
SIGNALLING = np.array([0x7FF0000000000001, 0xFFF4000000000000], np.uint64).view(np.float64)
VALUES = np.concatenate([F64[:9], SIGNALLING[:1], F64[9:], SIGNALLING[1:]])

DOUBLE = {
    "v_add_f64": (2, lambda a, b: a + b),
    "v_mul_f64": (2, lambda a, b: a * b),
    "v_min_f64": (2, af.pick(True, ieee=True)),
    "v_max_f64": (2, af.pick(False, ieee=True)),
    "v_fma_f64": (3, af.fma),
    "v_fmac_f64": (3, af.fma),
    "v_trunc_f64": (1, np.trunc),
    "v_ceil_f64": (1, np.ceil),
    "v_floor_f64": (1, np.floor),
    "v_rndne_f64": (1, np.rint),
    "v_fract_f64": (1, af.fraction),
    "v_sqrt_f64": (1, np.sqrt),
    "v_rcp_f64": (1, lambda a: 1 / a),
    "v_rsq_f64": (1, lambda a: 1 / np.sqrt(a)),
    "v_frexp_mant_f64": (1, af.mantissa),
    "v_div_fixup_f64": (3, lambda q, d, n: af.fixup(q, d, n, -1075)),
}


@pytest.mark.parametrize("mode", [KEPT, FLUSHED])
@pytest.mark.parametrize("opcode", DOUBLE)
def test_f64(opcode, mode):
    count, oracle = DOUBLE[opcode]
    inputs = grid(VALUES, count)
    change = flush if mode == FLUSHED else np.asarray
    with np.errstate(all="ignore"):
        want = change(oracle(*map(change, inputs)))
    text = f"{opcode} v[20:21], {sources(count, wide=True)}"
    if "fmac" in opcode:
        text = f"v_mov_b64 v[20:21], v[8:9]\n{opcode} v[20:21], v[4:5], v[6:7]"
    out = run(text, [row for x in inputs for row in dwords(x)], 2, mode=mode)
    same_floats(quads(out, np.float64), want)


@pytest.mark.parametrize("opcode", ["v_ldexp_f64"])
def test_ldexp_f64(opcode):
    x, n = (v.ravel().copy() for v in np.meshgrid(
        F64, np.array([0, 1, -1, 52, -1074, 2046, -3000, 2**31 - 1, -(2**31)])))  # fmt: skip
    with np.errstate(all="ignore"):
        want = np.ldexp(x, np.clip(n, -5000, 5000))
    got = run(f"{opcode} v[20:21], v[4:5], v6", [*dwords(x), low(n)], 2)
    same_floats(quads(got, np.float64), want)


@pytest.mark.parametrize("opcode", ["v_frexp_exp_i32_f64"])
def test_frexp_exponent_f64(opcode):
    for mode, change in ((KEPT, np.asarray), (FLUSHED, flush)):
        got = run(f"{opcode} v20, v[4:5]", [*dwords(VALUES)], mode=mode)[0].view(np.int32)
        np.testing.assert_array_equal(got, af.exponent(change(VALUES)))


def test_modifiers_of_f64():
    a, b = grid(F64, 2)
    inputs = [*dwords(a), *dwords(b)]
    with np.errstate(all="ignore"):
        total = -a + np.abs(b)
        text = "v_add_f64 v[20:21], -v[4:5], |v[6:7]|"
        same_floats(quads(run(text, inputs, 2), np.float64), total)
        got = quads(run(text + " clamp", inputs, 2), np.float64)
        same_floats(got, af.clamp(total))
        got = quads(run(text + " mul:4", inputs, 2), np.float64)
        same_floats(got, total)  # IEEE mode and kept denormals: ignored
        got = quads(run(text + " mul:4", inputs, 2, mode=FLUSHED, ieee=False), np.float64)
        scaled = flush(flush(-flush(a) + np.abs(flush(b))) * 4)
        same_floats(got, scaled + 0.0)


@pytest.mark.parametrize("opcode,smaller", [("v_min_f64", True), ("v_max_f64", False)])
def test_signalling_nans_lose_without_ieee(opcode, smaller):
    a, b = grid(VALUES, 2)
    got = run(f"{opcode} v[20:21], v[4:5], v[6:7]", [*dwords(a), *dwords(b)], 2, ieee=False)
    same_floats(quads(got, np.float64), af.pick(smaller)(a, b))
