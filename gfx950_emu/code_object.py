"""gfx950 code objects: kernels, their resources, arguments and instructions.

    code = CodeObject.from_file("kernel.hsaco")
    kernel = code.kernels["softmax"]

A code object is what a loader gets: a linked ELF file with kernel descriptors (`NAME.kd`), a note
of metadata in MessagePack, and code. Refused, with a message that names the file, the kernel and
the pc: another target, an instruction that LLVM does not know, relocations of loaded memory.
A `pc` is a byte offset in .text; `text_address + pc` is the address in the loaded image.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from gfx950_emu.debug_line import LineTable
from gfx950_emu.descriptor import (
    DESCRIPTOR_BYTES,
    PRELOAD_HEADER_BYTES,
    Descriptor,
    parse_descriptor,
)
from gfx950_emu.disassembler import disassembler
from gfx950_emu.elf import (
    EM_AMDGPU,
    STT_AMDGPU_HSA_KERNEL,
    STT_FUNC,
    Elf,
    ElfError,
    Segment,
    Symbol,
)

PROCESSOR = "gfx950"
WAVE_SIZE = 64
ELFOSABI_AMDGPU_HSA = 64
EF_AMDGPU_MACH, EF_MACH_GFX950 = 0xFF, 0x4F
CODE_OBJECT_VERSION = {2: 4, 3: 5, 4: 6}  # by the ABI version of the ELF header
NT_AMDGPU_METADATA = 32
R_AMDGPU_NONE = 0
# Instructions that go where only registers say: the kernel may then run any function.
CALLS = ("s_swappc_b64", "s_setpc_b64", "s_call_b64")


class CodeObjectError(ValueError):
    """This file is no code object that the emulator can run; the message says why and where."""


@dataclass(frozen=True)
class Instruction:
    pc: int  # byte offset in .text
    size: int  # bytes: 4, 8, 12 or, with the scales of an MFMA, 16
    text: str  # LLVM's: mnemonic, one space, operands
    raw: bytes

    @property
    def mnemonic(self) -> str:
        return self.text.partition(" ")[0]


@dataclass(frozen=True)
class Argument:
    offset: int  # bytes, in the kernel's argument block
    size: int  # bytes
    kind: str  # global_buffer, by_value, hidden_...
    name: str  # "" when the compiler wrote none


@dataclass(frozen=True)
class Kernel:
    name: str
    header_entry: int  # pc that the descriptor names
    preload_entry: int | None  # header_entry + 256 when arguments are preloaded, else None
    entry: int  # pc of the first instruction that runs: one of the two
    instructions: tuple[Instruction, ...]  # by pc, those of functions that it may call included
    descriptor: Descriptor
    args: tuple[Argument, ...]
    max_workgroup_size: int
    reqd_workgroup_size: tuple[int, int, int] | None
    wavefront_size: int
    vgpr_count: int
    agpr_count: int
    sgpr_count: int
    vgpr_spills: int
    sgpr_spills: int
    lines: LineTable = field(repr=False, compare=False)
    text_address: int = field(repr=False)

    @functools.cached_property
    def _pcs(self) -> list[int]:
        return [i.pc for i in self.instructions]

    def at(self, pc: int) -> Instruction:
        """The instruction at `pc`; KeyError when none begins there."""
        n = bisect.bisect_left(self._pcs, pc)
        if n == len(self._pcs) or self._pcs[n] != pc:
            raise KeyError(f"kernel {self.name}: no instruction begins at pc {pc:#x}")
        return self.instructions[n]

    def line(self, pc: int) -> str | None:
        """`file:line` of the source, when the compiler gave it."""
        return self.lines.find(self.text_address + pc)


@dataclass(frozen=True)
class CodeObject:
    path: str  # "<bytes>" when it came from memory; for messages
    digest: str  # SHA-256 of the file
    target: str  # amdgcn-amd-amdhsa--gfx950, feature suffixes included
    version: int  # of the code object format: 4, 5 or 6
    kernels: dict[str, Kernel]
    segments: tuple[Segment, ...]  # the loaded image: (address, data, flags)
    text_address: int
    symbols: dict[str, tuple[int, int]]  # (address, bytes) of what is not a kernel

    @classmethod
    def from_file(cls, path: str | Path) -> CodeObject:
        return cls.from_bytes(Path(path).read_bytes(), path=str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "<bytes>") -> CodeObject:
        return _Reader(bytes(data), path).read()


class _Reader:
    """Reads one file; each refusal names it."""

    def __init__(self, data: bytes, path: str) -> None:
        self.path, self.data = path, data
        if b"__CLANG_OFFLOAD_BUNDLE__" in data[:32] or data[:4] == b"CCOB":
            raise self.error("an offload bundle: unpack it first with clang-offload-bundler")
        try:
            self.elf = Elf(data)
            self.check_target()
            text = self.elf.section(".text")
            if text is None:
                raise self.error("it has no .text section")
            self.text = text
            self.text_index = self.elf.sections.index(text)
            code = self.elf.content(text)
            self.symbols = self.elf.symbols()
            self.segments = tuple(self.elf.segments())
            self.lines = LineTable.from_elf(self.elf)
            self.metadata = self.read_metadata()
            self.check_relocations()
        except ElfError as error:
            raise self.error(str(error)) from error
        self.code = ctypes.create_string_buffer(code, max(len(code), 1))
        self.decoded: dict[str, tuple[Instruction, ...]] = {}

    def error(self, what: str) -> CodeObjectError:
        return CodeObjectError(f"{self.path}: {what}")

    def check_target(self) -> None:
        elf = self.elf
        if elf.machine != EM_AMDGPU or elf.os_abi != ELFOSABI_AMDGPU_HSA:
            raise self.error(
                f"an ELF file for machine {elf.machine}, OS ABI {elf.os_abi}; needed is an AMDGPU "
                f"HSA code object ({EM_AMDGPU}, {ELFOSABI_AMDGPU_HSA})"
            )
        if elf.flags & EF_AMDGPU_MACH != EF_MACH_GFX950:
            raise self.error(
                f"compiled for another GPU (machine flags {elf.flags & EF_AMDGPU_MACH:#x}); the "
                f"emulator runs {PROCESSOR} ({EF_MACH_GFX950:#x}) only"
            )
        if elf.abi_version not in CODE_OBJECT_VERSION:
            raise self.error(f"unknown code object ABI version {elf.abi_version}")

    def read_metadata(self) -> dict:
        for owner, kind, content in self.elf.notes():
            if owner == "AMDGPU" and kind == NT_AMDGPU_METADATA:
                try:
                    return msgpack.unpackb(content, strict_map_key=False)
                except (ValueError, msgpack.UnpackException) as error:
                    raise self.error(f"its metadata note cannot be read: {error}") from error
        raise self.error("it has no AMDGPU metadata note")

    def check_relocations(self) -> None:
        for address, kind, _ in self.elf.relocations():
            if kind != R_AMDGPU_NONE:
                raise self.error(
                    f"relocation of type {kind} at address {address:#x}: loaded memory that needs "
                    "relocations is not supported"
                )

    def functions(self, *kinds: int) -> list[Symbol]:
        """Symbols of code, by address."""
        found = [s for s in self.symbols if s.section == self.text_index and s.kind in kinds]
        return sorted(found, key=lambda s: s.value)

    def decode(self, function: Symbol) -> tuple[Instruction, ...]:
        """All instructions of one function."""
        if function.name in self.decoded:
            return self.decoded[function.name]
        start = function.value - self.text.address
        pc, end, found = start, start + function.size, []
        if not 0 <= start <= end <= self.text.size:
            raise self.error(f"function {function.name} lies outside of .text")
        engine, raw = disassembler(), self.code.raw
        while pc < end:
            answer = engine.decode(self.code, pc, end)
            if answer is None:
                words = raw[pc : min(pc + 8, end)].hex(" ", 4)
                raise self.error(
                    f"kernel {function.name}, pc {pc:#x}: LLVM knows no {PROCESSOR} instruction "
                    f"for the bytes {words}"
                )
            size, text = answer
            found.append(Instruction(pc, size, text, raw[pc : pc + size]))
            pc += size
        self.decoded[function.name] = tuple(found)
        return self.decoded[function.name]

    def reachable(self, function: Symbol) -> tuple[Instruction, ...]:
        """The function's instructions, and all other functions' when it makes a call."""
        own = self.decode(function)
        if not any(i.mnemonic in CALLS for i in own):
            return own
        kernels = {entry[".name"] for entry in self.metadata.get("amdhsa.kernels", ())}
        others = [
            self.decode(s)
            for s in self.functions(STT_FUNC)
            if s.name not in kernels and s.value != function.value
        ]
        return tuple(sorted((i for part in (own, *others) for i in part), key=lambda i: i.pc))

    def loaded(self, address: int, size: int) -> bytes | None:
        for segment in self.segments:
            start = address - segment.address
            if start >= 0 and start + size <= len(segment.data):
                return segment.data[start : start + size]
        return None

    def kernel(self, entry: dict, by_name: dict[str, Symbol]) -> Kernel:
        name = entry[".name"]
        symbol = by_name.get(entry[".symbol"])
        raw = self.loaded(symbol.value, DESCRIPTOR_BYTES) if symbol else None
        if symbol is None or raw is None:
            raise self.error(f"kernel {name}: no kernel descriptor {entry['.symbol']}")
        try:
            descriptor = parse_descriptor(raw)
        except ValueError as error:
            raise self.error(f"kernel {name}: {error}") from error
        start = symbol.value + descriptor.entry_offset
        kinds = (STT_FUNC, STT_AMDGPU_HSA_KERNEL)
        function = next((s for s in self.functions(*kinds) if s.value == start), None)
        if function is None:
            raise self.error(f"kernel {name}: its entry {start:#x} is no function of .text")
        if entry[".wavefront_size"] != WAVE_SIZE:
            raise self.error(f"kernel {name}: waves of {entry['.wavefront_size']} lanes, not 64")
        header = start - self.text.address
        preload = header + PRELOAD_HEADER_BYTES if descriptor.preload_length else None
        args = [
            Argument(a[".offset"], a[".size"], a[".value_kind"], a.get(".name", ""))
            for a in entry.get(".args", ())
        ]
        required = entry.get(".reqd_workgroup_size")
        kernel = Kernel(
            name=name,
            header_entry=header,
            preload_entry=preload,
            entry=header if preload is None else preload,
            instructions=self.reachable(function),
            descriptor=descriptor,
            args=tuple(args),
            max_workgroup_size=entry[".max_flat_workgroup_size"],
            reqd_workgroup_size=tuple(required) if required else None,
            wavefront_size=entry[".wavefront_size"],
            vgpr_count=entry[".vgpr_count"],
            agpr_count=entry.get(".agpr_count", 0),
            sgpr_count=entry[".sgpr_count"],
            vgpr_spills=entry.get(".vgpr_spill_count", 0),
            sgpr_spills=entry.get(".sgpr_spill_count", 0),
            lines=self.lines,
            text_address=self.text.address,
        )
        try:
            kernel.at(kernel.entry)
        except KeyError:
            raise self.error(
                f"kernel {name}: its entry pc {kernel.entry:#x} is no instruction"
            ) from None
        return kernel

    def read(self) -> CodeObject:
        by_name = {s.name: s for s in self.symbols}
        entries = self.metadata.get("amdhsa.kernels", ())
        if not entries:
            raise self.error("it holds no kernel")
        try:
            kernels = {entry[".name"]: self.kernel(entry, by_name) for entry in entries}
        except KeyError as error:
            raise self.error(f"its metadata lacks the key {error}") from error
        target = self.metadata.get("amdhsa.target", f"amdgcn-amd-amdhsa--{PROCESSOR}")
        private = {n for name in kernels for n in (name, f"{name}.kd")}
        others = {
            s.name: (s.value, s.size)
            for s in self.symbols
            if s.name and s.section and s.name not in private
        }
        return CodeObject(
            path=self.path,
            digest=hashlib.sha256(self.data).hexdigest(),
            target=target,
            version=CODE_OBJECT_VERSION[self.elf.abi_version],
            kernels=kernels,
            segments=self.segments,
            text_address=self.text.address,
            symbols=others,
        )
