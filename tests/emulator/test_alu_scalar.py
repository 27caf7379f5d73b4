"""Scalar instructions (SOP1, SOP2, SOPC, SOPK) against Python integers, SCC and EXEC included."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emu import launch
from tests.emulator.alu import opcode_is_launched, run, signed, start  # noqa: F401

M32, M64 = 2**32 - 1, 2**64 - 1
EDGES = [0, 1, 2, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x0000FF80, 0xFFFF8000,
         0x00050003, 0x001F0004, 0x00200000, 0x12345678, 0xA5A5A5A5]  # fmt: skip
HIGH = [0, 0xFFFFFFFF, 0x80000001, 7]


def run_scalar(text: str, rows: np.ndarray, exec_mask: str = "-1") -> np.ndarray:
    """[n, 6]: s60, s61, SCC, EXEC (two dwords), s63 after `text`, one case a workgroup.

    A case has 8 dwords: s[40:41] and s[44:45] are the sources, s[42:43] goes to s[60:61] before,
    s46 is SCC before.
    """
    out = np.zeros((len(rows), 6), np.uint32)
    body = f"""
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_lshl_b32 s8, s2, 5
    s_waitcnt lgkmcnt(0)
    s_load_dwordx8 s[40:47], s[4:5], s8
    s_waitcnt lgkmcnt(0)
    s_mov_b64 s[60:61], s[42:43]
    s_mov_b32 s63, 0
    s_mov_b64 exec, {exec_mask}
    s_cmp_eq_u32 s46, 1
    {text}
    s_cselect_b32 s62, 1, 0
    s_mov_b64 s[64:65], exec
    s_mov_b64 exec, 1
    s_mul_i32 s8, s2, 24
    v_mov_b32 v1, s8
    """
    for k, register in enumerate(("s60", "s61", "s62", "s64", "s65", "s63")):
        body += f"v_mov_b32 v2, {register}\nglobal_store_dword v1, v2, s[6:7] offset:{4 * k}\n"
    code = start(body)
    launch(code, "k", len(rows), 64, [np.ascontiguousarray(rows), out]).raise_for_findings()
    return out


def cases() -> np.ndarray:
    """All pairs of edges, with different high dwords, old destinations and SCC both ways."""
    rows = []
    for n, (a, b) in enumerate((a, b) for a in EDGES for b in EDGES):
        old = EDGES[(n * 7 + 3) % len(EDGES)]
        rows.append([a, HIGH[n % 4], old, HIGH[n // 3 % 4], b, HIGH[n // 5 % 4], n % 2, 0])
    return np.array(rows, np.uint32)


CASES = cases()


def add_overflows(a, b, sign=1):
    return not -(2**31) <= signed(a) + sign * signed(b) < 2**31


def absdiff(a, b):
    return abs(signed(a - b))  # the difference wraps first


def field(x: int, spec: int, bits: int, is_signed: bool) -> int:
    offset, width = spec & (bits - 1), min(spec >> 16 & 0x7F, bits)
    value = (signed(x, bits) if is_signed else x) >> offset
    return (signed(value, width) if is_signed else value & ((1 << width) - 1)) if width else 0


def first_bit(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else M32


def leading(x: int, bits: int, is_signed: bool = False) -> int:
    if is_signed and x >> (bits - 1):
        x ^= (1 << bits) - 1
    return bits - x.bit_length() if x else M32


def whole_quads(x: int, bits: int) -> int:
    return sum(0xF << k for k in range(0, bits, 4) if x >> k & 0xF)


def quad_bits(x: int, bits: int) -> int:
    return sum(1 << k // 4 for k in range(0, bits, 4) if x >> k & 0xF)


def reverse(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


def not_zero(bits: int):
    return lambda value: value & ((1 << bits) - 1) != 0


N32, N64 = not_zero(32), not_zero(64)
# name: (dwords of result and sources, value(a, b, old, scc), SCC(a, b, value, scc) or None)
ARITHMETIC = {
    "s_add_u32": ("111", lambda a, b, o, c: a + b, lambda a, b, v, c: v > M32),
    "s_sub_u32": ("111", lambda a, b, o, c: a - b, lambda a, b, v, c: b > a),
    "s_addc_u32": ("111", lambda a, b, o, c: a + b + c, lambda a, b, v, c: v > M32),
    "s_subb_u32": ("111", lambda a, b, o, c: a - b - c, lambda a, b, v, c: v < 0),
    "s_add_i32": ("111", lambda a, b, o, c: a + b, lambda a, b, v, c: add_overflows(a, b)),
    "s_sub_i32": ("111", lambda a, b, o, c: a - b, lambda a, b, v, c: add_overflows(a, b, -1)),
    "s_min_i32": ("111", lambda a, b, o, c: min(signed(a), signed(b)),
                  lambda a, b, v, c: signed(a) < signed(b)),
    "s_max_i32": ("111", lambda a, b, o, c: max(signed(a), signed(b)),
                  lambda a, b, v, c: signed(a) >= signed(b)),
    "s_min_u32": ("111", lambda a, b, o, c: min(a, b), lambda a, b, v, c: a < b),
    "s_max_u32": ("111", lambda a, b, o, c: max(a, b), lambda a, b, v, c: a >= b),
    "s_mul_i32": ("111", lambda a, b, o, c: a * b, None),
    "s_mul_hi_u32": ("111", lambda a, b, o, c: a * b >> 32, None),
    "s_mul_hi_i32": ("111", lambda a, b, o, c: signed(a) * signed(b) >> 32, None),
    "s_absdiff_i32": ("111", lambda a, b, o, c: absdiff(a, b), lambda a, b, v, c: a != b),
    "s_lshl_b32": ("111", lambda a, b, o, c: a << (b & 31), lambda a, b, v, c: N32(v)),
    "s_lshr_b32": ("111", lambda a, b, o, c: a >> (b & 31), lambda a, b, v, c: N32(v)),
    "s_ashr_i32": ("111", lambda a, b, o, c: signed(a) >> (b & 31), lambda a, b, v, c: N32(v)),
    "s_lshl_b64": ("221", lambda a, b, o, c: a << (b & 63), lambda a, b, v, c: N64(v)),
    "s_lshr_b64": ("221", lambda a, b, o, c: a >> (b & 63), lambda a, b, v, c: N64(v)),
    "s_ashr_i64": ("221", lambda a, b, o, c: signed(a, 64) >> (b & 63),
                   lambda a, b, v, c: N64(v)),
    "s_bfm_b32": ("111", lambda a, b, o, c: ((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bfm_b64": ("211", lambda a, b, o, c: ((1 << (a & 63)) - 1) << (b & 63), None),
    "s_bfe_u32": ("111", lambda a, b, o, c: field(a, b, 32, False), lambda a, b, v, c: N32(v)),
    "s_bfe_i32": ("111", lambda a, b, o, c: field(a, b, 32, True), lambda a, b, v, c: N32(v)),
    "s_bfe_u64": ("221", lambda a, b, o, c: field(a, b, 64, False), lambda a, b, v, c: N64(v)),
    "s_bfe_i64": ("221", lambda a, b, o, c: field(a, b, 64, True), lambda a, b, v, c: N64(v)),
    "s_pack_ll_b32_b16": ("111", lambda a, b, o, c: (a & 0xFFFF) | b << 16, None),
    "s_pack_lh_b32_b16": ("111", lambda a, b, o, c: (a & 0xFFFF) | (b & 0xFFFF0000), None),
    "s_pack_hh_b32_b16": ("111", lambda a, b, o, c: a >> 16 | (b & 0xFFFF0000), None),
    "s_cselect_b32": ("111", lambda a, b, o, c: a if c else b, lambda a, b, v, c: c),
    "s_cselect_b64": ("222", lambda a, b, o, c: a if c else b, lambda a, b, v, c: c),
    "s_cmov_b32": ("11", lambda a, b, o, c: a if c else o, lambda a, b, v, c: c),
    "s_cmov_b64": ("22", lambda a, b, o, c: a if c else o, lambda a, b, v, c: c),
    "s_mov_b32": ("11", lambda a, b, o, c: a, lambda a, b, v, c: c),
    "s_mov_b64": ("22", lambda a, b, o, c: a, lambda a, b, v, c: c),
    "s_not_b32": ("11", lambda a, b, o, c: ~a, lambda a, b, v, c: N32(v)),
    "s_not_b64": ("22", lambda a, b, o, c: ~a, lambda a, b, v, c: N64(v)),
    "s_brev_b32": ("11", lambda a, b, o, c: reverse(a, 32), None),
    "s_brev_b64": ("22", lambda a, b, o, c: reverse(a, 64), None),
    "s_bcnt0_i32_b32": ("11", lambda a, b, o, c: 32 - a.bit_count(), lambda a, b, v, c: v != 0),
    "s_bcnt0_i32_b64": ("12", lambda a, b, o, c: 64 - a.bit_count(), lambda a, b, v, c: v != 0),
    "s_bcnt1_i32_b32": ("11", lambda a, b, o, c: a.bit_count(), lambda a, b, v, c: v != 0),
    "s_bcnt1_i32_b64": ("12", lambda a, b, o, c: a.bit_count(), lambda a, b, v, c: v != 0),
    "s_ff0_i32_b32": ("11", lambda a, b, o, c: first_bit(a ^ M32), None),
    "s_ff0_i32_b64": ("12", lambda a, b, o, c: first_bit(a ^ M64), None),
    "s_ff1_i32_b32": ("11", lambda a, b, o, c: first_bit(a), None),
    "s_ff1_i32_b64": ("12", lambda a, b, o, c: first_bit(a), None),
    "s_flbit_i32_b32": ("11", lambda a, b, o, c: leading(a, 32), None),
    "s_flbit_i32_b64": ("12", lambda a, b, o, c: leading(a, 64), None),
    "s_flbit_i32": ("11", lambda a, b, o, c: leading(a, 32, True), None),
    "s_flbit_i32_i64": ("12", lambda a, b, o, c: leading(a, 64, True), None),
    "s_sext_i32_i8": ("11", lambda a, b, o, c: signed(a, 8), None),
    "s_sext_i32_i16": ("11", lambda a, b, o, c: signed(a, 16), None),
    "s_abs_i32": ("11", lambda a, b, o, c: abs(signed(a)), lambda a, b, v, c: a != 0),
    "s_wqm_b32": ("11", lambda a, b, o, c: whole_quads(a, 32), lambda a, b, v, c: N32(v)),
    "s_wqm_b64": ("22", lambda a, b, o, c: whole_quads(a, 64), lambda a, b, v, c: N64(v)),
    "s_quadmask_b32": ("11", lambda a, b, o, c: quad_bits(a, 32), lambda a, b, v, c: N32(v)),
    "s_quadmask_b64": ("22", lambda a, b, o, c: quad_bits(a, 64), lambda a, b, v, c: N64(v)),
    "s_bitreplicate_b64_b32": ("21", lambda a, b, o, c: sum(
        3 << 2 * k for k in range(32) if a >> k & 1), None),
    "s_bitset0_b32": ("11", lambda a, b, o, c: o & ~(1 << (a & 31)), None),
    "s_bitset1_b32": ("11", lambda a, b, o, c: o | 1 << (a & 31), None),
    "s_bitset0_b64": ("21", lambda a, b, o, c: o & ~(1 << (a & 63)), None),
    "s_bitset1_b64": ("21", lambda a, b, o, c: o | 1 << (a & 63), None),
}  # fmt: skip
ARITHMETIC |= {
    f"s_lshl{k}_add_u32": (
        "111",
        lambda a, b, o, c, k=k: (a << k) + b,
        lambda a, b, v, c: v > M32,
    )
    for k in (1, 2, 3, 4)
}
BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
ARITHMETIC |= {
    f"s_{name}_b{bits}": (
        widths,
        lambda a, b, o, c, function=function: function(a, b),
        lambda a, b, v, c, check=check: check(v),
    )
    for name, function in BITWISE.items()
    for bits, widths, check in ((32, "111", N32), (64, "222", N64))
}


def wide(row, at: int, dwords: str) -> int:
    return int(row[at]) | (int(row[at + 1]) << 32 if dwords == "2" else 0)


def register(at: int, dwords: str) -> str:
    return f"s[{at}:{at + 1}]" if dwords == "2" else f"s{at}"


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_scalar(opcode):
    widths, value, scc = ARITHMETIC[opcode]
    operands = [register(at, w) for at, w in zip((40, 44), widths[1:], strict=False)]
    out = run_scalar(f"{opcode} {register(60, widths[0])}, {', '.join(operands)}", CASES)
    for row, got in zip(CASES, out, strict=True):
        a, b = wide(row, 0, widths[1]), wide(row, 4, widths[2:] or "1")
        old, before = wide(row, 2, widths[0]), int(row[6])
        v = value(a, b, old, before)
        mask = M64 if widths[0] == "2" else M32
        assert wide(got, 0, widths[0]) == v & mask, (opcode, hex(a), hex(b))
        if widths[0] == "1":
            assert got[1] == row[3]
        want = scc(a, b, v, before) if scc else before
        assert got[2] == want, (opcode, hex(a), hex(b), "SCC")


EXEC = 0x00FF123480000001
SAVE = {f"s_{name}_saveexec_b64": function for name, function in BITWISE.items()}
SAVE |= {"s_andn1_saveexec_b64": lambda s, e: ~s & e, "s_orn1_saveexec_b64": lambda s, e: ~s | e}
WRITE = {"s_andn1_wrexec_b64": lambda s, e: ~s & e, "s_andn2_wrexec_b64": lambda s, e: s & ~e}


@pytest.mark.parametrize("opcode", [*SAVE, *WRITE])
def test_exec_masks(opcode):
    """saveexec gives the old mask, wrexec the new one; SCC says that lanes are left."""
    masks = np.zeros((3, 8), np.uint32)
    masks[:, :2] = [[0, 0], [1, 0x00FF1234], [0xFFFFFFFF, 0xFFFFFFFF]]
    rows = np.concatenate([CASES[::5], masks])
    text = f"s_mov_b32 s70, {EXEC & M32:#x}\ns_mov_b32 s71, {EXEC >> 32:#x}"
    text += f"\ns_mov_b64 exec, s[70:71]\n{opcode} s[60:61], s[40:41]"
    out = run_scalar(text, rows)
    for row, got in zip(rows, out, strict=True):
        new = {**SAVE, **WRITE}[opcode](wide(row, 0, "2"), EXEC) & M64
        assert wide(got, 3, "2") == new
        assert wide(got, 0, "2") == (EXEC if opcode in SAVE else new)
        assert got[2] == (new != 0)


RELATIONS = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
COMPARE = {f"s_cmp_{r}_{t}": "11" for r in RELATIONS for t in ("i32", "u32")}
COMPARE |= {"s_cmp_eq_u64": "22", "s_cmp_lg_u64": "22"}
COMPARE |= {f"s_bitcmp{k}_b{w}": "11" if w == 32 else "21" for k in (0, 1) for w in (32, 64)}


@pytest.mark.parametrize("opcode", COMPARE)
def test_scalar_compare(opcode):
    widths = COMPARE[opcode]
    text = f"{opcode} {register(40, widths[0])}, {register(44, widths[1])}"
    for row, got in zip(CASES, run_scalar(text, CASES), strict=True):
        a, b = wide(row, 0, widths[0]), wide(row, 4, widths[1])
        if "bitcmp" in opcode:
            want = (a >> (b & (63 if widths[0] == "2" else 31)) & 1) == int(opcode[8])
        else:
            if opcode.endswith("i32"):
                a, b = signed(a), signed(b)
            want = RELATIONS[opcode.split("_")[2]](a, b)
        assert got[2] == want, (opcode, a, b)


CONSTANTS = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0xFF80, 0x1234)
WITH_CONSTANT = {
    "s_movk_i32": (lambda k, o, c: k, None),
    "s_cmovk_i32": (lambda k, o, c: k if c else o, None),
    "s_addk_i32": (lambda k, o, c: o + k,
                   lambda k, o: not -(2**31) <= signed(o) + k < 2**31),
    "s_mulk_i32": (lambda k, o, c: o * k, None),
    **{f"s_cmpk_{r}_{t}": None for r in RELATIONS for t in ("i32", "u32")},
}  # fmt: skip


@pytest.mark.parametrize("opcode", WITH_CONSTANT)
def test_scalar_constants(opcode):
    """The 16-bit constant is signed, except in unsigned comparisons."""
    rows = CASES[::9]
    for constant in CONSTANTS:
        out = run_scalar(f"{opcode} s60, {constant:#x}", rows)
        for row, got in zip(rows, out, strict=True):
            old, before = int(row[2]), int(row[6])
            if "cmpk" in opcode:
                pair = (old, constant) if "u32" in opcode else (signed(old), signed(constant, 16))
                assert got[0] == old and got[2] == RELATIONS[opcode.split("_")[2]](*pair)
                continue
            value, scc = WITH_CONSTANT[opcode]
            k = signed(constant, 16)
            assert got[0] == value(k, old, before) & M32
            assert got[2] == (scc(k, old) if scc else before)


@pytest.mark.parametrize("opcode", ["s_getreg_b32"])
def test_getreg(opcode):
    """A field of MODE: rounding, denormals, DX10_CLAMP and IEEE as the descriptor sets them."""
    for offset, size, want in ((0, 32, 0x3F0), (4, 4, 0xF), (8, 2, 3), (9, 1, 1), (10, 5, 0)):
        out = run(f"{opcode} s10, hwreg(HW_REG_MODE, {offset}, {size})\nv_mov_b32 v20, s10",
                  [np.zeros(1, np.uint32)])  # fmt: skip
        assert out[0, 0] == want


@pytest.mark.parametrize("opcode", ["s_setreg_b32", "s_setreg_imm32_b32"])
def test_setreg(opcode):
    """Only the field changes, and it takes the source's low bits."""
    source = "0xfffffff5" if "imm" in opcode else "s9"
    text = (f"s_mov_b32 s9, 0xfffffff5\n{opcode} hwreg(HW_REG_MODE, 2, 4), {source}\n"
            "s_getreg_b32 s10, hwreg(HW_REG_MODE)\nv_mov_b32 v20, s10")  # fmt: skip
    out = run(text, [np.zeros(1, np.uint32)])
    assert out[0, 0] == 0x3F0 & ~(0xF << 2) | 5 << 2


def test_absdiff_of_the_manual():
    """The examples of AMD's document: the difference wraps, and its largest one is negative."""
    examples = {(2, 5): 3, (M32, 0): 1, (0x80000000, 0): 0x80000000, (0x80000000, 1): 0x7FFFFFFF,
                (0x80000000, M32): 0x7FFFFFFF, (0x80000000, 0xFFFFFFFE): 0x7FFFFFFE}  # fmt: skip
    rows = np.array([[a, 0, 0, 0, b, 0, 0, 0] for a, b in examples], np.uint32)
    got = run_scalar("s_absdiff_i32 s60, s40, s44", rows)[:, 0]
    np.testing.assert_array_equal(got, list(examples.values()))
