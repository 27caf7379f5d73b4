"""LDS, flat, buffer, scratch and scalar memory: widths, bounds, transposes, atomics."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emu import Checks, launch
from tests.emulator.assembler import kernel

LANE = np.arange(64)
START = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_mov_b32 s12, s4
s_waitcnt lgkmcnt(0)
s_mov_b32 s12, s4
s_mov_b32 s13, s5
s_mov_b32 s15, 0x27000
"""


def go(body: str, a: np.ndarray, out: np.ndarray, lds: int = 0, lanes: int = 64, scratch: int = 0,
       checks: Checks = Checks.ALL):  # fmt: skip
    start = START.replace("s_mov_b32 s12, s4\ns_waitcnt", "s_waitcnt", 1)
    code = kernel(start + body, lds=lds, scratch=scratch, vgprs=64)
    report = launch(code, "k", 1, lanes, [a, out], checks=checks)
    report.raise_for_findings()
    return report


def rng(n, high=2**32):
    return np.random.default_rng(3).integers(0, high, n).astype(np.uint32)


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_widths_through_lds(dwords):
    a, out = rng(64 * dwords), np.zeros(64 * dwords, np.uint32)
    word = "" if dwords == 1 else f"x{dwords}"
    v = "v4" if dwords == 1 else f"v[4:{3 + dwords}]"
    w = "v8" if dwords == 1 else f"v[8:{7 + dwords}]"
    go(f"""
    v_mul_u32_u24 v1, {4 * dwords}, v0
    global_load_dword{word} {v}, v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_write_b{32 * dwords} v1, {v} offset:16
    ds_read_b{32 * dwords} {w}, v1 offset:16
    s_waitcnt lgkmcnt(0)
    global_store_dword{word} v1, {w}, s[6:7]
    """, a, out, 64 * 16 + 16)  # fmt: skip
    np.testing.assert_array_equal(a, out)


def test_small_loads_and_stores():
    a, out = rng(64), np.zeros((5, 64), np.uint32)
    go("""
    v_lshlrev_b32 v1, 2, v0
    global_load_sbyte v4, v1, s[4:5] offset:1
    global_load_ubyte v5, v1, s[4:5] offset:2
    global_load_sshort v6, v1, s[4:5] offset:2
    v_mov_b32 v7, 0x11112222
    global_load_short_d16_hi v7, v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    global_store_dword v1, v5, s[6:7] offset:256
    global_store_dword v1, v6, s[6:7] offset:512
    global_store_dword v1, v7, s[6:7] offset:768
    global_store_byte v1, v4, s[6:7] offset:1025
    global_store_short_d16_hi v1, v7, s[6:7] offset:1026
    """, a, out)  # fmt: skip
    bytes_ = a.view(np.uint8).reshape(64, 4)
    np.testing.assert_array_equal(out[0].view(np.int32), bytes_[:, 1].view(np.int8))
    np.testing.assert_array_equal(out[1], bytes_[:, 2])
    np.testing.assert_array_equal(out[2].view(np.int32), (a >> 16).astype(np.uint16).view(np.int16))
    np.testing.assert_array_equal(out[3], (a & 0xFFFF) << 16 | 0x2222)
    np.testing.assert_array_equal(out[4], (a & 0xFFFF) << 16 | bytes_[:, 1].astype(np.uint32) << 8)


def test_lds_pairs_and_small():
    a, out = rng(256), np.zeros(256, np.uint32)
    go("""
    v_lshlrev_b32 v1, 4, v0
    v_lshlrev_b32 v2, 2, v0
    v_lshlrev_b32 v3, 3, v0
    global_load_dwordx4 v[4:7], v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_write2st64_b32 v2, v4, v5 offset0:0 offset1:1
    ds_write2_b32 v3, v6, v7 offset0:128 offset1:129
    ds_read2st64_b32 v[8:9], v2 offset0:0 offset1:1
    ds_read_b64 v[10:11], v3 offset:512
    s_waitcnt lgkmcnt(0)
    global_store_dwordx4 v1, v[8:11], s[6:7]
    """, a, out, 2048)  # fmt: skip
    np.testing.assert_array_equal(a, out)


