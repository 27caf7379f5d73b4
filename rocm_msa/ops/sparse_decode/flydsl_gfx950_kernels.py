"""The three kernels of sparse_decode for gfx950, traced by FlyDSL; the plan is in flydsl_gfx950.py.

An item is one slot of one row's block list, of one KV head: number row * TOPK + slot.

    prepare   what every item is; the queries as operands of the matrix pipe
    pages     page-stationary: a page is dequantised once, into LDS, for all items that name it
    rows      row-stationary: a wave goes through its slots, dequantising pages of its own or taking
              the result of `pages`, then the waves' results become the row's

The kernels are launches of one stream: each sees all that the one before it wrote.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import convert, mfma, nvfp4, wave
from rocm_msa.device.memory import global_bytes, lds_atomic_add, lds_regions, loads_are_issued
from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_page import (
    PIECE,
    PIECES_BYTES,
    TILES,
    Format,
    finite,
    load_query,
    load_tile,
    operand,
    operands,
    stage_page,
    staged_k,
    store_v,
)
from rocm_msa.ops.flydsl_products import (
    D_TILES,
    P_SHIFT,
    fold,
    mask_tail,
    nothing,
    score,
    softmax,
    weigh,
)
from rocm_msa.ops.sparse_decode.flydsl_gfx950 import (
    ITEMS_A_PASS,
    PAGES_WAVES,
    PARTIAL_O_BYTES,
    TASK_LEADER,
    TASK_LIVE,
    TASK_SHARED,
    TASK_STORED,
    Build,
)
from rocm_msa.ops.sparse_decode.flydsl_gfx950_prepare import prepare

LN2 = 0.6931471805599453
PAGES_LANES = PAGES_WAVES * wave.WAVE


def compile_kernel(build: Build) -> Compiled:
    """Compile one kernel."""
    make = {"prepare": prepare, "pages": _pages, "rows": _rows}[build.kernel]
    launch, arguments = make(build)
    # Waves a SIMD that the registers must allow: as many as the LDS does.
    waves = 1 if build.kernel == "rows" and build.rows_waves == 4 else 2
    return compile_flydsl(
        launch, *arguments, kernel=build.symbol, hints={"waves_per_eu": waves}, line_info=False
    )


def _pointer():
    return flyc.from_c_void_p(fx.Uint32, None, assumed_align=16)


# pages


def _pages(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    per_lane = ITEMS_A_PASS // PAGES_LANES

    @flyc.kernel(name=build.symbol)
    def kernel(
        pages: fx.Pointer,  # uint8 [num_pages, page bytes]
        stride: fx.Int64,  # bytes from page to page
        lut: fx.Pointer,  # uint8 [256, 8]
        rows: fx.Int32,
        page: fx.Pointer,  # int32 [kv_heads, items]
        task: fx.Pointer,  # int32 [kv_heads, items]
        query: fx.Pointer,  # [kv_heads, rows, Q_BYTES]
        factors: fx.Pointer,  # fp32 [kv_heads, rows, 16]
        part_o: fx.Pointer,  # out: fp32 [kv_heads, items, 2048], lane order
        part_ml: fx.Pointer,  # out: fp32 [kv_heads, items, 2, 16]
    ):
        item, head = fx.block_idx.x, fx.block_idx.y
        thread, lane, w = fx.thread_idx.x, wave.lane_id(), wave.wave_id()
        items = rows * topk
        first_item = head * items
        table, k_lds, v_lds, users, count = lds_regions(
            form.table_bytes, form.k_bytes, form.v_bytes, 4 * ITEMS_A_PASS, 16
        )
        words = global_bytes(task).at(fx.Int64(first_item) * 4)
        numbers = global_bytes(page).at(fx.Int64(first_item) * 4)
        word = words.uniform(fx.Int32, offset=fx.Int64(item) * 4)
        number = numbers.uniform(fx.Int32, offset=fx.Int64(item) * 4)

        @flyc.jit
        def attend(user, k):
            """One item against the page in LDS."""
            live = words.uniform(fx.Int32, offset=fx.Int64(user) * 4) & TASK_LIVE
            place = fx.Int64(head * rows + user // topk)
            terms = load_query(form, global_bytes(query).at(place * Q_BYTES), lane)
            factor = global_bytes(factors).load(
                fx.Float32, offset=place * (4 * HEADS) + fx.Int64(lane % HEADS) * 4
            )
            x = [score(form, k[t], terms, factor) for t in range(TILES)]
            m, p = softmax(form, mask_tail(x, live, lane))
            total, out = weigh(form, v_lds, p, lane)
            # Writer: this wave. Reader: `rows`, the next launch.
            to = fx.Int64(first_item + user)
            place = global_bytes(part_o).at(to * PARTIAL_O_BYTES)
            for i in fx.range_constexpr(D_TILES):
                place.store(out[i], offset=lane * PIECE + PIECES_BYTES * i)
            if lane < HEADS:
                place = global_bytes(part_ml).at(to * (8 * HEADS))
                place.store(m, offset=lane * 4)
                place.store(total, offset=lane * 4 + 4 * HEADS)

        if (word & TASK_LEADER) != 0:
            base = global_bytes(pages).at(
                fx.Int64(number) * stride + fx.Int64(head * form.page.head_bytes)
            )
            if fx.const_expr(table is not None):
                nvfp4.copy_table(global_bytes(lut), table, thread, PAGES_LANES)
                fx.barrier()
            stage_page(form, base, w, lane, table, k_lds, v_lds, word & TASK_LIVE)
            if thread == 0:
                count.store(fx.Int32(0))
            fx.barrier()
            k = [staged_k(form, k_lds, t, lane) for t in range(TILES)]
            if (word & TASK_SHARED) == 0:
                if w == 0:
                    attend(item, k)
            else:
                for first in range(fx.Int32(0), items, fx.Int32(ITEMS_A_PASS)):
                    # The items of this pass that name the page, in any order.
                    for i in fx.range_constexpr(per_lane):
                        place = fx.Int32(first) + i * PAGES_LANES + thread
                        if place < items:
                            other = numbers.load(fx.Int32, offset=fx.Int64(place) * 4)
                            if other == number:
                                at = lds_atomic_add(count, fx.Int32(1))
                                users.store(place, offset=at * 4)
                    fx.barrier()
                    total = wave.uniform(count.load(fx.Int32))
                    for at in range(w, total, fx.Int32(PAGES_WAVES)):
                        attend(wave.uniform(users.load(fx.Int32, offset=fx.Int32(at) * 4)), k)
                    fx.barrier()
                    if thread == 0:
                        count.store(fx.Int32(0))
                    fx.barrier()

    @flyc.jit
    def launch(
        pages: fx.Pointer,
        stride: fx.Int64,
        lut: fx.Pointer,
        rows: fx.Int32,
        page: fx.Pointer,
        task: fx.Pointer,
        query: fx.Pointer,
        factors: fx.Pointer,
        part_o: fx.Pointer,
        part_ml: fx.Pointer,
    ):
        kernel(pages, stride, lut, rows, page, task, query, factors, part_o, part_ml).launch(
            grid=(1, 1, 1), block=(PAGES_LANES, 1, 1)
        )

    p = _pointer()
    return launch, (p, 1, p, 1, p, p, p, p, p, p)


# rows


def _rows(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    each, waves = build.slots_a_wave, build.rows_waves
    lanes = waves * wave.WAVE

    @flyc.kernel(name=build.symbol)
    def kernel(
        pages: fx.Pointer,  # uint8 [num_pages, page bytes]
        stride: fx.Int64,  # bytes from page to page
        lut: fx.Pointer,  # uint8 [256, 8]
        rows: fx.Int32,
        page: fx.Pointer,  # int32 [kv_heads, items]
        task: fx.Pointer,  # int32 [kv_heads, items]
        query: fx.Pointer,  # [kv_heads, rows, Q_BYTES]
        factors: fx.Pointer,  # fp32 [kv_heads, rows, 16]
        part_o: fx.Pointer,  # fp32 [kv_heads, items, 2048], lane order
        part_ml: fx.Pointer,  # fp32 [kv_heads, items, 2, 16]
        v_scale: fx.Float32,
        out: fx.Pointer,  # out: [rows, q_heads, 128], last dimension contiguous
        out_row: fx.Int64,  # elements
        out_head: fx.Int64,
        lse: fx.Pointer,  # out: fp32 [rows, q_heads]
        group: fx.Int32,  # query heads a KV head
        q_heads: fx.Int32,
    ):
        row, head = fx.block_idx.x, fx.block_idx.y
        thread, lane, w = fx.thread_idx.x, wave.lane_id(), wave.wave_id()
        first_item = (head * rows + row) * topk
        table, lds, ml = lds_regions(form.table_bytes, waves * form.v_bytes, waves * 8 * HEADS)
        if fx.const_expr(table is not None):
            nvfp4.copy_table(global_bytes(lut), table, thread, lanes)
            fx.barrier()
        v_lds = lds.at(w * form.v_bytes)  # of this wave alone: no barrier
        words = global_bytes(task).at(fx.Int64(first_item) * 4)
        numbers = global_bytes(page).at(fx.Int64(first_item) * 4)
        place = fx.Int64(head * rows + row)
        terms = load_query(form, global_bytes(query).at(place * Q_BYTES), lane)
        factor = global_bytes(factors).load(
            fx.Float32, offset=place * (4 * HEADS) + fx.Int64(lane % HEADS) * 4
        )

        @flyc.jit
        def attend(slot, live):
            """This wave's own page: K straight from memory, V through its part of LDS."""
            number = numbers.uniform(fx.Int32, offset=slot * 4)
            base = global_bytes(pages).at(
                fx.Int64(number) * stride + fx.Int64(head * form.page.head_bytes)
            )
            k, v = ([load_tile(form, base, side, t, lane) for t in range(TILES)] for side in "kv")
            loads_are_issued()  # the whole page is in flight
            x = [
                score(form, operands(form, operand(form, tile, table)), terms, factor) for tile in k
            ]
            v = [operand(form, tile, table) for tile in v]
            if live < BLOCK_TOKENS:
                v = [finite(form, tile) for tile in v]
            for t in fx.range_constexpr(TILES):
                store_v(form, v_lds, t, v[t], lane)
            m, p = softmax(form, mask_tail(x, live, lane))
            total, o = weigh(form, v_lds, p, lane)
            return m, total, o

        m, total, o = nothing()
        for i in range(fx.Int32(0), fx.Int32(each)):
            slot = w * each + fx.Int32(i)
            word = fx.Int32(0)
            if slot < topk:
                word = words.uniform(fx.Int32, offset=slot * 4)
            live = word & TASK_LIVE
            if live > 0:
                m2, total2, o2 = nothing()
                if (word & TASK_STORED) != 0:
                    m2, total2, o2 = _load_partial(part_o, part_ml, first_item + slot, lane)
                else:
                    m2, total2, o2 = attend(slot, live)
                m, total, o = fold(m, total, o, m2, total2, o2)

        # Writer: each wave, its own part of LDS. Readers: waves 0 to 3, after the barrier.
        for i in fx.range_constexpr(D_TILES):
            v_lds.store(o[i], offset=lane * PIECE + PIECES_BYTES * i)
        if lane < HEADS:
            ml.store(m, offset=w * (8 * HEADS) + lane * 4)
            ml.store(total, offset=w * (8 * HEADS) + lane * 4 + 4 * HEADS)
        fx.barrier()
        if w < 4:
            # A lane: one head, dims 8 c .. 8 c + 7.
            h, c = lane % HEADS, w * 4 + lane // HEADS
            top, weight, pair = _merge(form, lds, ml, waves, h, c)
            has = weight > 0.0
            scale = has.select(v_scale * wave.rcp(weight), fx.Float32(0.0))
            if h < group:
                number = head * group + h
                at = fx.Int64(row) * out_row + fx.Int64(number) * out_head + fx.Int64(c * 8)
                global_bytes(out).store(_packed(build, form, pair, scale), offset=at * 2)
                if c == 0:
                    value = (top + wave.log2(weight) - float(P_SHIFT)) * LN2
                    value = has.select(value, fx.Float32(float("-inf")))
                    at = fx.Int64(row * q_heads + number) * 4
                    global_bytes(lse).store(value, offset=at)

    @flyc.jit
    def launch(
        pages: fx.Pointer,
        stride: fx.Int64,
        lut: fx.Pointer,
        rows: fx.Int32,
        page: fx.Pointer,
        task: fx.Pointer,
        query: fx.Pointer,
        factors: fx.Pointer,
        part_o: fx.Pointer,
        part_ml: fx.Pointer,
        v_scale: fx.Float32,
        out: fx.Pointer,
        out_row: fx.Int64,
        out_head: fx.Int64,
        lse: fx.Pointer,
        group: fx.Int32,
        q_heads: fx.Int32,
    ):
        kernel(
            pages, stride, lut, rows, page, task, query, factors, part_o, part_ml, v_scale, out,
            out_row, out_head, lse, group, q_heads,
        ).launch(grid=(1, 1, 1), block=(lanes, 1, 1))  # fmt: skip

    p = _pointer()
    return launch, (p, 1, p, 1, p, p, p, p, p, p, 1.0, p, 1, 1, p, 1, 1)


