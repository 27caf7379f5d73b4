"""Buffers: swizzled descriptors, add-tid, and loads and stores that convert."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gfx950_emu import launch
from gfx950_emu.decode import DecodeError
from tests.emulator.assembler import kernel

LANE = np.arange(64)
DATA = {1: (1, 1), 2: (1, 2), 3: (2, 1), 4: (1, 4), 5: (2, 2), 10: (4, 1), 11: (2, 4), 12: (4, 2),
        13: (3, 4), 14: (4, 4)}  # fmt: skip
NAMES = {1: "8", 2: "16", 3: "8_8", 4: "32", 5: "16_16", 10: "8_8_8_8", 11: "32_32",
         12: "16_16_16_16", 13: "32_32_32", 14: "32_32_32_32"}  # fmt: skip
UNORM, SNORM, USCALED, SSCALED, UINT, SINT, FLOAT = 0, 1, 2, 3, 4, 5, 7
NUMBERS = {UNORM: "UNORM", SNORM: "SNORM", USCALED: "USCALED", SSCALED: "SSCALED", UINT: "UINT",
           SINT: "SINT", FLOAT: "FLOAT"}  # fmt: skip
XYZW = 4 | 5 << 3 | 6 << 6 | 7 << 9


def go(body: str, a: np.ndarray, out: np.ndarray, *, stride: int = 0, swizzle: bool = False,
       records: int, word3: int = 0):  # fmt: skip
    """Descriptor of `a` in s[12:15]; v0 the lane, v1 four times it; `out` at s[6:7]."""
    start = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_lshlrev_b32 v3, 4, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s12, s4
    s_or_b32 s13, s5, {stride << 16 | swizzle << 31:#x}
    s_mov_b32 s14, {records:#x}
    s_mov_b32 s15, {word3:#x}
    """
    report = launch(kernel(start + body, vgprs=64), "k", 1, 64, [a, out])
    assert report.status == "finished"
    return report


