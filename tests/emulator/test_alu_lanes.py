"""Lanes that exchange data: DPP, SDWA, readlane and writelane, swaps, mbcnt, AGPR moves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.alu import (
    F16,
    F32,
    LANE,
    U32,
    f,
    grid,
    h,
    opcode_is_launched,  # noqa: F401
    run,
    same_floats,
)

X = (LANE * 7 + 1).astype(np.uint32)
Y = (LANE * 11 + 500).astype(np.uint32)
DPP = {  # lane -> the lane that it reads, negative when there is none
    "quad_perm:[3,2,1,0]": LANE ^ 3,
    "quad_perm:[1,1,3,0]": (LANE & ~3) + np.array([1, 1, 3, 0])[LANE & 3],
    "row_shl:1": np.where(LANE % 16 < 15, LANE + 1, -1),
    "row_shl:15": np.where(LANE % 16 < 1, LANE + 15, -1),
    "row_shr:2": np.where(LANE % 16 >= 2, LANE - 2, -1),
    "row_ror:3": LANE // 16 * 16 + (LANE - 3) % 16,
    "row_mirror": LANE // 16 * 16 + 15 - LANE % 16,
    "row_half_mirror": LANE // 8 * 8 + 7 - LANE % 8,
    "row_newbcast:5": LANE // 16 * 16 + 5,
    "row_bcast:15": np.where(LANE >= 16, LANE // 16 * 16 - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "wave_shl:1": np.where(LANE < 63, LANE + 1, -1),
    "wave_rol:1": (LANE + 1) % 64,
    "wave_shr:1": LANE - 1,
    "wave_ror:1": (LANE - 1) % 64,
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("control", DPP)
def test_dpp_controls(control, bound):
    """Without a source lane: 0 with bound_ctrl, otherwise the destination stays."""
    end = " bound_ctrl:0" if bound else ""
    text = f"v_mov_b32_dpp v20, v4 {control} row_mask:0xf bank_mask:0xf{end}"
    got = run(text, [X], before="v_mov_b32 v20, 7")[0]
    want = np.where(DPP[control] >= 0, X[DPP[control]], 0 if bound else 7)
    np.testing.assert_array_equal(got, want)


def test_dpp_masks():
    """A lane is written when its row and its bank of four lanes are both enabled."""
    text = "v_mov_b32_dpp v20, v4 row_mirror row_mask:0xa bank_mask:0x6"
    got = run(text, [X], before="v_mov_b32 v20, 7")[0]
    on = (0xA >> LANE // 16 & 1) & (0x6 >> LANE // 4 % 4 & 1)
    np.testing.assert_array_equal(got, np.where(on, X[DPP["row_mirror"]], 7))


def test_dpp_of_float_instructions():
    """neg and abs hold for the moved lanes; v_cndmask and carries take them, too."""
    a = np.resize(F32, 64).astype(np.uint32)
    b = np.resize(F32[::-1], 64).astype(np.uint32)
    moved = f(a)[DPP["row_ror:3"]]
    tail = "row_ror:3 row_mask:0xf bank_mask:0xf"
    with np.errstate(all="ignore"):
        got = run(f"v_add_f32_dpp v20, -v4, |v5| {tail}", [a, b])[0]
        same_floats(got.view(np.float32), -moved + np.abs(f(b)))
    text = "s_mov_b32 vcc_lo, 0x0f0f1234\ns_mov_b32 vcc_hi, 0x0f\n"
    got = run(f"{text}v_cndmask_b32_dpp v20, v4, v5, vcc {tail}", [X, Y])[0]
    mask = (0x0F << 32 | 0x0F0F1234) >> LANE.astype(object) & 1
    np.testing.assert_array_equal(got, np.where(mask.astype(bool), Y, X[DPP["row_ror:3"]]))
    got = run(f"v_add_co_u32_dpp v20, vcc, v4, v5 {tail}\nv_cndmask_b32 v21, 0, 1, vcc",
              [X * np.uint32(2**25), Y * np.uint32(2**22)], 2)  # fmt: skip
    total = (X * np.uint32(2**25))[DPP["row_ror:3"]].astype(np.uint64) + Y * np.uint32(2**22)
    np.testing.assert_array_equal(got[0], total & np.uint64(0xFFFFFFFF))
    np.testing.assert_array_equal(got[1], total >> np.uint64(32))


BYTES = {f"BYTE_{k}": (8 * k, 8) for k in range(4)}
PARTS = {**BYTES, "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)}


def part(x: np.ndarray, name: str, extend: bool) -> np.ndarray:
    shift, bits = PARTS[name]
    v = (x.astype(np.int64) >> shift) & ((1 << bits) - 1)
    return v - ((v >> bits - 1 & 1) << bits) if extend else v


@pytest.mark.parametrize("second", ["BYTE_3", "WORD_1", "DWORD"])
@pytest.mark.parametrize("first", PARTS)
def test_sdwa_sources(first, second):
    a, b = grid(U32, 2)
    for extend in (False, True):
        sext = "sext(v4)" if extend else "v4"
        text = (f"v_add_u32_sdwa v20, {sext}, v5 dst_sel:DWORD dst_unused:UNUSED_PAD "
                f"src0_sel:{first} src1_sel:{second}")  # fmt: skip
        want = part(a, first, extend) + part(b, second, False)
        np.testing.assert_array_equal(run(text, [a, b])[0], want & 0xFFFFFFFF)


@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("place", PARTS)
def test_sdwa_destinations(place, unused):
    a, b = grid(U32, 2)
    text = (f"v_add_u32_sdwa v20, v4, v5 dst_sel:{place} dst_unused:{unused} "
            "src0_sel:DWORD src1_sel:DWORD")  # fmt: skip
    old = 0x9ABC8DEF
    got = run(text, [a, b], before=f"v_mov_b32 v20, {old:#x}")[0]
    shift, bits = PARTS[place]
    field = ((a + b) & np.uint32((1 << bits) - 1)).astype(np.int64)
    if unused == "UNUSED_SEXT":
        field -= (field >> bits - 1) << bits
    want = field << shift
    if unused == "UNUSED_PRESERVE":
        want |= old & ~(((1 << bits) - 1) << shift)
    np.testing.assert_array_equal(got, want & 0xFFFFFFFF)


def test_sdwa_of_floats():
    """Halves as sources and results; neg and abs hold for the half that is read."""
    a, b = grid(F16, 2)
    text = ("v_add_f16_sdwa v20, -v4, |v5| dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
            "src0_sel:WORD_1 src1_sel:WORD_0")  # fmt: skip
    got = run(text, [a << 16 | b, b], before="v_mov_b32 v20, 0x1234")[0]
    with np.errstate(all="ignore"):
        same_floats(h(got >> 16), -h(a) + np.abs(h(b)))
    assert (got & 0xFFFF == 0x1234).all()
    text = ("v_cmp_lt_f16_sdwa vcc, v4, v5 src0_sel:WORD_1 src1_sel:WORD_0\n"
            "v_cndmask_b32 v20, 0, 1, vcc")  # fmt: skip
    np.testing.assert_array_equal(run(text, [a << 16, b])[0], h(a) < h(b))


@pytest.mark.parametrize("opcode", ["v_readlane_b32"])
def test_readlane(opcode):
    for text, lane in (("17", 17), ("s11", 61)):  # lane 125 wraps to 61
        got = run(f"s_mov_b32 s11, 125\n{opcode} s10, v4, {text}\nv_mov_b32 v20, s10", [X])[0]
        assert (got == X[lane]).all()


@pytest.mark.parametrize("opcode", ["v_readfirstlane_b32"])
def test_readfirstlane(opcode):
    """The lowest active lane; lane 0 when none is."""
    for mask, lane in (("-1", 0), ("0x00700000", 20), ("0", 0)):
        text = (f"s_mov_b64 exec, {mask}\n{opcode} s10, v4\ns_mov_b64 exec, -1\n"
                "v_mov_b32 v20, s10")  # fmt: skip
        assert (run(text, [X])[0] == X[lane]).all()


@pytest.mark.parametrize("opcode", ["v_writelane_b32"])
def test_writelane(opcode):
    """One lane, active or not."""
    text = (f"v_mov_b32 v20, v4\ns_mov_b64 exec, 1\n{opcode} v20, 9, 33\ns_mov_b32 s10, 77\n"
            f"{opcode} v20, s10, 2\ns_mov_b64 exec, -1")  # fmt: skip
    want = X.copy()
    want[33], want[2] = 9, 77
    np.testing.assert_array_equal(run(text, [X])[0], want)


@pytest.mark.parametrize(
    "opcode,row", [("v_permlane16_swap_b32", 16), ("v_permlane32_swap_b32", 32)]
)
def test_permlane_swap(opcode, row):
    """Odd rows of the destination trade places with even rows of the source."""
    d, s = run(f"v_mov_b32 v20, v4\nv_mov_b32 v21, v5\ns_nop 1\n{opcode} v20, v21", [X, Y], 2)
    odd, even = (LANE // row % 2 == k for k in (1, 0))
    want_d, want_s = X.copy(), Y.copy()
    want_d[odd], want_s[even] = Y[even], X[odd]
    np.testing.assert_array_equal(d, want_d)
    np.testing.assert_array_equal(s, want_s)


@pytest.mark.parametrize("opcode", ["v_swap_b32"])
def test_swap(opcode):
    text = (f"v_mov_b32 v20, v4\nv_mov_b32 v21, v5\ns_mov_b64 exec, 0xffff\n{opcode} v20, v21\n"
            "s_mov_b64 exec, -1")  # fmt: skip
    out = run(text, [X, Y], 2)
    np.testing.assert_array_equal(out[0], np.where(LANE < 16, Y, X))
    np.testing.assert_array_equal(out[1], np.where(LANE < 16, X, Y))


@pytest.mark.parametrize("opcode", ["v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"])
def test_count_of_lower_lanes(opcode):
    """Bits of the mask's half below the lane, plus the second source."""
    a, b = np.resize(U32, 128).astype(np.uint32), np.resize(U32[::-1], 128).astype(np.uint32)
    first = 0 if "lo" in opcode else 32
    want = [
        (int(a[k]) & ((1 << max(k % 64 - first, 0)) - 1) & 0xFFFFFFFF).bit_count() + int(b[k])
        for k in range(128)
    ]
    got = run(f"{opcode} v20, v4, v5", [a, b])[0]
    np.testing.assert_array_equal(got, np.array(want) & 0xFFFFFFFF)


