"""Traced code of index_score_decode for gfx950.

A workgroup of four waves scores blocks [first, first + run) of a request, a block a wave. The
(row, head) pairs are columns, 16 a matrix tile; A operands are keys, 16 tokens a tile:

    D[token, column] = sum over d of k[token, d] q[column, d]        score = max over the tokens

Lane row + 16 g holds dims 32 g .. 32 g + 31 of token `row` and of column `row`; the order within
them is the one in which the table gives them, on both sides. Blocks that every row sees in full
take no mask; in the others, tokens at and beyond a row's length count as -inf.
"""

from __future__ import annotations

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
from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from rocm_msa.ops.index_score_decode.flydsl_gfx950 import HEAD_DIM, TILE, WAVES, Build

DIMS = HEAD_DIM // (WAVE // TILE)  # of a token or column that a lane holds
TOKEN_TILES = BLOCK_TOKENS // TILE
NONE = float("-inf")
# Tiles whose bytes are asked for together: what a lane holds of them fits in 64 registers.
TILES_AT_ONCE = {"nvfp4": 8, "fp8": 8, "bf16": 4}


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
        part = self.token_bytes * DIMS // HEAD_DIM
        at = self.data + tile * TILE * self.token_bytes
        place = page.at(self.token * self.token_bytes + self.group * part)
        data = [place.load(fx.Uint32, 4, offset=at + 16 * i, align=16) for i in range(part // 16)]
        if self.kind != "nvfp4":
            return data, None
        at = self.scales + tile * TILE * self.scale_bytes
        place = page.at(self.token * self.scale_bytes + self.group * 2)
        return data, fx.Uint32(place.load(fx.Uint16, offset=at))

    def operands(self, loaded) -> list:
        """One operand of 32 E4M3 bytes, or four of 8 bf16 values."""
        data, scales = loaded
        if self.kind == "nvfp4":
            return [dequantise_chunk(data[0], scale_rows(self.table, scales))]
        if self.kind == "fp8":
            words = [vector[i] for vector in data for i in range(4)]
            return [fx.Vector.from_elements(words, fx.Uint32)]
        return data


def _query(build: Build, place: Bytes):
    """B operands of this lane's column (FP8 terms, or bf16), and the factor that undoes them."""
    words = [place.load(fx.Uint32, 4, offset=16 * i, align=4) for i in range(2 * DIMS // 16)]
    if build.kind == "bf16":
        return words, fx.Float32(1.0)
    widen = bf16_values if build.query == "bf16" else f16_values
    values = [x for vector in words for i in range(4) for x in widen(vector[i])]
    if build.kind == "nvfp4":
        values = [values[i] for i in value_order(DIMS)]
    return split_query(values, TERMS[build.query])


def _product(build: Build, keys: list, columns: list):
    """[16 tokens, 16 columns] in fp32: tokens 4 g + r of column lane % 16."""
    total = mfma.zeros()
    if build.kind == "bf16":
        for a, b in zip(keys, columns, strict=True):
            total = mfma.mfma_bf16(a, b, total)
        return total
    for i, term in enumerate(columns):
        total = mfma.mfma_fp8(keys[0], term, total, b_exponent=-STEP * i)
    return total


def _block(build: Build, keys: Keys, page: Bytes, queries: list, live: list | None) -> list:
    """Scores of one block for this lane's column of each tile; `live`: tokens that count, or all.

    A NaN stays one: fx.maximumf propagates it.
    """
    best = [fx.Float32(NONE) for _ in queries]
    step = TILES_AT_ONCE[build.kind]
    for first in range(0, TOKEN_TILES, step):
        loaded = [keys.load(page, tile) for tile in range(first, first + step)]
        for tile, raw in enumerate(loaded, first):
            operands = keys.operands(raw)
            for column, query in enumerate(queries):
                product = _product(build, operands, query)
                for r in range(4):
                    score = product[r]
                    if live is not None:
                        seen = live[column] > tile * TILE + r
                        score = seen.select(score, fx.Float32(NONE))
                    best[column] = fx.Float32(fx.maximumf(best[column], score))
    return [fx.Float32(column_reduce(x, fx.maximumf)) for x in best]


def _store_scores(places: list, owned: list, offset, scores: list) -> None:
    for place, mine, score in zip(places, owned, scores, strict=True):
        _store_if(mine, place, offset, score)


@flyc.jit
def _store_if(condition, place, offset, value):
    if condition:
        place[offset] = value


def compile_kernel(build: Build) -> Compiled:
    tiles = build.tiles

    @flyc.kernel(name=build.symbol)
    def kernel(
        index_q: fx.Pointer,  # [rows, heads, 128]
        q_row: fx.Int64,  # bytes
        q_head: fx.Int64,
        pages: fx.Pointer,  # [num_pages, page bytes]
        block_stride: fx.Int64,  # bytes
        num_pages: fx.Int32,
        table: fx.Pointer,  # the NVFP4 table, 2048 bytes
        block_table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int64,  # elements
        table_column: fx.Int64,
        seq_lens: fx.Pointer,  # int32 [requests]
        seq_stride: fx.Int64,
        rows_per_request: fx.Int32,
        heads: fx.Int32,
        max_blocks: fx.Int32,
        run: fx.Int32,  # blocks a workgroup
        factor: fx.Float32,  # undoes the scale of the keys
        out: fx.Pointer,  # fp32 [heads, rows, max_blocks]
        out_head: fx.Int64,  # elements
        out_row: fx.Int64,
        out_block: fx.Int64,
    ):
        request = fx.Int64(fx.block_idx.y)
        lane, wave = lane_id(), wave_id()
        lut = lds_bytes(TABLE_BYTES) if build.kind == "nvfp4" else None
        if fx.const_expr(build.kind == "nvfp4"):
            copy_table(global_bytes(table), lut, fx.thread_idx.x, WAVES * WAVE)
            # Writer: all waves. Reader: all waves.
            fx.barrier()
        keys = Keys(build.kind, lut)

        length = global_bytes(seq_lens).uniform(fx.Int32, offset=request * seq_stride * 4)
        pairs = rows_per_request * heads
        queries, limits, factors, places, owned = [], [], [], [], []
        for tile in fx.range_constexpr(tiles):
            pair = lane % TILE + tile * TILE
            mine = pair < pairs
            pair = mine.select(pair, fx.Int32(0))  # a column of nobody repeats column 0
            row, head = pair // heads, pair % heads
            whole_row = request * fx.Int64(rows_per_request) + fx.Int64(row)
            at = whole_row * q_row + fx.Int64(head) * q_head
            place = global_bytes(index_q).at(at + fx.Int64((lane // TILE) * (2 * DIMS)))
            operands, undo = _query(build, place)
            queries.append(operands)
            # Tokens 4 g + r of a tile are this lane's.
            limits.append(length - rows_per_request + row + 1 - (lane // TILE) * 4)
            factors.append(undo * factor)
            places.append(out + fx.Int64(head) * out_head + whole_row * out_row)
            owned.append(mine & (lane < TILE))

        first = fx.block_idx.x * run
        end = fx.min(first + run, max_blocks)
        full = fx.max(fx.min((length - rows_per_request + 1) // BLOCK_TOKENS, end), first)
        last = fx.max(fx.min((length + BLOCK_TOKENS - 1) // BLOCK_TOKENS, end), full)
        row_of_table = global_bytes(block_table).at(request * table_row * 4)

        def score(block, masked: bool):
            """Scores of the lane's columns for one block, to be stored."""
            number = row_of_table.uniform(fx.Int32, offset=fx.Int64(block) * table_column * 4)
            known = (number >= 0) & (number < num_pages)
            page = known.select(number, fx.Int32(0))
            page = global_bytes(pages).at(fx.Int64(page) * block_stride)
            live = [limit - block * BLOCK_TOKENS for limit in limits] if masked else None
            scores = _block(build, keys, page, queries, live)
            # A table entry that names no page scores nothing.
            scores = [
                known.select(x * undo, fx.Float32(NONE))
                for x, undo in zip(scores, factors, strict=True)
            ]
            _store_scores(places, owned, fx.Int64(block) * out_block, scores)

        for block in range(first + wave, full, WAVES):
            score(block, masked=False)
        done = (full - first - wave + WAVES - 1) // WAVES * WAVES
        for block in range(first + wave + done, last, WAVES):
            score(block, masked=True)

        # What no row sees.
        for block in range(last + fx.thread_idx.x, end, WAVES * WAVE):
            for unseen in range(0, pairs, 1):
                to_row = request * fx.Int64(rows_per_request) + fx.Int64(unseen // heads)
                to = fx.Int64(unseen % heads) * out_head + to_row * out_row
                out[to + fx.Int64(block) * out_block] = fx.Float32(NONE)

    @flyc.jit
    def launch(
        index_q: fx.Pointer,
        q_row: fx.Int64,
        q_head: fx.Int64,
        pages: fx.Pointer,
        block_stride: fx.Int64,
        num_pages: fx.Int32,
        table: fx.Pointer,
        block_table: fx.Pointer,
        table_row: fx.Int64,
        table_column: fx.Int64,
        seq_lens: fx.Pointer,
        seq_stride: fx.Int64,
        rows_per_request: fx.Int32,
        heads: fx.Int32,
        max_blocks: fx.Int32,
        run: fx.Int32,
        factor: fx.Float32,
        out: fx.Pointer,
        out_head: fx.Int64,
        out_row: fx.Int64,
        out_block: fx.Int64,
    ):
        kernel(
            index_q, q_row, q_head, pages, block_stride, num_pages, table, block_table,
            table_row, table_column, seq_lens, seq_stride, rows_per_request, heads, max_blocks,
            run, factor, out, out_head, out_row, out_block,
        ).launch(grid=(1, 1, 1), block=(WAVES * WAVE, 1, 1))  # fmt: skip

    def null(dtype, align: int = 4):
        return flyc.from_c_void_p(dtype, None, assumed_align=align)

    wide, words = fx.Int64(1), null(fx.Int32)
    page = null(fx.Uint32, 16)
    return compile_flydsl(
        launch, page, wide, wide, page, wide, 1, page, words, wide, wide, words, wide,
        1, 1, 1, 1, 1.0, null(fx.Float32), wide, wide, wide, line_info=False,
    )  # fmt: skip