def swizzled_dword(index, offset, stride: int, index_stride: int):
    """Dword number of a swizzled buffer, by the formula in words of records and elements."""
    block, lane = index // index_stride, index % index_stride
    return (block * (stride // 4) + offset // 4) * index_stride + lane


@pytest.mark.parametrize("code,index_stride", [(0, 8), (1, 16), (2, 32), (3, 64)])
@pytest.mark.parametrize("dwords", [1, 2, 4])
def test_swizzled(code, index_stride, dwords):
    stride = 32
    a = np.random.default_rng(code).integers(0, 2**32, 64 * stride // 4).astype(np.uint32)
    b, out = np.zeros_like(a), np.zeros((64, dwords), np.uint32)
    word = "" if dwords == 1 else f"x{dwords}"
    v = "v4" if dwords == 1 else f"v[4:{3 + dwords}]"
    go(f"""
    buffer_load_dword{word} {v}, v0, s[12:15], 0 idxen offset:8
    v_mul_u32_u24 v2, {4 * dwords}, v0
    s_waitcnt vmcnt(0)
    global_store_dword{word} v2, {v}, s[6:7]
    """, a, out, stride=stride, swizzle=True, records=64,
       word3=code << 21).raise_for_findings()  # fmt: skip
    want = swizzled_dword(LANE[:, None], 8 + 4 * np.arange(dwords), stride, index_stride)
    np.testing.assert_array_equal(out, a[want])
    go(f"""
    global_load_dword{word} {v}, v3, s[6:7]
    s_waitcnt vmcnt(0)
    buffer_store_dword{word} {v}, v0, s[12:15], 0 idxen offset:8
    """, b, np.resize(out, (64, 4)).copy(), stride=stride, swizzle=True, records=64,
       word3=code << 21).raise_for_findings()  # fmt: skip
    np.testing.assert_array_equal(b[want], np.resize(out, (64, 4))[:, :dwords])


def test_swizzled_range():
    """The record must exist and the offset lie within it."""
    a, out = np.arange(1, 513, dtype=np.uint32), np.full((64, 4), 9, np.uint32)
    go("""
    buffer_load_dwordx4 v[4:7], v0, s[12:15], 0 idxen offset:24
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v3, v[4:7], s[6:7]
    """, a, out, stride=32, swizzle=True, records=40).raise_for_findings()  # fmt: skip
    assert (out[:40, :2] > 0).all() and (out[:40, 2:] == 0).all() and (out[40:] == 0).all()


@pytest.mark.parametrize("swizzle", [False, True])
def test_add_tid(swizzle):
    """The lane is the record; with it the data format is part of the stride."""
    stride, high = 16, 0
    a, out = np.arange(64 * 4, dtype=np.uint32), np.zeros(64, np.uint32)
    body = """
    buffer_load_dword v4, off, s[12:15], 0 offset:4
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    """
    go(body, a, out, stride=stride, swizzle=swizzle, records=64,
       word3=1 << 23 | 3 << 21 | high << 15).raise_for_findings()  # fmt: skip
    want = swizzled_dword(LANE, 4, stride, 64) if swizzle else LANE * 4 + 1
    np.testing.assert_array_equal(out, a[want])
    wide = np.arange(64 << 12, dtype=np.uint32)  # stride 1 << 14: bit 0 of the data format
    go(body, wide, out, stride=0, records=64, word3=1 << 23 | 1 << 15).raise_for_findings()
    np.testing.assert_array_equal(out, LANE * (1 << 12) + 1)


def decoded(raw: np.ndarray, bits: int, number: int) -> np.ndarray:
    """Bits of the loaded dwords."""
    signed = raw.astype(np.int64) - ((raw.astype(np.int64) >> (bits - 1)) << bits)
    if number == UINT:
        return raw.astype(np.uint32)
    if number == SINT:
        return signed.astype(np.int32).view(np.uint32)
    if number == FLOAT:
        values = raw.astype(f"u{bits // 8}").view(f"f{bits // 8}")
    elif number == UNORM:
        values = raw.astype(np.float32) / np.float32(2**bits - 1)
    elif number == SNORM:
        values = np.maximum(signed.astype(np.float32) / np.float32(2 ** (bits - 1) - 1), -1)
    else:
        values = (raw if number == USCALED else signed).astype(np.float64)
    return np.asarray(values).astype(np.float32).view(np.uint32)


def legal(data: int, number: int) -> bool:
    size = DATA[data][1]
    if size == 4:
        return number in (UINT, SINT, FLOAT)
    return size == 2 or number != FLOAT


FORMATS = [(d, n) for d, n in itertools.product(DATA, NUMBERS) if legal(d, n)]


def one_of(number: int) -> int:
    return 1 if number in (UINT, SINT) else 0x3F800000


def elements(data: int, number: int, seed: int) -> np.ndarray:
    """[64, components], unsigned of the component's size; edge values first, finite floats."""
    count, size = DATA[data]
    top = 2 ** (8 * size)
    raw = np.random.default_rng(seed).integers(0, top, (64, count))
    raw[:4] = np.array([0, top // 2 - 1, top // 2, top - 1])[:, None]
    raw = raw.astype(f"u{size}")
    if number == FLOAT:
        finite = np.isfinite(raw.view(f"f{size}"))
        raw = np.where(finite, raw, 0).astype(f"u{size}")
    return raw


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("data,number", FORMATS)
def test_formats(data, number, typed):
    count, size = DATA[data]
    raw = elements(data, number, data * 8 + number)
    out = np.zeros((64, 4), np.uint32)
    name = "tbuffer" if typed else "buffer"
    tail = (
        f" format:[BUF_DATA_FORMAT_{NAMES[data]},BUF_NUM_FORMAT_{NUMBERS[number]}]" if typed else ""
    )
    word3 = XYZW | (0 if typed else number << 12 | data << 15)
    go(f"""
    {name}_load_format_xyzw v[4:7], v0, s[12:15], 0{tail} idxen
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v3, v[4:7], s[6:7]
    """, raw, out, stride=count * size, records=64, word3=word3).raise_for_findings()  # fmt: skip
    want = np.zeros((64, 4), np.uint32)
    want[:, 3] = one_of(number)
    want[:, :count] = decoded(raw, 8 * size, number)
    np.testing.assert_array_equal(out, want)
    if number in (USCALED, SSCALED):
        return
    # What was loaded is stored as it was; only snorm's two lowest codes are one value.
    back = np.zeros_like(raw)
    words = ("x", "xy", "xyz", "xyzw")[count - 1]
    v = "v4" if count == 1 else f"v[4:{3 + count}]"
    go(f"""
    global_load_dwordx4 v[4:7], v3, s[6:7]
    s_waitcnt vmcnt(0)
    {name}_store_format_{words} {v}, v0, s[12:15], 0{tail} idxen
    """, back, out, stride=count * size, records=64, word3=word3).raise_for_findings()  # fmt: skip
    if number == SNORM:
        low = 2 ** (8 * size - 1)
        raw = np.where(raw == low, low + 1, raw)
    np.testing.assert_array_equal(back, raw)


def test_stores_clamp_and_round():
    values = np.zeros((64, 4), np.float32)
    values[:8, 0] = [-1.0, 2.0, 0.5, 0.25, np.nan, 1.4 / 255, 1.6 / 255, 0.7]
    back = np.zeros((64, 1), np.uint8)
    go("""
    global_load_dwordx4 v[4:7], v3, s[6:7]
    s_waitcnt vmcnt(0)
    buffer_store_format_x v4, v0, s[12:15], 0 idxen
    """, back, values, stride=1, records=64, word3=XYZW | 1 << 15)  # fmt: skip
    assert list(back[:8, 0]) == [0, 255, 128, 64, 0, 1, 2, 178]
    integers = np.zeros((64, 4), np.int32)
    integers[:4, 0] = [-200, 300, -5, 100]
    for number, want in ((SINT, [-128, 127, -5, 100]), (UINT, [255, 255, 255, 100])):
        go("""
        global_load_dwordx4 v[4:7], v3, s[6:7]
        s_waitcnt vmcnt(0)
        buffer_store_format_x v4, v0, s[12:15], 0 idxen
        """, back, integers, stride=1, records=64,
           word3=XYZW | number << 12 | 1 << 15)  # fmt: skip
        got = back[:4, 0].view(np.int8) if number == SINT else back[:4, 0]
        assert list(got) == want


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_d16(count):
    """Halves, packed; the unused half of an odd count stays."""
    raw = elements(10, UNORM, 1)
    out = np.zeros((64, 4), np.uint32)
    words = ("x", "xy", "xyz", "xyzw")[count - 1]
    v = "v4" if count < 3 else "v[4:5]"
    go(f"""
    v_mov_b32 v4, 0x11112222
    v_mov_b32 v5, 0x33334444
    v_mov_b32 v6, 0
    v_mov_b32 v7, 0
    buffer_load_format_d16_{words} {v}, v0, s[12:15], 0 idxen
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v3, v[4:7], s[6:7]
    """, raw, out, stride=4, records=64, word3=XYZW | 10 << 15).raise_for_findings()  # fmt: skip
    halves = np.ascontiguousarray(out).view(np.uint16)[:, :4]
    want = np.broadcast_to(np.array([0x2222, 0x1111, 0x4444, 0x3333], np.uint16), (64, 4)).copy()
    floats = raw.astype(np.float32) / np.float32(255)
    want[:, :count] = floats[:, :count].astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(halves, want)
    back = np.zeros_like(raw)
    go(f"""
    global_load_dwordx4 v[4:7], v3, s[6:7]
    s_waitcnt vmcnt(0)
    buffer_store_format_d16_{words} {v}, v0, s[12:15], 0 idxen
    """, back, out, stride=4, records=64, word3=XYZW | 10 << 15).raise_for_findings()  # fmt: skip
    np.testing.assert_array_equal(back[:, :count], raw[:, :count])
    assert not back[:, count:].any()


def test_d16_high_half():
    raw, out = elements(2, FLOAT, 4), np.zeros((64, 4), np.uint32)
    descriptor = {"stride": 2, "records": 64, "word3": XYZW | FLOAT << 12 | 2 << 15}
    go("""
    v_mov_b32 v4, 0x2222
    v_mov_b32 v5, 0
    v_mov_b32 v6, 0
    v_mov_b32 v7, 0
    buffer_load_format_d16_hi_x v4, v0, s[12:15], 0 idxen
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v3, v[4:7], s[6:7]
    """, raw, out, **descriptor).raise_for_findings()  # fmt: skip
    np.testing.assert_array_equal(out[:, 0], raw[:, 0].astype(np.uint32) << 16 | 0x2222)
    back = np.zeros_like(raw)
    go("""
    global_load_dword v4, v3, s[6:7]
    s_waitcnt vmcnt(0)
    buffer_store_format_d16_hi_x v4, v0, s[12:15], 0 idxen
    """, back, out, **descriptor).raise_for_findings()  # fmt: skip
    np.testing.assert_array_equal(back, raw)


def test_selection_range_and_what_is_not_modelled():
    raw, out = elements(10, UINT, 2), np.zeros((64, 4), np.uint32)
    load = """
    buffer_load_format_xyzw v[4:7], v0, s[12:15], 0 idxen
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v3, v[4:7], s[6:7]
    """
    select = 7 | 4 << 3 | 0 << 6 | 1 << 9  # W, X, zero, one
    go(load, raw, out, stride=4, records=50, word3=select | UINT << 12 | 10 << 15)
    np.testing.assert_array_equal(out[:50, :2], raw[:50, [3, 0]])
    assert (out[:50, 2] == 0).all() and (out[:, 3] == 1).all() and not out[50:, :3].any()
    packed = go(load, raw, out, stride=4, records=64, word3=XYZW | 8 << 15)
    assert {f.kind for f in packed.findings} == {"not modelled"}
    code = kernel("tbuffer_load_format_x v4, v0, s[12:15], 0 format:22 idxen")  # 10_11_11
    with pytest.raises(DecodeError, match="BUF_DATA_FORMAT_10_11_11"):
        launch(code, "k", 1, 64, [])
