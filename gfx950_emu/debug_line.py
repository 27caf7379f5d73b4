"""Source lines from DWARF: the .debug_line section of versions 2 to 5.

Only what `file:line` needs is kept: for each row its address, file and line.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from gfx950_emu.elf import Elf, text_at

# Standard opcodes
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, CONST_ADD_PC, FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
# Extended opcodes
END_SEQUENCE, SET_ADDRESS = 1, 2
# Content types and forms of a version-5 header
LNCT_PATH, LNCT_DIRECTORY = 1, 2
FORM_BLOCK, FORM_STRING, FORM_UDATA, FORM_STRP, FORM_LINE_STRP = 0x09, 0x08, 0x0F, 0x0E, 0x1F
FIXED_FORMS = {0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8, 0x1E: 16}  # data1, 2, 4, 8, 16


class Cursor:
    """Reads little-endian numbers one after the other."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def number(self, size: int, signed: bool = False) -> int:
        self.at += size
        if self.at > self.end:
            raise ValueError("line table cut short")
        return int.from_bytes(self.data[self.at - size : self.at], "little", signed=signed)

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value

    def text(self) -> str:
        text = text_at(self.data, self.at)
        self.at = self.data.index(b"\0", self.at) + 1
        return text


@dataclass(frozen=True)
class LineTable:
    """Rows by address; a row holds until the next one."""

    addresses: tuple[int, ...] = ()
    places: tuple[str | None, ...] = ()  # None ends a sequence

    def find(self, address: int) -> str | None:
        n = bisect.bisect_right(self.addresses, address) - 1
        return self.places[n] if n >= 0 else None

    @classmethod
    def from_elf(cls, elf: Elf) -> LineTable:
        """The table of an object; empty when it has none, or one of a form not known here."""
        section = elf.section(".debug_line")
        if section is None:
            return cls()
        tables = {
            form: elf.content(found) if (found := elf.section(name)) else b""
            for form, name in ((FORM_STRP, ".debug_str"), (FORM_LINE_STRP, ".debug_line_str"))
        }
        data = elf.content(section)
        rows: list[tuple[int, str | None]] = []
        at = 0
        try:
            while at + 4 <= len(data):
                size = int.from_bytes(data[at : at + 4], "little")
                at += 4
                rows += _unit(Cursor(data, at, min(at + size, len(data))), tables)
                at += size
        except (ValueError, IndexError):
            return cls()  # lines only make messages nicer
        # Stable: of several rows at one address the last one holds, and an end gives way.
        rows.sort(key=lambda row: (row[0], row[1] is not None))
        return cls(tuple(r[0] for r in rows), tuple(r[1] for r in rows))


def _unit(cursor: Cursor, tables: dict[int, bytes]) -> list[tuple[int, str | None]]:
    version = cursor.number(2)
    if not 2 <= version <= 5:
        raise ValueError(f"line table of version {version}")
    if version == 5:
        cursor.number(2)  # sizes of an address and of a segment selector
    program = cursor.number(4)
    program += cursor.at
    least = cursor.number(1)
    if version >= 4:
        cursor.number(1)  # operations an instruction: 1, this is no VLIW
    cursor.number(1)  # is_stmt by default
    base, span, first_special = cursor.number(1, True), cursor.number(1), cursor.number(1)
    lengths = [cursor.number(1) for _ in range(first_special - 1)]
    files = _files_v5(cursor, tables) if version == 5 else _files_v4(cursor)
    cursor.at = program
    return _run(cursor, files, least, base, span, first_special, lengths)


def _files_v4(cursor: Cursor) -> dict[int, str]:
    folders, files = [""], {}
    while text := cursor.text():
        folders.append(text)
    while name := cursor.text():
        folder = folders[cursor.leb()]
        cursor.leb(), cursor.leb()  # time and size
        files[len(files) + 1] = _join(folder, name)
    return files


def _files_v5(cursor: Cursor, tables: dict[int, bytes]) -> dict[int, str]:
    folders = [entry.get(LNCT_PATH, "") for entry in _entries(cursor, tables)]
    files = {}
    for n, entry in enumerate(_entries(cursor, tables)):
        folder = folders[entry.get(LNCT_DIRECTORY, 0)] if folders else ""
        files[n] = _join(folder, entry.get(LNCT_PATH, ""))
    return files


def _entries(cursor: Cursor, tables: dict[int, bytes]) -> list[dict]:
    forms = [(cursor.leb(), cursor.leb()) for _ in range(cursor.number(1))]
    return [
        {content: _value(cursor, form, tables) for content, form in forms}
        for _ in range(cursor.leb())
    ]


def _value(cursor: Cursor, form: int, tables: dict[int, bytes]):
    if form in tables:
        return text_at(tables[form], cursor.number(4))
    if form == FORM_STRING:
        return cursor.text()
    if form == FORM_UDATA:
        return cursor.leb()
    if form == FORM_BLOCK:
        return cursor.number(cursor.leb())
    return cursor.number(FIXED_FORMS[form]) if form in FIXED_FORMS else _unknown(form)


def _unknown(form: int):
    raise ValueError(f"line table with form {form:#x}")


def _join(folder: str, name: str) -> str:
    return name if name.startswith("/") or not folder else f"{folder}/{name}"


def _run(
    cursor: Cursor,
    files: dict[int, str],
    least: int,
    base: int,
    span: int,
    first_special: int,
    lengths: list[int],
) -> list[tuple[int, str | None]]:
    """Run a line number program."""
    rows: list[tuple[int, str | None]] = []
    address, file, line = 0, 1, 1

    def emit() -> None:
        # Line 0 says that the code belongs to no line.
        rows.append((address, f"{files.get(file, '?')}:{line}" if line else None))

    while cursor.at < cursor.end:
        opcode = cursor.number(1)
        if opcode >= first_special:
            step = opcode - first_special
            address += step // span * least
            line += base + step % span
            emit()
        elif opcode == 0:
            size = cursor.leb()
            after = cursor.at + size
            kind = cursor.number(1)
            if kind == END_SEQUENCE:
                rows.append((address, None))
                address, file, line = 0, 1, 1
            elif kind == SET_ADDRESS:
                address = cursor.number(size - 1)
            cursor.at = after
        elif opcode == COPY:
            emit()
        elif opcode == ADVANCE_PC:
            address += cursor.leb() * least
        elif opcode == ADVANCE_LINE:
            line += cursor.leb(signed=True)
        elif opcode == SET_FILE:
            file = cursor.leb()
        elif opcode == CONST_ADD_PC:
            address += (255 - first_special) // span * least
        elif opcode == FIXED_ADVANCE_PC:
            address += cursor.number(2)
        else:
            for _ in range(lengths[opcode - 1]):
                cursor.leb()
    return rows
