"""Vector ALU instructions against NumPy: each opcode on edge values, all pairs or triples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gfx950_emu import launch
from gfx950_emu.decode import opcodes
from tests.emulator.assembler import kernel

U32 = np.array(
    [0, 1, 2, 3, 5, 7, 31, 32, 33, 64, 0xFF, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFFF,
     0x800000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFF80, 0xDEADBEEF, 0x12345678],
    np.uint32,
)  # fmt: skip
F32 = np.array(
    [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x40490FDB, 0x7F800000, 0xFF800000, 0x7FC00000,
     0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000, 0x4B000001, 0xCB7FFFFF,
     0x3FC00000, 0xC0200000, 0x34000000, 0x5F000000, 0x4F7FFFFF, 0x447A4000],
    np.uint32,
)  # fmt: skip
F16 = np.array(
    [0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 1, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3800,
     0x3555, 0x4248, 0xC500, 0x1400, 0x6401], np.uint32,
)  # fmt: skip
F64 = np.array(
    [0.0, -0.0, 1.0, -1.5, np.pi, np.inf, -np.inf, np.nan, 5e-324, 2.2250738585072014e-308, 1e308,
     -1e308, 0.5, 1e16, -3.7, 123456.75], np.float64,
)  # fmt: skip


def run(instruction: str, inputs: list[np.ndarray], out_dwords: int = 1, before: str = "",
        vgprs: int = 64, **settings) -> np.ndarray:  # fmt: skip
    """[out_dwords, n]: `instruction` reads v4, ... (a dword an input row), writes v20, ..."""
    rows = np.concatenate([np.atleast_2d(r) for r in inputs]).astype(np.uint32)
    n = rows.shape[1]
    padded = -(-n // 64) * 64
    source = np.zeros((len(rows), padded), np.uint32)
    source[:, :n] = rows
    out = np.zeros((out_dwords, padded), np.uint32)
    body = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "s_lshl_b32 s8, s2, 8",
            "v_lshlrev_b32 v1, 2, v0", "v_add_u32 v1, s8, v1"]  # fmt: skip
    for k in range(out_dwords):
        body.append(f"v_mov_b32 v{20 + k}, 0")
    body.append("s_waitcnt lgkmcnt(0)")
    for k in range(len(rows)):
        body += [
            f"v_add_u32 v2, {k * padded * 4:#x}, v1",
            f"global_load_dword v{4 + k}, v2, s[4:5]",
        ]
    body += ["s_waitcnt vmcnt(0)", before, instruction]
    for k in range(out_dwords):
        body += [f"v_add_u32 v2, {k * padded * 4:#x}, v1",
                 f"global_store_dword v2, v{20 + k}, s[6:7]"]  # fmt: skip
    code = kernel("\n".join(body), vgprs=vgprs, **settings)
    report = launch(code, "k", padded // 64, 64, [source, out])
    report.raise_for_findings()
    return out[:, :n]


def grid(values: np.ndarray, count: int) -> list[np.ndarray]:
    picked = values if count < 3 else values[:12]
    table = np.array(list(itertools.product(picked, repeat=count)), values.dtype)
    return list(table.T)


def i32(x):
    return x.astype(np.int32)


def i24(x):
    return (x.astype(np.int64) << 40 >> 40).astype(np.int64)


def u64(x):
    return x.astype(np.uint64)


def i64(x):
    return x.astype(np.uint32).view(np.int32).astype(np.int64)


def low(x):
    return (x.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32) if x.dtype != np.uint64 else (
        x & np.uint64(0xFFFFFFFF)
    ).astype(np.uint32)  # fmt: skip


def each(function):
    return lambda *a: np.array(
        [function(*map(int, v)) & 0xFFFFFFFF for v in zip(*a, strict=True)], np.uint32
    )


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def bfe_i(a, b, c):
    b, c = b & 31, c & 31
    return signed((signed(a) >> b) & ((1 << c) - 1), c) if c else 0


def perm(a, b, s):
    data, result = a << 32 | b, 0
    for k in range(4):
        sel = s >> 8 * k & 0xFF
        if sel >= 13:
            byte = 0xFF
        elif sel == 12:
            byte = 0
        elif sel >= 8:
            byte = 0xFF * (data >> (16 * (sel - 8) + 15) & 1)
        else:
            byte = data >> 8 * sel & 0xFF
        result |= byte << 8 * k
    return result


def clz(x):
    return 32 - x.bit_length() if x else 0xFFFFFFFF


def sad(a, b, c, bits):
    m = (1 << bits) - 1
    return c + sum(abs((a >> k & m) - (b >> k & m)) for k in range(0, 32, bits))


def med(a, b, c):
    return sorted((a, b, c))[1]


INTEGER = {
    "v_mov_b32": (1, lambda a: a),
    "v_not_b32": (1, lambda a: ~a),
    "v_bfrev_b32": (1, each(lambda a: int(f"{a:032b}"[::-1], 2))),
    "v_ffbh_u32": (1, each(clz)),
    "v_ffbl_b32": (1, each(lambda a: (a & -a).bit_length() - 1 if a else 0xFFFFFFFF)),
    "v_ffbh_i32": (1, each(lambda a: clz(a if signed(a) >= 0 else a ^ 0xFFFFFFFF)
                           if a not in (0, 0xFFFFFFFF) else 0xFFFFFFFF)),
    "v_prng_b32": (1, each(lambda a: a << 1 ^ (197 if a >> 31 else 0))),
    "v_and_b32": (2, lambda a, b: a & b),
    "v_or_b32": (2, lambda a, b: a | b),
    "v_xor_b32": (2, lambda a, b: a ^ b),
    "v_xnor_b32": (2, lambda a, b: ~(a ^ b)),
    "v_lshrrev_b32": (2, lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": (2, lambda a, b: (i32(b) >> i32(a & 31)).view(np.uint32)),
    "v_lshlrev_b32": (2, lambda a, b: b << (a & 31)),
    "v_add_u32": (2, lambda a, b: a + b),
    "v_sub_u32": (2, lambda a, b: a - b),
    "v_subrev_u32": (2, lambda a, b: b - a),
    "v_add_i32": (2, lambda a, b: a + b),
    "v_sub_i32": (2, lambda a, b: a - b),
    "v_min_i32": (2, lambda a, b: np.minimum(i32(a), i32(b)).view(np.uint32)),
    "v_max_i32": (2, lambda a, b: np.maximum(i32(a), i32(b)).view(np.uint32)),
    "v_min_u32": (2, np.minimum),
    "v_max_u32": (2, np.maximum),
    "v_mul_i32_i24": (2, lambda a, b: low(i24(a) * i24(b))),
    "v_mul_hi_i32_i24": (2, lambda a, b: low(i24(a) * i24(b) >> 32)),
    "v_mul_u32_u24": (2, lambda a, b: low(u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF))),
    "v_mul_hi_u32_u24": (2, lambda a, b: low(u64(a & 0xFFFFFF) * u64(b & 0xFFFFFF)
                                               >> np.uint64(32))),
    "v_mul_lo_u32": (2, lambda a, b: a * b),
    "v_mul_hi_u32": (2, lambda a, b: low(u64(a) * u64(b) >> np.uint64(32))),
    "v_mul_hi_i32": (2, lambda a, b: low(i64(a) * i64(b) >> 32)),
    "v_bfm_b32": (2, lambda a, b: ((np.uint32(1) << (a & 31)) - 1) << (b & 31)),
    "v_bcnt_u32_b32": (2, each(lambda a, b: a.bit_count() + b)),
    "v_cvt_pk_u16_u32": (2, each(lambda a, b: min(a, 65535) | min(b, 65535) << 16)),
    "v_cvt_pk_i16_i32": (2, each(lambda a, b: (max(min(signed(a), 32767), -32768) & 0xFFFF)
                                 | (max(min(signed(b), 32767), -32768) & 0xFFFF) << 16)),
    "v_bfe_u32": (3, each(lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1))),
    "v_bfe_i32": (3, each(bfe_i)),
    "v_bfi_b32": (3, lambda a, b, c: (a & b) | (~a & c)),
    "v_alignbit_b32": (3, each(lambda a, b, c: (a << 32 | b) >> (c & 31))),
    "v_alignbyte_b32": (3, each(lambda a, b, c: (a << 32 | b) >> 8 * (c & 3))),
    "v_min3_i32": (3, each(lambda a, b, c: min(signed(a), signed(b), signed(c)))),
    "v_max3_i32": (3, each(lambda a, b, c: max(signed(a), signed(b), signed(c)))),
    "v_min3_u32": (3, each(min)),
    "v_max3_u32": (3, each(max)),
    "v_med3_i32": (3, each(lambda a, b, c: med(signed(a), signed(b), signed(c)))),
    "v_med3_u32": (3, each(med)),
    "v_mad_i32_i24": (3, each(lambda a, b, c: signed(a, 24) * signed(b, 24) + c)),
    "v_mad_u32_u24": (3, each(lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c)),
    "v_xad_u32": (3, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": (3, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": (3, lambda a, b, c: (a + b) << (c & 31)),
    "v_add3_u32": (3, lambda a, b, c: a + b + c),
    "v_lshl_or_b32": (3, lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32": (3, lambda a, b, c: (a & b) | c),
    "v_or3_b32": (3, lambda a, b, c: a | b | c),
    "v_perm_b32": (3, each(perm)),
    "v_sad_u8": (3, each(lambda a, b, c: sad(a, b, c, 8))),
    "v_sad_u16": (3, each(lambda a, b, c: sad(a, b, c, 16))),
    "v_sad_u32": (3, each(lambda a, b, c: abs(a - b) + c)),
    "v_sad_hi_u8": (3, each(lambda a, b, c: (sad(a, b, 0, 8) << 16) + c)),
    "v_msad_u8": (3, each(lambda a, b, c: c + sum(abs((a >> k & 255) - (b >> k & 255))
                                                  for k in (0, 8, 16, 24) if b >> k & 255))),
    "v_lerp_u8": (3, each(lambda a, b, c: sum((((a >> k & 255) + (b >> k & 255)
                                                + (c >> k & 1)) >> 1)
                                              << k for k in (0, 8, 16, 24)))),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGER)
def test_integer(name):
    count, oracle = INTEGER[name]
    inputs = grid(U32, count)
    with np.errstate(over="ignore"):
        want = oracle(*inputs).astype(np.uint32)
    got = run(f"{name} v20, {', '.join(f'v{4 + k}' for k in range(count))}", inputs)[0]
    np.testing.assert_array_equal(got, want)


def f(x):
    return x.view(np.float32)


def fma32(a, b, c):
    return np.array(
        [float_fma(x, y, z) for x, y, z in zip(f(a), f(b), f(c), strict=True)], np.float32
    )


def float_fma(a, b, c):
    """Rounded once: exact rationals."""
    from fractions import Fraction

    if not all(np.isfinite((a, b, c))):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(a) * np.float32(b) + np.float32(c)
    return round_fraction(exact)


def round_fraction(x, mantissa=23, low_exponent=-126, high=3.4028234663852886e38):
    """The nearest f32, ties to even."""
    import math

    sign, x = (-1 if x < 0 else 1), abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while x >= 2 ** (e + 1):
        e += 1
    while x < (2**e if e >= 0 else type(x)(1, 2**-e)):
        e -= 1
    step = max(e, low_exponent) - mantissa
    scaled = x / 2**step if step >= 0 else x * 2**-step
    n = round(scaled)  # Python rounds half to even
    if n * (2.0**step) > high:
        return np.float32(sign * math.inf)
    return np.float32(sign * math.ldexp(n, step))


def num(pick):
    """minNum or maxNum, -0 below +0, a NaN loses."""

    def of(a, b):
        x, y = f(a), f(b)
        key_x, key_y = (
            (x.astype(np.float64), ~np.signbit(x)),
            (y.astype(np.float64), ~np.signbit(y)),
        )
        less = (key_x[0] < key_y[0]) | ((key_x[0] == key_y[0]) & (key_x[1] < key_y[1]))
        r = np.where(less == (pick == "min"), x, y)
        return np.where(np.isnan(x), y, np.where(np.isnan(y), x, r)).astype(np.float32)

    return of


def nan_wins(pick):
    def of(a, b, c):
        r = num(pick)(num(pick)(a, b).view(np.uint32), c)
        return np.where(np.isnan(f(a)) | np.isnan(f(b)) | np.isnan(f(c)), np.float32(np.nan), r)

    return of


FLOAT = {
    "v_add_f32": (2, lambda a, b: f(a) + f(b)),
    "v_sub_f32": (2, lambda a, b: f(a) - f(b)),
    "v_subrev_f32": (2, lambda a, b: f(b) - f(a)),
    "v_mul_f32": (2, lambda a, b: f(a) * f(b)),
    "v_min_f32": (2, num("min")),
    "v_max_f32": (2, num("max")),
    "v_min3_f32": (3, lambda a, b, c: num("min")(num("min")(a, b).view(np.uint32), c)),
    "v_max3_f32": (3, lambda a, b, c: num("max")(num("max")(a, b).view(np.uint32), c)),
    "v_minimum3_f32": (3, nan_wins("min")),
    "v_maximum3_f32": (3, nan_wins("max")),
    "v_fma_f32": (3, fma32),
    "v_trunc_f32": (1, lambda a: np.trunc(f(a))),
    "v_ceil_f32": (1, lambda a: np.ceil(f(a))),
    "v_floor_f32": (1, lambda a: np.floor(f(a))),
    "v_rndne_f32": (1, lambda a: np.rint(f(a))),
    "v_sqrt_f32": (1, lambda a: np.sqrt(f(a))),
    "v_rcp_f32": (1, lambda a: np.float32(1) / f(a)),
    "v_rsq_f32": (1, lambda a: (1 / np.sqrt(f(a).astype(np.float64))).astype(np.float32)),
    "v_exp_f32": (1, lambda a: np.exp2(f(a).astype(np.float64)).astype(np.float32)),
    "v_log_f32": (1, lambda a: np.log2(f(a).astype(np.float64)).astype(np.float32)),
    "v_frexp_mant_f32": (1, lambda a: np.where(np.isfinite(f(a)), np.frexp(f(a))[0], f(a))),
}


def same_floats(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, any NaN for a NaN."""
    want = np.asarray(want, dtype=got.dtype)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    np.testing.assert_array_equal(got.view(kind)[~nan], want.view(kind)[~nan])


