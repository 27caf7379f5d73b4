"""Vector instructions on 32-bit and 64-bit integers against NumPy and Python integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.alu import (
    U32,
    U64,
    dwords,
    each,
    grid,
    low,
    opcode_is_launched,  # noqa: F401
    quads,
    run,
    signed,
    sources,
)


def i32(x):
    return x.astype(np.int32)


def i24(x):
    return (x.astype(np.int64) << 40 >> 40).astype(np.int64)


def u64(x):
    return x.astype(np.uint64)


def i64(x):
    return x.astype(np.uint32).view(np.int32).astype(np.int64)


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


@pytest.mark.parametrize("opcode", INTEGER)
def test_integer(opcode):
    count, oracle = INTEGER[opcode]
    inputs = grid(U32, count)
    with np.errstate(over="ignore"):
        want = oracle(*inputs).astype(np.uint32)
    got = run(f"{opcode} v20, {sources(count)}", inputs)[0]
    np.testing.assert_array_equal(got, want)


def saturated(x: int, bits: int, is_signed: bool) -> int:
    least = -(1 << bits - 1) if is_signed else 0
    return min(max(x, least), least + (1 << bits) - 1)


CLAMPED = {  # what is computed before clamp saturates it
    "v_add_u32": (2, False, lambda a, b: a + b),
    "v_sub_u32": (2, False, lambda a, b: a - b),
    "v_subrev_u32": (2, False, lambda a, b: b - a),
    "v_add_i32": (2, True, lambda a, b: signed(a) + signed(b)),
    "v_sub_i32": (2, True, lambda a, b: signed(a) - signed(b)),
    "v_mad_i32_i24": (3, True, lambda a, b, c: signed(a, 24) * signed(b, 24) + signed(c)),
    "v_mad_u32_u24": (3, False, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
}


@pytest.mark.parametrize("opcode", CLAMPED)
def test_integer_clamp(opcode):
    count, is_signed, value = CLAMPED[opcode]
    inputs = grid(U32, count)
    want = each(lambda *v: saturated(value(*v), 32, is_signed))(*inputs)
    got = run(f"{opcode} v20, {sources(count)} clamp", inputs)[0]
    np.testing.assert_array_equal(got, want)


def spread(*values: np.ndarray) -> list[np.ndarray]:
    """All combinations of the values of several arrays."""
    return [v.ravel().copy() for v in np.meshgrid(*values)]


SHIFTS = np.array([0, 1, 7, 31, 32, 33, 63, 64], np.uint32)
LONG_SHIFT = {
    "v_lshlrev_b64": lambda s, x: x << (s & 63),
    "v_lshrrev_b64": lambda s, x: x >> (s & 63),
    "v_ashrrev_i64": lambda s, x: signed(x, 64) >> (s & 63),
}


@pytest.mark.parametrize("opcode", LONG_SHIFT)
def test_64_bit_shifts(opcode):
    s, x = spread(SHIFTS, U64)
    out = run(f"{opcode} v[20:21], v4, v[6:7]", [s, s, *dwords(x)], 2)
    np.testing.assert_array_equal(quads(out), each(LONG_SHIFT[opcode], 64)(s, x))


@pytest.mark.parametrize("opcode", ["v_lshl_add_u64"])
def test_64_bit_shift_and_add(opcode):
    a, s, c = spread(U64, np.array([0, 1, 3, 4], np.uint32), U64)
    out = run(f"{opcode} v[20:21], v[4:5], v6, v[8:9]", [*dwords(a), s, s, *dwords(c)], 2)
    np.testing.assert_array_equal(quads(out), each(lambda x, n, y: (x << n) + y, 64)(a, s, c))


@pytest.mark.parametrize("opcode", ["v_mov_b64"])
def test_64_bit_moves(opcode):
    out = run(f"{opcode} v[20:21], v[4:5]", [*dwords(U64)], 2)
    np.testing.assert_array_equal(quads(out), U64)


CARRY = {  # value before it wraps; `k` is the carry that comes in
    "v_add_co_u32": lambda a, b, k: a + b,
    "v_sub_co_u32": lambda a, b, k: a - b,
    "v_subrev_co_u32": lambda a, b, k: b - a,
    "v_addc_co_u32": lambda a, b, k: a + b + k,
    "v_subb_co_u32": lambda a, b, k: a - b - k,
    "v_subbrev_co_u32": lambda a, b, k: b - a - k,
}


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("opcode", CARRY)
def test_carries(opcode, saturate):
    a, b = grid(U32, 2)
    k = (np.arange(len(a)) % 3 == 0).astype(np.uint32)
    carry_in = ", s[12:13]" if "c_co" in opcode or "bb" in opcode else ""
    text = (
        f"v_cmp_ne_u32 s[12:13], 0, v6\n{opcode} v20, s[14:15], v4, v5{carry_in}"
        f"{' clamp' if saturate else ''}\nv_cndmask_b32 v21, 0, 1, s[14:15]"
    )
    # The e64 form: an SGPR pair, not VCC, takes the carry.
    text = text.replace("_u32 v20", "_u32_e64 v20")
    exact = [CARRY[opcode](*v) for v in zip(a.tolist(), b.tolist(), k.tolist(), strict=True)]
    out = run(text, [a, b, k], 2)
    want = [saturated(x, 32, False) if saturate else x & 0xFFFFFFFF for x in exact]
    np.testing.assert_array_equal(out[0], np.array(want, np.uint32))
    np.testing.assert_array_equal(out[1], [not 0 <= x < 2**32 for x in exact])


def test_carries_chain():
    a, b = grid(U32, 2)
    text = "v_add_co_u32 v20, vcc, v4, v5\nv_addc_co_u32 v21, vcc, v5, v4, vcc"
    want = each(lambda x, y: (y << 32 | x) + (x << 32 | y), 64)(a, b)
    np.testing.assert_array_equal(quads(run(text, [a, b], 2)), want)


@pytest.mark.parametrize("opcode", ["v_mad_u64_u32", "v_mad_i64_i32"])
def test_64_bit_multiply_add(opcode):
    a, b, c = spread(U32[:12], U32[:12], U64)
    text = f"{opcode} v[20:21], s[14:15], v4, v5, v[6:7]\nv_cndmask_b32 v22, 0, 1, s[14:15]"
    is_signed = "i64" in opcode

    def exact(x, y, z):
        return signed(x) * signed(y) + signed(z, 64) if is_signed else x * y + z

    out = run(text, [a, b, *dwords(c)], 3)
    np.testing.assert_array_equal(quads(out), each(exact, 64)(a, b, c))
    bit64 = each(lambda *v: exact(*v) >> 64 & 1)(a, b, c)
    np.testing.assert_array_equal(out[2], bit64)


BITOP_TABLES = [0x00, 0x6C, 0x96, 0xCA, 0xFE, 0x36, 0xDE, 0xFF, 0x01, 0x10]


@pytest.mark.parametrize("opcode", ["v_bitop3_b32", "v_bitop3_b16"])
def test_bitop3(opcode):
    a, b, c = grid(U32, 3)
    for table in BITOP_TABLES:
        want = np.zeros_like(a)
        for n in range(8):
            if table >> n & 1:
                want |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        text = f"{opcode} v20, v4, v5, v6 bitop3:{table:#x}"
        got = run(text, [a, b, c], before="v_mov_b32 v20, 0xabcd8765")[0]
        if "b16" in opcode:  # the other half of the destination stays
            want = want & np.uint32(0xFFFF) | np.uint32(0xABCD0000)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("opcode", ["v_cndmask_b32"])
def test_cndmask(opcode):
    """A mask picks; neg and abs hold for the 32 bits as a float."""
    a, b = grid(U32, 2)
    mask = np.resize(np.array([1, 0, 0, 1, 1], np.uint32), len(a))
    text = f"v_cmp_ne_u32 s[12:13], 0, v6\n{opcode} v20, v4, v5, s[12:13]"
    np.testing.assert_array_equal(run(text, [a, b, mask])[0], np.where(mask, b, a))
    text = f"v_cmp_ne_u32 s[12:13], 0, v6\n{opcode}_e64 v20, -v4, |v5|, s[12:13]"
    want = np.where(mask, b & 0x7FFFFFFF, a ^ np.uint32(0x80000000))
    np.testing.assert_array_equal(run(text, [a, b, mask])[0], want)


@pytest.mark.parametrize("opcode,low_end", [("v_ashr_pk_i8_i32", -128), ("v_ashr_pk_u8_i32", 0)])
def test_shift_and_pack_bytes(opcode, low_end):
    a, b, c = grid(U32, 3)

    def pack(x, y, n):
        parts = [min(max(signed(v) >> (n & 31), low_end), low_end + 255) & 0xFF for v in (x, y)]
        return parts[0] | parts[1] << 8

    for select, shift in (("", 0), (" op_sel:[0,0,0,1]", 16)):
        got = run(f"{opcode} v20, v4, v5, v6{select}", [a, b, c],
                  before="v_mov_b32 v20, 0x9abc8def")[0]  # fmt: skip
        kept = np.uint32(0x9ABC8DEF & ~(0xFFFF << shift))
        np.testing.assert_array_equal(got, each(pack)(a, b, c) << np.uint32(shift) | kept)
