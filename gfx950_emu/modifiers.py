"""The words after an instruction's operands, and immediates with a notation of their own."""

from __future__ import annotations

import re

from gfx950_emu import operands as ops
from gfx950_emu.operands import OperandError
from gfx950_emu.records import (
    BRANCH,
    DS,
    F_BOUND_CTRL,
    F_CLAMP,
    F_DPP,
    F_GDS,
    F_IDXEN,
    F_LDS,
    F_NT,
    F_OFFEN,
    F_SC0,
    F_SC1,
    FLAT,
    MFMA,
    MISC,
    MUBUF,
    SALU,
    SMEM,
    VALU,
    VOP3P,
    Fields,
)  # fmt: skip

FLAG_WORDS = {
    "sc0": F_SC0,
    "sc1": F_SC1,
    "nt": F_NT,
    "offen": F_OFFEN,
    "idxen": F_IDXEN,
    "lds": F_LDS,
    "clamp": F_CLAMP,
    "gds": F_GDS,
}
MEMORY_WORDS = {"sc0", "sc1", "nt"}
ALLOWED = {
    VALU: {"clamp", "mul", "div", "op_sel", "bitop3", "dst_sel", "dst_unused", "src0_sel",
           "src1_sel", "row_mask", "bank_mask", "bound_ctrl", "dpp"},
    VOP3P: {"clamp", "op_sel", "op_sel_hi", "neg_lo", "neg_hi"},
    MFMA: {"cbsz", "abid", "blgp", "neg", "op_sel", "op_sel_hi"},
    SALU: set(),
    BRANCH: set(),
    SMEM: {"offset"},
    DS: {"offset", "offset0", "offset1"},
    FLAT: MEMORY_WORDS | {"offset", "lds"},
    MUBUF: MEMORY_WORDS | {"offset", "offen", "idxen", "lds", "format"},
    MISC: set(),
}  # fmt: skip
DPP_WORDS = {
    "quad_perm": 1,
    "row_shl": 2,
    "row_shr": 3,
    "row_ror": 4,
    "wave_shl": 5,
    "wave_rol": 6,
    "wave_shr": 7,
    "wave_ror": 8,
    "row_mirror": 9,
    "row_half_mirror": 10,
    "row_bcast": 11,
    "row_newbcast": 13,
}
BUFFER_DATA = {
    f"BUF_DATA_FORMAT_{name}": code
    for code, name in (
        (1, "8"), (2, "16"), (3, "8_8"), (4, "32"), (5, "16_16"), (10, "8_8_8_8"), (11, "32_32"),
        (12, "16_16_16_16"), (13, "32_32_32"), (14, "32_32_32_32"),
    )
}  # fmt: skip
BUFFER_NUMBERS = {
    f"BUF_NUM_FORMAT_{name}": code
    for code, name in enumerate(
        ("UNORM", "SNORM", "USCALED", "SSCALED", "UINT", "SINT", "RESERVED_6", "FLOAT")
    )
    if code != 6
}
UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}

HWREGS = {
    "HW_REG_MODE": 1,
    "HW_REG_STATUS": 2,
    "HW_REG_TRAPSTS": 3,
    "HW_REG_HW_ID": 4,
    "HW_REG_GPR_ALLOC": 5,
    "HW_REG_LDS_ALLOC": 6,
    "HW_REG_IB_STS": 7,
    "HW_REG_SH_MEM_BASES": 15,
    "HW_REG_SQ_SHADER_TBA_LO": 16,
    "HW_REG_XCC_ID": 20,
}


def number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise OperandError(f"{text} is no number") from None


def bit_list(text: str) -> int:
    values = [number(t) for t in text.strip("[]").split(",")]
    return sum(v << k for k, v in enumerate(values))


def signed16(text: str) -> int:
    value = number(text)
    return value - 0x10000 if value & 0x8000 else value


def hwreg(text: str) -> int:
    found = re.match(r"^hwreg\(([A-Z_0-9]+)(?:,\s*(\d+),\s*(\d+))?\)$", text)
    if not found:
        raise OperandError(f"{text} is no hwreg()")
    name, offset, size = found.groups()
    code = int(name) if name.isdigit() else HWREGS.get(name)
    if code is None:
        raise OperandError(f"hardware register {name}")
    return code | int(offset or 0) << 6 | (int(size or 32) - 1) << 11