AGPR = {
    "v_accvgpr_write_b32": "v_accvgpr_write_b32 a3, v4\ns_nop 1\nv_accvgpr_read_b32 v20, a3",
    "v_accvgpr_read_b32": "v_accvgpr_write_b32 a2, v4\ns_nop 1\nv_accvgpr_read_b32 v20, a2",
    "v_accvgpr_mov_b32": "v_accvgpr_write_b32 a2, v4\ns_nop 1\nv_accvgpr_mov_b32 a1, a2\ns_nop 1\n"
    "v_accvgpr_read_b32 v20, a1",
}


@pytest.mark.parametrize("opcode", AGPR)
def test_accumulation_registers(opcode):
    np.testing.assert_array_equal(run(AGPR[opcode], [U32], vgprs=72, accum=64)[0], U32)


@pytest.mark.parametrize("opcode", ["v_nop"])
def test_nop(opcode):
    before = "v_mov_b32 v20, v4\nv_mov_b32 v21, v5\nv_cmp_gt_u32 vcc, 20, v4"
    out = run(f"{opcode}\nv_cndmask_b32 v22, 0, 1, vcc", [X, Y], 3, before=before)
    np.testing.assert_array_equal(out, [X, Y, X < 20])


def test_inactive_lanes_keep_their_values():
    for name, args in (("v_add_f32", "v4, v5"), ("v_add_u16", "v4, v5"), ("v_pk_add_u16", "v4, v5"),
                       ("v_cvt_pk_fp8_f32", "v4, v5"), ("v_perm_b32", "v4, v5, v4")):  # fmt: skip
        text = f"s_mov_b64 exec, 0xf0f0\n{name} v20, {args}\ns_mov_b64 exec, -1"
        got = run(text, [X, Y], before="v_mov_b32 v20, 0x9abc8def")[0]
        off = ~(0xF0F0 >> np.minimum(LANE, 32) & 1).astype(bool)
        assert (got[off] == 0x9ABC8DEF).all(), name
