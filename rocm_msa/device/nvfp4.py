"""NVFP4 to E4M3 by a table in LDS, the bytes of formats/nvfp4_lut.py.

    row of a scale byte: 8 bytes, one ds_read_b64        byte m: the scaled magnitude of code m
    x = 8 nibbles, value 2 j in the low half of byte j
    even = perm(row, x & 0x07070707)         ^ (x << 4) & 0x80808080      values 0 2 4 6 of x
    odd  = perm(row, (x >> 4) & 0x07070707)  ^ x & 0x80808080             values 1 3 5 7

Eight instructions for eight values: the mask is needed, since v_perm_b32 reads selectors above 7
as something else, and the sign and the XOR are one v_bitop3_b32. A dequantised run of 32 values is
8 dwords; `value_order` says which value lies where. Dot products take both sides in that order
instead of sorting it.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr import rocdl

from rocm_msa.device.memory import Bytes

TABLE_BYTES = 2048
GROUP = 16  # values that share a scale
CHUNK = 32  # values of one 16-byte load
_MAGNITUDES = 0x07070707
_SIGNS = 0x80808080  # to be wrapped: a plain int beyond 31 bits would make the sum 64 bits wide


def value_order(chunk: int = CHUNK) -> list[int]:
    """Value in each byte of a dequantised chunk: byte 4 i + j of dword pair i // 2."""
    order = []
    for word in range(chunk // 8):
        for parity in (0, 1):
            order += [8 * word + 2 * byte + parity for byte in range(4)]
    return order


def copy_table(table: Bytes, lds: Bytes, thread: fx.Int32, threads: int) -> None:
    """Copy the table into LDS by `threads` (128, 256 or 512) threads; a barrier must follow."""
    size = TABLE_BYTES // threads
    if size not in (4, 8, 16):
        raise ValueError(f"threads: expected 128, 256 or 512, got {threads}")
    lds.store(table.load(fx.Uint32, size // 4, offset=thread * size), offset=thread * size)


def scale_rows(lds: Bytes, scales: fx.Uint32) -> list[fx.Vector]:
    """Table rows of the two scale bytes in the low half of `scales`."""
    low, high = (scales & 0xFF) << 3, (scales >> 8 & 0xFF) << 3
    return [lds.load(fx.Uint32, 2, offset=fx.Int32(at), align=8) for at in (low, high)]


def dequantise_word(word: fx.Uint32, row: fx.Vector) -> tuple[fx.Uint32, fx.Uint32]:
    """8 nibbles -> E4M3 bytes of the even values and of the odd ones."""
    even = _perm(row, word & _MAGNITUDES) ^ ((word << 4) & fx.Uint32(_SIGNS))
    odd = _perm(row, (word >> 4) & _MAGNITUDES) ^ (word & fx.Uint32(_SIGNS))
    return even, odd


def dequantise_chunk(words: fx.Vector, rows: list[fx.Vector]) -> fx.Vector:
    """32 nibbles (4 dwords, two groups of 16) -> 8 dwords of E4M3 in `value_order`."""
    found = []
    for i in range(4):
        found += dequantise_word(words[i], rows[i // 2])
    return fx.Vector.from_elements(found, fx.Uint32)


def _perm(row: fx.Vector, selectors: fx.Uint32) -> fx.Uint32:
    return fx.Uint32(rocdl.perm_b32(row[1], row[0], selectors))