@pytest.mark.parametrize("name", FLOAT)
def test_f32(name):
    count, oracle = FLOAT[name]
    inputs = grid(F32, count)
    with np.errstate(all="ignore"):
        want = oracle(*inputs)
    got = run(f"{name} v20, {', '.join(f'v{4 + k}' for k in range(count))}", inputs)[0]
    same_floats(got.view(np.float32), want)


def test_modifiers_of_f32():
    a, b = grid(F32, 2)
    with np.errstate(all="ignore"):
        for text, want in (
            ("v_add_f32 v20, -v4, |v5|", -f(a) + np.abs(f(b))),
            ("v_mul_f32 v20, v4, -|v5|", f(a) * -np.abs(f(b))),
            ("v_add_f32 v20, v4, v5 mul:4", (f(a) + f(b)) * np.float32(4)),
            ("v_add_f32 v20, v4, v5 div:2", (f(a) + f(b)) * np.float32(0.5)),
        ):
            same_floats(run(text, [a, b])[0].view(np.float32), want)
        total = f(a) + f(b)
        clamped = np.where(total > 1, 1, np.where(total > 0, total, 0)).astype(np.float32)
        got = run("v_add_f32 v20, v4, v5 clamp", [a, b])[0].view(np.float32)
        np.testing.assert_array_equal(got, clamped)


