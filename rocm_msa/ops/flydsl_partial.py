"""What a page gives a row, and a row's result from it: shared by the attention kernels.

    partial      x = m + log2 l - 8 and O / l, 16 heads: fp16 of E4M3 pages, fp32 of bf16 pages
    result       sum over the slots s, in their order, of 2^(x_s - max x) (O / l)_s, over the same
                 sum of the powers alone

A partial depends on the row's query and the page alone, so that it does not matter for a bit
whether it went through registers, LDS or memory, nor who else used the page. fp16 rounds 2^-11 of a
value, a quarter of the rounding of a bf16 result. (m, l, O): flydsl_products.py. Traced code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.device import convert, wave
from rocm_msa.device.memory import Bytes, global_bytes, loads_are_issued
from rocm_msa.ops.flydsl_attend import HEADS
from rocm_msa.ops.flydsl_page import PIECE, PIECES_BYTES, Format
from rocm_msa.ops.flydsl_products import P_SHIFT

LN2 = 0.6931471805599453
NONE = float("-inf")
AT_ONCE = 16  # slots whose partials are on their way together


def partial_bytes(form: Format) -> int:
    """Of O / l of a page and row."""
    return form.d_tiles * PIECES_BYTES // (1 if form.value_bytes == 2 else 2)


def log_weight(m: fx.Float32, total: fx.Float32) -> fx.Float32:
    return m + wave.log2(total) - float(P_SHIFT)


def pack(form: Format, out: list[fx.Vector], total: fx.Float32) -> list[fx.Vector]:
    """O / l as 16-byte pieces: one a tile of 16 dims in fp32, one for two tiles in fp16."""
    inverse = fx.Vector.filled(4, wave.rcp(total), fx.Float32)
    scaled = [tile * inverse for tile in out]
    if form.value_bytes == 2:
        return [tile.bitcast(fx.Int32) for tile in scaled]
    words = [convert.f16_word(tile[i], tile[i + 1]) for tile in scaled for i in (0, 2)]
    return [fx.Vector.from_elements(words[i : i + 4], fx.Int32) for i in range(0, len(words), 4)]


def store_pieces(place: Bytes, pieces: list[fx.Vector], lane) -> None:
    """Write a partial, in the order of the lanes."""
    for i, piece in enumerate(pieces):
        place.store(piece, offset=lane * PIECE + PIECES_BYTES * i)


# A lane of those that merge: one head, eight dims.


def merging_waves(form: Format) -> int:
    return form.d_tiles // 2


def merge_place(w, lane) -> SimpleNamespace:
    """head; tile of 16 dims; half: which eight of them. Lanes read LDS without conflicts."""
    j = lane // HEADS
    return SimpleNamespace(head=lane % HEADS, tile=2 * w + j % 2, half=j // 2)


def load_eight(form: Format, part: Bytes, at: SimpleNamespace, offset: int) -> list:
    """A lane's eight dims of a partial, in order, fp32."""
    lane = 2 * at.half * HEADS + at.head
    if form.value_bytes == 2:
        place = part.at(at.tile * PIECES_BYTES + lane * PIECE)
    else:
        place = part.at(at.tile // 2 * PIECES_BYTES + lane * PIECE + at.tile % 2 * 8)
    found = []
    for first in (offset, offset + HEADS * PIECE):  # two lanes hold them
        if form.value_bytes == 2:
            four = place.load(fx.Float32, 4, offset=first)
            found.append([four[r] for r in range(4)])
        else:
            words = place.load(fx.Uint32, 2, offset=first, align=8)
            found.append([x for i in (0, 1) for x in convert.f16_values(words[i])])
    a, b = found
    if form.dtype is CacheDType.NVFP4:  # even dims, odd dims
        return [x[r] for r in range(4) for x in (a, b)]
    return [*a, *b]


def merge(x: list, part_of: Callable[[int], list]):
    """(largest x, sum of the powers, eight weighted sums).

    x: of each slot, -inf for no partial. part_of: a slot's eight dims, then zeros.
    """
    top = x[0]
    for other in x[1:]:
        top = wave.maximum(top, other)
    safe = (top > NONE).select(top, fx.Float32(0.0))
    total, sums = fx.Float32(0.0), [fx.Float32(0.0)] * 8
    for slot, value in enumerate(x):
        if slot and slot % AT_ONCE == 0:
            loads_are_issued()  # no more of them: registers
        weight = wave.exp2(value - safe)
        total = total + weight
        sums = [fx.math.fma(weight, p, s) for p, s in zip(part_of(slot), sums, strict=True)]
    return top, total, sums


@flyc.jit
def store_result(q_dtype, a, row, head, dim, at, top, total, sums):
    """Write a lane's dims of a row, from dim + 16 tile + 8 half on, and the first lanes lse.

    a: of the kernel's arguments v_scale, group, out, out_row, out_head, lse, q_heads.
    """
    word = convert.bf16_word if q_dtype == "bf16" else convert.f16_word
    has = top > NONE
    factor = has.select(a.v_scale * wave.rcp(total), fx.Float32(0.0))
    sums = [value * factor for value in sums]
    packed = [word(sums[i], sums[i + 1]) for i in range(0, 8, 2)]
    number, first = head * a.group + at.head, dim + at.tile * 16 + at.half * 8
    if at.head < a.group:
        to = fx.Int64(row) * a.out_row + fx.Int64(number) * a.out_head + fx.Int64(first)
        global_bytes(a.out).at(to * 2).store(fx.Vector.from_elements(packed, fx.Int32))
        if first == 0:
            value = has.select((top + wave.log2(total)) * LN2, fx.Float32(NONE))
            to = fx.Int64(row) * fx.Int64(a.q_heads) + fx.Int64(number)
            global_bytes(a.lse).at(to * 4).store(value)
