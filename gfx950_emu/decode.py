"""LLVM's text -> the flat array of instructions that the core runs.

Whatever is not understood is refused: an unknown mnemonic, another number or kind of operands
than the opcode's form says, a modifier that the family does not take.
"""

from __future__ import annotations

import re

import numpy as np

from gfx950_emu import operands as ops
from gfx950_emu.modifiers import hwreg, modifiers, number, parse_wait, signed16
from gfx950_emu.operands import Operand, OperandError
from gfx950_emu.records import (
    DS,
    F_COHERENT,
    F_READS_DST,
    F_SPIN,
    FLAT,
    INST_DTYPE,
    MFMA,
    MUBUF,
    SMEM,
    VOP3P,
    Fields,
    opcodes,
)  # fmt: skip
from gfx950_emu.refusals import check

SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
SPIN_LOOP_MAX = 256  # instructions: a longer loop does not only poll


class DecodeError(ValueError):
    """An instruction that the emulator does not run; names kernel, pc and text."""


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


def check_registers(f: Fields, vgprs: int) -> None:
    """The core allocates what the kernel's descriptor declares."""
    for o in (*f.dst, *f.src):
        if o.kind == ops.KIND_VGPR and o.reg + o.width > vgprs:
            raise OperandError(
                f"vector register {o.reg + o.width - 1}, the kernel's descriptor declares {vgprs}"
            )


def decode(instructions, accum_offset: int, vgprs: int, kernel: str = "?") -> np.ndarray:
    """INST_DTYPE records of `instructions` (objects with pc and text), in their order.

    accum_offset, vgprs: of the kernel's descriptor.
    """
    found, index = [], {}
    for instruction in instructions:
        try:
            f = parse(instruction.text, instruction.pc, accum_offset)
            check_registers(f, vgprs)
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
