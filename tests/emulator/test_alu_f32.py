"""Vector instructions on 32-bit floats against NumPy, with denormals kept and flushed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import alu_float as af
from tests.emulator.alu import (
    F32,
    U32,
    f,
    flush,
    grid,
    low,
    opcode_is_launched,  # noqa: F401
    run,
    same_floats,
    sources,
)

KEPT, FLUSHED = 0xF0, 0xC0  # f32 denormals; those of f16 and f64 are kept


def doubled(function):
    """Computed in double and rounded once."""
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


def cube(part: str):
    """The face of a cube map, its larger axis and coordinates: z before y before x when equal."""

    def of(x, y, z):
        ax, ay, az = np.abs(x), np.abs(y), np.abs(z)
        on_z = (az >= ax) & (az >= ay)
        on_y = ~on_z & (ay >= ax)
        by_axis = {
            "ma": (z * 2, y * 2, x * 2),
            "id": (4 + (z < 0), 2 + (y < 0), 0 + (x < 0)),
            "sc": (np.where(z < 0, -x, x), x, np.where(x < 0, z, -z)),
            "tc": (-y, np.where(y < 0, -z, z), -y),
        }[part]
        return np.select([on_z, on_y], by_axis[:2], by_axis[2]).astype(np.float32)

    return of


def legacy_multiply(a, b):
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


ARITHMETIC = {
    "v_add_f32": (2, lambda a, b: a + b),
    "v_sub_f32": (2, lambda a, b: a - b),
    "v_subrev_f32": (2, lambda a, b: b - a),
    "v_mul_f32": (2, lambda a, b: a * b),
    "v_mul_legacy_f32": (2, legacy_multiply),
    "v_min_f32": (2, af.pick(True, ieee=True)),
    "v_max_f32": (2, af.pick(False, ieee=True)),
    "v_min3_f32": (3, af.pick3(True, ieee=True)),
    "v_max3_f32": (3, af.pick3(False, ieee=True)),
    "v_med3_f32": (3, af.median(ieee=True)),
    "v_minimum3_f32": (3, af.nan_wins(True)),
    "v_maximum3_f32": (3, af.nan_wins(False)),
    "v_fma_f32": (3, af.fma),
    "v_fmac_f32": (3, af.fma),
    "v_fmamk_f32": (2, lambda a, b: af.fma(a, np.full_like(a, 1.1), b)),
    "v_fmaak_f32": (2, lambda a, b: af.fma(a, b, np.full_like(a, -3e-39))),
    "v_fract_f32": (1, af.fraction),
    "v_trunc_f32": (1, np.trunc),
    "v_ceil_f32": (1, np.ceil),
    "v_floor_f32": (1, np.floor),
    "v_rndne_f32": (1, np.rint),
    "v_frexp_mant_f32": (1, af.mantissa),
    "v_cubema_f32": (3, cube("ma")),
    "v_cubeid_f32": (3, cube("id")),
    "v_cubesc_f32": (3, cube("sc")),
    "v_cubetc_f32": (3, cube("tc")),
    "v_div_fixup_f32": (3, lambda q, d, n: af.fixup(q, d, n, -150)),
}
TEXT = {
    "v_fmac_f32": "v_mov_b32 v20, v6\nv_fmac_f32 v20, v4, v5",
    "v_fmamk_f32": "v_fmamk_f32 v20, v4, 0x3f8ccccd, v5",
    "v_fmaak_f32": f"v_fmaak_f32 v20, v4, v5, {np.float32(-3e-39).view(np.uint32):#x}",
}
NEVER_FLUSH = ("v_cubeid_f32",)  # a small whole number


@pytest.mark.parametrize("mode", [KEPT, FLUSHED])
@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_f32(opcode, mode):
    count, oracle = ARITHMETIC[opcode]
    inputs = grid(F32, count)
    values = [f(x) for x in inputs]
    if mode == FLUSHED:
        values = [flush(x) for x in values]
    with np.errstate(all="ignore"):
        if opcode == "v_fmaak_f32" and mode == FLUSHED:  # the constant is a denormal
            want = af.fma(*values, np.full_like(values[0], -0.0))
        else:
            want = oracle(*values)
        if mode == FLUSHED and opcode not in NEVER_FLUSH:
            want = flush(want)
    got = run(TEXT.get(opcode, f"{opcode} v20, {sources(count)}"), inputs, mode=mode)[0]
    same_floats(got.view(np.float32), want)


TRANSCENDENTAL = {
    "v_exp_f32": doubled(np.exp2),
    "v_log_f32": doubled(np.log2),
    "v_rcp_f32": lambda a: np.float32(1) / a,
    "v_rcp_iflag_f32": lambda a: np.float32(1) / a,
    "v_rsq_f32": doubled(lambda a: 1 / np.sqrt(a)),
    "v_sqrt_f32": np.sqrt,
}
MANY = np.concatenate(
    [F32, np.random.default_rng(1).integers(0, 2**32, 2000, np.uint64).astype(np.uint32),
     np.linspace(-150, 130, 500).astype(np.float32).view(np.uint32)]
)  # fmt: skip


@pytest.mark.parametrize("mode", [KEPT, FLUSHED])
@pytest.mark.parametrize("opcode", TRANSCENDENTAL)
def test_transcendental_f32_flushes_in_every_mode(opcode, mode):
    with np.errstate(all="ignore"):
        want = flush(TRANSCENDENTAL[opcode](flush(f(MANY))))
    got = run(f"{opcode} v20, v4", [MANY], mode=mode)[0].view(np.float32)
    same_floats(flush(got), want, ulp=1)
    same_floats(got, flush(got))


@pytest.mark.parametrize("opcode,function", [("v_sin_f32", np.sin), ("v_cos_f32", np.cos)])
def test_f32_of_revolutions(opcode, function):
    x = np.concatenate([MANY, np.linspace(-300, 300, 1000).astype(np.float32).view(np.uint32)])
    with np.errstate(all="ignore"):
        want = af.turns(function)(f(x))
    got = run(f"{opcode} v20, v4", [x])[0].view(np.float32)
    assert (np.isnan(got) == np.isnan(want)).all()
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-15)
    zero = f(x) == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("mode", [KEPT, FLUSHED])
@pytest.mark.parametrize("opcode", ["v_ldexp_f32"])
def test_ldexp_f32(opcode, mode):
    x, n = (v.ravel().copy() for v in np.meshgrid(
        F32, np.array([0, 1, -1, 23, -24, 126, -149, 254, -300, 2**31 - 1, -(2**31)])))  # fmt: skip
    change = flush if mode == FLUSHED else np.asarray
    with np.errstate(all="ignore"):
        scaled = np.ldexp(change(f(x)).astype(np.float64), np.clip(n, -2000, 2000))
        want = change(scaled.astype(np.float32))
    got = run(f"{opcode} v20, v4, v5", [x, low(n)], mode=mode)[0]
    same_floats(got.view(np.float32), want)


@pytest.mark.parametrize("opcode", ["v_frexp_exp_i32_f32"])
def test_frexp_exponent_f32(opcode):
    got = run(f"{opcode} v20, v4", [F32])[0].view(np.int32)
    np.testing.assert_array_equal(got, af.exponent(f(F32)))
    got = run(f"{opcode} v20, v4", [F32], mode=FLUSHED)[0].view(np.int32)
    np.testing.assert_array_equal(got, af.exponent(flush(f(F32))))


@pytest.mark.parametrize("mode", [0xC0, 0xD0, 0xE0, 0xF0])
def test_denormal_modes_of_sources_and_results(mode):
    """Bit 4 keeps denormal sources, bit 5 denormal results."""
    a, b = grid(F32, 2)
    x, y = (f(v) if mode & 0x10 else flush(f(v)) for v in (a, b))
    with np.errstate(all="ignore"):
        want = x * y if mode & 0x20 else flush(x * y)
    got = run("v_mul_f32 v20, v4, v5", [a, b], mode=mode)[0]
    same_floats(got.view(np.float32), want)


@pytest.mark.parametrize("rounding,toward", [(1, np.inf), (2, -np.inf), (3, 0)])
def test_rounding_modes(rounding, toward):
    a, b = grid(F32, 2)
    with np.errstate(all="ignore"):
        exact = f(a).astype(np.float64) * f(b).astype(np.float64)
        near = exact.astype(np.float32)
        target = np.float32(toward) if rounding < 3 else np.where(exact > 0, 0, -0.0)
        wrong = np.where(exact > 0, near > exact, near < exact) if rounding == 3 else (
            near < exact if rounding == 1 else near > exact)  # fmt: skip
        want = np.where(wrong & ~np.isnan(near), np.nextafter(near, np.float32(target)), near)
    got = run("v_mul_f32 v20, v4, v5", [a, b], mode=KEPT | rounding)[0]
    same_floats(got.view(np.float32), want)


@pytest.mark.parametrize("opcode,smaller", [("v_min_f32", True), ("v_max_f32", False)])
def test_signalling_nans_lose_without_ieee(opcode, smaller):
    a, b = grid(F32, 2)
    got = run(f"{opcode} v20, v4, v5", [a, b], ieee=False)[0]
    same_floats(got.view(np.float32), af.pick(smaller)(f(a), f(b)))


def test_neg_and_abs():
    a, b = grid(F32, 2)
    with np.errstate(all="ignore"):
        for text, want in (
            ("v_add_f32 v20, -v4, |v5|", -f(a) + np.abs(f(b))),
            ("v_mul_f32 v20, v4, -|v5|", f(a) * -np.abs(f(b))),
            ("v_fma_f32 v20, -v4, |v5|, -|v4|", af.fma(-f(a), np.abs(f(b)), -np.abs(f(a)))),
        ):
            same_floats(run(text, [a, b])[0].view(np.float32), want)


def test_omod_and_clamp():
    """omod counts only without IEEE mode and with result denormals flushed; it makes no -0."""
    a, b = grid(F32, 2)
    with np.errstate(all="ignore"):
        total = f(a) + f(b)
        for word, factor in (("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)):
            text = f"v_add_f32 v20, v4, v5 {word}"
            for settings in ({}, {"ieee": False}):  # denormals kept: ignored
                same_floats(run(text, [a, b], **settings)[0].view(np.float32), total)
            flushed = flush(flush(f(a)) + flush(f(b)))
            got = run(text, [a, b], mode=FLUSHED)[0]
            same_floats(got.view(np.float32), flushed)
            got = run(text, [a, b], mode=FLUSHED, ieee=False)[0].view(np.float32)
            same_floats(got, flush(flushed * np.float32(factor)) + np.float32(0))
        got = run("v_add_f32 v20, v4, v5 clamp", [a, b])[0].view(np.float32)
        same_floats(got, af.clamp(total))
        got = run("v_add_f32 v20, v4, v5 clamp", [a, b], dx10_clamp=False)[0].view(np.float32)
        same_floats(got, af.clamp(total, dx10=False))


def test_integers_have_no_float_modes():
    """A move keeps denormals and signalling NaNs."""
    np.testing.assert_array_equal(run("v_mov_b32 v20, v4", [F32], mode=FLUSHED)[0], F32)
    np.testing.assert_array_equal(run("v_max_u32 v20, v4, v4", [U32], mode=FLUSHED)[0], U32)
