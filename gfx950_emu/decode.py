"""LLVM's text -> the flat array of instructions that the core runs.

Whatever is not understood is refused: an unknown mnemonic, another number or kind of operands
than the opcode's form says, a modifier that the family does not take.
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field

import numpy as np

from gfx950_emu import operands as ops
from gfx950_emu.build import core
from gfx950_emu.operands import NONE, Operand, OperandError

(VALU, VOP3P, MFMA, SALU, BRANCH, SMEM, DS, FLAT, MUBUF, MISC) = range(10)
PIPES = (
    "valu",
    "valu",
    "mfma",
    "salu",
    "branch",
    "smem",
    "lds",
    "vmem",
    "vmem",
    "misc",
)
F_SC0, F_SC1, F_NT, F_OFFEN, F_IDXEN, F_LDS, F_CLAMP, F_DPP, F_SDWA = (1 << n for n in range(9))
F_BOUND_CTRL, F_GDS, F_SPIN, F_CLOCK = 1 << 9, 1 << 10, 1 << 11, 1 << 12
F_SLOW_OUT, F_READS_DST, F_COHERENT, F_PLAIN, F_FLAT = (1 << n for n in range(13, 18))

OPERAND_DTYPE = np.dtype(
    [
        ("kind", "u1"),
        ("type", "u1"),
        ("width", "u1"),
        ("mods", "u1"),
        ("sel", "u1"),
        ("pad", "u1"),
        ("reg", "<u2"),
        ("lit", "<u8"),
    ]
)
INST_DTYPE = np.dtype(
    [
        ("dst", OPERAND_DTYPE, 2),
        ("src", OPERAND_DTYPE, 5),
        *((name, "<u4") for name in ("op", "flags")),
        *((name, "<i4") for name in ("offset", "offset1")),
        *((name, "<u4") for name in ("target", "pc", "extra", "imm")),
        *(
            (name, "u1")
            for name in [
                "omod",
                "op_sel",
                "op_sel_hi",
                "neg_lo",
                "neg_hi",
                "cbsz",
                "abid",
                "blgp",
                "dpp",
                "dpp_arg",
                "row_mask",
                "bank_mask",
                "dst_sel",
                "dst_unused",
                "wait_vm",
                "wait_lgkm",
            ]
        ),
    ]
)
TAIL = struct.Struct("<IIiiIIII16B")
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
    MUBUF: MEMORY_WORDS | {"offset", "offen", "idxen", "lds"},
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
UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
# Integer instructions whose clamp the core saturates.
INT_CLAMP = re.compile(
    r"v_(add|sub|subrev)(_co)?_[iu](16|32)|v_(addc|subb|subbrev)_co_u32|v_mad_[iu](16|32_[iu]24)|"
    r"v_pk_(add|sub|mad)_[iu]16|v_dot[248]_[iu]32_.*"
)
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
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
SPIN_LOOP_MAX = 256  # instructions: a longer loop does not only poll


class DecodeError(ValueError):
    """An instruction that the emulator does not run; names kernel, pc and text."""


@dataclass(frozen=True)
class OpInfo:
    number: int
    name: str
    family: int
    form: tuple[str, ...]
    extra: int


@functools.lru_cache(maxsize=1)
def opcodes() -> dict[str, OpInfo]:
    """The core's table, by name."""
    c = core()
    table = {}
    for k in range(c.emu_op_count()):
        name = c.emu_op_name(k).decode()
        form = tuple(c.emu_op_form(k).decode().split())
        table[name] = OpInfo(k, name, c.emu_op_family(k), form, c.emu_op_extra(k))
    return table


