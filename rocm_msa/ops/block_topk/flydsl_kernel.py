"""Traced code of block_topk for gfx950: a workgroup selects for one (row, head).

Kept blocks are arithmetic: ids [0, init), then [last, nb). The candidates, ids in [init, last), are
dealt to the waves in contiguous runs; each wave finds its best in rank order, then wave 0 the best
of all waves' lists. Positions in the lists order like ids, so that ties go to the lower id.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.device.memory import global_bytes
from rocm_msa.device.topk import ABSENT, order_key, top_positions
from rocm_msa.device.wave import WAVE, lane_id, wave_id
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.block_topk.flydsl_gfx950 import Build


def _candidates(row, stride, first, begin, end, count: int) -> list:
    """Keys of ids first + 64 r + lane, absent outside of [begin, end); `row`: scores of the row."""
    keys = []
    for r in range(count):
        at = first + WAVE * r
        present = (at >= begin) & (at < end)
        safe = present.select(at, fx.Int32(0))  # what is not a candidate is not looked at
        keys.append(order_key(row[fx.Int64(safe) * stride], present))
    return keys


def compile_build(build: Build) -> Compiled:
    kept, waves = build.kept, build.waves
    listed = waves * kept

    @flyc.kernel(name=build.symbol)
    def kernel(
        scores: fx.Pointer,  # fp32 [heads, rows, max_blocks]
        score_head: fx.Int64,  # strides in elements
        score_row: fx.Int64,
        score_block: fx.Int64,
        num_blocks: fx.Pointer,  # int32 [rows]
        num_blocks_stride: fx.Int64,
        max_blocks: fx.Int32,
        topk: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        out: fx.Pointer,  # int32 [heads, rows, topk]
        out_head: fx.Int64,
        out_row: fx.Int64,
        out_slot: fx.Int64,
    ):
        lds = fx.SharedAllocator()
        lds_keys = lds.allocate(fx.Array[fx.Int32, listed, 16]).peek().ptr
        lds_ids = lds.allocate(fx.Array[fx.Int32, listed, 16]).peek().ptr
        row, head = fx.Int64(fx.block_idx.x), fx.Int64(fx.block_idx.y)
        lane, wave = lane_id(), wave_id()
        count = global_bytes(num_blocks).uniform(fx.Int32, offset=row * num_blocks_stride * 4)
        count = fx.max(fx.min(count, max_blocks), fx.Int32(0))
        init = fx.min(init_blocks, count)
        last = fx.max(count - local_blocks, init)
        always = init + count - last

        first = wave * (WAVE * build.registers)
        if lane < kept:
            lds_keys[wave * kept + lane] = fx.Int32(ABSENT)
        if first < last:
            keys = _candidates(
                scores + head * score_head + row * score_row,
                score_block, first + lane, init, last, build.registers,
            )  # fmt: skip
            key, place = top_positions(keys, kept)
            if lane < kept:
                lds_keys[wave * kept + lane] = fx.Int32(key)
                lds_ids[wave * kept + lane] = first + place
        # Writer: each wave, its own list. Reader: wave 0.
        fx.barrier()
        if wave == 0:
            keys = []
            for r in fx.range_constexpr(-(-listed // WAVE)):
                at = lane + WAVE * r
                present = at < listed
                key = lds_keys[present.select(at, fx.Int32(0))]
                keys.append(present.select(fx.Uint32(key), fx.Uint32(ABSENT)))
            key, place = top_positions(keys, kept)
            found = key != fx.Uint32(ABSENT)
            ranked = found.select(lds_ids[found.select(place, fx.Int32(0))], fx.Int32(-1))
            target = out + head * out_head + row * out_row
            if lane < always:
                kept_id = (lane < init).select(lane, last + lane - init)
                target[fx.Int64(lane) * out_slot] = kept_id
            if lane < topk - always:
                target[fx.Int64(always + lane) * out_slot] = ranked

    return compile_kernel(
        kernel,
        waves * WAVE,
        pointers={"scores": fx.Float32, "num_blocks": fx.Int32, "out": fx.Int32},
    )
