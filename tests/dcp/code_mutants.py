"""Mutants of compiled code: one step of the protocol taken out of a code object's bytes.

    for mutant in mutants(code, lines):
        mutant.what, mutant.source, mutant.apply(data)

Every s_waitcnt, barrier, write-back and invalidation of a cache becomes s_nop; of every load,
store, atomic, write-back and invalidation each scope bit is cleared; every comparison with a tag or
a flag comes out as "it is there". Bits are found by disassembling, not by a table of encodings.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from gfx950_emu import CodeObject
from gfx950_emu.code_object import Instruction, Kernel
from gfx950_emu.disassembler import disassembler
from gfx950_emu.elf import Elf

NOP = bytes.fromhex("000080bf")  # s_nop 0
MOVE = 0xBE800100  # s_mov_b64, without its operands
NOTHING, EVERY_LANE, VCC = 0x80, 126, 106  # operands: 0, exec, vcc
DROPPED = ("s_waitcnt", "s_barrier", "buffer_wbl2", "buffer_inv")
SCOPES = ("sc0", "sc1")
COMPARED = ("!= end.tag", "!= launch")
"""Source texts of the comparisons with a tag, with a flag."""


@dataclass(frozen=True)
class Mutant:
    """what: the mnemonic and what became of it. source: the line that it was compiled from."""

    what: str
    source: str
    pc: int
    code: bytes

    def apply(self, data: bytes) -> bytes:
        """The file with this mutation, of the file that it was made from."""
        at = _text_offset(data) + self.pc
        return data[:at] + self.code + data[at + len(self.code) :]

    @property
    def name(self) -> str:
        return f"{self.what} at {self.source}"


def mutants(data: bytes, lined: bytes) -> list[Mutant]:
    """All mutants of the one kernel in a file; lined: the same instructions with source lines."""
    (kernel,), (known,) = (CodeObject.from_bytes(x).kernels.values() for x in (data, lined))
    assert [i.raw for i in kernel.instructions] == [i.raw for i in known.instructions]
    found = []
    for one in kernel.instructions:
        source = _source(known, one.pc)
        if one.mnemonic in DROPPED:
            what = re.sub(r"\(\d+\)", "", one.text)
            found.append(Mutant(f"{what} dropped", source, one.pc, NOP * (one.size // 4)))
        for bit in SCOPES:
            if re.search(rf"\b{bit}\b", one.text):
                code = _without(one, bit)
                found.append(Mutant(f"{one.mnemonic} without {bit}", source, one.pc, code))
        if one.mnemonic.startswith("v_cmp_") and any(text in source for text in COMPARED):
            found.append(Mutant(f"{one.mnemonic} says there", source, one.pc, _there(one)))
    return found


def _text_offset(data: bytes) -> int:
    return Elf(data).section(".text").offset


def _source(kernel: Kernel, pc: int) -> str:
    """`file: text` of the line, without its number, which any change above it would move."""
    place = kernel.line(pc)
    if place is None:
        return "?"
    path, _, number = place.rpartition(":")
    text = dict(enumerate(Path(path).read_text().splitlines(), 1))
    return f"{Path(path).name}: {text.get(int(number), '?').strip()}"


def _decoded(code: bytes) -> str | None:
    engine = disassembler()
    answer = engine.decode(ctypes.create_string_buffer(code, len(code)), 0, len(code))
    return answer[1] if answer else None


def _without(one: Instruction, bit: str) -> bytes:
    """The same instruction without a scope bit."""
    wanted = re.sub(rf" {bit}\b", "", one.text)
    word = int.from_bytes(one.raw[:4], "little")
    for place in range(32):
        if word >> place & 1:
            code = (word & ~(1 << place)).to_bytes(4, "little") + one.raw[4:]
            if _decoded(code) == wanted:
                return code
    # A returning atomic without sc0 has no destination in its text.
    for place in range(32):
        if word >> place & 1:
            code = (word & ~(1 << place)).to_bytes(4, "little") + one.raw[4:]
            text = _decoded(code) or ""
            if text.startswith(one.mnemonic) and not re.search(rf"\b{bit}\b", text):
                return code
    raise AssertionError(f"no bit of {one.text} is {bit}")


def _there(one: Instruction) -> bytes:
    """A comparison that finds every word there: "differs" is 0, "equals" all active lanes."""
    to = re.match(r"\S+ (vcc|s\[(\d+):\d+\])", one.text)
    register = VCC if to[1] == "vcc" else int(to[2])
    source = EVERY_LANE if "_eq_" in one.mnemonic else NOTHING
    move = (MOVE | register << 16 | source).to_bytes(4, "little")
    return move + NOP * (one.size // 4 - 1)
