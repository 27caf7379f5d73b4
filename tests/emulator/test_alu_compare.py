"""Every v_cmp and v_cmpx against NumPy, and the float classes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.alu import (
    F16,
    F32,
    F64,
    U32,
    U64,
    dwords,
    f,
    flush,
    grid,
    h,
    opcode_is_launched,  # noqa: F401
    run,
)

H16 = U32 & np.uint32(0xFFFF)
S64 = np.array([0x7FF0000000000001, 0xFFF0000000000123], np.uint64).view(np.float64)
VALUES = {
    "f32": (F32, f), "f16": (F16, h), "f64": (np.concatenate([F64, S64]), lambda x: x),
    "i32": (U32, lambda x: x.view(np.int32)), "u32": (U32, lambda x: x),
    "i16": (H16, lambda x: x.astype(np.uint16).view(np.int16)), "u16": (H16, lambda x: x),
    "i64": (U64, lambda x: x.view(np.int64)), "u64": (U64, lambda x: x),
}  # fmt: skip
ORDERED = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


def never(a, b):
    return np.zeros(len(a), bool)


def always(a, b):
    return np.ones(len(a), bool)


def unordered(a, b):
    return np.isnan(a) | np.isnan(b)


def opposite(function):
    return lambda a, b: ~function(a, b)


def less_or_greater(a, b):
    return (a < b) | (a > b)


INTEGER = {"f": never, **ORDERED, "ne": np.not_equal, "t": always}
FLOAT = {
    "f": never, **ORDERED, "lg": less_or_greater, "u": unordered, "o": opposite(unordered),
    "nge": opposite(np.greater_equal), "nlg": opposite(less_or_greater),
    "ngt": opposite(np.greater), "nle": opposite(np.less_equal), "neq": opposite(np.equal),
    "nlt": opposite(np.less), "tru": always,
}  # fmt: skip
COMPARISONS = {
    f"v_{kind}_{name}_{type_}": oracle
    for kind in ("cmp", "cmpx")
    for type_ in VALUES
    for name, oracle in (FLOAT if type_[0] == "f" else INTEGER).items()
}


def lanes_of(opcode: str, sources: str) -> str:
    """v20 = 1 where `opcode` holds. v_cmpx: by EXEC, with VCC's and EXEC's bits in v21 and v22."""
    if "cmpx" not in opcode:
        return f"{opcode} vcc, {sources}\nv_cndmask_b32 v20, 0, 1, vcc"
    return (
        f"s_mov_b64 s[20:21], exec\n{opcode} vcc, {sources}\nv_mov_b32 v20, 1\n"
        "s_mov_b64 s[24:25], exec\ns_mov_b64 exec, s[20:21]\n"
        "v_cndmask_b32 v21, 0, 1, vcc\nv_cndmask_b32 v22, 0, 1, s[24:25]"
    )


@pytest.mark.parametrize("opcode", COMPARISONS)
def test_comparison(opcode):
    values, view = VALUES[opcode.rsplit("_", 1)[1]]
    a, b = grid(values, 2)
    wide = opcode.endswith("64")
    inputs = [*dwords(a), *dwords(b)] if wide else [a, b]
    text = lanes_of(opcode, "v[4:5], v[6:7]" if wide else "v4, v5")
    want = COMPARISONS[opcode](view(a), view(b))
    out = run(text, inputs, 3)
    np.testing.assert_array_equal(out[0], want)
    if "cmpx" in opcode:
        np.testing.assert_array_equal(out[1], want)
        np.testing.assert_array_equal(out[2], want)


@pytest.mark.parametrize("kind,mode", [("f32", 0xC0), ("f16", 0x30), ("f64", 0x30)])
def test_comparison_of_flushed_denormals(kind, mode):
    values, view = VALUES[kind]
    a, b = grid(values, 2)
    wide = kind == "f64"
    inputs = [*dwords(a), *dwords(b)] if wide else [a, b]
    text = lanes_of(f"v_cmp_lt_{kind}", "v[4:5], v[6:7]" if wide else "v4, v5")
    np.testing.assert_array_equal(run(text, inputs, mode=mode)[0], flush(view(a)) < flush(view(b)))


def test_modifiers_and_lanes_that_are_off():
    """Inactive lanes get 0 in the mask; neg and abs hold."""
    a, b = grid(F32, 2)
    text = (
        "s_mov_b64 exec, 0x0f0f0f0f\nv_cmp_lt_f32 s[12:13], -v4, |v5|\ns_mov_b64 exec, -1\n"
        "v_cndmask_b32 v20, 0, 1, s[12:13]"
    )
    lane = np.arange(len(a)) % 64
    active = (lane < 32) & (lane % 8 < 4)
    np.testing.assert_array_equal(run(text, [a, b])[0], (-f(a) < np.abs(f(b))) & active)


KINDS = {  # a code of each class, from signalling NaN to +infinity
    "f16": [0x7C01, 0x7E00, 0xFC00, 0xBC00, 0x8001, 0x8000, 0, 1, 0x3C00, 0x7C00],
    "f32": [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0, 1,
            0x3F800000, 0x7F800000],
    "f64": [0x7FF0000000000001, 0x7FF8000000000000, 0xFFF0000000000000, 0xBFF0000000000000,
            0x8000000000000001, 0x8000000000000000, 0, 1, 0x3FF0000000000000, 0x7FF0000000000000],
}  # fmt: skip


@pytest.mark.parametrize("opcode", [f"v_{c}_class_{t}" for c in ("cmp", "cmpx") for t in KINDS])
def test_classes(opcode):
    """The mask's bit of the class; denormals keep their class when they are flushed elsewhere."""
    kind = opcode[-3:]
    codes = np.array(KINDS[kind], np.uint64 if kind == "f64" else np.uint32)
    masks = np.array([1 << k for k in range(10)] + [0x3FF, 0x2A5, 0], np.uint32)
    x, mask = (v.ravel().copy() for v in np.meshgrid(codes, masks))
    which = np.resize(np.arange(10), len(x))
    if kind == "f64":
        text, inputs = lanes_of(opcode, "v[4:5], v6"), [*dwords(x), mask]
    else:
        text, inputs = lanes_of(opcode, "v4, v5"), [x, mask]
    for mode in (0xF0, 0x00):
        np.testing.assert_array_equal(run(text, inputs, mode=mode)[0], mask >> which & 1)
