"""All comparisons, 16-bit and packed integers, dot products, mixed precision, scalar ALU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.test_alu import (
    F16,
    F32,
    F64,
    U32,
    dwords,
    f,
    fma32,
    grid,
    h,
    run,
    same_floats,
    signed,
)

U64 = np.array(
    [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 12345678901234], np.uint64
)
H16 = (U32 & 0xFFFF).astype(np.uint32)
VALUES = {
    "f32": (F32, f), "f16": (F16, h), "f64": (F64, lambda x: x),
    "i32": (U32, lambda x: x.view(np.int32)), "u32": (U32, lambda x: x),
    "i16": (H16, lambda x: x.astype(np.uint16).view(np.int16)), "u16": (H16, lambda x: x),
    "i64": (U64, lambda x: x.view(np.int64)), "u64": (U64, lambda x: x),
}  # fmt: skip
ORDERED = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


def predicates(kind: str) -> dict:
    table = {"f": lambda a, b: np.zeros(len(a), bool), **ORDERED}
    if kind[0] != "f":
        return {**table, "ne": np.not_equal, "t": lambda a, b: np.ones(len(a), bool)}
    unordered = lambda a, b: np.isnan(a) | np.isnan(b)  # noqa: E731
    table |= {"lg": lambda a, b: (a < b) | (a > b), "u": unordered,
              "o": lambda a, b: ~unordered(a, b),
              "tru": lambda a, b: np.ones(len(a), bool)}  # fmt: skip
    table |= {"nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
              "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
              "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b)}  # fmt: skip
    return table


@pytest.mark.parametrize("kind", VALUES)
def test_every_comparison(kind):
    values, view = VALUES[kind]
    a, b = grid(values, 2)
    wide = kind.endswith("64")
    inputs = [*dwords(a), *dwords(b)] if wide else [a, b]
    sources = "v[4:5], v[6:7]" if wide else "v4, v5"
    for name, oracle in predicates(kind).items():
        want = oracle(view(a), view(b)).astype(np.uint32)
        text = f"v_cmp_{name}_{kind} vcc, {sources}\nv_cndmask_b32 v20, 0, 1, vcc"
        np.testing.assert_array_equal(run(text, inputs)[0], want, name)
        text = (
            f"s_mov_b64 s[20:21], exec\nv_mov_b32 v20, 0\nv_cmpx_{name}_{kind} vcc, {sources}\n"
            "v_mov_b32 v20, 1\ns_mov_b64 exec, s[20:21]"
        )
        np.testing.assert_array_equal(run(text, inputs)[0], want, f"cmpx {name}")


def test_classes():
    kinds = {0x7F800001: 0, 0x7FC00000: 1, 0xFF800000: 2, 0xBF800000: 3, 0x80000001: 4,
             0x80000000: 5, 0: 6, 1: 7, 0x3F800000: 8, 0x7F800000: 9}  # fmt: skip
    a = np.array(list(kinds), np.uint32)
    for k in range(10):
        text = (
            f"v_mov_b32 v6, {1 << k:#x}\nv_cmp_class_f32 vcc, v4, v6\nv_cndmask_b32 v20, 0, 1, vcc"
        )
        got = run(text, [a])[0]
        np.testing.assert_array_equal(got, np.array(list(kinds.values())) == k)


def s16(x):
    return x.astype(np.uint16).view(np.int16).astype(np.int64)


def u16(x):
    return (x & 0xFFFF).astype(np.int64)


SHORT = {
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
    "v_max3_i16": (3, lambda a, b, c: np.maximum(np.maximum(s16(a), s16(b)), s16(c))),
    "v_min3_u16": (3, lambda a, b, c: np.minimum(np.minimum(u16(a), u16(b)), u16(c))),
    "v_med3_i16": (3, lambda a, b, c: np.median([s16(a), s16(b), s16(c)], 0).astype(np.int64)),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_integers(name):
    count, oracle = SHORT[name]
    inputs = grid(U32, count)
    want = (oracle(*inputs) & 0xFFFF).astype(np.uint32)
    sources = ", ".join(f"v{4 + k}" for k in range(count))
    np.testing.assert_array_equal(run(f"{name} v20, {sources}", inputs)[0], want)


PACKED = {name.replace("v_", "v_pk_", 1): SHORT[name] for name in (
    "v_add_u16", "v_sub_u16", "v_mul_lo_u16", "v_lshlrev_b16", "v_lshrrev_b16", "v_ashrrev_i16",
    "v_max_u16", "v_min_u16", "v_max_i16", "v_min_i16", "v_add_i16", "v_sub_i16", "v_mad_u16",
    "v_mad_i16")}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_integers(name):
    count, oracle = PACKED[name]
    inputs = grid(U32, count)
    low_ = oracle(*inputs) & 0xFFFF
    high = oracle(*[x >> 16 for x in inputs]) & 0xFFFF
    sources = ", ".join(f"v{4 + k}" for k in range(count))
    got = run(f"{name} v20, {sources}", inputs)[0]
    np.testing.assert_array_equal(got, (high << 16 | low_).astype(np.uint32))


@pytest.mark.parametrize("name,bits,is_signed", [
    ("v_dot2_i32_i16", 16, True), ("v_dot2_u32_u16", 16, False), ("v_dot4_i32_i8", 8, True),
    ("v_dot4_u32_u8", 8, False), ("v_dot8_i32_i4", 4, True),
    ("v_dot8_u32_u4", 4, False)])  # fmt: skip
def test_integer_dots(name, bits, is_signed):
    inputs = grid(U32, 3)

    def part(x, k):
        x = x >> k & ((1 << bits) - 1)
        return signed(x, bits) if is_signed else x

    want = [
        (c + sum(part(a, k) * part(b, k) for k in range(0, 32, bits))) & 0xFFFFFFFF
        for a, b, c in zip(*(map(int, x) for x in inputs), strict=True)
    ]
    got = run(f"{name} v20, v4, v5, v6", inputs)[0]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


def test_mixed_precision_and_packed_f32():
    a, b = grid(F16, 2)
    c = np.resize(F32, len(a)).astype(np.uint32)
    with np.errstate(all="ignore"):
        wide_a, wide_b = h(a).astype(np.float32), h(b).astype(np.float32)
        want = fma32(wide_a.view(np.uint32), wide_b.view(np.uint32), c)
    got = run("v_fma_mix_f32 v20, v4, v5, v6 op_sel:[0,1,0] op_sel_hi:[1,1,0]", [a, b << 16, c])[0]
    same_floats(got.view(np.float32), want)
    x, y = grid(F32, 2)
    with np.errstate(all="ignore"):
        for text, lo, hi in (
            ("v_pk_add_f32 v[20:21], v[4:5], v[6:7]", f(x) + f(y), f(y) + f(x)),
            ("v_pk_mul_f32 v[20:21], v[4:5], v[4:5] op_sel:[0,1] op_sel_hi:[1,0]", f(x) * f(y),
             f(y) * f(x)),
            ("v_pk_add_f32 v[20:21], v[4:5], v[6:7] op_sel_hi:[0,0] neg_lo:[0,1] neg_hi:[1,0]",
             f(x) - f(y), -f(x) + f(y)),
        ):  # fmt: skip
            out = run(text, [x, y, y, x], 2)
            same_floats(out[0].view(np.float32), lo)
            same_floats(out[1].view(np.float32), hi)


def test_division_sequence():
    """LLVM's expansion of an f32 division gives the correctly rounded quotient.

    Left out: finite operands whose quotient overflows, where AMD's pseudo-code gives a NaN.
    """
    x, y = grid(F32, 2)
    text = """
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
    with np.errstate(all="ignore"):
        want = f(x) / f(y)
    keep = ~(np.isinf(want) & np.isfinite(f(x)) & (f(y) != 0))
    same_floats(run(text, [x, y])[0].view(np.float32)[keep], want[keep])


