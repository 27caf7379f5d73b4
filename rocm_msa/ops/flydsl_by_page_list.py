"""Who wants which page: three of the kernels by page for gfx950, see flydsl_by_page.py."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import wave
from rocm_msa.device.memory import Bytes, global_bytes, lds_atomic_add, lds_regions
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_by_page import ITEM, LANES, Build
from rocm_msa.ops.flydsl_page import PIECE, PIECES_BYTES, Format, query_pieces
from rocm_msa.ops.flydsl_rows import last_request

ITEM_BYTES = 16


def word(place: Bytes, number, bytes_each: int = 4) -> Bytes:
    return place.at(fx.Int64(number) * bytes_each)


@flyc.jit
def _count_at(place: Bytes, value):
    """Add to a word of global memory that other workgroups add to; what was there before."""
    return fx.atomic_add(place.pointer, value, syncscope="agent")


# prepare


def prepare(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))

    @flyc.kernel(name=build.symbol)
    def kernel(
        q: fx.Pointer,  # [tokens, q_heads, 128], last dimension contiguous
        q_row: fx.Int64,  # elements
        q_head: fx.Int64,
        group: fx.Int32,  # query heads a KV head
        block_ids: fx.Pointer,  # int32 [kv_heads, tokens, TOPK]
        ids_head: fx.Int64,
        ids_row: fx.Int64,
        ids_slot: fx.Int64,
        table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int64,
        table_column: fx.Int64,
        max_blocks: fx.Int32,
        cu_seqlens: fx.Pointer,  # int32 [requests + 1]
        cu_stride: fx.Int64,
        seq_lens: fx.Pointer,  # int32 [requests]
        lens_stride: fx.Int64,
        requests: fx.Int32,
        first_token: fx.Int32,
        kv_heads: fx.Int32,
        num_pages: fx.Int32,
        factor: fx.Float32,  # of q . k: the softmax scale, K's scale, log2(e)
        counts: fx.Pointer,  # in and out: int32 [keys + 2]
        key: fx.Pointer,  # out: int32 [entries]
        rank: fx.Pointer,  # out: int32 [entries]
        live: fx.Pointer,  # out: int32 [entries]
        query: fx.Pointer,  # out: [rows, Q_BYTES]
        factors: fx.Pointer,  # out: fp32 [rows, 16]
    ):
        head, lane = fx.block_idx.y, wave.lane_id()
        token = first_token + fx.block_idx.x
        row = fx.block_idx.x * kv_heads + head
        if wave.wave_id() == 0:
            cu = global_bytes(cu_seqlens)
            found = last_request(cu, cu_stride, requests, lambda first, _: first <= token)
            padding = found == requests
            request = fx.Int64(padding.select(fx.Int32(0), found))
            end = cu.load(fx.Int32, offset=(request + 1) * cu_stride * 4)
            length = global_bytes(seq_lens).load(fx.Int32, offset=request * lens_stride * 4)
            n = padding.select(fx.Int32(0), length - end + token + 1)
            if lane < topk:
                at = fx.Int64(head) * ids_head + fx.Int64(token) * ids_row
                at = at + fx.Int64(lane) * ids_slot
                block = word(global_bytes(block_ids), at).load(fx.Int32)
                causal = (block >= 0) & (block * BLOCK_TOKENS < n) & (block < max_blocks)
                safe = causal.select(block, fx.Int32(0))
                at = request * table_row + fx.Int64(safe) * table_column
                number = word(global_bytes(table), at).load(fx.Int32)
                causal = causal & (number >= 0) & (number < num_pages)
                keys = fx.min(n - block * BLOCK_TOKENS, fx.Int32(BLOCK_TOKENS))
                keys = causal.select(keys, fx.Int32(0))
                name = causal.select(head * num_pages + number, fx.Int32(-1))
                entry = row * topk + lane
                word(global_bytes(key), entry).store(name)
                word(global_bytes(live), entry).store(keys)
                if causal:
                    before = _count_at(word(global_bytes(counts), name), fx.Int32(1))
                    word(global_bytes(rank), entry).store(before)
        else:
            # Heads beyond the group repeat its last one; their results are not stored.
            number = head * group + fx.min(lane % HEADS, group - 1)
            source = fx.Int64(token) * q_row + fx.Int64(number) * q_head
            pieces, scale = query_pieces(build.q_dtype, form, global_bytes(q).at(source * 2), lane)
            to = word(global_bytes(query), row, Q_BYTES)
            for i, piece in enumerate(pieces):
                to.store(piece, offset=lane * PIECE + PIECES_BYTES * i)
            if lane < HEADS:
                word(global_bytes(factors), row, 4 * HEADS).store(scale * factor, offset=lane * 4)

    return kernel, 2 * wave.WAVE


# items


def items(build: Build):
    @flyc.kernel(name=build.symbol)
    def kernel(
        counts: fx.Pointer,  # in and out: int32 [keys + 2]: entries a page; entries, items in all
        places: fx.Pointer,  # out: int32 [keys]
        items: fx.Pointer,  # out: int32 [most items, 4]: key, first place, entries
        keys: fx.Int32,
    ):
        key, thread = fx.block_idx.x * LANES + fx.thread_idx.x, fx.thread_idx.x
        local, base = lds_regions(8, 8)
        totals = word(global_bytes(counts), keys)
        if thread < 2:
            local.store(fx.Int32(0), offset=thread * 4)
        fx.barrier()
        inside = key < keys
        safe = inside.select(key, fx.Int32(0))
        count = word(global_bytes(counts), safe).load(fx.Int32)
        count = inside.select(count, fx.Int32(0))
        parts = (count + ITEM - 1) // ITEM
        place = lds_atomic_add(local, count)
        item = lds_atomic_add(local.at(4), parts)
        fx.barrier()
        if thread < 2:
            mine = local.load(fx.Int32, offset=thread * 4)
            before = _count_at(totals.at(thread * 4), mine)
            base.store(before, offset=thread * 4)
        fx.barrier()
        place = place + base.load(fx.Int32)
        item = item + base.load(fx.Int32, offset=4)
        if inside:
            word(global_bytes(places), key).store(place)
        for part in range(0, parts, 1):
            done = fx.Int32(part) * ITEM
            size = fx.min(count - done, fx.Int32(ITEM))
            words = fx.Vector.from_elements([key, place + done, size, fx.Int32(0)], fx.Int32)
            word(global_bytes(items), item + fx.Int32(part), ITEM_BYTES).store(words)

    return kernel, LANES


# place


def place(build: Build):
    @flyc.kernel(name=build.symbol)
    def kernel(
        key: fx.Pointer,  # int32 [entries]
        rank: fx.Pointer,  # int32 [entries]
        places: fx.Pointer,  # int32 [keys]
        order: fx.Pointer,  # out: int32 [entries]
        entries: fx.Int32,
    ):
        entry = fx.block_idx.x * LANES + fx.thread_idx.x
        if entry < entries:
            name = word(global_bytes(key), entry).load(fx.Int32)
            if name >= 0:
                place = word(global_bytes(places), name).load(fx.Int32)
                place = place + word(global_bytes(rank), entry).load(fx.Int32)
                word(global_bytes(order), place).store(entry)

    return kernel, LANES
