"""Traced code of index_score_prefill for gfx950; the work is in flydsl_index_score.py."""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.device.memory import global_bytes
from rocm_msa.device.wave import WAVE
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.flydsl_host import SCORE_WAVES
from rocm_msa.ops.flydsl_index_score import score_run
from rocm_msa.ops.flydsl_rows import last_request
from rocm_msa.ops.index_score_prefill.flydsl_gfx950 import TILES, Build

NO_TOKEN = -(2**30)  # a length below which no block is seen


def compile_build(build: Build) -> Compiled:
    @flyc.kernel(name=build.symbol)
    def kernel(
        index_q: fx.Pointer,  # [tokens, heads, 128]
        q_row: fx.Int64,  # bytes
        q_head: fx.Int64,
        pages: fx.Pointer,  # [num_pages, page bytes]
        block_stride: fx.Int64,  # bytes
        num_pages: fx.Int32,
        table: fx.Pointer,  # the NVFP4 table, 2048 bytes
        block_table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int64,  # elements
        table_column: fx.Int64,
        cu_seqlens: fx.Pointer,  # int32 [requests + 1]
        cu_stride: fx.Int64,
        seq_lens: fx.Pointer,  # int32 [requests]
        seq_stride: fx.Int64,
        requests: fx.Int32,
        tokens: fx.Int32,
        group: fx.Int32,  # tokens a workgroup
        heads: fx.Int32,
        max_blocks: fx.Int32,
        run: fx.Int32,  # blocks a workgroup
        factor: fx.Float32,  # undoes the scale of the keys
        out: fx.Pointer,  # fp32 [heads, tokens, max_blocks]
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
        cu, number = global_bytes(cu_seqlens), fx.block_idx.y
        # The request whose groups begin at or before this one.
        found = last_request(cu, cu_stride, requests, lambda first, r: first // group + r <= number)
        request = fx.Int64(found)
        begin = cu.load(fx.Int32, offset=request * cu_stride * 4)
        padding = found == requests
        known = padding.select(fx.Int64(0), request)  # a request that there is, for its numbers
        after = cu.load(fx.Int32, offset=(known + 1) * cu_stride * 4)
        end = padding.select(tokens, after)
        length = global_bytes(seq_lens).load(fx.Int32, offset=known * seq_stride * 4)
        offset = (number - begin // group - found) * group
        first_length = length - (end - begin) + offset + 1
        first_length = padding.select(fx.Int32(NO_TOKEN), first_length)
        count = fx.min(group, end - begin - offset)
        if count > 0:
            first_row = fx.Int64(begin + offset)
            score_run(build, TILES, a, known, first_row, first_length, count * heads)

    return compile_kernel(kernel, SCORE_WAVES * WAVE, pointers={"out": fx.Float32})