M32, M64 = 2**32 - 1, 2**64 - 1
SCALAR = {  # name: (widths of result and sources, value, SCC or None)
    "s_add_u32": ("111", lambda a, b: a + b, lambda a, b: a + b > M32),
    "s_sub_u32": ("111", lambda a, b: a - b, lambda a, b: b > a),
    "s_add_i32": ("111", lambda a, b: a + b,
                  lambda a, b: not -(2**31) <= signed(a) + signed(b) < 2**31),
    "s_min_i32": ("111", lambda a, b: min(signed(a), signed(b)),
                  lambda a, b: signed(a) < signed(b)),
    "s_max_u32": ("111", max, lambda a, b: a > b),
    "s_mul_i32": ("111", lambda a, b: a * b, None),
    "s_mul_hi_u32": ("111", lambda a, b: a * b >> 32, None),
    "s_mul_hi_i32": ("111", lambda a, b: signed(a) * signed(b) >> 32, None),
    "s_and_b32": ("111", lambda a, b: a & b, lambda a, b: a & b != 0),
    "s_andn2_b64": ("222", lambda a, b: a & ~b, lambda a, b: a & ~b != 0),
    "s_orn2_b64": ("222", lambda a, b: a | (~b & M64), lambda a, b: (a | (~b & M64)) != 0),
    "s_xnor_b32": ("111", lambda a, b: ~(a ^ b), lambda a, b: a ^ b != M32),
    "s_nand_b64": ("222", lambda a, b: ~(a & b), lambda a, b: a & b != M64),
    "s_lshl_b64": ("221", lambda a, b: a << (b & 63), lambda a, b: (a << (b & 63)) & M64 != 0),
    "s_ashr_i32": ("111", lambda a, b: signed(a) >> (b & 31),
                   lambda a, b: signed(a) >> (b & 31) != 0),
    "s_lshr_b64": ("221", lambda a, b: a >> (b & 63), lambda a, b: a >> (b & 63) != 0),
    "s_bfm_b32": ("111", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_absdiff_i32": ("111", lambda a, b: abs(signed(a) - signed(b)), lambda a, b: a != b),
    "s_lshl2_add_u32": ("111", lambda a, b: (a << 2) + b, lambda a, b: (a << 2) + b > M32),
    "s_pack_lh_b32_b16": ("111", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000), None),
    "s_not_b64": ("22", lambda a: ~a, lambda a: a != M64),
    "s_brev_b32": ("11", lambda a: int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b64": ("12", lambda a: a.bit_count(), lambda a: a != 0),
    "s_ff1_i32_b32": ("11", lambda a: (a & -a).bit_length() - 1 if a else M32, None),
    "s_flbit_i32_b32": ("11", lambda a: 32 - a.bit_length() if a else M32, None),
    "s_sext_i32_i8": ("11", lambda a: signed(a, 8), None),
    "s_abs_i32": ("11", lambda a: abs(signed(a)), lambda a: a != 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name):
    widths, value, scc = SCALAR[name]
    rng = np.random.default_rng(4)
    edges = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFF80]
    cases = [(int(a), int(b)) for a in edges for b in edges]
    chosen = [cases[k] for k in rng.permutation(len(cases))[:24]]
    for n, pair in enumerate(chosen):
        high = [0x80000001 if n & 1 else 0, 0x7 if n & 2 else 0xFFFFFFFF]
        values, lines, names = [], [], []
        for k, w in enumerate(widths[1:]):
            at = 40 + 4 * k
            lines.append(f"s_mov_b32 s{at}, {pair[k]:#x}\ns_mov_b32 s{at + 1}, {high[k]:#x}")
            values.append(pair[k] | (high[k] << 32 if w == "2" else 0))
            names.append(f"s[{at}:{at + 1}]" if w == "2" else f"s{at}")
        d = "s[60:61]" if widths[0] == "2" else "s60"
        lines.append(f"s_mov_b32 s61, 0\ns_cmp_eq_u32 0, 1\n{name} {d}, {', '.join(names)}")
        lines.append("s_cselect_b32 s62, 1, 0\nv_mov_b32 v20, s60\nv_mov_b32 v21, s61")
        lines.append("v_mov_b32 v22, s62")
        out = run("\n".join(lines), [np.zeros(1, np.uint32)], 3)[:, 0]
        want = value(*values) & (M64 if widths[0] == "2" else M32)
        assert int(out[0]) | int(out[1]) << 32 == want, (name, values)
        if scc:
            assert out[2] == scc(*values), (name, values)
