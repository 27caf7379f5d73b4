"""Phase insert: norms, RoPE, quantisation and insertion, as the op qkv_insert does it.

A task is four heads of four rows; a wave has a head.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.plan import TOKENS_A_WAVE, WAVES
from mono_kernel.shapes import HEAD_DIM
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device.memory import Bytes, global_address
from rocm_msa.ops.qkv_insert.flydsl_gfx950 import Build
from rocm_msa.ops.qkv_insert.flydsl_kernel import insert_head


@flyc.jit
def insert(ctx, task):
    groups = -(-ctx.s.heads // WAVES)
    head = task % groups * WAVES + ctx.wave
    write_head(ctx, ctx.scratch("index_q"), head, task // groups * TOKENS_A_WAVE)


def write_head(ctx, index_q: Bytes, head, first_row) -> None:
    """A wave's head of four rows: to q, to `index_q` [rows, index heads, 128], or to a page."""
    s, a = ctx.s, ctx.a
    build = Build(
        s.q_heads, s.kv_heads, s.index_heads, HEAD_DIM, s.rotary_dim,
        main_dtype="nvfp4", index_dtype="nvfp4",
        dtype="bf16", weight_dtype="bf16", rope_dtype="fp32",
    )  # fmt: skip

    def pointer(place):
        return ctx.pointer(place, fx.Uint32)

    def argument(address):
        return pointer(global_address(address))

    step, high = fx.Int32(8), fx.Int32(4)  # int64: bytes from one to the next, to its high word
    arguments = SimpleNamespace(
        qkv=pointer(ctx.scratch("projected")), qkv_row=fx.Int64(2 * s.features), tokens=ctx.rows,
        weight_q=pointer(ctx.weights("q_norm")), weight_k=pointer(ctx.weights("k_norm")),
        weight_index_q=pointer(ctx.weights("index_q_norm")),
        weight_index_k=pointer(ctx.weights("index_k_norm")), eps=fx.Float32(s.eps),
        cos_sin=argument(a.cos_sin), cos_sin_row=fx.Int64(4 * s.rotary_dim),
        max_position=a.max_position,
        positions=argument(a.positions), position_step=step, position_high=high,
        main_slots=argument(a.main_slots), main_slot_step=step, main_slot_high=high,
        index_slots=argument(a.index_slots), index_slot_step=step, index_slot_high=high,
        main_pages=argument(a.main_pages), main_stride=a.main_stride,
        main_limit=fx.Int64(a.main_blocks) * BLOCK_TOKENS, k_scale=a.k_scale, v_scale=a.v_scale,
        index_pages=argument(a.index_pages), index_stride=a.index_stride,
        index_limit=fx.Int64(a.index_blocks) * BLOCK_TOKENS, index_scale=a.index_scale,
        q_out=pointer(ctx.scratch("q")), index_q_out=pointer(index_q),
    )  # fmt: skip
    insert_head(build, arguments, head, first_row)
