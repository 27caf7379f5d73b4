"""Code objects with one instruction changed: dropped, or a scope bit of it cleared."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from gfx950_emu.code_object import Instruction, Kernel
from gfx950_emu.elf import Elf

_NOP = struct.pack("<I", 0xBF800000)
_DROPPED = ("s_waitcnt", "s_barrier", "buffer_wbl2", "buffer_inv")
# Bits of the first dword, by how the mnemonic starts.
_SCOPE_BITS = {
    "buffer_": {"sc0": 14, "sc1": 15},
    "global_": {"sc0": 16, "sc1": 25},
    "flat_": {"sc0": 16, "sc1": 25},
}


@dataclass(frozen=True)
class Mutant:
    """`instruction` of the original, and what was done to it."""

    instruction: Instruction
    change: str
    code_object: bytes

    def __str__(self) -> str:
        return f"{self.change} {self.instruction.text} at {self.instruction.pc:#x}"


def mutants(data: bytes, kernel: Kernel) -> Iterator[Mutant]:
    """Every wait, barrier and fence that runs dropped, every scope bit cleared, one at a time."""
    text = Elf(data).section(".text").offset
    for i in kernel.instructions:
        if kernel.header_entry <= i.pc < kernel.entry:
            continue  # loads the arguments where the hardware does not preload them
        at = text + i.pc
        if i.mnemonic.startswith(_DROPPED):
            nops = _NOP * (i.size // 4)
            yield Mutant(i, "dropped", data[:at] + nops + data[at + i.size :])
        for start, bits in _SCOPE_BITS.items():
            for name, bit in bits.items():
                if i.mnemonic.startswith(start) and name in i.text.split():
                    word = struct.unpack_from("<I", data, at)[0] & ~(1 << bit)
                    changed = data[:at] + struct.pack("<I", word) + data[at + 4 :]
                    yield Mutant(i, f"{name} cleared in", changed)
