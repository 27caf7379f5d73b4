"""The first kernel of sparse_decode for gfx950: what every item is, and the queries as operands."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import wave
from rocm_msa.device.memory import Bytes, global_bytes, lds_atomic_or, lds_regions
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_page import PIECE, PIECES_BYTES, Format, query_pieces
from rocm_msa.ops.sparse_decode.flydsl_gfx950 import (
    PREPARE_WAVES,
    TASK_LEADER,
    TASK_SHARED,
    TASK_STORED,
    Build,
)

LANES = PREPARE_WAVES * wave.WAVE
FILTER_BITS = 4096
UNROLL = 4  # items a lane in flight


def prepare(build: Build):
    """(launch function, example arguments)."""
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    step = LANES * UNROLL

    @flyc.kernel(name=build.symbol)
    def kernel(
        q: fx.Pointer,  # [rows, q_heads, 128], last dimension contiguous
        q_row: fx.Int64,  # elements
        q_head: fx.Int64,
        group: fx.Int32,  # query heads a KV head, 1 .. 16
        block_ids: fx.Pointer,  # int32 [kv_heads, rows, TOPK]
        ids_head: fx.Int32,
        ids_row: fx.Int32,
        ids_slot: fx.Int32,
        table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int32,
        table_column: fx.Int32,
        max_blocks: fx.Int32,
        seq_lens: fx.Pointer,  # int32 [requests]
        lens_stride: fx.Int32,
        rows_per_request: fx.Int32,
        reciprocal: fx.Int32,  # 2^30 / rows_per_request, rounded up
        rows: fx.Int32,
        num_pages: fx.Int32,
        factor: fx.Float32,  # of q . k: the softmax scale, K's scale, log2(e)
        all_stored: fx.Int32,  # whether `pages` takes every item, not only shared pages
        page: fx.Pointer,  # out: int32 [kv_heads, items]
        task: fx.Pointer,  # out: int32 [kv_heads, items]
        query: fx.Pointer,  # out: [kv_heads, rows, Q_BYTES]
        factors: fx.Pointer,  # out: fp32 [kv_heads, rows, 16]
    ):
        row, head = fx.block_idx.x, fx.block_idx.y
        thread, lane, w = fx.thread_idx.x, wave.lane_id(), wave.wave_id()
        items = rows * topk
        own = row * topk
        ids = global_bytes(block_ids).at(_far(head * ids_head))
        lengths, entries = global_bytes(seq_lens), global_bytes(table)
        known, shared = lds_regions(FILTER_BITS // 8, 8 * PREPARE_WAVES)

        def resolve(item):
            """(page or -1, live keys) of an item; of the last one beyond the end."""
            item = fx.Uint32((item < items).select(item, items - 1))
            r = item // topk
            request = wave.high_product(4 * r, reciprocal)
            step = fx.Int32(r - request * rows_per_request)
            n = lengths.load(fx.Int32, offset=_far(request * lens_stride)) - rows_per_request
            n = n + step + 1
            block = ids.load(fx.Int32, offset=_far(r * ids_row + (item - r * topk) * ids_slot))
            causal = (block >= 0) & (block * BLOCK_TOKENS < n) & (block < max_blocks)
            safe = causal.select(block, fx.Int32(0))
            at = _far(request * table_row + fx.Uint32(safe) * table_column)
            number = entries.load(fx.Int32, offset=at)
            causal = causal & (number >= 0) & (number < num_pages)
            live = fx.min(n - block * BLOCK_TOKENS, fx.Int32(BLOCK_TOKENS))
            return causal.select(number, fx.Int32(-1)), causal.select(live, fx.Int32(0))

        # Every wave knows the row's own pages: slot s in lane s.
        own_page, own_live = resolve(own + (lane < topk).select(lane, fx.Int32(0)))
        # A filter, for most pages are named once: bit `page % FILTER_BITS` of each own page.
        if thread < FILTER_BITS // 32:
            known.store(fx.Int32(0), offset=thread * 4)
        fx.barrier()
        if (thread < topk) & (own_page >= 0):
            lds_atomic_or(_filter_word(known, own_page), fx.Int32(1) << (own_page & 31))
        fx.barrier()
        earlier, later = fx.Int32(0), fx.Int32(0)
        for first in range(fx.Int32(0), items, fx.Int32(step)):
            places = [fx.Int32(first) + LANES * i + thread for i in range(UNROLL)]
            found = [resolve(place)[0] for place in places]
            hits = fx.Uint32(0)
            for number in found:
                word = _filter_word(known, number).load(fx.Uint32)
                hits = hits | ((word >> fx.Uint32(number & 31)) & 1)
            if wave.wave_any(hits != 0):
                slots = [wave.lane_value(own_page, s) for s in range(topk)]
                for place, number in zip(places, found, strict=True):
                    same = fx.Int32(0)
                    for s in fx.range_constexpr(topk):
                        same = same | (number == slots[s]).select(fx.Int32(1 << s), fx.Int32(0))
                    real = (number >= 0) & (place < items)
                    same = real.select(same, fx.Int32(0))
                    # Bit s: an item before, or after, slot s of this row names the same page.
                    earlier = earlier | (same & _bits_above(place - own, topk))
                    later = later | (same & _bits_below(place - own, topk))
        earlier, later = wave.wave_or(earlier), wave.wave_or(later)
        if lane == 0:
            shared.store(fx.Vector.from_elements([earlier, later], fx.Int32), offset=w * 8, align=8)
        fx.barrier()
        if w == 0:
            for i in fx.range_constexpr(1, PREPARE_WAVES):
                both = shared.load(fx.Int32, 2, offset=8 * i, align=8)
                earlier, later = earlier | both[0], later | both[1]
            first_user = ((earlier >> lane) & 1) == 0
            alone = (((earlier | later) >> lane) & 1) == 0
            live = own_live
            stored = (live > 0) & ((all_stored != 0) | (alone == False))  # noqa: E712
            word = live | stored.select(fx.Int32(TASK_STORED), fx.Int32(0))
            word = word | (stored & first_user).select(fx.Int32(TASK_LEADER), fx.Int32(0))
            word = word | alone.select(fx.Int32(0), fx.Int32(TASK_SHARED))
            if lane < topk:
                at = fx.Int64(head * items + own + lane) * 4
                global_bytes(page).store(own_page, offset=at)
                global_bytes(task).store(word, offset=at)
        if w == 1:
            # Heads beyond the group repeat its last one; their results are not stored.
            number = head * group + fx.min(lane % HEADS, group - 1)
            source = fx.Int64(row) * q_row + fx.Int64(number) * q_head
            pieces, scale = query_pieces(build.q_dtype, form, global_bytes(q).at(source * 2), lane)
            place = fx.Int64(head * rows + row)
            for i, piece in enumerate(pieces):
                to = global_bytes(query).at(place * Q_BYTES)
                to.store(piece, offset=lane * PIECE + PIECES_BYTES * i)
            if lane < HEADS:
                to = global_bytes(factors).at(place * (4 * HEADS))
                to.store(scale * factor, offset=lane * 4)

    @flyc.jit
    def launch(
        q: fx.Pointer,
        q_row: fx.Int64,
        q_head: fx.Int64,
        group: fx.Int32,
        block_ids: fx.Pointer,
        ids_head: fx.Int32,
        ids_row: fx.Int32,
        ids_slot: fx.Int32,
        table: fx.Pointer,
        table_row: fx.Int32,
        table_column: fx.Int32,
        max_blocks: fx.Int32,
        seq_lens: fx.Pointer,
        lens_stride: fx.Int32,
        rows_per_request: fx.Int32,
        reciprocal: fx.Int32,
        rows: fx.Int32,
        num_pages: fx.Int32,
        factor: fx.Float32,
        all_stored: fx.Int32,
        page: fx.Pointer,
        task: fx.Pointer,
        query: fx.Pointer,
        factors: fx.Pointer,
    ):
        kernel(
            q, q_row, q_head, group, block_ids, ids_head, ids_row, ids_slot, table, table_row,
            table_column, max_blocks, seq_lens, lens_stride, rows_per_request, reciprocal,
            rows, num_pages, factor, all_stored, page, task, query, factors,
        ).launch(grid=(1, 1, 1), block=(LANES, 1, 1))  # fmt: skip

    p = flyc.from_c_void_p(fx.Uint32, None, assumed_align=16)
    return launch, (p, 1, 1, 1, p, 1, 1, 1, p, 1, 1, 1, p, 1, 1, 1, 1, 1, 1.0, 1, p, p, p, p)


def _filter_word(known: Bytes, number) -> Bytes:
    return known.at(fx.Int32((fx.Uint32(number) >> 5) & (FILTER_BITS // 32 - 1)) * 4)


def _far(element) -> fx.Int64:
    """Byte offset of a 4-byte element, at most 2^32 of them."""
    return fx.Int64(fx.Uint32(element)) * 4


def _bits_above(d, count: int):
    """Bits s > d of `count`, d any int: the slots that an item at distance d comes before."""
    d = fx.min(fx.max(d, fx.Int32(-1)), fx.Int32(count))
    return (fx.Int32(-1) << (d + 1)) & ((1 << count) - 1)


def _bits_below(d, count: int):
    """Bits s < d of `count`, d any int: the slots that an item at distance d comes after."""
    return (fx.Int32(1) << fx.min(fx.max(d, fx.Int32(0)), fx.Int32(count))) - 1
