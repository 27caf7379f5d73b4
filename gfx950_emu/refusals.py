"""What the core would ignore is refused; the flags that it reads are set."""

from __future__ import annotations

import re

from gfx950_emu import operands as ops
from gfx950_emu.modifiers import buffer_format
from gfx950_emu.operands import Operand, OperandError
from gfx950_emu.records import (
    F_CLAMP,
    F_COHERENT,
    F_DPP,
    F_FLAT,
    F_IDXEN,
    F_LDS,
    F_OFFEN,
    F_PLAIN,
    F_READS_DST,
    F_SC0,
    F_SC1,
    F_SDWA,
    F_SLOW_OUT,
    FLAT,
    MFMA,
    MUBUF,
    VALU,
    VOP3P,
    Fields,
)  # fmt: skip

# Integer instructions whose clamp the core saturates.
INT_CLAMP = re.compile(
    r"v_(add|sub|subrev)(_co)?_[iu](16|32)|v_(addc|subb|subbrev)_co_u32|v_mad_[iu](16|32_[iu]24)|"
    r"v_pk_(add|sub|mad)_[iu]16|v_dot[248]_[iu]32_.*"
)


def check(f: Fields, mnemonic: str) -> None:
    """Modifiers that the core would ignore are refused; the flags that it reads are set."""
    op = f.op
    types = {o.type for o in (*f.dst, *f.src) if o.kind}
    if op.family == VALU:
        if f.op_sel and not types & {ops.T_F16, ops.T_B16, ops.T_BF16} and "cvt_" not in op.name:
            raise OperandError("op_sel")
        if f.op_sel and op.name.startswith(("v_cvt_f32_fp8", "v_cvt_f32_bf8")):
            raise OperandError("op_sel")
        if f.flags & F_DPP and any(o.sel != ops.SEL_DWORD for o in f.src):
            raise OperandError("DPP with SDWA")
        if mnemonic.endswith("_sdwa"):
            f.flags |= F_SDWA
        floats = f.dst and f.dst[0].type in (ops.T_F32, ops.T_F16, ops.T_F64)
        if f.omod and not floats:
            raise OperandError("omod on a result that is no float")
        if f.flags & F_CLAMP and not floats and not INT_CLAMP.fullmatch(op.name):
            raise OperandError("clamp")
        if f.omod or f.flags & F_CLAMP or f.dst_sel != ops.SEL_DWORD:
            f.flags |= F_SLOW_OUT
        if f.flags & F_SDWA and f.dst_unused == 2 and f.dst_sel != ops.SEL_DWORD:
            f.flags |= F_READS_DST
        if (f.op_sel & 8) and f.dst and f.dst[0].type in (ops.T_F16, ops.T_B16):
            f.flags |= F_READS_DST
    if op.family == VOP3P and f.flags & F_CLAMP:
        floats = f.dst[0].type in (ops.T_PK16, ops.T_PK32, ops.T_F32)
        if not floats and not INT_CLAMP.fullmatch(op.name):
            raise OperandError("clamp")
    if op.name.startswith("v_div_fmas"):
        f.src[3] = Operand(ops.KIND_SGPR, ops.T_MASK, 2, reg=106)
    if op.name.startswith("v_pk_") and "f32" in op.name:
        for k, o in enumerate(f.src):
            if o.kind == ops.KIND_CONST and o.lit and f.op_sel_hi >> k & 1:
                raise OperandError("a constant in the high half of a packed f32 operand")
    for k, o in enumerate(f.src):
        # Both results take the same dword: the other one is not read.
        if o.type == ops.T_PK32 and o.width == 2 and o.kind in (ops.KIND_VGPR, ops.KIND_SGPR):
            low, high = f.op_sel >> k & 1, f.op_sel_hi >> k & 1
            if op.name == "v_pk_mov_b32":
                high = low
            if low == high:
                o.reg, o.width = o.reg + low, 1
                f.op_sel &= ~(1 << k)
                f.op_sel_hi &= ~(1 << k)
    if op.family == MFMA:
        check_mfma(f)
    if op.family in (FLAT, MUBUF):
        if f.flags & (F_SC0 | F_SC1):
            f.flags |= F_COHERENT
        if op.name.startswith("flat_"):
            f.flags |= F_FLAT
            if f.src[0].width != 2:
                raise OperandError("a flat address of one dword")
        if "_format_" in op.name:
            if f.flags & F_LDS:
                raise OperandError("a formatted load to LDS")
            if op.name.startswith("tbuffer"):
                f.imm = f.imm or buffer_format("")
            elif f.imm:
                raise OperandError("format")
        if op.name.startswith("global_load_lds"):
            f.flags |= F_LDS
        if op.name.startswith("global_") and f.src[0].width != (1 if f.src[1].kind else 2):
            raise OperandError("address and base do not fit together")
        if op.name.startswith("buffer_atomic") and f.flags & F_SC0:
            width = f.src[3].width // (2 if "cmpswap" in op.name else 1)
            data = f.src[3]
            f.dst.append(Operand(ops.KIND_VGPR, ops.T_B32, width, reg=data.reg))
        if f.flags & F_LDS:
            f.src[4] = Operand(ops.KIND_SGPR, ops.T_B32, 1, reg=124)
        words = bool(f.flags & F_OFFEN) + bool(f.flags & F_IDXEN)
        if (
            op.family == MUBUF
            and f.src[1].kind
            and words != (f.src[0].width if f.src[0].kind else 0)
        ):
            raise OperandError("address registers do not fit offen and idxen")
    if op.name in ("ds_append", "ds_consume") or "_addtid_" in op.name:
        f.src[4] = Operand(ops.KIND_SGPR, ops.T_B32, 1, reg=124)
    if op.name == "ds_swizzle_b32":
        f.imm, f.offset = f.offset, 0
    altered = f.flags & (F_DPP | F_SDWA) or any(o.mods or o.sel != ops.SEL_DWORD for o in f.src)
    if op.family in (VALU, VOP3P) and not altered:
        f.flags |= F_PLAIN


def check_mfma(f: Fields) -> None:
    name = f.op.name
    if "f8f6f4" in name:
        regs = (8, 8, 6, 6, 4)
        for code, o in ((f.cbsz, f.src[0]), (f.blgp, f.src[1])):
            if code > 4 or o.kind != ops.KIND_VGPR or o.width != regs[code]:
                raise OperandError(f"format {code} in {o.width} registers")
        return
    if f.op_sel or f.op_sel_hi or f.blgp:
        raise OperandError("op_sel or blgp on this instruction")
    if f.neg_lo and "f64" not in name:
        raise OperandError("neg")
    if any(o.kind != ops.KIND_VGPR for o in f.src[:2]) and "f64" not in name:
        raise OperandError("a matrix that is no vector register")
