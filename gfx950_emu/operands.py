"""Operands of LLVM's text: registers, constants and the modifiers written around them.

The opcode table (csrc, read through build.core()) gives each instruction a form: words of a role
and a type. Roles:

    d r w   VGPR written; written and read; source that is also written (swaps)
    m k     SGPR pair with a bit for each lane: written; read
    x       SGPR written
    s v     source of any kind; VGPR only
    a g q   address VGPRs or `off`; base SGPRs or `off`; buffer descriptor
    t @     data of a store or atomic; where an atomic puts the old value, if it does
    n o     a number or the soffset; offset of a scalar load
    i16 u16 signed and unsigned 16-bit immediates
    j h     branch distance in dwords; hwreg()
    wait msg  counters of s_waitcnt; a message

Types: b16 b32 b64 ... integers of that many bits; f16 f32 f64 bf16; pk16 pkb16 pk32 packed floats,
packed integers, two f32; `?` a VGPR range of any length.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

KIND_NONE, KIND_VGPR, KIND_SGPR, KIND_CONST, KIND_SPECIAL = range(5)
(T_B32, T_F32, T_F16, T_B16, T_BF16, T_B64, T_F64, T_PK16, T_PKB16, T_PK32, T_WIDE, T_MASK) = range(
    12
)
MOD_NEG, MOD_ABS, MOD_SEXT = 1, 2, 4
SEL = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
SEL_DWORD = 6

# type word -> (type, dwords)
TYPES = {
    "b32": (T_B32, 1),
    "f32": (T_F32, 1),
    "f16": (T_F16, 1),
    "b16": (T_B16, 1),
    "bf16": (T_BF16, 1),
    "b64": (T_B64, 2),
    "f64": (T_F64, 2),
    "pk16": (T_PK16, 1),
    "pkb16": (T_PKB16, 1),
    "pk32": (T_PK32, 2),
    "": (T_B32, 1),
    "?": (T_WIDE, 0),
}
NAMED_SGPRS = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
SPECIAL = {
    "scc": 0,
    "src_scc": 0,
    "vccz": 1,
    "src_vccz": 1,
    "execz": 2,
    "src_execz": 2,
    "src_shared_base": 3,
    "src_shared_limit": 4,
    "src_private_base": 5,
    "src_private_limit": 6,
}
REGISTER = re.compile(r"^(v|a|s|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")
INTEGER = re.compile(r"^-?(?:0x[0-9a-fA-F]+|\d+)$")
FLOAT = re.compile(r"^-?\d+\.\d+(?:e[-+]?\d+)?$")
HALF_OF_PI = "0.15915494"  # 1 / (2 pi), an inline constant with its own bits
INV_2PI = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}


class OperandError(ValueError):
    """This text is no operand that the form allows."""


@dataclass
class Operand:
    kind: int = KIND_NONE
    type: int = T_B32
    width: int = 1
    mods: int = 0
    sel: int = SEL_DWORD
    reg: int = 0
    lit: int = 0

    def pack(self) -> bytes:
        return struct.pack(
            "<BBBBBBHQ",
            self.kind,
            self.type,
            self.width,
            self.mods,
            self.sel,
            0,
            self.reg,
            self.lit,
        )


NONE = Operand(width=0)


def type_of(word: str) -> tuple[int, int]:
    """(type, dwords) of a form's type word."""
    if word in TYPES:
        return TYPES[word]
    if word.startswith("b") and word[1:].isdigit():
        return T_WIDE, int(word[1:]) // 32
    raise AssertionError(f"the opcode table has a form with type {word!r}")


