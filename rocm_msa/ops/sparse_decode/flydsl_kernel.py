"""The kernel of sparse_decode for gfx950, traced by FlyDSL; the plan is in flydsl_gfx950.py.

A workgroup owns one row, one KV head and one part of the dims of V. Wave w takes slots w * n ..
w * n + n - 1 of the row's list, a page each: K goes from memory through registers into S = K Q^T,
V through the wave's own LDS into O = V^T P. What a page gives stays in registers; at the end the
waves leave it in LDS, and the first ones fold it slot by slot into the row's result.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import nvfp4, wave
from rocm_msa.device.memory import Bytes, global_bytes, lds_regions, loads_are_issued
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_page import (
    PIECE,
    TILES,
    Format,
    finite,
    load_query,
    load_tile,
    operand,
    operands,
    query_pieces,
    store_v,
)
from rocm_msa.ops.flydsl_partial import (
    NONE,
    load_eight,
    log_weight,
    merge,
    merge_place,
    merging_waves,
    pack,
    partial_bytes,
    store_pieces,
    store_result,
)
from rocm_msa.ops.flydsl_products import mask_tail, score, softmax, weigh
from rocm_msa.ops.sparse_decode.flydsl_gfx950 import Build


def compile_build(build: Build) -> Compiled:
    form = Format.of(CacheDType(build.dtype), build.parts)
    topk, each, lanes = build.topk, build.slots_a_wave, build.waves * wave.WAVE
    region = max(form.v_bytes, each * partial_bytes(form))  # of LDS, a wave's own

    @flyc.kernel(name=build.symbol)
    def kernel(
        q: fx.Pointer,  # [rows, q_heads, 128], last dimension contiguous
        q_row: fx.Int64,  # elements
        q_head: fx.Int64,
        group: fx.Int32,  # query heads a KV head, 1 .. 16
        block_ids: fx.Pointer,  # int32 [kv_heads, rows, TOPK]
        ids_head: fx.Int64,
        ids_row: fx.Int64,
        ids_slot: fx.Int64,
        block_table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int64,
        table_column: fx.Int64,
        max_blocks: fx.Int32,
        seq_lens: fx.Pointer,  # int32 [requests]
        lens_stride: fx.Int64,
        rows_per_request: fx.Int32,
        pages: fx.Pointer,  # uint8 [num_pages, page bytes]
        stride: fx.Int64,  # bytes from page to page
        num_pages: fx.Int32,
        lut: fx.Pointer,  # uint8 [256, 8]
        factor: fx.Float32,  # of q . k: the softmax scale, K's scale, log2(e)
        v_scale: fx.Float32,
        out: fx.Pointer,  # out: [rows, q_heads, 128], last dimension contiguous
        out_row: fx.Int64,  # elements
        out_head: fx.Int64,
        lse: fx.Pointer,  # out: fp32 [rows, q_heads]
        q_heads: fx.Int32,
    ):
        a = SimpleNamespace(
            q=q, q_row=q_row, q_head=q_head, group=group, block_ids=block_ids, ids_head=ids_head,
            ids_row=ids_row, ids_slot=ids_slot, block_table=block_table, table_row=table_row,
            table_column=table_column, max_blocks=max_blocks, pages=pages, stride=stride,
            num_pages=num_pages, factor=factor, v_scale=v_scale, out=out, out_row=out_row,
            out_head=out_head, lse=lse, q_heads=q_heads,
        )  # fmt: skip
        request, step = fx.block_idx.x, fx.block_idx.y
        head, part = fx.block_idx.z // build.parts, fx.block_idx.z % build.parts
        row = request * rows_per_request + step
        lane, w = wave.lane_id(), wave.wave_id()
        table, lds, weights, query, factors = lds_regions(
            form.table_bytes, build.waves * region, 4 * HEADS * topk, Q_BYTES, 4 * HEADS
        )
        if fx.const_expr(table is not None):
            nvfp4.copy_table(global_bytes(lut), table, fx.thread_idx.x, lanes)
        _prepare_query(build, form, a, row, head, query, factors, w, lane)
        n = global_bytes(seq_lens).uniform(fx.Int32, offset=fx.Int64(request) * lens_stride * 4)
        n = n - rows_per_request + step + 1
        # Writers: all waves the table, wave 0 the query. Readers: all waves.
        fx.barrier()
        terms = load_query(form, query, lane)
        own_factor = factors.load(fx.Float32, offset=(lane % HEADS) * 4)
        mine = lds.at(w * region)  # of this wave alone: no barrier
        found = []
        for i in fx.range_constexpr(each):
            page, live = _page_of(a, request, row, head, n, w * each + i, topk)
            base = fx.Int64(page) * stride + fx.Int64(head * form.page.head_bytes)
            page = global_bytes(pages).at(base)
            found.append(attend_page(form, page, part, live, terms, own_factor, table, mine, lane))
        for i in fx.range_constexpr(each):
            x, pieces = found[i]
            store_pieces(mine.at(i * partial_bytes(form)), pieces, lane)
            if (lane < HEADS) & (w * each + i < topk):
                weights.store(x, offset=(w * each + i) * (4 * HEADS) + lane * 4)
        # Writers: all waves. Readers: the first ones.
        fx.barrier()
        if w < merging_waves(form):
            at = merge_place(w, lane)
            dim = part * (form.d_tiles * 16)
            merged = _merge_slots(build, form, region, lds, weights, at)
            store_result(build.q_dtype, a, row, head, dim, at, *merged)

    # Waves a SIMD that the registers must allow: as many as the LDS does.
    return compile_kernel(kernel, lanes, hints={"waves_per_eu": build.waves_a_simd})


@flyc.jit
def _prepare_query(build, form, a, row, head, query: Bytes, factors: Bytes, w, lane):
    """Wave 0: the row's queries as operands into LDS, and what their products are scaled by."""
    if w == 0:
        # Heads beyond the group repeat its last one; their results are not stored.
        number = head * a.group + fx.min(lane % HEADS, a.group - 1)
        source = fx.Int64(row) * a.q_row + fx.Int64(number) * a.q_head
        pieces, scale = query_pieces(build.q_dtype, form, global_bytes(a.q).at(source * 2), lane)
        store_pieces(query, pieces, lane)
        if lane < HEADS:
            factors.store(scale * a.factor, offset=lane * 4)