HALF = {
    "v_add_f16": (2, lambda a, b: a + b),
    "v_sub_f16": (2, lambda a, b: a - b),
    "v_mul_f16": (2, lambda a, b: a * b),
    "v_fma_f16": (3, None),
    "v_sqrt_f16": (1, np.sqrt),
    "v_rcp_f16": (1, lambda a: (1 / a.astype(np.float64)).astype(np.float16)),
    "v_floor_f16": (1, np.floor),
    "v_ceil_f16": (1, np.ceil),
    "v_trunc_f16": (1, np.trunc),
    "v_rndne_f16": (1, np.rint),
}


def h(x):
    return x.astype(np.uint16).view(np.float16)


def half_fma(a, b, c):
    from fractions import Fraction

    if not all(np.isfinite((a, b, c))):
        return np.float16(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float16(np.float64(a) * np.float64(b) + np.float64(c))
    return np.float16(round_fraction(exact, 10, -14, 65519.99))


@pytest.mark.parametrize("name", HALF)
def test_f16(name):
    count, oracle = HALF[name]
    inputs = grid(F16, count)
    with np.errstate(all="ignore"):
        if oracle is None:
            want = np.array([half_fma(*v) for v in zip(*map(h, inputs), strict=True)], np.float16)
        else:
            want = oracle(*map(h, inputs))
    got = run(f"{name} v20, {', '.join(f'v{4 + k}' for k in range(count))}", inputs)[0]
    assert not (got >> 16).any()
    same_floats(got.astype(np.uint16).view(np.float16), want)


PACKED = {
    "v_pk_add_f16": lambda a, b: h(a) + h(b),
    "v_pk_mul_f16": lambda a, b: h(a) * h(b),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_f16_and_op_sel(name):
    a, b = grid(F16, 2)
    with np.errstate(all="ignore"):
        low_, high = PACKED[name](a, b), PACKED[name](b, a)
    x, y = a | b << 16, b | a << 16
    got = run(f"{name} v20, v4, v5", [x, y])[0]
    same_floats((got & 0xFFFF).astype(np.uint16).view(np.float16), low_)
    same_floats((got >> 16).astype(np.uint16).view(np.float16), high)
    got = run(f"{name} v20, v4, v5 op_sel:[1,0] op_sel_hi:[0,0] neg_lo:[0,1] neg_hi:[1,1]", [x, y])[
        0
    ]
    with np.errstate(all="ignore"):
        low_ = PACKED[name](b, b ^ 0x8000)
        high = PACKED[name](a ^ 0x8000, b ^ 0x8000)
    same_floats((got & 0xFFFF).astype(np.uint16).view(np.float16), low_)
    same_floats((got >> 16).astype(np.uint16).view(np.float16), high)


def dwords(x: np.ndarray) -> np.ndarray:
    v = np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2)
    return v.T


DOUBLE = {
    "v_add_f64": (2, lambda a, b: a + b),
    "v_mul_f64": (2, lambda a, b: a * b),
    "v_trunc_f64": (1, np.trunc),
    "v_ceil_f64": (1, np.ceil),
    "v_floor_f64": (1, np.floor),
    "v_rndne_f64": (1, np.rint),
    "v_sqrt_f64": (1, np.sqrt),
    "v_rcp_f64": (1, lambda a: 1 / a),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_f64(name):
    count, oracle = DOUBLE[name]
    inputs = grid(F64, count)
    with np.errstate(all="ignore"):
        want = oracle(*inputs)
    sources = ", ".join(f"v[{4 + 2 * k}:{5 + 2 * k}]" for k in range(count))
    out = run(f"{name} v[20:21], {sources}", [dwords(x) for x in inputs], 2)
    same_floats(np.ascontiguousarray(out.T).view(np.float64)[:, 0], want)


def test_64_bit_shifts_and_sums():
    values = np.array([0, 1, 0xFFFFFFFF, 0x123456789ABCDEF0, 2**63, 2**64 - 1, 2**32], np.uint64)
    x, s = (v.ravel() for v in np.meshgrid(values, np.array([0, 1, 7, 31, 32, 33, 63], np.uint64)))
    for name, want in (
        ("v_lshlrev_b64", x << s),
        ("v_lshrrev_b64", x >> s),
        ("v_ashrrev_i64", (x.view(np.int64) >> s.view(np.int64)).view(np.uint64)),
    ):
        out = run(f"{name} v[20:21], v4, v[6:7]", [low(s), low(s), *dwords(x)], 2)
        np.testing.assert_array_equal(np.ascontiguousarray(out.T).view(np.uint64)[:, 0], want)
    with np.errstate(over="ignore"):
        want = (x << np.uint64(3)) + s
    out = run("v_lshl_add_u64 v[20:21], v[4:5], 3, v[6:7]", [*dwords(x), *dwords(s)], 2)
    np.testing.assert_array_equal(np.ascontiguousarray(out.T).view(np.uint64)[:, 0], want)
    a, b = grid(U32, 2)
    out = run("v_mad_u64_u32 v[20:21], vcc, v4, v5, v[4:5]", [a, b], 2)
    want = [
        (int(p) * int(q) + (int(q) << 32 | int(p))) & (2**64 - 1) for p, q in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(np.ascontiguousarray(out.T).view(np.uint64)[:, 0],
                                  np.array(want, np.uint64))  # fmt: skip


COMPARE = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("kind", ["f32", "i32", "u32"])
@pytest.mark.parametrize("name", COMPARE)
def test_compare(name, kind):
    a, b = grid(F32 if kind == "f32" else U32, 2)
    view = {"f32": np.float32, "i32": np.int32, "u32": np.uint32}[kind]
    want = COMPARE[name](a.view(view), b.view(view)).astype(np.uint32)
    text = f"v_cmp_{name}_{kind} vcc, v4, v5\nv_cndmask_b32 v20, 0, 1, vcc"
    np.testing.assert_array_equal(run(text, [a, b])[0], want)
    if kind == "f32":
        text = (
            f"v_cmp_n{name if name != 'eq' else 'eq'}_f32 vcc, v4, v5\nv_cndmask_b32 v20, 0, 1, vcc"
        )
        np.testing.assert_array_equal(run(text, [a, b])[0], 1 - want)


@pytest.mark.parametrize("table", [0x00, 0x6C, 0x96, 0xCA, 0xFE, 0x36, 0xDE, 0xFF])
def test_bitop3(table):
    a, b, c = grid(U32, 3)
    want = np.zeros_like(a)
    for n in range(8):
        if table >> n & 1:
            want |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    got = run(f"v_bitop3_b32 v20, v4, v5, v6 bitop3:{table:#x}", [a, b, c])[0]
    np.testing.assert_array_equal(got, want)


def test_carries_chain():
    a, b = grid(U32, 2)
    text = "v_add_co_u32 v20, vcc, v4, v5\nv_addc_co_u32 v21, vcc, v5, v4, vcc"
    out = run(text, [a, b], 2)
    for k in range(len(a)):
        x, y = int(a[k]), int(b[k])
        total = (y << 32 | x) + (x << 32 | y)
        assert int(out[1, k]) << 32 | int(out[0, k]) == total & (2**64 - 1)


LANE = np.arange(64)
DPP = {
    "quad_perm:[3,2,1,0]": LANE ^ 3,
    "row_shl:1": np.where(LANE % 16 < 15, LANE + 1, -1),
    "row_shr:2": np.where(LANE % 16 >= 2, LANE - 2, -1),
    "row_ror:3": LANE // 16 * 16 + (LANE - 3) % 16,
    "row_mirror": LANE // 16 * 16 + 15 - LANE % 16,
    "row_half_mirror": LANE // 8 * 8 + 7 - LANE % 8,
    "row_newbcast:5": LANE // 16 * 16 + 5,
    "row_bcast:15": np.where(LANE >= 16, LANE // 16 * 16 - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "wave_shr:1": LANE - 1,
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("control", DPP)
def test_dpp(control, bound):
    x = (LANE * 3 + 100).astype(np.uint32)
    end = " bound_ctrl:0" if bound else ""
    text = f"v_mov_b32_dpp v20, v4 {control} row_mask:0xf bank_mask:0xf{end}"
    got = run(text, [x], before="v_mov_b32 v20, 7")[0]
    want = np.where(DPP[control] >= 0, x[DPP[control]], 0 if bound else 7)
    np.testing.assert_array_equal(got, want)


def test_sdwa_selects():
    a, b = grid(U32, 2)
    text = (
        "v_add_u32_sdwa v20, sext(v4), v5 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
        "src0_sel:BYTE_2 src1_sel:WORD_1"
    )
    got = run(text, [a, b], before="v_mov_b32 v20, 0x1234")[0]
    byte = (a >> 16 & 0xFF).astype(np.uint8).view(np.int8).astype(np.int64)
    total = (byte + (b >> 16)) & 0xFFFF
    np.testing.assert_array_equal(got, (total << 16 | 0x1234).astype(np.uint32))


def test_lane_moves():
    x = (LANE * 7 + 1).astype(np.uint32)
    y = (LANE * 11 + 5).astype(np.uint32)
    got = run("v_readlane_b32 s10, v4, 17\nv_mov_b32 v20, s10", [x])[0]
    assert (got == x[17]).all()
    got = run("v_mov_b32 v20, v4\nv_writelane_b32 v20, 9, 33", [x])[0]
    assert got[33] == 9 and (np.delete(got, 33) == np.delete(x, 33)).all()
    for n, name in ((32, "v_permlane32_swap_b32"), (16, "v_permlane16_swap_b32")):
        text = f"v_mov_b32 v20, v4\nv_mov_b32 v21, v5\ns_nop 1\n{name} v20, v21"
        d, s = run(text, [x, y], 2)
        want_d, want_s = x.copy(), y.copy()
        for base in range(0, 64, 2 * n):
            want_d[base + n : base + 2 * n] = y[base : base + n]
            want_s[base : base + n] = x[base + n : base + 2 * n]
        np.testing.assert_array_equal(d, want_d)
        np.testing.assert_array_equal(s, want_s)
    got = run("v_mbcnt_lo_u32_b32 v20, -1, 0\nv_mbcnt_hi_u32_b32 v20, -1, v20", [x])[0]
    np.testing.assert_array_equal(got, LANE)


def test_enough_opcodes():
    assert len(opcodes()) >= 320