def register(text: str, accum_offset: int) -> tuple[int, int, int] | None:
    """(kind, number, dwords), or None when the text names no register."""
    if text in NAMED_SGPRS:
        return KIND_SGPR, *NAMED_SGPRS[text]
    found = REGISTER.match(text)
    if not found:
        return None
    letter, one, first, last = found.groups()
    low = int(one if one is not None else first)
    count = 1 if one is not None else int(last) - low + 1
    if letter == "ttmp":
        return KIND_SGPR, 108 + low, count
    if letter == "s":
        return KIND_SGPR, low, count
    return KIND_VGPR, low + (accum_offset if letter == "a" else 0), count


def float_bits(text: str, bits: int) -> int:
    negative = text.startswith("-")
    if text.lstrip("-").startswith(HALF_OF_PI):
        return INV_2PI[bits] | negative << (bits - 1)
    code = {16: "<e", 32: "<f", 64: "<d"}[bits]
    return int.from_bytes(struct.pack(code, float(text)), "little")


def constant(text: str, type_: int, width: int, double: bool) -> int | None:
    """Bits of a constant in the operand's type, sign-extended to 64; None when it is none."""
    if INTEGER.match(text):
        value = int(text, 0)
        if type_ == T_F64 and text.startswith("0x"):
            return value << 32  # a literal gives the high half
        if type_ in (T_PK16, T_PKB16, T_PK32) and not -16 <= value <= 64 and type_ == T_PK32:
            raise OperandError(f"literal {text} in a packed f32 operand")
        return value & (2**64 - 1)
    if not FLOAT.match(text):
        return None
    if type_ in (T_F16, T_B16, T_PK16):
        return float_bits(text, 16)
    if type_ in (T_BF16, T_PKB16):
        raise OperandError(f"constant {text} in a bf16 or packed integer operand")
    if type_ in (T_F64, T_B64) or (type_ == T_WIDE and double):
        return float_bits(text, 64)
    if type_ == T_PK32:
        return float_bits(text, 32)
    return float_bits(text, 32)


def strip_modifiers(text: str, type_: int) -> tuple[str, int]:
    """The bare operand and its neg, abs and sext bits."""
    mods = 0
    if text.startswith("-") and not (FLOAT.match(text) or INTEGER.match(text)):
        mods, text = MOD_NEG, text[1:]
    for word, bit in (("neg(", MOD_NEG), ("sext(", MOD_SEXT), ("abs(", MOD_ABS)):
        if text.startswith(word) and text.endswith(")"):
            mods, text = mods | bit, text[len(word) : -1]
    if text.startswith("|") and text.endswith("|"):
        mods, text = mods | MOD_ABS, text[1:-1]
    if mods & (MOD_NEG | MOD_ABS) and type_ not in (T_F32, T_F16, T_BF16, T_F64):
        raise OperandError(f"neg or abs on an operand that is no float: {text}")
    return text, mods


def source(text: str, word: str, accum_offset: int, vgpr_only: bool, double: bool) -> Operand:
    """A source of type `word`."""
    type_, width = type_of(word)
    text, mods = strip_modifiers(text, type_)
    found = register(text, accum_offset)
    if found:
        kind, number, count = found
        if vgpr_only and kind != KIND_VGPR:
            raise OperandError(f"{text} is no vector register")
        if width and count != width:
            raise OperandError(f"{text} has {count} dwords, the instruction takes {width}")
        return Operand(kind, type_, count, mods, reg=number)
    if vgpr_only:
        raise OperandError(f"{text} is no vector register")
    if text in SPECIAL:
        return Operand(KIND_SPECIAL, type_, max(width, 1), mods, reg=SPECIAL[text])
    value = constant(text, type_, width, double)
    if value is None:
        raise OperandError(f"{text} is no operand that the decoder knows")
    return Operand(KIND_CONST, type_, min(max(width, 1), 2), mods, lit=value)


def split(text: str) -> list[str]:
    """Parts between commas that lie outside of brackets."""
    parts, depth, start = [], 0, 0
    for k, c in enumerate(text):
        if c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:k].strip())
            start = k + 1
    last = text[start:].strip()
    if last:
        parts.append(last)
    return parts