def _page_of(a: SimpleNamespace, request, row, head, n, slot, topk: int):
    """(page, live keys) of a slot of the row's list; 0, 0 where it names nothing. Scalars."""
    safe = fx.min(slot, fx.Int32(topk - 1))
    at = fx.Int64(head) * a.ids_head + fx.Int64(row) * a.ids_row + fx.Int64(safe) * a.ids_slot
    block = global_bytes(a.block_ids).uniform(fx.Int32, offset=at * 4)
    causal = (slot < topk) & (block >= 0) & (block < a.max_blocks)
    block = causal.select(block, fx.Int32(0))
    causal = causal & (block * BLOCK_TOKENS < n)
    at = fx.Int64(request) * a.table_row + fx.Int64(block) * a.table_column
    page = global_bytes(a.block_table).uniform(fx.Int32, offset=at * 4)
    causal = causal & (page >= 0) & (page < a.num_pages)
    live = fx.min(n - block * BLOCK_TOKENS, fx.Int32(BLOCK_TOKENS))
    return causal.select(page, fx.Int32(0)), causal.select(live, fx.Int32(0))


@flyc.jit
def attend_page(form, page, part, live, terms, factor, table, v_lds, lane):
    """(x, pieces of O / l) of a page against the row: flydsl_partial.py; none for live = 0."""
    x = fx.Float32(NONE)
    nothing = fx.Vector.filled(4, fx.Int32(0), fx.Int32)
    pieces = [nothing] * (partial_bytes(form) // (PIECE * wave.WAVE))
    v_tiles = form.stored("v").tiles
    if live > 0:
        k = [load_tile(form, page, "k", t, lane) for t in range(TILES)]
        v = [load_tile(form, page, "v", t, lane, part) for t in range(v_tiles)]
        loads_are_issued()  # the whole page is in flight
        s = [score(form, operands(form, operand(form, tile, table)), terms, factor) for tile in k]
        v = [operand(form, tile, table) for tile in v]
        if live < BLOCK_TOKENS:
            v = [finite(form, tile) for tile in v]
        for t in fx.range_constexpr(v_tiles):
            store_v(form, v_lds, t, v[t], lane)
        m, p = softmax(form, mask_tail(s, live, lane))
        total, o = weigh(form, v_lds, p, lane)
        x, pieces = log_weight(m, total), pack(form, o, total)
    return x, pieces


def _merge_slots(build: Build, form: Format, region: int, lds: Bytes, weights: Bytes, at):
    """A lane's dims of the row from the slots' partials in LDS; see flydsl_partial.merge."""
    each, size = build.slots_a_wave, partial_bytes(form)
    x = [
        weights.load(fx.Float32, offset=at.head * 4 + slot * 4 * HEADS)
        for slot in range(build.topk)
    ]
    first = [slot // each * region + slot % each * size for slot in range(build.topk)]
    return merge(x, lambda slot: load_eight(form, lds, at, first[slot]))