@dataclass
class Fields:
    """What becomes one Inst."""

    op: OpInfo
    pc: int
    dst: list[Operand] = field(default_factory=list)
    src: list[Operand] = field(default_factory=lambda: [NONE] * 5)
    flags: int = 0
    offset: int = 0
    offset1: int = 0
    branch: int | None = None  # pc of the target
    target: int = 0
    imm: int = 0
    omod: int = 0
    op_sel: int = 0
    op_sel_hi: int = 0
    neg_lo: int = 0
    neg_hi: int = 0
    cbsz: int = 0
    abid: int = 0
    blgp: int = 0
    dpp: int = 0
    dpp_arg: int = 0
    row_mask: int = 15
    bank_mask: int = 15
    dst_sel: int = ops.SEL_DWORD
    dst_unused: int = 0
    wait_vm: int = 255
    wait_lgkm: int = 255

    def pack(self) -> bytes:
        dst = [*self.dst, NONE, NONE][:2]
        return b"".join(o.pack() for o in (*dst, *self.src)) + TAIL.pack(
            self.op.number, self.flags, self.offset, self.offset1, self.target, self.pc, 0,
            self.imm, self.omod,
            self.op_sel, self.op_sel_hi, self.neg_lo, self.neg_hi, self.cbsz, self.abid,
            self.blgp, self.dpp, self.dpp_arg, self.row_mask, self.bank_mask, self.dst_sel,
            self.dst_unused, self.wait_vm, self.wait_lgkm,
        )  # fmt: skip


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
        if name in FLAG_WORDS:
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


def place(f: Fields, token: str, text: str, accum: int, at: int) -> int:
    """One operand by its form token; `at` is the next free source slot, returned anew."""
    role, word = token[0], token[1:]
    if token in ("i16", "u16"):
        value = signed16(text) if token == "i16" else number(text)
        f.src[at] = Operand(ops.KIND_CONST, lit=value & (2**64 - 1))
        return at + 1
    if role in "sv":
        f.src[at] = ops.source(text, word, accum, role == "v", "f64" in f.op.name)
        return at + 1
    if role == "w":
        f.src[at] = ops.source(text, word, accum, True, False)
        f.dst.append(f.src[at])
        return at + 1
    if role in "drxm@":
        found = ops.register(text, accum)
        if role == "m" or (role == "x" and not word):
            type_, width = (ops.T_MASK, 2) if role == "m" else (ops.T_B32, 1)
        else:
            type_, width = ops.type_of(word)
        want = ops.KIND_SGPR if role in "xm" else ops.KIND_VGPR
        if not found or found[0] != want or found[2] != width:
            raise OperandError(f"{text} cannot be the destination ({token})")
        f.dst.append(Operand(want, type_, width, reg=found[1]))
        if role == "r":
            f.flags |= F_READS_DST
        return at
    if role == "k":
        found = ops.register(text, accum)
        if not found or found[0] != ops.KIND_SGPR or found[2] != 2:
            raise OperandError(f"{text} is no lane mask")
        f.src[at] = Operand(ops.KIND_SGPR, ops.T_MASK, 2, reg=found[1])
        return at + 1
    if role == "t":
        f.src[3] = ops.source(text, word, accum, True, False)
        return at
    if role == "a":
        if text != "off":
            found = ops.register(text, accum)
            if not found or found[0] != ops.KIND_VGPR or found[2] > 2:
                raise OperandError(f"{text} is no address")
            f.src[0] = Operand(ops.KIND_VGPR, ops.T_B32, found[2], reg=found[1])
        return at
    if role == "g":
        if text != "off":
            width = "b32" if f.op.name.startswith("scratch") else "b64"
            f.src[1] = ops.source(text, width, accum, False, False)
        return at
    if role == "q":
        f.src[1] = ops.source(text, "b128", accum, False, False)
        if f.src[1].kind != ops.KIND_SGPR:
            raise OperandError(f"{text} is no buffer descriptor")
        return at
    if role == "n":
        if f.op.family == MUBUF:
            f.src[2] = ops.source(text, "b32", accum, False, False)
        else:
            f.imm = number(text)
        return at
    if role == "o":
        if ops.INTEGER.match(text):
            f.offset = number(text)
        else:
            f.src[1] = ops.source(text, "b32", accum, False, False)
        return at
    if role == "j":
        f.branch = f.pc + 4 + 4 * signed16(text)
        return at
    if role == "h":
        f.imm = hwreg(text)
        return at
    raise AssertionError(f"the opcode table has a form with {token!r}")


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


