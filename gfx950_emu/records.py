"""The record of one decoded instruction, and the core's table of opcodes."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field

import numpy as np

from gfx950_emu import operands as ops
from gfx950_emu.build import core
from gfx950_emu.operands import NONE, Operand

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
