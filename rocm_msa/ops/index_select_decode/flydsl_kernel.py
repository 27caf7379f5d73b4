"""Traced code of index_select_decode for gfx950; scores are those of flydsl_index_score.py.

A workgroup scores a run of at most 64 blocks of one request into LDS and lists, for every
(row, head) pair, the best of its run. The last workgroup of a request, told so by a counter, takes
the best of all lists. Kept blocks are arithmetic, see block_topk/flydsl_kernel.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device.memory import Bytes, global_bytes, lds_regions
from rocm_msa.device.nvfp4 import TABLE_BYTES, copy_table
from rocm_msa.device.topk import ABSENT, order_key, top_candidates
from rocm_msa.device.wave import WAVE, lane_id, lane_value, uniform, wave_id
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.flydsl_host import SCORE_WAVES, TILE
from rocm_msa.ops.flydsl_index_score import Keys, block_scores, columns
from rocm_msa.ops.index_select_decode.flydsl_gfx950 import CANDIDATE_BYTES, Build

LANES = SCORE_WAVES * WAVE
REGISTERS = 8  # candidates a lane that are compared together


def compile_build(build: Build) -> Compiled:
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
        run: fx.Int32,  # blocks a workgroup, <= 64
        runs: fx.Int32,  # workgroups a request
        factor: fx.Float32,  # undoes the scale of the keys
        topk: fx.Int32,  # <= KEPT
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        lists: fx.Pointer,  # between workgroups: (key, id) [requests, pairs, runs, listed]
        counters: fx.Pointer,  # int32 [requests], zeros before and after
        out: fx.Pointer,  # out: int32 [heads, rows, topk], contiguous
        rows: fx.Int32,
    ):
        pairs = rows_per_request * heads
        listed = fx.min(run, fx.Int32(build.kept))
        request = fx.Int64(fx.block_idx.y)
        length = global_bytes(seq_lens).uniform(fx.Int32, offset=request * seq_stride * 4)
        a = SimpleNamespace(
            index_q=index_q, q_row=q_row, q_head=q_head, pages=pages, block_stride=block_stride,
            num_pages=num_pages, table_column=table_column, heads=heads, rows=rows, pairs=pairs,
            max_blocks=max_blocks, run=run, runs=runs, listed=listed, factor=factor, topk=topk,
            init_blocks=init_blocks, local_blocks=local_blocks,
            first_row=request * fx.Int64(rows_per_request),
            first_length=length - rows_per_request + 1,
            table_place=global_bytes(block_table).at(request * table_row * 4),
            lists=global_bytes(lists).at(
                request * fx.Int64(pairs) * fx.Int64(runs * listed * CANDIDATE_BYTES)
            ),
            counter=global_bytes(counters).at(request * 4), ids=global_bytes(out),
            out=out, out_head=fx.Int64(0), out_row=fx.Int64(0),  # of scores in memory: none
        )  # fmt: skip
        nvfp4 = build.kind == "nvfp4"
        lut, scores, arrived, chosen = lds_regions(
            TABLE_BYTES if nvfp4 else 0, TILE * WAVE * 4, 16, SCORE_WAVES * WAVE * 4
        )
        if fx.const_expr(nvfp4):
            copy_table(global_bytes(table), lut, fx.thread_idx.x, LANES)
        fx.barrier()
        keys = Keys(build.kind, lut)
        first = fx.block_idx.x * run
        end = fx.min(first + run, _blocks(a, length))
        _score(build, a, keys, scores, first, end)
        # Writers: all waves. Readers: all waves.
        fx.barrier()
        _list_best(build, a, scores, first, end)
        # Writer: each wave, its lists. Reader: the last workgroup of the request, after its
        # acquire; agent scope, for it may be on another XCD.
        fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope="agent")
        fx.barrier()
        if fx.thread_idx.x == 0:
            before = fx.atomic_add(a.counter.pointer, fx.Int32(1), syncscope="agent")
            arrived.store(before)
        fx.barrier()
        if uniform(arrived.load(fx.Int32)) == runs - 1:
            fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope="agent")
            if fx.thread_idx.x == 0:
                a.counter.store(fx.Int32(0))  # reader: the next launch
            _select(build, a, length, chosen)

    return compile_kernel(kernel, LANES)


def _blocks(a: SimpleNamespace, length):
    """Causal blocks of a row of this length."""
    count = (length + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    return fx.max(fx.min(count, a.max_blocks), fx.Int32(0))


def _candidates(a: SimpleNamespace, row):
    """(causal blocks, first and last + 1 id that is ranked) of a row of the request."""
    count = _blocks(a, a.first_length + row)
    init = fx.min(a.init_blocks, count)
    return count, init, fx.max(count - a.local_blocks, init)


@flyc.jit
def _score(build, a, keys, scores: Bytes, first, end):
    """Scores of blocks first .. end - 1 of all pairs: fp32 [pairs, 64] in LDS."""
    own = columns(build, 1, a, a.first_row, a.first_length, a.pairs)
    wave = wave_id()
    full = fx.max(fx.min(a.first_length // BLOCK_TOKENS, end), first)
    done = (full - first - wave + SCORE_WAVES - 1) // SCORE_WAVES * SCORE_WAVES
    for block in range(first + wave, full, SCORE_WAVES):
        _score_one(build, a, keys, own, scores, block, first, False)
    for block in range(first + wave + done, end, SCORE_WAVES):
        _score_one(build, a, keys, own, scores, block, first, True)


@flyc.jit
def _score_one(build, a, keys, own, scores: Bytes, block, first, masked):
    lane = lane_id()
    found = block_scores(a, keys, own, a.table_place, block, masked)
    if lane < TILE:
        scores.store(found[0], offset=lane * (WAVE * 4) + (fx.Int32(block) - first) * 4)


def _list(a: SimpleNamespace, pair, number) -> Bytes:
    """The list of a pair from run `number`: a.listed candidates, absent ones last."""
    return a.lists.at(fx.Int64((pair * a.runs + number) * a.listed) * CANDIDATE_BYTES)


@flyc.jit
def _list_best(build, a, scores: Bytes, first, end):
    """Of each pair the best of this run, in rank order; runs that no row sees have no list."""
    lane = lane_id()
    if first < end:
        for pair in range(wave_id(), a.pairs, fx.Int32(SCORE_WAVES)):
            _, init, last = _candidates(a, fx.Int32(pair) // a.heads)
            block = first + lane
            score = scores.load(fx.Float32, offset=fx.Int32(pair) * (WAVE * 4) + lane * 4)
            begin, stop = fx.max(init, first), fx.min(last, end)
            present = (block >= begin) & (block < stop)
            key = order_key(score, present)
            rank = fx.Int32(0)
            for other in range(fx.Int32(0), end - first, fx.Int32(1)):
                theirs = lane_value(key, fx.Int32(other))
                before = (theirs > key) | ((theirs == key) & (fx.Int32(other) < lane))
                rank = rank + before.select(fx.Int32(1), fx.Int32(0))
            place = _list(a, fx.Int32(pair), fx.block_idx.x)
            found = stop - begin
            if present & (rank < a.listed):
                both = fx.Vector.from_elements([fx.Int32(key), block], fx.Int32)
                place.store(both, offset=rank * CANDIDATE_BYTES, align=8)
            if (lane >= found) & (lane < a.listed):
                none = fx.Vector.from_elements([fx.Int32(ABSENT), fx.Int32(-1)], fx.Int32)
                place.store(none, offset=lane * CANDIDATE_BYTES, align=8)


@flyc.jit
def _select(build, a, length, chosen: Bytes):
    """The selection of each pair from its lists; chosen: LDS for 64 numbers a wave.

    Lists are in rank order: only those with the best first candidates hold any of the best.
    """
    lane = lane_id()
    lists = (_blocks(a, length) + a.run - 1) // a.run
    mine = chosen.at(wave_id() * (WAVE * 4))
    for pair in range(wave_id(), a.pairs, fx.Int32(SCORE_WAVES)):
        first = _list(a, fx.Int32(pair), fx.Int32(0))
        block = fx.Int32(-1)
        if lists <= WAVE:
            block = _best(build, a, first, fx.Int32(1), lists, mine, 1, True)[1]
        else:
            block = _best(build, a, first, fx.Int32(1), lists, mine, REGISTERS, True)[1]
        # Writer and reader: this wave.
        mine.store((block < 0).select(block, fx.Int32(fx.Uint32(block) // a.run)), offset=lane * 4)
        if a.listed * build.kept <= WAVE:
            block = _best(build, a, first, a.listed, build.kept, mine, 1, False)[1]
        else:
            block = _best(build, a, first, a.listed, build.kept, mine, REGISTERS // 2, False)[1]
        row, head = fx.Int32(pair) // a.heads, fx.Int32(pair) % a.heads
        count, init, last = _candidates(a, row)
        always = init + count - last
        to = (fx.Int64(head * a.rows + row) + a.first_row) * fx.Int64(a.topk * 4)
        if lane < always:
            kept = (lane < init).select(lane, last + lane - init)
            a.ids.at(to).store(kept, offset=lane * 4)
        if lane < a.topk - always:
            a.ids.at(to).store(block, offset=(always + lane) * 4)


@flyc.jit
def _best(build, a, first: Bytes, each, lists, chosen: Bytes, registers, heads):
    """(key, id) of the best of the first `each` candidates of `lists` lists, by rank in the lanes.

    heads: of all lists, whose first candidates they are; else of those whose numbers `chosen` has.
    """
    lane, total = lane_id(), lists * each
    key, block = fx.Uint32(ABSENT), fx.Int32(-1)
    for start in range(fx.Int32(0), total, fx.Int32(registers * WAVE)):
        keys, blocks = [key], [block]
        for r in fx.range_constexpr(registers):
            at = fx.Int32(start) + WAVE * r + lane
            there = at < total
            at = there.select(at, fx.Int32(0))
            number, slot = at, fx.Int32(0)
            if fx.const_expr(not heads):
                number = fx.Int32(fx.Uint32(at) // fx.Uint32(each))
                slot = at - number * each
                number = chosen.load(fx.Int32, offset=number * 4)
                there = there & (number >= 0)
                number = there.select(number, fx.Int32(0))
            place = fx.Int64(number * a.listed + slot) * CANDIDATE_BYTES
            both = first.load(fx.Int32, 2, offset=place, align=8)
            keys.append(there.select(fx.Uint32(both[0]), fx.Uint32(ABSENT)))
            blocks.append(both[1])
        key, block = top_candidates(keys, blocks, build.kept)
    return key, block
