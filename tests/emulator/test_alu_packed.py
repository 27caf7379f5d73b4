"""VOP3P: two 16-bit or two 32-bit values a lane, mixed precision, dot products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import alu_float as af
from tests.emulator.alu import (
    F16,
    F32,
    U32,
    each,
    f,
    flush,
    grid,
    h,
    opcode_is_launched,  # noqa: F401
    run,
    same_floats,
    signed,
    sources,
)
from tests.emulator.test_alu_16 import FLUSHED, saturate
from tests.emulator.test_alu_16 import INTEGER as SHORT

FLOAT = {
    "v_pk_add_f16": (2, lambda a, b: a + b),
    "v_pk_mul_f16": (2, lambda a, b: a * b),
    "v_pk_fma_f16": (3, af.fma),
    "v_pk_min_f16": (2, af.pick(True, ieee=True)),
    "v_pk_max_f16": (2, af.pick(False, ieee=True)),
    "v_pk_minimum3_f16": (3, af.nan_wins(True)),
    "v_pk_maximum3_f16": (3, af.nan_wins(False)),
}


def halves_of(out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return h(out), h(out >> 16)


@pytest.mark.parametrize("settings", [
    {}, {"mode": FLUSHED}, {"fp16_ovfl": True}], ids=["plain", "flushed", "ovfl"])  # fmt: skip
@pytest.mark.parametrize("opcode", FLOAT)
def test_packed_f16(opcode, settings):
    count, oracle = FLOAT[opcode]
    inputs = grid(F16, count)
    change = flush if "mode" in settings else np.asarray

    def expected(codes):
        values = [change(h(x)) for x in codes]
        with np.errstate(all="ignore"):
            want = change(oracle(*values))
        finite = np.all([np.isfinite(v) for v in values], axis=0)
        return saturate(want, finite) if "fp16_ovfl" in settings else want

    words = [x | y << 16 for x, y in zip(inputs, inputs[::-1], strict=True)]
    got = halves_of(run(f"{opcode} v20, {sources(count)}", words, **settings)[0])
    same_floats(got[0], expected(inputs))
    same_floats(got[1], expected(inputs[::-1]))
    # Halves swapped for the first source; signs flipped for each result on its own.
    last = ",0" * (count - 2)
    text = (f"{opcode} v20, {sources(count)} op_sel:[1,0{last}] op_sel_hi:[0,0{last}] "
            f"neg_lo:[0,1{last}] neg_hi:[1,1{last}]")  # fmt: skip
    low, high = halves_of(run(text, words, **settings)[0])
    a, b, *c = inputs
    first = inputs[-1]  # the high half of the first word
    flip = np.uint32(0x8000)
    same_floats(low, expected([first, b ^ flip, *c]))
    same_floats(high, expected([a ^ flip, b ^ flip, *c]))


@pytest.mark.parametrize("opcode", ["v_pk_fmac_f16"])
def test_packed_fmac(opcode):
    a, b, c = grid(F16, 3)
    text = f"v_mov_b32 v20, v6\n{opcode} v20, v4, v5"
    for settings in ({}, {"fp16_ovfl": True}):
        words = [x | y << 16 for x, y in ((a, b), (b, c), (c, a))]
        got = halves_of(run(text, words, **settings)[0])
        for half, codes in zip(got, ((a, b, c), (b, c, a)), strict=True):
            values = [h(x) for x in codes]
            want = af.fma(*values)
            if settings:
                want = saturate(want, np.all([np.isfinite(v) for v in values], axis=0))
            same_floats(half, want)


def test_packed_clamp():
    a, b = grid(F16, 2)
    with np.errstate(all="ignore"):
        want = h(a) + h(b)
    for dx10 in (True, False):
        got = run("v_pk_add_f16 v20, v4, v5 clamp", [a, b << 16 | b], dx10_clamp=dx10)[0]
        same_floats(h(got), af.clamp(want, dx10))


INTEGER = {name.replace("v_", "v_pk_", 1): SHORT[name] for name in (
    "v_add_u16", "v_sub_u16", "v_mul_lo_u16", "v_lshlrev_b16", "v_lshrrev_b16", "v_ashrrev_i16",
    "v_max_u16", "v_min_u16", "v_max_i16", "v_min_i16", "v_add_i16", "v_sub_i16", "v_mad_u16",
    "v_mad_i16")}  # fmt: skip


@pytest.mark.parametrize("opcode", INTEGER)
def test_packed_integer(opcode):
    count, oracle = INTEGER[opcode]
    inputs = grid(U32, count)
    low = oracle(*inputs)
    high = oracle(*[x >> 16 for x in inputs])
    text = f"{opcode} v20, {sources(count)}"
    got = run(text, inputs)[0]
    np.testing.assert_array_equal(got & 0xFFFF, low & 0xFFFF)
    np.testing.assert_array_equal(got >> 16, high & 0xFFFF)
    swapped = ",".join("1" * count), ",".join("0" * count)
    got = run(f"{text} op_sel:[{swapped[0]}] op_sel_hi:[{swapped[1]}]", inputs)[0]
    np.testing.assert_array_equal(got, (low << 16 & 0xFFFF0000) | (high & 0xFFFF))
    if any(word in opcode for word in ("add", "sub", "mad")):
        least = -32768 if "i16" in opcode else 0
        got = run(f"{text} clamp", inputs)[0]
        np.testing.assert_array_equal(got & 0xFFFF, np.clip(low, least, least + 65535) & 0xFFFF)
        np.testing.assert_array_equal(got >> 16, np.clip(high, least, least + 65535) & 0xFFFF)


PACKED_F32 = {
    "v_pk_add_f32": (2, lambda a, b: a + b),
    "v_pk_mul_f32": (2, lambda a, b: a * b),
    "v_pk_fma_f32": (3, af.fma),
}


@pytest.mark.parametrize("mode", [0xF0, 0xC0])
@pytest.mark.parametrize("opcode", PACKED_F32)
def test_packed_f32(opcode, mode):
    count, oracle = PACKED_F32[opcode]
    inputs = grid(F32, count)
    pairs = [row for x, y in zip(inputs, inputs[::-1], strict=True) for row in (x, y)]
    change = flush if mode == 0xC0 else np.asarray

    def expected(*values):
        with np.errstate(all="ignore"):
            return change(oracle(*map(change, values)))

    a, b, *c = (f(x) for x in inputs)
    high = [f(x) for x in inputs[::-1]]
    text = f"{opcode} v[20:21], {sources(count, wide=True)}"
    out = run(text, pairs, 2, mode=mode)
    same_floats(out[0].view(np.float32), expected(a, b, *c))
    same_floats(out[1].view(np.float32), expected(*high))
    last = ",0" * (count - 2)
    text += f" op_sel:[1,0{last}] op_sel_hi:[0,0{last}] neg_lo:[0,1{last}] neg_hi:[1,0{last}]"
    out = run(text, pairs, 2, mode=mode)
    same_floats(out[0].view(np.float32), expected(high[0], -b, *c))
    same_floats(out[1].view(np.float32), expected(-a, b, *c))


def test_packed_f32_clamp():
    a, b = grid(F32, 2)
    with np.errstate(all="ignore"):
        want = af.clamp(f(a) + f(b))
    out = run("v_pk_add_f32 v[20:21], v[4:5], v[6:7] clamp", [a, b, b, a], 2)
    same_floats(out[0].view(np.float32), want)
    same_floats(out[1].view(np.float32), want)


@pytest.mark.parametrize("opcode", ["v_pk_mov_b32"])
def test_packed_move(opcode):
    """The two results are one dword of each source."""
    rows = [np.arange(64, dtype=np.uint32) * 5 + k for k in range(4)]
    for x in (0, 1):
        for y in (0, 1):
            out = run(f"{opcode} v[20:21], v[4:5], v[6:7] op_sel:[{x},{y}]", rows, 2)
            np.testing.assert_array_equal(out, [rows[x], rows[2 + y]])


MIX = {"v_fma_mix_f32": None, "v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 16}


@pytest.mark.parametrize("settings", [
    {}, {"mode": 0x00}, {"fp16_ovfl": True}], ids=["plain", "flushed", "ovfl"])  # fmt: skip
@pytest.mark.parametrize("opcode", MIX)
def test_mixed_precision(opcode, settings):
    """Sources are f32 or either half; neg and abs hold; f16 results go to one half."""
    a, b = grid(F16, 2)
    c = np.resize(F32, len(a)).astype(np.uint32)
    words = [a | b << 16, b | a << 16, c]
    change = flush if "mode" in settings else np.asarray
    cases = {
        "op_sel:[0,1,0] op_sel_hi:[1,1,0]": (h(a), h(a), f(c)),
        "op_sel:[1,0,1] op_sel_hi:[1,0,1]": (h(b), f(words[1]), h(c >> 16)),
    }
    for select, values in cases.items():
        x, y, z = (change(v).astype(np.float32) for v in values)
        text = f"{opcode} v20, -v4, |v5|, v6 {select}"
        with np.errstate(all="ignore"):
            want = change(af.fma(-x, np.abs(y), z))
            half = want.astype(np.float16)
        got = run(text, words, before="v_mov_b32 v20, 0xabcd8765", **settings)[0]
        shift = MIX[opcode]
        if shift is None:
            same_floats(got.view(np.float32), want)
            continue
        half = change(half)
        if "fp16_ovfl" in settings:
            half = saturate(half, np.isfinite(x) & np.isfinite(y) & np.isfinite(z))
        same_floats(h(got >> shift), half)
        np.testing.assert_array_equal(
            h(got >> 16 - shift).view(np.uint16), 0x8765 if shift else 0xABCD
        )


def test_mixed_precision_clamp():
    a, b, c = grid(F32, 3)
    got = run("v_fma_mix_f32 v20, v4, v5, v6 clamp", [a, b, c])[0]
    with np.errstate(all="ignore"):
        same_floats(got.view(np.float32), af.clamp(af.fma(f(a), f(b), f(c))))


DOT = {  # bits of an element, signed
    "v_dot2_i32_i16": (16, True), "v_dot2_u32_u16": (16, False), "v_dot4_i32_i8": (8, True),
    "v_dot4_u32_u8": (8, False), "v_dot8_i32_i4": (4, True), "v_dot8_u32_u4": (4, False),
    "v_dot2c_i32_i16": (16, True), "v_dot4c_i32_i8": (8, True), "v_dot8c_i32_i4": (4, True),
}  # fmt: skip


@pytest.mark.parametrize("opcode", DOT)
def test_integer_dot(opcode):
    bits, is_signed = DOT[opcode]
    inputs = grid(U32, 3)

    def part(x, k):
        x = x >> k & ((1 << bits) - 1)
        return signed(x, bits) if is_signed else x

    def exact(a, b, c):
        start = signed(c) if is_signed else c
        return start + sum(part(a, k) * part(b, k) for k in range(0, 32, bits))

    if "c_" in opcode:  # the destination is the accumulator
        text = f"v_mov_b32 v20, v6\n{opcode} v20, v4, v5"
    else:
        text = f"{opcode} v20, v4, v5, v6"
        least = -(2**31) if is_signed else 0
        want = each(lambda *v: min(max(exact(*v), least), least + 2**32 - 1))(*inputs)
        np.testing.assert_array_equal(run(f"{text} clamp", inputs)[0], want)
    np.testing.assert_array_equal(run(text, inputs)[0], each(exact)(*inputs))


def bf16(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16)


BF16 = np.array([0, 0x8000, 0x3F80, 0xC049, 0x7F80, 0xFF80, 0x7FC0, 0x3F81, 0x0080, 0xBDCC, 0x4B00,
                 0x7F7F], np.uint32)  # fmt: skip
FLOAT_DOT = {
    "v_dot2_f32_f16": (F16, h, False), "v_dot2c_f32_f16": (F16, h, False),
    "v_dot2_f32_bf16": (BF16, bf16, True), "v_dot2c_f32_bf16": (BF16, bf16, False),
}  # fmt: skip


@pytest.mark.parametrize("opcode", FLOAT_DOT)
def test_float_dot(opcode):
    """f32 sums of the two products, in the document's order: the accumulator comes first, or last
    in v_dot2_f32_bf16."""
    values, view, accumulator_last = FLOAT_DOT[opcode]
    a, b = (x[: 64 * 9] for x in grid(values, 2))
    rng = np.random.default_rng(5)
    c = np.concatenate([F32, rng.standard_normal(len(a)).astype(np.float32).view(np.uint32)])
    words = [a | rng.permutation(b) << 16, b | rng.permutation(a) << 16, c[: len(a)]]

    def dot(x_low, x_high, y_low, y_high, start):
        with np.errstate(all="ignore"):
            first = x_low.astype(np.float32) * y_low.astype(np.float32)
            second = x_high.astype(np.float32) * y_high.astype(np.float32)
            return first + second + start if accumulator_last else start + first + second

    x, y, z = words
    parts = [view(x), view(x >> 16), view(y), view(y >> 16)]
    if "c_" in opcode:
        got = run(f"v_mov_b32 v20, v6\n{opcode} v20, v4, v5", words)[0]
        same_floats(got.view(np.float32), dot(*parts, f(z)))
        return
    want = dot(*parts, f(z))
    text = f"{opcode} v20, v4, v5, v6"
    same_floats(run(text, words)[0].view(np.float32), want)
    same_floats(run(f"{text} clamp", words)[0].view(np.float32), af.clamp(want))
    got = run(f"{text} neg_lo:[1,0,1] neg_hi:[0,1,1]", words)[0]
    want = dot(-parts[0], parts[1], parts[2], -parts[3], -f(z))
    same_floats(got.view(np.float32), want)
