"""Scores of a run of blocks for up to 64 (row, head) pairs on gfx950: traced, shared by two ops.

Four waves take the blocks in turns. Pairs are columns, 16 a matrix tile; A operands are keys, 16
tokens a tile:

    D[token, column] = sum over d of k[token, d] q[column, d]        score = max over the tokens

Lane row + 16 g holds dims 32 g .. 32 g + 31 of token `row` and of column `row`; the order within
them is the one in which the table gives them, on both sides. Blocks that every row sees in full
take no mask; in the others, tokens at and beyond a row's length count as -inf.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import index_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import mfma
from rocm_msa.device.convert import bf16_values, f16_values
from rocm_msa.device.memory import Bytes, global_bytes, lds_bytes
from rocm_msa.device.nvfp4 import (
    TABLE_BYTES,
    copy_table,
    dequantise_chunk,
    scale_rows,
    value_order,
)
from rocm_msa.device.query import STEP, TERMS, split_query
from rocm_msa.device.wave import WAVE, column_reduce, lane_id, wave_id
from rocm_msa.ops.flydsl_host import HEAD_DIM, SCORE_WAVES, TILE

DIMS = HEAD_DIM // (WAVE // TILE)  # of a token or column that a lane holds
TOKEN_TILES = BLOCK_TOKENS // TILE
NONE = float("-inf")
# Tiles whose bytes are asked for together: what a lane holds of them fits in 64 registers.
TILES_AT_ONCE = {"nvfp4": 8, "fp8": 8, "bf16": 4}
# Tiles that a wave has asked for ahead: up to 40 registers beside those of any four column tiles.
TILES_AHEAD = {"nvfp4": 8, "fp8": 4, "bf16": 2}


class Keys:
    """Key tiles of a page as A operands; a lane's part of one token."""

    def __init__(self, kind: str, table: Bytes) -> None:
        layout = index_page(HEAD_DIM, CacheDType.parse(kind)).head_layout
        self.kind, self.table = kind, table
        self.data = layout["k_data"].offset
        self.scales = layout["k_scales"].offset if "k_scales" in layout else 0
        self.token_bytes = CacheDType.parse(kind).data_bytes(HEAD_DIM)
        self.scale_bytes = CacheDType.parse(kind).scale_bytes(HEAD_DIM)
        lane = lane_id()
        self.token, self.group = lane % TILE, lane // TILE

    def load(self, page: Bytes, tile: int):
        """The bytes of tile `tile`: data as 16-byte vectors, and the scales."""
        data = self._data(page, tile)
        if self.kind != "nvfp4":
            return data, None
        at = self.scales + tile * TILE * self.scale_bytes
        place = page.at(self.token * self.scale_bytes + self.group * 2)
        return data, fx.Uint32(place.load(fx.Uint16, offset=at))

    def load_words(self, page: Bytes, tile: int) -> list:
        """The same as a flat list of words, to be kept in registers: no bit of them is touched, so
        that nothing waits for them before they are used."""
        words = [vector[i] for vector in self._data(page, tile) for i in range(4)]
        if self.kind == "nvfp4":
            at = self.scales + tile * TILE * self.scale_bytes
            place = page.at(self.token * self.scale_bytes + self.group // 2 * 4)
            words.append(place.load(fx.Uint32, offset=at))
        return words

    def of_words(self, words: list):
        """What `load` gives, of `load_words`."""
        count = self.token_bytes * DIMS // HEAD_DIM // 4
        data = [fx.Vector.from_elements(words[i : i + 4], fx.Uint32) for i in range(0, count, 4)]
        if self.kind != "nvfp4":
            return data, None
        return data, words[count] >> fx.Uint32(self.group % 2 * 16)

    def _data(self, page: Bytes, tile: int) -> list:
        part = self.token_bytes * DIMS // HEAD_DIM
        at = self.data + tile * TILE * self.token_bytes
        place = page.at(self.token * self.token_bytes + self.group * part)
        return [place.load(fx.Uint32, 4, offset=at + 16 * i, align=16) for i in range(part // 16)]

    def operands(self, loaded) -> list:
        """One operand of 32 E4M3 bytes, or four of 8 bf16 values."""
        data, scales = loaded
        if self.kind == "nvfp4":
            return [dequantise_chunk(data[0], scale_rows(self.table, scales))]
        if self.kind == "fp8":
            words = [vector[i] for vector in data for i in range(4)]
            return [fx.Vector.from_elements(words, fx.Uint32)]
        return data


def query_operands(kind: str, dtype: str, words: list):
    """Of the lane's part of a query, four vectors of four words: B operands of its column (FP8
    terms, or bf16), and the factor that undoes them."""
    if kind == "bf16":
        return words, fx.Float32(1.0)
    widen = bf16_values if dtype == "bf16" else f16_values
    values = [x for vector in words for i in range(4) for x in widen(vector[i])]
    if kind == "nvfp4":
        values = [values[i] for i in value_order(DIMS)]
    return split_query(values, TERMS[dtype])


def _product(kind: str, keys: list, columns: list):
    """[16 tokens, 16 columns] in fp32: tokens 4 g + r of column lane % 16."""
    total = mfma.zeros()
    if kind == "bf16":
        for a, b in zip(keys, columns, strict=True):
            total = mfma.mfma_bf16(a, b, total)
        return total
    for i, term in enumerate(columns):
        total = mfma.mfma_fp8(keys[0], term, total, b_exponent=-STEP * i)
    return total


def _block(keys: Keys, page: Bytes, queries: list, live: list | None) -> list:
    """Scores of one block for this lane's column of each tile; live: tokens that count, or all."""
    best = [fx.Float32(NONE) for _ in queries]
    step = TILES_AT_ONCE[keys.kind]
    for first in range(0, TOKEN_TILES, step):
        loaded = [keys.load(page, tile) for tile in range(first, first + step)]
        for tile, raw in enumerate(loaded, first):
            best = _tile(keys, raw, queries, best, live, tile)
    return [fx.Float32(column_reduce(x, fx.maximumf)) for x in best]


def _tile(keys: Keys, raw, queries: list, best: list, live: list | None, tile: int) -> list:
    """The maxima so far and those of one tile of tokens. A NaN stays one: fx.maximumf propagates
    it."""
    operands, best = keys.operands(raw), list(best)
    for column, query in enumerate(queries):
        product = _product(keys.kind, operands, query)
        for r in range(4):
            score = product[r]
            if live is not None:
                seen = live[column] > tile * TILE + r
                score = seen.select(score, fx.Float32(NONE))
            best[column] = fx.Float32(fx.maximumf(best[column], score))
    return best


def asked_for(keys: Keys, page: Bytes) -> fx.Vector:
    """The first TILES_AHEAD tiles of a page, as `block_ahead` takes them."""
    return _flat([keys.load_words(page, tile) for tile in range(TILES_AHEAD[keys.kind])])


def nothing_asked_for(keys: Keys) -> fx.Vector:
    """A value of the same type."""
    count = TILES_AHEAD[keys.kind] * (keys.token_bytes + keys.scale_bytes * 2) // 16
    return fx.Vector.from_elements([fx.Uint32(0)] * count, fx.Uint32)


def block_ahead(keys: Keys, page: Bytes, held: fx.Vector, queries: list, following: Bytes):
    """(the maxima of a block's products for the lane's columns, `held` of the page `following`).

    held: of `asked_for(keys, page)`. Whenever a tile has been used, its place takes the tile that
    is TILES_AHEAD further on: the memory is never without a request of this wave.
    """
    step = TILES_AHEAD[keys.kind]
    count = held.numel // step
    tiles = [[held[at + i] for i in range(count)] for at in range(0, held.numel, count)]
    best = [fx.Float32(NONE) for _ in queries]
    for tile in range(TOKEN_TILES):
        raw = keys.of_words(tiles[tile % step])
        best = _tile(keys, raw, queries, best, None, tile)
        here = tile + step < TOKEN_TILES
        later = tile + step if here else tile + step - TOKEN_TILES
        tiles[tile % step] = keys.load_words(page if here else following, later)
    found = [fx.Float32(column_reduce(x, fx.maximumf)) for x in best]
    return found, _flat(tiles)


def _flat(tiles: list) -> fx.Vector:
    return fx.Vector.from_elements([word for words in tiles for word in words], fx.Uint32)


@flyc.jit
def _store_if(condition, place, offset, value):
    if condition:
        place[offset] = value


def key_tiles(kind: str, table: fx.Pointer) -> Keys:
    """Keys of the cache; for NVFP4 with the table copied to LDS, all waves taking part."""
    if kind != "nvfp4":
        return Keys(kind, None)
    lut = lds_bytes(TABLE_BYTES)
    copy_table(global_bytes(table), lut, fx.thread_idx.x, SCORE_WAVES * WAVE)
    # Writer: all waves. Reader: all waves.
    fx.barrier()
    return Keys(kind, lut)


def columns(build, tiles: int, a: SimpleNamespace, first_row, first_length, pairs):
    """Of the lane's column in each tile: operands, length, factor, place of scores, is it its own.

    Pair p: head p % heads of row first_row + p // heads, of length first_length + p // heads.
    """
    found = SimpleNamespace(queries=[], limits=[], factors=[], places=[], owned=[])
    lane = lane_id()
    for tile in range(tiles):
        pair = lane % TILE + tile * TILE
        mine = pair < pairs
        pair = mine.select(pair, fx.Int32(0))  # a column of nobody repeats column 0
        row, head = pair // a.heads, fx.Int64(pair % a.heads)
        whole_row = first_row + fx.Int64(row)
        place = global_bytes(a.index_q).at(whole_row * a.q_row + head * a.q_head)
        place = place.at(fx.Int64((lane // TILE) * (2 * DIMS)))
        words = [place.load(fx.Uint32, 4, offset=16 * i, align=4) for i in range(2 * DIMS // 16)]
        operands, undo = query_operands(build.kind, build.query, words)
        found.queries.append(operands)
        # Tokens 4 g + r of a tile are this lane's.
        found.limits.append(first_length + row - (lane // TILE) * 4)
        found.factors.append(undo * a.factor)
        found.places.append(a.out + head * a.out_head + whole_row * a.out_row)
        found.owned.append(mine & (lane < TILE))
    return found


def block_scores(
    a: SimpleNamespace, keys: Keys, own: SimpleNamespace, table_row, block, masked: bool
) -> list:
    """Scores of one block for the lane's columns, one a tile of columns."""
    number = table_row.uniform(fx.Int32, offset=fx.Int64(block) * a.table_column * 4)
    live = [limit - block * BLOCK_TOKENS for limit in own.limits] if masked else None
    return scores_of(a, number, _block(keys, page_of(a, number), own.queries, live), own)


def page_of(a: SimpleNamespace, number: fx.Int32) -> Bytes:
    """The page that a table entry names; page 0 where it names none."""
    page = (fx.Uint32(number) < fx.Uint32(a.num_pages)).select(number, fx.Int32(0))
    return global_bytes(a.pages).at(fx.Int64(page) * a.block_stride)


def scores_of(a: SimpleNamespace, number: fx.Int32, best: list, own: SimpleNamespace) -> list:
    """Scores of maxima; a table entry that names no page scores nothing."""
    known = fx.Uint32(number) < fx.Uint32(a.num_pages)
    return [
        known.select(score * factor, fx.Float32(NONE))
        for score, factor in zip(best, own.factors, strict=True)
    ]


def score_block(
    a: SimpleNamespace, keys: Keys, own: SimpleNamespace, table_row, block, masked: bool
):
    """Score one block for the lane's columns and store it."""
    for column, score in enumerate(block_scores(a, keys, own, table_row, block, masked)):
        place = own.places[column]
        _store_if(own.owned[column], place, fx.Int64(block) * a.out_block, score)


def score_run(build, tiles: int, a: SimpleNamespace, request, first_row, first_length, pairs):
    """Scores of blocks [first, first + run), first = run * blockIdx.x, for `pairs` pairs.

    Args:
        a: the kernel's arguments by name, see index_score_decode/flydsl_kernel.py.
        request: row of the block table, Int64. first_row: Int64, of index_q and out.
        first_length: causal length of that row, Int32; the rows after it see one token more each.
    """
    keys = key_tiles(build.kind, a.table)
    own = columns(build, tiles, a, first_row, first_length, pairs)
    rows = (pairs + a.heads - 1) // a.heads
    first = fx.block_idx.x * a.run
    end = fx.min(first + a.run, a.max_blocks)
    full = fx.max(fx.min(first_length // BLOCK_TOKENS, end), first)
    longest = first_length + rows - 1
    last = fx.max(fx.min((longest + BLOCK_TOKENS - 1) // BLOCK_TOKENS, end), full)
    table_row = global_bytes(a.block_table).at(request * a.table_row * 4)
    wave = wave_id()
    done = (full - first - wave + SCORE_WAVES - 1) // SCORE_WAVES * SCORE_WAVES
    _score_blocks(a, keys, own, table_row, first + wave, full, masked=False)
    _score_blocks(a, keys, own, table_row, first + wave + done, last, masked=True)
    _score_nothing(a, first_row, pairs, last, end)


@flyc.jit
def _score_blocks(a, keys, own, table_row, begin, end, masked):
    for block in range(begin, end, SCORE_WAVES):
        score_block(a, keys, own, table_row, block, masked)


@flyc.jit
def _score_nothing(a, first_row, pairs, begin, end):
    """Blocks that no row sees."""
    out = a.out
    for block in range(begin + fx.thread_idx.x, end, SCORE_WAVES * WAVE):
        for pair in range(0, pairs, 1):
            row = first_row + fx.Int64(pair // a.heads)
            to = fx.Int64(pair % a.heads) * a.out_head + row * a.out_row
            out[to + fx.Int64(block) * a.out_block] = fx.Float32(NONE)
