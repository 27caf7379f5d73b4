"""Pages against their entries, and the tokens' results: two kernels by page for gfx950.

The plan is in flydsl_by_page.py, the work list in flydsl_by_page_list.py. The kernels are launches
of one stream: each sees all that the one before it wrote.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.device import nvfp4, wave
from rocm_msa.device.memory import global_bytes, lds_regions
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops import flydsl_by_page_list as worklist
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_by_page import PAGES_WAVES, Build, partial_bytes
from rocm_msa.ops.flydsl_by_page_list import ITEM_BYTES, word
from rocm_msa.ops.flydsl_page import TILES, Format, load_query, stage_page, staged_k
from rocm_msa.ops.flydsl_partial import (
    NONE,
    load_eight,
    log_weight,
    merge,
    merge_place,
    merging_waves,
    pack,
    store_pieces,
    store_result,
)
from rocm_msa.ops.flydsl_products import mask_tail, score, softmax, weigh


def compile_build(build: Build) -> Compiled:
    make = {
        "prepare": worklist.prepare,
        "items": worklist.items,
        "place": worklist.place,
        "pages": _pages,
        "merge": _merge,
    }[build.kernel]
    return compile_kernel(*make(build), hints={"waves_per_eu": 2})


# pages


def _pages(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    o_bytes, lanes = partial_bytes(form.dtype), PAGES_WAVES * wave.WAVE

    @flyc.kernel(name=build.symbol)
    def kernel(
        pages: fx.Pointer,  # uint8 [num_pages, page bytes]
        stride: fx.Int64,  # bytes from page to page
        num_pages: fx.Int32,
        lut: fx.Pointer,  # uint8 [256, 8]
        items: fx.Pointer,  # int32 [most items, 4]
        counts: fx.Pointer,  # int32 [keys + 2]
        order: fx.Pointer,  # int32 [entries]
        live: fx.Pointer,  # int32 [entries]
        query: fx.Pointer,  # [rows, Q_BYTES]
        factors: fx.Pointer,  # fp32 [rows, 16]
        part_x: fx.Pointer,  # out: fp32 [entries, 16]
        part_o: fx.Pointer,  # out: [entries, 2048], lane order
        keys: fx.Int32,
        workers: fx.Int32,  # workgroups of the launch
    ):
        thread, lane, w = fx.thread_idx.x, wave.lane_id(), wave.wave_id()
        table, k_lds, v_lds = lds_regions(form.table_bytes, form.k_bytes, form.v_bytes)
        if fx.const_expr(table is not None):
            nvfp4.copy_table(global_bytes(lut), table, thread, lanes)
        last = word(global_bytes(counts), keys + 1).uniform(fx.Int32)

        @flyc.jit
        def attend(place, k):
            """One entry against the page in LDS."""
            entry = word(global_bytes(order), place).uniform(fx.Int32)
            seen = word(global_bytes(live), entry).uniform(fx.Int32)
            row = entry // topk
            terms = load_query(form, word(global_bytes(query), row, Q_BYTES), lane)
            own = word(global_bytes(factors), row, 4 * HEADS)
            factor = own.load(fx.Float32, offset=(lane % HEADS) * 4)
            x = [score(form, k[t], terms, factor) for t in range(TILES)]
            m, p = softmax(form, mask_tail(x, seen, lane))
            total, out = weigh(form, v_lds, p, lane)
            # Writer: this wave. Reader: `merge`, the next launch.
            place = word(global_bytes(part_o), entry, o_bytes)
            store_pieces(place, pack(form, out, total), lane)
            if lane < HEADS:
                place = word(global_bytes(part_x), entry, 4 * HEADS)
                place.store(log_weight(m, total), offset=lane * 4)

        for item in range(fx.block_idx.x, last, workers):
            words = word(global_bytes(items), fx.Int32(item), ITEM_BYTES).uniform(fx.Int32, 4)
            name, first, count = words[0], words[1], words[2]
            head = name // num_pages
            base = fx.Int64(name - head * num_pages) * stride
            base = global_bytes(pages).at(base + fx.Int64(head) * form.page.head_bytes)
            # The table is there, and nobody reads the page before.
            fx.barrier()
            stage_page(form, base, w, lane, table, k_lds, v_lds, fx.Int32(0))
            fx.barrier()
            k = [staged_k(form, k_lds, t, lane) for t in range(TILES)]
            for u in range(w, count, fx.Int32(PAGES_WAVES)):
                attend(first + fx.Int32(u), k)

    return kernel, lanes


# merge


def _merge(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    o_bytes = partial_bytes(form.dtype)

    @flyc.kernel(name=build.symbol)
    def kernel(
        live: fx.Pointer,  # int32 [entries]
        part_x: fx.Pointer,  # fp32 [entries, 16]
        part_o: fx.Pointer,  # [entries, 2048], lane order
        v_scale: fx.Float32,
        first_token: fx.Int32,
        kv_heads: fx.Int32,
        group: fx.Int32,  # query heads a KV head
        out: fx.Pointer,  # out: [tokens, q_heads, 128], last dimension contiguous
        out_row: fx.Int64,  # elements
        out_head: fx.Int64,
        lse: fx.Pointer,  # out: fp32 [tokens, q_heads]
        q_heads: fx.Int32,
    ):
        a = SimpleNamespace(
            v_scale=v_scale, group=group, out=out, out_row=out_row, out_head=out_head, lse=lse,
            q_heads=q_heads,
        )  # fmt: skip
        at, head = merge_place(wave.wave_id(), wave.lane_id()), fx.block_idx.y
        first = (fx.block_idx.x * kv_heads + head) * topk
        keys = word(global_bytes(live), first)
        weights = word(global_bytes(part_x), first, 4 * HEADS).at(at.head * 4)
        outputs = word(global_bytes(part_o), first, o_bytes)
        seen, x = [], []
        for slot in fx.range_constexpr(topk):
            seen.append(keys.uniform(fx.Int32, offset=slot * 4) > 0)
            weight = weights.load(fx.Float32, offset=slot * 4 * HEADS)
            x.append(seen[slot].select(weight, fx.Float32(NONE)))

        def part_of(slot):
            part = load_eight(form, outputs, at, slot * o_bytes)
            return [seen[slot].select(value, fx.Float32(0.0)) for value in part]

        row = first_token + fx.block_idx.x
        store_result(build.q_dtype, a, row, head, 0, at, *merge(x, part_of))

    return kernel, merging_waves(form) * wave.WAVE