def swizzle(text: str) -> int:
    """The 16 bits of a ds_swizzle pattern."""
    found = re.match(r"^swizzle\(([A-Z_]+),(.*)\)$", text)
    if not found:
        return number(text)
    mode, rest = found.group(1), [t.strip() for t in found.group(2).split(",")]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(v) << 2 * k for k, v in enumerate(rest))
    if mode == "BITMASK_PERM":
        bits = rest[0].strip('"')
        masks = [0, 0, 0]  # and, or, xor
        for k, c in enumerate(reversed(bits)):
            masks[0] |= (c in "pi") << k
            masks[1] |= (c == "1") << k
            masks[2] |= (c == "i") << k
        return masks[0] | masks[1] << 5 | masks[2] << 10
    size = int(rest[0])
    if mode == "BROADCAST":
        return (32 - size) | int(rest[1]) << 5
    if mode == "SWAP":
        return 31 | size << 10
    if mode == "REVERSE":
        return 31 | (size - 1) << 10
    raise OperandError(text)


def buffer_format(text: str) -> int:
    """data | number << 4 of a tbuffer instruction's format; bit 31 says that there is one."""
    data, numbers = BUFFER_DATA["BUF_DATA_FORMAT_8"], 0
    words = text.strip("[]").split(",") if text else []
    for word in (w.strip() for w in words):
        if word in BUFFER_DATA:
            data = BUFFER_DATA[word]
        elif word in BUFFER_NUMBERS:
            numbers = BUFFER_NUMBERS[word]
        else:
            raise OperandError(f"buffer format {word}")
    return data | numbers << 4 | 1 << 31


def modifiers(f: Fields, words: list[str]) -> None:
    """The words after the operands."""
    allowed = ALLOWED[f.op.family]
    for word in words:
        name, _, value = word.partition(":")
        if name in DPP_WORDS and f.op.family == VALU:
            f.dpp = DPP_WORDS[name]
            if name == "quad_perm":
                f.dpp_arg = sum(int(v) << 2 * k for k, v in enumerate(value.strip("[]").split(",")))
            elif name == "row_bcast":
                f.dpp = {"15": 11, "31": 12}[value]
            elif value:
                f.dpp_arg = int(value)
            f.flags |= F_DPP
            continue
        if name not in allowed:
            raise OperandError(f"modifier {word}")
        if name == "format":
            f.imm = buffer_format(value)
        elif name in FLAG_WORDS:
            f.flags |= FLAG_WORDS[name]
        elif name == "bound_ctrl":
            f.flags |= F_BOUND_CTRL
        elif name == "offset":
            f.offset = swizzle(value) if f.op.name == "ds_swizzle_b32" else number(value)
        elif name == "offset0":
            f.offset = number(value)
        elif name == "offset1":
            f.offset1 = number(value)
        elif name == "mul":
            f.omod = {"2": 1, "4": 2}[value]
        elif name == "div":
            f.omod = 3
        elif name == "bitop3":
            f.imm = number(value)
        elif name == "op_sel" and f.op.family == VALU:
            f.op_sel = bit_list(value)
            count = value.count(",") + 1
            if count == sum(o.kind != 0 for o in f.src) + 1 < 4:  # the last one is the result's
                f.op_sel = f.op_sel & ~(1 << count - 1) | (f.op_sel >> count - 1) << 3
        elif name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi"):
            setattr(f, name, bit_list(value))
        elif name == "neg":
            f.neg_lo = bit_list(value)
        elif name == "dst_sel":
            f.dst_sel = ops.SEL[value]
        elif name == "dst_unused":
            f.dst_unused = UNUSED[value]
        elif name in ("src0_sel", "src1_sel"):
            f.src[int(name[3])].sel = ops.SEL[value]
        else:
            setattr(f, name, number(value))


def parse_wait(f: Fields, text: str) -> None:
    for word in re.split(r"[\s&]+", text.strip()):
        found = re.match(r"^(vmcnt|expcnt|lgkmcnt)\((\d+)\)$", word)
        if not found:
            raise OperandError(word)
        counter, value = found.group(1), int(found.group(2))
        if counter == "vmcnt" and value < 63:
            f.wait_vm = value
        if counter == "lgkmcnt" and value < 15:
            f.wait_lgkm = value
