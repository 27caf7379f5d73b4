"""Pages against their entries, and the tokens' results: sparse_prefill's kernels for gfx950.

The plan is in flydsl_gfx950.py, the work list in flydsl_worklist.py. The kernels are launches of
one stream: each sees all that the one before it wrote.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.device import convert, nvfp4, wave
from rocm_msa.device.memory import Bytes, global_bytes, lds_regions
from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from rocm_msa.ops.flydsl_attend import HEADS, Q_BYTES
from rocm_msa.ops.flydsl_page import (
    PIECE,
    PIECES_BYTES,
    TILES,
    Format,
    load_query,
    stage_page,
    staged_k,
)
from rocm_msa.ops.flydsl_products import (
    D_TILES,
    P_SHIFT,
    mask_tail,
    score,
    softmax,
    weigh,
)
from rocm_msa.ops.sparse_prefill import flydsl_worklist as worklist
from rocm_msa.ops.sparse_prefill.flydsl_gfx950 import PAGES_WAVES, Build, partial_bytes
from rocm_msa.ops.sparse_prefill.flydsl_worklist import ITEM_BYTES, pointer, word

LN2 = 0.6931471805599453
NONE = float("-inf")


def compile_kernel(build: Build) -> Compiled:
    make = {
        "prepare": worklist.prepare,
        "items": worklist.items,
        "place": worklist.place,
        "pages": _pages,
        "merge": _merge,
    }[build.kernel]
    launch, arguments = make(build)
    return compile_flydsl(
        launch, *arguments, kernel=build.symbol, hints={"waves_per_eu": 2}, line_info=False
    )


# pages


def _store_partial(form: Format, place: Bytes, out: list, total, lane):
    """The normalised output: fp16 pairs of tiles, or fp32."""
    inverse = wave.rcp(total)
    for i in range(D_TILES if form.value_bytes == 2 else 0):
        place.store(out[i] * inverse, offset=lane * PIECE + PIECES_BYTES * i)
    for i in range(0 if form.value_bytes == 2 else D_TILES // 2):
        values = [out[2 * i + j][r] * inverse for j in (0, 1) for r in range(4)]
        words = [convert.f16_word(values[j], values[j + 1]) for j in range(0, 8, 2)]
        place.store(
            fx.Vector.from_elements(words, fx.Int32), offset=lane * PIECE + PIECES_BYTES * i
        )


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
            _store_partial(form, word(global_bytes(part_o), entry, o_bytes), out, total, lane)
            if lane < HEADS:
                weight = m + wave.log2(total) - float(P_SHIFT)
                word(global_bytes(part_x), entry, 4 * HEADS).store(weight, offset=lane * 4)

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

    @flyc.jit
    def launch(
        pages: fx.Pointer,
        stride: fx.Int64,
        num_pages: fx.Int32,
        lut: fx.Pointer,
        items: fx.Pointer,
        counts: fx.Pointer,
        order: fx.Pointer,
        live: fx.Pointer,
        query: fx.Pointer,
        factors: fx.Pointer,
        part_x: fx.Pointer,
        part_o: fx.Pointer,
        keys: fx.Int32,
        workers: fx.Int32,
    ):
        kernel(
            pages, stride, num_pages, lut, items, counts, order, live, query, factors, part_x,
            part_o, keys, workers,
        ).launch(grid=(1, 1, 1), block=(lanes, 1, 1))  # fmt: skip

    p = pointer()
    return launch, (p, fx.Int64(1), 1, p, p, p, p, p, p, p, p, p, 1, 1)


# merge


def _eight_dims(form: Format, part_o: Bytes, h, c) -> Bytes:
    """Where dims 8 c .. 8 c + 7 of head `h` begin in an entry's output."""
    tile, lane = c // 2, 2 * (c % 2) * HEADS + h
    if form.value_bytes == 2:
        return part_o.at(tile * PIECES_BYTES + lane * PIECE)
    return part_o.at((tile // 2) * PIECES_BYTES + lane * PIECE + (tile % 2) * 8)


def _load_eight(form: Format, place: Bytes, offset: int) -> list:
    """The eight dims in order, fp32; they lie in the same place of two lanes' pieces."""
    found = []
    for at in (offset, offset + HEADS * PIECE):
        if form.value_bytes == 2:
            four = place.load(fx.Float32, 4, offset=at)
            found.append([four[r] for r in range(4)])
        else:
            words = place.load(fx.Uint32, 2, offset=at, align=8)
            found.append([x for j in (0, 1) for x in convert.f16_values(words[j])])
    a, b = found
    if form.dtype is CacheDType.NVFP4:  # even dims, odd dims
        return [x[r] for r in range(4) for x in (a, b)]
    return [*a, *b]


def _merge(build: Build):
    topk, form = build.topk, Format.of(CacheDType(build.dtype))
    o_bytes = partial_bytes(form.dtype)
    packed_word = convert.bf16_word if build.q_dtype == "bf16" else convert.f16_word

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
        # A lane: one head, dims 8 c .. 8 c + 7.
        lane = wave.lane_id()
        h, c = lane % HEADS, wave.wave_id() * 4 + lane // HEADS
        head = fx.block_idx.y
        first = (fx.block_idx.x * kv_heads + head) * topk
        keys = word(global_bytes(live), first)
        weights = word(global_bytes(part_x), first, 4 * HEADS).at(h * 4)
        outputs = _eight_dims(form, word(global_bytes(part_o), first, o_bytes), h, c)
        seen, x, parts = [], [], []
        for slot in fx.range_constexpr(topk):
            seen.append(keys.uniform(fx.Int32, offset=slot * 4) > 0)
            weight = weights.load(fx.Float32, offset=slot * 4 * HEADS)
            x.append(seen[slot].select(weight, fx.Float32(NONE)))
            parts.append(_load_eight(form, outputs, slot * o_bytes))
        top = x[0]
        for other in x[1:]:
            top = wave.maximum(top, other)
        has = top > fx.Float32(NONE)
        safe = has.select(top, fx.Float32(0.0))
        total, sums = fx.Float32(0.0), [fx.Float32(0.0)] * 8
        for slot in fx.range_constexpr(topk):
            weight = wave.exp2(x[slot] - safe)
            total = total + weight
            for i in fx.range_constexpr(8):
                value = seen[slot].select(parts[slot][i], fx.Float32(0.0))
                sums[i] = fx.math.fma(weight, value, sums[i])
        factor = has.select(v_scale * wave.rcp(total), fx.Float32(0.0))
        sums = [value * factor for value in sums]
        packed = [packed_word(sums[i], sums[i + 1]) for i in range(0, 8, 2)]
        number, token = head * group + h, first_token + fx.block_idx.x
        if h < group:
            at = fx.Int64(token) * out_row + fx.Int64(number) * out_head + fx.Int64(c * 8)
            global_bytes(out).at(at * 2).store(fx.Vector.from_elements(packed, fx.Int32))
            if c == 0:
                value = has.select((top + wave.log2(total)) * LN2, fx.Float32(NONE))
                at = fx.Int64(token) * fx.Int64(q_heads) + fx.Int64(number)
                word(global_bytes(lse), at).store(value)

    @flyc.jit
    def launch(
        live: fx.Pointer,
        part_x: fx.Pointer,
        part_o: fx.Pointer,
        v_scale: fx.Float32,
        first_token: fx.Int32,
        kv_heads: fx.Int32,
        group: fx.Int32,
        out: fx.Pointer,
        out_row: fx.Int64,
        out_head: fx.Int64,
        lse: fx.Pointer,
        q_heads: fx.Int32,
    ):
        kernel(
            live, part_x, part_o, v_scale, first_token, kv_heads, group, out, out_row, out_head,
            lse, q_heads,
        ).launch(grid=(1, 1, 1), block=(4 * wave.WAVE, 1, 1))  # fmt: skip

    p, wide = pointer(), fx.Int64(1)
    return launch, (p, p, p, 1.0, 1, 1, 1, p, wide, wide, p, 1)
