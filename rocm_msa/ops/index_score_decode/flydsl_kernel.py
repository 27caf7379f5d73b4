"""Traced code of index_score_decode for gfx950; the work is in flydsl_index_score.py."""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.device.memory import global_bytes
from rocm_msa.device.wave import WAVE
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.flydsl_host import SCORE_WAVES
from rocm_msa.ops.flydsl_index_score import score_run
from rocm_msa.ops.index_score_decode.flydsl_gfx950 import Build


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
        run: fx.Int32,  # blocks a workgroup
        factor: fx.Float32,  # undoes the scale of the keys
        out: fx.Pointer,  # fp32 [heads, rows, max_blocks]
        out_head: fx.Int64,  # elements
        out_row: fx.Int64,
        out_block: fx.Int64,
    ):
        a = SimpleNamespace(
            index_q=index_q, q_row=q_row, q_head=q_head,
            pages=pages, block_stride=block_stride, num_pages=num_pages, table=table,
            block_table=block_table, table_row=table_row, table_column=table_column,
            heads=heads, max_blocks=max_blocks, run=run, factor=factor,
            out=out, out_head=out_head, out_row=out_row, out_block=out_block,
        )  # fmt: skip
        request = fx.Int64(fx.block_idx.y)
        length = global_bytes(seq_lens).uniform(fx.Int32, offset=request * seq_stride * 4)
        first_row = request * fx.Int64(rows_per_request)
        first_length = length - rows_per_request + 1
        pairs = rows_per_request * heads
        score_run(build, build.tiles, a, request, first_row, first_length, pairs)

    return compile_kernel(kernel, SCORE_WAVES * WAVE, pointers={"out": fx.Float32})
