"""K, V and Q of the attention kernels for gfx950, on their way from a page to matrix operands.

A tile is 16 tokens of a page. A lane of a wave holds of tile t, with g = lane // 16:

    K, V as stored     token 16 t + lane % 16: 16 bytes of NVFP4 (32 values, d = 32 g ..), or a
                       piece of 16 bytes out of each 64 (FP8, bf16)
    K as operand       the same token and values as E4M3 or bf16
    V in LDS           a row a token, padded; the products read it transposed (flydsl_products.py)

Workgroups may share a page's V by d, each a contiguous part. Where a token's part is narrower than
the four pieces that lanes g hold, they hold those of neighbouring tiles instead: a tile is then a
run of 32 or 64 tokens, and a page has fewer.

Order of d. The NVFP4 table gives even and odd values of a dword apart (nvfp4.value_order). K and Q
agree on that order; V's order in LDS decides which d a result is.

Rounding. K and V: NVFP4 through the table, FP8 and bf16 as stored. Q for E4M3 pages: two terms,
2^k q = hi + lo, each rounded to E4M3: eight bits, as good as bf16. Traced code: see device/.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import Page, main_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import convert, mfma, nvfp4, wave
from rocm_msa.device.memory import Bytes, loads_are_issued
from rocm_msa.ops.flydsl_attend import HEAD_DIM, Q_BYTES

TILES = BLOCK_TOKENS // mfma.TILE
PIECE = 16  # bytes of one load or store of a lane
PIECES_BYTES = PIECE * wave.WAVE


@dataclass(frozen=True)
class Stored:
    """A tile of K or V as stored. row_bytes: of a token. part_bytes: of them, what is loaded.

    columns: neighbouring pieces of a token, in lanes g.
    """

    row_bytes: int
    part_bytes: int
    columns: int

    @property
    def tokens(self) -> int:
        return wave.WAVE // self.columns

    @property
    def tiles(self) -> int:
        return BLOCK_TOKENS // self.tokens

    @property
    def loads(self) -> int:
        """16-byte loads a lane, 64 bytes apart."""
        return self.part_bytes // (PIECE * self.columns)

    def place(self, lane):
        """(token, column) of a lane in a tile."""
        g = lane // mfma.TILE
        if self.columns == 4:
            return lane % mfma.TILE, g
        return lane % mfma.TILE + g // self.columns * mfma.TILE, g % self.columns


@dataclass(frozen=True)
class Format:
    """How a page's values reach the matrix pipe; sizes in bytes. See `Format.of`.

    value_bytes: of an operand. terms: of Q and P. parts: of d, that V is cut into.
    """

    dtype: CacheDType
    page: Page
    value_bytes: int
    terms: int
    parts: int

    @classmethod
    def of(cls, dtype: CacheDType, parts: int = 1) -> Format:
        page = main_page(1, HEAD_DIM, dtype)
        return cls(dtype, page, *((2, 1) if dtype is CacheDType.BF16 else (1, 2)), parts)

    @property
    def pieces(self) -> int:
        """16-byte pieces a lane holds of a tile, as operand: 2 or 4."""
        return HEAD_DIM * self.value_bytes * mfma.TILE // PIECES_BYTES

    @property
    def d_tiles(self) -> int:
        """Tiles of 16 dims in a part of V."""
        return HEAD_DIM // mfma.TILE // self.parts

    @property
    def table_bytes(self) -> int:
        """The table in LDS."""
        return nvfp4.TABLE_BYTES if self.dtype is CacheDType.NVFP4 else 0

    @property
    def k_bytes(self) -> int:
        """K of a page in LDS, as operands."""
        return TILES * self.pieces * PIECES_BYTES

    @property
    def row_stride(self) -> int:
        """Of V in LDS, a row a token. E4M3: 16 rows in a column lie in 16 groups of 4 banks."""
        return HEAD_DIM * self.value_bytes // self.parts + 16 * self.value_bytes

    @property
    def tile_stride(self) -> int:
        """E4M3: so do the 8 + 8 rows of two tiles that one transposed read takes."""
        return mfma.TILE * self.row_stride + (128 if self.value_bytes == 1 else 0)

    @property
    def v_bytes(self) -> int:
        """V of a page in LDS."""
        return TILES * self.tile_stride

    def stored(self, side: str) -> Stored:
        """How a wave loads tiles of K or V."""
        row_bytes = self.page.head_layout[f"{side}_data"].nbytes // BLOCK_TOKENS
        part_bytes = row_bytes // (self.parts if side == "v" else 1)
        return Stored(row_bytes, part_bytes, min(4, part_bytes // PIECE))

    def query_order(self) -> list[int]:
        """Value in each operand byte of 32 loaded query values (of 16 values, twice, for FP8)."""
        if self.dtype is CacheDType.NVFP4:
            return nvfp4.value_order()
        return list(range(32))


# Loading


def load_tile(form: Format, head: Bytes, side: str, tile, lane, part=0) -> list:
    """A lane's share of a tile, as stored. `head`: start of the KV head's run in the page.

    tile: an int, whose offset then costs nothing, or an Int32. part: of V, an int or Int32.
    """
    data, shape = form.page.head_layout[f"{side}_data"], form.stored(side)
    token, column = shape.place(lane)
    if not isinstance(tile, int):
        token, tile = token + tile * shape.tokens, 0
    first = data.offset + tile * shape.tokens * shape.row_bytes
    place = head.at(token * shape.row_bytes + column * PIECE + part * shape.part_bytes)
    found = [place.load(fx.Uint32, 4, offset=first + 64 * i) for i in range(shape.loads)]
    if form.dtype is not CacheDType.NVFP4:
        return found
    row_bytes = HEAD_DIM // nvfp4.GROUP
    place = head.at(token * row_bytes + column * 2 + part * (row_bytes // form.parts))
    first = form.page.head_layout[f"{side}_scales"].offset + tile * shape.tokens * row_bytes
    return [found[0], place.load(fx.Uint16, offset=first)]


def operand(form: Format, loaded: list, table: Bytes | None) -> list[fx.Vector]:
    """16-byte pieces of the matrix operand."""
    if form.dtype is not CacheDType.NVFP4:
        return loaded
    words, scales = loaded
    found = nvfp4.dequantise_chunk(words, nvfp4.scale_rows(table, fx.Uint32(scales)))
    return [found.shuffle(found, list(range(4 * i, 4 * i + 4))) for i in (0, 1)]


def finite(form: Format, pieces: list[fx.Vector]) -> list[fx.Vector]:
    """Zeros for NaN and infinities, which only memory that no token owns can hold."""
    if form.dtype is CacheDType.NVFP4:
        return pieces  # the table gives none
    exponent, one, width = (
        (0x7F7F7F7F, 0x01010101, 8)
        if form.dtype is CacheDType.FP8
        else (0x7F807F80, 0x00800080, 16)
    )
    found = []
    for piece in pieces:
        words = []
        for i in range(4):
            # The top bit of each element that is not finite, moved to its lowest bit.
            top = (piece[i] & exponent) + one
            top = (top >> (width - 1)) & (0x01010101 if width == 8 else 0x00010001)
            words.append(piece[i] & ~((top << width) - top))
        found.append(fx.Vector.from_elements(words, fx.Uint32))
    return found


def store_v(form: Format, v_lds: Bytes, tile: int, pieces: list[fx.Vector], lane) -> None:
    """Write a lane's share of a tile of V, a row a token; `pieces`: as operand."""
    shape = form.stored("v")
    g, token = lane // mfma.TILE, lane % mfma.TILE
    # NVFP4: two neighbouring pieces from one load; else the load's, 64 bytes apart.
    width, step = (2 * PIECE, PIECE) if form.dtype is CacheDType.NVFP4 else (PIECE, 4 * PIECE)
    place = v_lds.at(token * form.row_stride + g % shape.columns * width)
    if shape.columns < 4:
        place = place.at(g // shape.columns * form.tile_stride)
    first = tile * (4 // shape.columns) * form.tile_stride
    for i, piece in enumerate(pieces):
        place.store(piece, offset=first + i * step)


def operands(form: Format, pieces: list[fx.Vector]) -> list[fx.Vector]:
    """Pieces as operands of the products: two make a K = 128 operand of E4M3, one makes bf16's."""
    if form.value_bytes == 2:
        return pieces
    return [pieces[i].shuffle(pieces[i + 1], list(range(8))) for i in range(0, len(pieces), 2)]


def load_query(form: Format, query: Bytes, lane) -> list[list[fx.Vector]]:
    """The prepared query of a row: operands of each term."""
    pieces = [
        query.load(fx.Uint32, 4, offset=lane * PIECE + PIECES_BYTES * i)
        for i in range(Q_BYTES // PIECES_BYTES)
    ]
    each = len(pieces) // form.terms
    return [operands(form, pieces[i * each : (i + 1) * each]) for i in range(form.terms)]


# LDS


@flyc.jit
def stage_page(form, base, w, lane, table, k_lds, v_lds, live):
    """Wave w: tile w of a page into LDS, K as operands, V as rows. A barrier must follow."""
    loaded = [load_tile(form, base, side, w, lane) for side in ("k", "v")]
    loads_are_issued()
    k, v = (operand(form, tile, table) for tile in loaded)
    place = k_lds.at(w * (form.pieces * PIECES_BYTES) + lane * PIECE)
    for i in fx.range_constexpr(form.pieces):
        place.store(k[i], offset=i * PIECES_BYTES)
    if live < BLOCK_TOKENS:
        v = finite(form, v)
    store_v(form, v_lds.at(w * form.tile_stride), 0, v, lane)


def staged_k(form: Format, k_lds: Bytes, tile: int, lane) -> list[fx.Vector]:
    """Operands of a K tile that `stage_page` left in LDS."""
    first = tile * form.pieces * PIECES_BYTES
    pieces = [
        k_lds.load(fx.Uint32, 4, offset=lane * PIECE + (first + i * PIECES_BYTES))
        for i in range(form.pieces)
    ]
    return operands(form, pieces)


# The query


def query_pieces(q_dtype: str, form: Format, q: Bytes, lane):
    """(16-byte pieces of the operands of a head's query, what its products are to be scaled by).

    E4M3 terms are of 2^k q, k such that the largest magnitude of the head lies in [128, 256).
    """
    g = lane // 16
    nvfp4_pages = form.dtype is CacheDType.NVFP4
    values = []
    for i in range(4):  # 16 bytes, 8 values each
        if nvfp4_pages:
            at = g * 64 + 16 * i
        elif form.dtype is CacheDType.FP8:
            at = g * 32 + 128 * (i // 2) + 16 * (i % 2)
        else:
            at = g * 16 + 64 * i
        words = q.load(fx.Uint32, 4, offset=at)
        if form.dtype is CacheDType.BF16 and q_dtype == "bf16":
            values.append(words)
            continue
        unpack = convert.bf16_values if q_dtype == "bf16" else convert.f16_values
        values.append([v for j in range(4) for v in unpack(words[j])])
    if form.dtype is CacheDType.BF16:
        if q_dtype != "bf16":
            values = [
                fx.Vector.from_elements(
                    [convert.bf16_word(v[2 * j], v[2 * j + 1]) for j in range(4)], fx.Int32
                )
                for v in values
            ]
        return values, fx.Float32(1.0)
    values = [v for eight in values for v in eight]
    top = fx.Float32(0.0)
    for v in values:
        top = wave.maximum(top, wave.magnitude(v))
    exponent = fx.Int32(fx.Uint32(wave.column_max(top).bitcast(fx.Uint32)) >> 23)
    exponent = (exponent < 8).select(fx.Int32(8), exponent)  # both powers stay normal numbers
    up = ((261 - exponent) << 23).bitcast(fx.Float32)
    down = ((exponent - 7) << 23).bitcast(fx.Float32)
    ordered = [values[i] * up for i in form.query_order()]
    terms = convert.fp8_two_terms([ordered[4 * i : 4 * i + 4] for i in range(8)])
    pieces = [
        fx.Vector.from_elements(term[4 * i : 4 * i + 4], fx.Int32) for term in terms for i in (0, 1)
    ]
    return pieces, down
