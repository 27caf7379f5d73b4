"""One page against the 16 query heads of a row, by one wave: the products of the attention kernels.

    S = K Q^T   [128 tokens, 16 heads]      x = factor S,  m = max x,  p = 2^(x - m + 8)
    O = V^T P   [128 dims, 16 heads]        l = sum p

head = lane % 16 and g = lane // 16 throughout: a matrix result gives a lane one head, so m, l and
every scale of a head are where they are needed, and P is an operand of the second product as it
lies. A lane of tile t holds scores of the tokens 16 t + 4 g + r, r = 0..3.

P of E4M3 pages is two terms, p = hi + lo, each rounded to E4M3; of bf16 pages bf16. l is the sum of
the rounded p, in the matrix pipe. Everything else is fp32. What attention ops make of (m, l, O):
flydsl_partial.py. Traced code: see device/; operands: see flydsl_page.py.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import convert, mfma, wave
from rocm_msa.device.memory import Bytes
from rocm_msa.ops.flydsl_page import TILES, Format

P_SHIFT = 8  # p reaches 2^8: E4M3 then keeps p down to 2^-17
LOW = -3.0e38  # stands for -inf where a difference is taken


def _product(form: Format, a: list, terms: list[list], c: fx.Vector) -> fx.Vector:
    """c + a . (sum of the terms)."""
    call = mfma.mfma_bf16 if form.value_bytes == 2 else mfma.mfma_fp8
    for term in terms:
        for left, right in zip(a, term, strict=True):
            c = call(left, right, c)
    return c


# The two products


def score(form: Format, k: list, query: list[list], factor: fx.Float32) -> fx.Vector:
    """x of one tile: fp32 x 4. k: the tile's operands."""
    return _product(form, k, query, mfma.zeros()) * factor


@flyc.jit
def mask_tail(x: list, live: fx.Int32, lane: fx.Int32):
    """-inf at the tokens from `live` on."""
    if live < BLOCK_TOKENS:
        limit = live - 4 * (lane // 16)
        x = [
            fx.Vector.from_elements(
                [(limit > 16 * t + r).select(x[t][r], fx.Float32(float("-inf"))) for r in range(4)],
                fx.Float32,
            )
            for t in range(TILES)
        ]
    return x


def softmax(form: Format, x: list):
    """(m, P as operands of each term) of a page's scores."""
    top = x[0][0]
    for t in range(TILES):
        for r in range(4):
            top = wave.maximum(top, x[t][r])
    m = wave.column_max(top)
    shift = m - float(P_SHIFT)
    p = [[wave.exp2(x[t][r] - shift) for r in range(4)] for t in range(TILES)]
    if form.value_bytes == 2:
        words = [[convert.bf16_word(*row[:2]), convert.bf16_word(*row[2:])] for row in p]
        pairs = [words[t] + words[t + 1] for t in range(0, TILES, 2)]
        return m, [[fx.Vector.from_elements(pair, fx.Int32) for pair in pairs]]
    return m, [[fx.Vector.from_elements(term, fx.Int32)] for term in convert.fp8_two_terms(p)]


def weigh(form: Format, v_lds: Bytes, p: list[list], lane):
    """(l, O as vectors of fp32 x 4: dims 16 i + 4 g + r of V's order) of a page."""
    ones = 0x3F803F80 if form.value_bytes == 2 else 0x38383838
    words = 4 if form.value_bytes == 2 else mfma.FP8_WORDS
    one = fx.Vector.filled(words, fx.Int32(ones), fx.Int32)
    total = _product(form, [one] * len(p[0]), p, mfma.zeros())[0]
    out = []
    for i in range(form.d_tiles):
        out.append(_product(form, _v_operands(form, v_lds, i, lane), p, mfma.zeros()))
    return total, out


def _v_operands(form: Format, v_lds: Bytes, d_tile: int, lane) -> list[fx.Vector]:
    """Operands of V^T for 16 dims: transposed reads, 8 bytes a lane.

    16 lanes read rows of 16 values together and get a column each. Lane j gives the address of
    8 bytes: of row j // 2 of 8 (E4M3), of row j // 4 of 4 (bf16). The rows are the tokens whose P
    the lane group holds.
    """
    j, g = lane % 16, lane // 16
    pair = fx.Vector.make_type(2, fx.Int32)
    words = []
    if form.value_bytes == 1:
        row, part = j // 2, j % 2
        at = (row // 4) * form.tile_stride + (4 * g + row % 4) * form.row_stride + part * 8
        for u in range(TILES // 2):
            place = v_lds.at(at).at(2 * u * form.tile_stride + d_tile * 16)
            got = fx.Vector(rocdl.ds_read_tr8_b64_(pair, place.pointer))
            words += [got[0], got[1]]
        return [fx.Vector.from_elements(words, fx.Int32)]
    at = (4 * g + j // 4) * form.row_stride + (j % 4) * 8
    quad = fx.Vector.make_type(4, fx.Int16)
    for t in range(TILES):
        place = v_lds.at(at).at(t * form.tile_stride + d_tile * 32)
        got = fx.Vector(rocdl.ds_read_tr16_b64_(quad, place.pointer)).bitcast(fx.Int32)
        words += [got[0], got[1]]
    return [fx.Vector.from_elements(words[4 * c : 4 * c + 4], fx.Int32) for c in range(TILES // 2)]