def form_of(f: Fields, count: int, words: list[str]) -> list[str]:
    """The form that fits: stores without `off`, atomics with a result, loads to LDS."""
    form = list(f.op.form)
    if form and form[0].startswith("@"):
        form = form if "sc0" in words else form[1:]
    if f.op.family in (MUBUF,) and "lds" in words:
        form = form[1:]
    if f.op.family == SMEM and form[-1:] == ["o"] and count == 2:
        form = form[:-1]
    return form


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


def parse(text: str, pc: int, accum: int) -> Fields:
    mnemonic, _, rest = text.partition(" ")
    name = mnemonic
    info = opcodes().get(name)
    if info is None:
        name = SUFFIX.sub("", mnemonic)
        info = opcodes().get(name)
    if info is None:
        raise OperandError(f"unknown mnemonic {mnemonic}")
    f = Fields(info, pc)
    if info.family == VOP3P:
        f.op_sel_hi = 0 if "_mix" in name else 7
    if info.form == ("wait",):
        parse_wait(f, rest)
        return f
    if info.form == ("msg",):
        return f
    parts = ops.split(rest)
    words: list[str] = []
    if parts:
        pieces = re.split(r"\s+(?![^\[(]*[\])])", parts[-1])
        # A modifier may come first when there are no operands: "buffer_inv sc1".
        if info.form:
            parts[-1], words = pieces[0], pieces[1:]
        else:
            parts, words = [], pieces
    form = form_of(f, len(parts), words)
    if len(form) != len(parts):
        raise OperandError(f"{len(parts)} operands, {len(form)} expected ({' '.join(form)})")
    at = 0
    for token, part in zip(form, parts, strict=True):
        at = place(f, token, part, accum, at)
    f.src = [Operand(**vars(o)) for o in f.src]
    modifiers(f, words)
    check(f, mnemonic)
    return f


def mark_spin_loops(found: list[Fields], index: dict[int, int]) -> None:
    """Innermost loops that only poll: they sleep, or read memory at a scope, and compute little."""
    heads = {f.target for n, f in enumerate(found) if f.branch is not None and f.target <= n}
    for n, f in enumerate(found):
        if f.branch is None or f.target > n or n - f.target > SPIN_LOOP_MAX:
            continue
        body = found[f.target : n + 1]
        if any(h in heads for h in range(f.target + 1, n + 1)):
            continue
        polls = any(
            b.op.name == "s_sleep"
            or (b.op.family in (FLAT, MUBUF) and b.flags & F_COHERENT and b.dst)
            or (b.op.family == SMEM and "load" in b.op.name)
            for b in body
        )
        works = any(
            b.op.family in (MFMA, DS)
            or b.op.name == "s_barrier"
            or (
                b.op.family in (FLAT, MUBUF)
                and not b.flags & F_COHERENT
                and b.op.name[:9] != "buffer_in"
            )
            for b in body
        )
        if polls and not works:
            for b in body:
                b.flags |= F_SPIN


def decode(instructions, accum_offset: int, kernel: str = "?") -> np.ndarray:
    """INST_DTYPE records of `instructions` (objects with pc and text), in their order."""
    found, index = [], {}
    for instruction in instructions:
        try:
            f = parse(instruction.text, instruction.pc, accum_offset)
        except (OperandError, KeyError, ValueError, IndexError) as error:
            raise DecodeError(
                f"kernel {kernel}, pc {instruction.pc:#x}: {instruction.text}: not supported: "
                f"{error}"
            ) from error
        index[instruction.pc] = len(found)
        found.append(f)
    for f in found:
        if f.branch is not None:
            if f.branch not in index:
                raise DecodeError(
                    f"kernel {kernel}, pc {f.pc:#x}: branch to {f.branch:#x}, where no "
                    "instruction is"
                )
            f.target = index[f.branch]
    mark_spin_loops(found, index)
    data = b"".join(f.pack() for f in found)
    return np.frombuffer(bytearray(data), dtype=INST_DTYPE)