def _load_partial(part_o, part_ml, item, lane):
    place = global_bytes(part_o).at(fx.Int64(item) * PARTIAL_O_BYTES)
    o = [place.load(fx.Float32, 4, offset=lane * PIECE + PIECES_BYTES * i) for i in range(D_TILES)]
    place = global_bytes(part_ml).at(fx.Int64(item) * (8 * HEADS))
    at = (lane % HEADS) * 4
    return place.load(fx.Float32, offset=at), place.load(fx.Float32, offset=at + 4 * HEADS), o


def _merge(form, lds, ml, waves, h, c):
    """The waves' results in their order, for one head and two groups of four dims."""
    m, total, o = fx.Float32(float("-inf")), fx.Float32(0.0), [mfma.zeros(), mfma.zeros()]
    at = (c // 2) * PIECES_BYTES + (2 * (c % 2) * HEADS + h) * PIECE
    for u in range(waves):
        first = u * form.v_bytes
        pair = [lds.load(fx.Float32, 4, offset=at + (first + HEADS * PIECE * e)) for e in (0, 1)]
        m2, total2 = (
            ml.load(fx.Float32, offset=h * 4 + (u * 8 * HEADS + 4 * HEADS * e)) for e in (0, 1)
        )
        m, total, o = fold(m, total, o, m2, total2, pair)
    return m, total, o


def _packed(build: Build, form, pair, scale):
    """Eight dims in order, rounded: 4 words. `pair`: two lanes' dims, by V's order in LDS."""
    a, b = pair
    if form.dtype is CacheDType.NVFP4:  # even dims, odd dims
        values = [x[r] for r in range(4) for x in (a, b)]
    else:
        values = [x[r] for x in (a, b) for r in range(4)]
    values = [v * scale for v in values]
    word = convert.bf16_word if build.q_dtype == "bf16" else convert.f16_word
    return fx.Vector.from_elements([word(values[i], values[i + 1]) for i in (0, 2, 4, 6)], fx.Int32)