@pytest.mark.parametrize(
    "bits,name", [(16, "b64_tr_b16"), (8, "b64_tr_b8"), (4, "b64_tr_b4"), (6, "b96_tr_b6")]
)
def test_transposed_reads(bits, name):
    """In each 16 lanes the rows have 16 columns; lane i gets column i."""
    each = 96 if bits == 6 else 64
    per = each // bits
    gen = np.random.default_rng(bits)
    matrix = gen.integers(0, 1 << bits, (4, per, 16))  # [group, row, column]
    words = each // 32
    lanes_a_row = max(1, 16 // per)

    def pack(rows):  # [64, per] -> [64, words]
        out = np.zeros((64, words), np.uint32)
        for lane in range(64):
            value = sum(int(c) << bits * n for n, c in enumerate(rows[lane]))
            out[lane] = [value >> 32 * k & 0xFFFFFFFF for k in range(words)]
        return out

    source = np.zeros((64, per), np.int64)
    for lane in range(64):
        g, i = divmod(lane, 16)
        row, part = divmod(i, lanes_a_row)
        source[lane] = matrix[g, row, part * per : part * per + per]
    want = np.stack([matrix[lane // 16, :, lane % 16] for lane in range(64)])
    a, out = pack(source).ravel(), np.zeros(64 * words, np.uint32)
    kind = f"x{words}"
    go(f"""
    v_mul_u32_u24 v1, {4 * words}, v0
    global_load_dword{kind} v[4:{3 + words}], v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_write_b{each} v1, v[4:{3 + words}]
    ds_read_{name} v[8:{7 + words}], v1
    s_waitcnt lgkmcnt(0)
    global_store_dword{kind} v1, v[8:{7 + words}], s[6:7]
    """, a, out, 1024)  # fmt: skip
    np.testing.assert_array_equal(out.reshape(64, words), pack(want))


def test_lane_permutes():
    a, out = rng(64), np.zeros((3, 64), np.uint32)
    go("""
    v_lshlrev_b32 v1, 2, v0
    v_sub_u32 v2, 0xfc, v1
    global_load_dword v4, v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_bpermute_b32 v5, v2, v4
    ds_permute_b32 v6, v2, v4
    ds_swizzle_b32 v7, v4 offset:swizzle(SWAP,8)
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v5, s[6:7]
    global_store_dword v1, v6, s[6:7] offset:256
    global_store_dword v1, v7, s[6:7] offset:512
    """, a, out)  # fmt: skip
    np.testing.assert_array_equal(out[0], a[::-1])
    np.testing.assert_array_equal(out[1], a[::-1])
    np.testing.assert_array_equal(out[2], a[LANE ^ 8])


def test_buffer_bounds():
    """Beyond num_records loads give 0 and stores do nothing, each dword by itself."""
    a, out = rng(64), np.full(64, 7, np.uint32)
    go("""
    s_mov_b32 s14, 100
    s_mov_b32 s16, s6
    s_mov_b32 s17, s7
    s_mov_b32 s18, 88
    s_mov_b32 s19, 0x27000
    v_lshlrev_b32 v1, 3, v0
    buffer_load_dwordx2 v[4:5], v1, s[12:15], 0 offen
    s_waitcnt vmcnt(0)
    v_add_u32 v4, 1, v4
    v_add_u32 v5, 1, v5
    s_mov_b64 exec, 0xffff
    buffer_store_dwordx2 v[4:5], v1, s[16:19], 0 offen offset:4
    """, a, out)  # fmt: skip
    want = np.full(64, 7, np.uint32)
    loaded = np.where(np.arange(64) < 25, a, 0) + np.uint32(1)
    want[1:22] = loaded[:21]
    np.testing.assert_array_equal(out, want)


def test_buffer_index_and_soffset():
    a, out = rng(64), np.zeros(64, np.uint32)
    go("""
    s_and_b32 s13, s5, 0xffff
    s_or_b32 s13, s13, 0x40000
    s_mov_b32 s14, 60
    s_mov_b32 s20, 8
    v_lshlrev_b32 v1, 2, v0
    buffer_load_dword v4, v0, s[12:15], s20 idxen
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    """, a, out)  # fmt: skip
    want = np.zeros(64, np.uint32)
    want[:60] = a[2:62]
    np.testing.assert_array_equal(out, want)


def test_buffer_lds_dma():
    a, out = rng(256), np.zeros(256, np.uint32)
    go("""
    s_mov_b32 s14, 1024
    s_mov_b32 m0, 32
    v_lshlrev_b32 v1, 4, v0
    buffer_load_dwordx4 v1, s[12:15], 0 offen lds
    s_waitcnt vmcnt(0)
    ds_read_b128 v[4:7], v1 offset:32
    s_waitcnt lgkmcnt(0)
    global_store_dwordx4 v1, v[4:7], s[6:7]
    """, a, out, 2048)  # fmt: skip
    np.testing.assert_array_equal(out, a)


ATOMICS = {
    "add": lambda m, d: m + d,
    "sub": lambda m, d: m - d,
    "umin": np.minimum,
    "umax": np.maximum,
    "smax": lambda m, d: np.maximum(m.view(np.int32), d.view(np.int32)).view(np.uint32),
    "and": lambda m, d: m & d,
    "or": lambda m, d: m | d,
    "xor": lambda m, d: m ^ d,
    "swap": lambda m, d: d,
    "inc": lambda m, d: np.where(m >= d, 0, m + 1).astype(np.uint32),
    "dec": lambda m, d: np.where((m == 0) | (m > d), d, m - 1).astype(np.uint32),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name):
    a, memory = rng(64), np.zeros((2, 64), np.uint32)
    memory[0] = np.random.default_rng(9).integers(0, 2**32, 64)
    memory[0, :4] = a[:4]
    before = memory[0].copy()
    go(f"""
    v_lshlrev_b32 v1, 2, v0
    global_load_dword v4, v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_atomic_{name} v5, v1, v4, s[6:7] sc0
    s_waitcnt vmcnt(0)
    global_store_dword v1, v5, s[6:7] offset:256
    """, a, memory)  # fmt: skip
    np.testing.assert_array_equal(memory[1], before)
    np.testing.assert_array_equal(memory[0], ATOMICS[name](before, a))


def test_atomics_of_64_bits_floats_and_compare():
    a, memory = np.zeros(64, np.uint32), np.zeros(16, np.uint64)
    memory[1] = 5
    go("""
    v_mov_b32 v1, 0
    v_mov_b32 v4, 1
    v_mov_b32 v5, 1
    v_mov_b32 v6, 5
    v_mov_b32 v7, 0
    global_atomic_add_x2 v1, v[4:5], s[6:7]
    v_mov_b32 v8, 1.0
    global_atomic_add_f32 v1, v8, s[6:7] offset:16
    v_mov_b32 v10, 0
    v_mov_b32 v11, 0x3ff00000
    global_atomic_add_f64 v1, v[10:11], s[6:7] offset:24
    v_mov_b32 v12, 0x3f803f80
    global_atomic_pk_add_bf16 v1, v12, s[6:7] offset:32
    s_mov_b64 exec, 1
    global_atomic_cmpswap_x2 v1, v[4:7], s[6:7] offset:8
    """, a, memory)  # fmt: skip
    assert memory[0] == 64 * (2**32 + 1) and memory[1] == 2**32 + 1
    assert memory[2:3].view(np.float32)[0] == 64 and memory[3:4].view(np.float64)[0] == 64
    assert memory[4:5].view(np.uint32)[0] == 0x42804280


def test_lds_atomics():
    a, out = np.zeros(64, np.uint32), np.zeros((2, 64), np.uint32)
    go("""
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 0
    v_mov_b32 v3, 0
    ds_write_b32 v2, v3
    v_mov_b32 v4, 3
    ds_add_rtn_u32 v5, v2, v4
    ds_read_b32 v6, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v5, s[6:7]
    global_store_dword v1, v6, s[6:7] offset:256
    """, a, out, 64)  # fmt: skip
    np.testing.assert_array_equal(out[0], 3 * LANE)
    assert (out[1] == 192).all()


def test_scratch_and_its_undefined_bytes():
    a, out = rng(64), np.zeros(64, np.uint32)
    body = """
    v_lshlrev_b32 v1, 2, v0
    global_load_dword v4, v1, s[4:5]
    s_waitcnt vmcnt(0)
    scratch_store_dword off, v4, off offset:8
    scratch_load_dword v5, off, off offset:{at}
    s_waitcnt vmcnt(0)
    global_store_dword v1, v5, s[6:7]
    """
    go(body.format(at=8), a, out, scratch=16)
    np.testing.assert_array_equal(a, out)
    with pytest.raises(AssertionError, match="uninitialised value stored"):
        go(body.format(at=4), a, out, scratch=16)
    with pytest.raises(AssertionError, match="outside"):
        go(body.format(at=16), a, out, scratch=16)


def test_scalar_loads():
    a, out = rng(64), np.zeros(64, np.uint32)
    go("""
    s_mov_b32 s14, 20
    s_load_dwordx8 s[24:31], s[4:5], 0x20
    s_buffer_load_dwordx2 s[32:33], s[12:15], 0x10
    s_movk_i32 s40, 0x40
    s_load_dword s34, s[4:5], s40
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v1, 0
    v_mov_b32 v2, s31
    v_mov_b32 v3, s32
    v_mov_b32 v4, s33
    v_mov_b32 v5, s34
    global_store_dwordx4 v1, v[2:5], s[6:7]
    """, a, out)  # fmt: skip
    np.testing.assert_array_equal(out[:4], [a[15], a[4], 0, a[16]])


def test_bytes_are_counted():
    a, out = rng(64), np.zeros(64, np.uint32)
    report = go("""
    v_lshlrev_b32 v1, 2, v0
    global_load_dword v4, v1, s[4:5]
    v_mov_b32 v5, 0
    global_load_dword v5, v5, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    """, a, out)  # fmt: skip
    c = report.counters
    assert c["global_read_bytes"] == 512 and c["global_write_bytes"] == 256
    assert 2 <= c["write_lines"] <= 3


@pytest.mark.parametrize("stride,extra", [(4, 0), (8, 1), (256, 63)])
def test_bank_conflicts(stride, extra):
    a, out = rng(64), np.zeros(64, np.uint32)
    report = go(f"""
    v_lshlrev_b32 v1, 2, v0
    v_mul_u32_u24 v2, {stride}, v0
    ds_write_b32 v2, v0
    """, a, out, 64 * 256)  # fmt: skip
    assert report.counters["lds_conflict_cycles"] == extra
