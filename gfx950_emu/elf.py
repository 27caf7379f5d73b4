"""A reader of 64-bit little-endian ELF files, as far as AMDGPU code objects need it.

Sections, symbols, loadable segments, notes and relocations; nothing is written or relocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

EM_AMDGPU = 224
SHT_SYMTAB, SHT_RELA, SHT_NOTE, SHT_NOBITS, SHT_REL, SHT_DYNSYM = 2, 4, 7, 8, 9, 11
SHF_ALLOC = 2
PT_LOAD = 1
STT_OBJECT, STT_FUNC, STT_AMDGPU_HSA_KERNEL = 1, 2, 10


class ElfError(ValueError):
    """The bytes are not the ELF file that we need."""


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    name: str
    kind: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Segment:
    """Bytes to be mapped at `address`; flags: 1 execute, 2 write, 4 read."""

    address: int
    data: bytes
    flags: int


class Elf:
    """One ELF file in memory. Every offset is checked, so that a cut file is an ElfError."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        if data[:4] != b"\x7fELF":
            raise ElfError(f"not an ELF file: it starts with {data[:16]!r}")
        if data[4:6] != b"\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        self.os_abi, self.abi_version = data[7], data[8]
        head = self.unpack("<HHIQQQIHHHHHH", 16)
        self.kind, self.machine = head[0], head[1]
        self.program_offset, section_offset, self.flags = head[4], head[5], head[6]
        self.program_size, self.program_count = head[8], head[9]
        section_size, section_count, names = head[10], head[11], head[12]
        rows = [
            self.unpack("<IIQQQQIIQQ", section_offset + n * section_size)
            for n in range(section_count)
        ]
        self.sections = [Section("", *row[1:8]) for row in rows]
        if rows:
            table = self.content(self.sections[names])
            self.sections = [Section(text_at(table, row[0]), *row[1:8]) for row in rows]

    def unpack(self, form: str, offset: int) -> tuple:
        try:
            return struct.unpack_from(form, self.data, offset)
        except struct.error as error:
            raise ElfError(f"cut short at byte {offset}: {error}") from None

    def slice(self, offset: int, size: int) -> bytes:
        if offset + size > len(self.data):
            raise ElfError(f"cut short: {offset + size} bytes are needed, {len(self.data)} there")
        return self.data[offset : offset + size]

    def content(self, section: Section) -> bytes:
        if section.kind == SHT_NOBITS:
            return bytes(section.size)
        return self.slice(section.offset, section.size)

    def section(self, name: str) -> Section | None:
        return next((s for s in self.sections if s.name == name), None)

    def symbols(self) -> list[Symbol]:
        """Of .symtab and .dynsym, each symbol once."""
        found: dict[tuple[str, int], Symbol] = {}
        for section in self.sections:
            if section.kind not in (SHT_SYMTAB, SHT_DYNSYM):
                continue
            names = self.content(self.sections[section.link])
            rows = self.content(section)
            for name, info, _, index, value, size in struct.iter_unpack("<IBBHQQ", rows):
                symbol = Symbol(text_at(names, name), info & 15, index, value, size)
                found.setdefault((symbol.name, value), symbol)
        return list(found.values())

    def segments(self) -> list[Segment]:
        """What a loader maps, the zero-filled tail included."""
        found = []
        for n in range(self.program_count):
            row = self.unpack("<IIQQQQQQ", self.program_offset + n * self.program_size)
            kind, flags, offset, address, _, file_size, memory_size, _ = row
            if kind == PT_LOAD:
                data = self.slice(offset, file_size) + bytes(memory_size - file_size)
                found.append(Segment(address, data, flags))
        return found

    def notes(self) -> Iterator[tuple[str, int, bytes]]:
        """(owner, type, content) of each note."""
        for section in self.sections:
            if section.kind != SHT_NOTE:
                continue
            at, end = section.offset, section.offset + section.size
            while at + 12 <= end:
                name_size, size, kind = self.unpack("<III", at)
                name = self.slice(at + 12, name_size).rstrip(b"\0").decode()
                at += 12 + (name_size + 3) // 4 * 4
                yield name, kind, self.slice(at, size)
                at += (size + 3) // 4 * 4

    def relocations(self) -> Iterator[tuple[int, int, int]]:
        """(address, type, symbol index) of the relocations that touch loaded memory."""
        for section in self.sections:
            if section.kind not in (SHT_RELA, SHT_REL):
                continue
            # In a linked object `info` is 0 for the dynamic ones, which are themselves loaded.
            touched = self.sections[section.info] if section.info else section
            if touched.flags & SHF_ALLOC:
                form = "<QQq" if section.kind == SHT_RELA else "<QQ"
                for row in struct.iter_unpack(form, self.content(section)):
                    yield row[0], row[1] & 0xFFFFFFFF, row[1] >> 32


def text_at(table: bytes, offset: int) -> str:
    """The zero-terminated text at an offset of a string table."""
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else None].decode(errors="replace")
