"""index_score_decode in Triton: hopper.py for NVFP4 pages on sm_90, else portable.py.

The score of a (row, head, block) is a function of its query and page alone: the same bits for every
tile, run and batch. Entries at and beyond a row's causal blocks are stored as -inf by the program
that owns them; nothing is read for them. A block whose table entry names no page of the cache
scores -inf (the reference raises).
"""

from __future__ import annotations

import torch
import triton

from rocm_msa.cache.paged import IndexCache
from rocm_msa.ops.index_score_decode.plan import (
    REGISTERS,
    HopperTuning,
    Tuning,
    select,
    select_hopper,
)
from rocm_msa.ops.index_score_decode.portable import score_kernel
from rocm_msa.ops.triton_host import (
    Geometry,
    aligned,
    converts_e4m3,
    hopper,
    operand_types,
    scale,
)
from rocm_msa.ops.triton_prefill import register_limit


def run(
    index_q,
    index_cache,
    block_table,
    seq_lens,
    rows_per_request,
    out=None,
    tuning: Tuning | HopperTuning | None = None,
    fast: bool = True,
) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`; see api.py. `tuning` and `fast`: tests and benchmarks.

    fast: whether the Hopper kernel may be taken where it applies.
    """
    rows, heads, dim = index_q.shape
    requests, max_blocks = block_table.shape
    if out is None:
        shape = (heads, rows, max_blocks)
        out = torch.empty(shape, dtype=torch.float32, device=index_q.device)
    if rows == 0 or heads == 0 or max_blocks == 0:
        return out
    cache = index_cache
    if cache.num_blocks == 0:
        return out.fill_(float("-inf"))
    g = Geometry.of(cache)
    pairs = rows_per_request * heads
    pages = (cache.pages, cache.block_stride, cache.num_blocks)
    target = (scale(cache, "k"), out, *out.stride())
    if fast and on_hopper(index_q, cache, g):
        from rocm_msa.ops.index_score_decode import hopper as fast_kernel

        t = tuning or select_hopper(requests, pairs, max_blocks)
        fast_kernel.score_kernel[(t.programs, triton.cdiv(pairs, 16))](
            index_q, index_q.stride(0), index_q.stride(1), *pages, block_table,
            *block_table.stride(), max_blocks, seq_lens, requests, rows_per_request, *target,
            HEADS=heads, K_SCALES=g.k_scales, TILE=t.tile, REQUESTS=t.requests, num_warps=1,
            **register_limit(REGISTERS[t.tile]),
        )  # fmt: skip
        return out
    t = tuning or select(requests, pairs, max_blocks)
    grid = (requests, triton.cdiv(max_blocks, t.run), triton.cdiv(pairs, t.pairs))
    qk, _ = operand_types(index_q, cache)
    score_kernel[grid](
        index_q, *index_q.stride(), *pages, block_table, *block_table.stride(), max_blocks,
        seq_lens, rows_per_request, *target, t.run,
        HEADS=heads, K_SCALES=g.k_scales, D=dim,
        KIND=g.kind + 2 if g.kind and converts_e4m3(index_q) else g.kind, QK=qk,
        PAIRS=t.pairs, TILE=t.tile, num_warps=t.warps,
    )  # fmt: skip
    return out


def on_hopper(index_q: torch.Tensor, cache: IndexCache, g: Geometry) -> bool:
    """Whether hopper.py scores these queries: its sums are in another order than portable.py's."""
    return (
        hopper(index_q)
        and g.kind == 0
        and g.head_dim == 128
        and index_q.shape[1] <= 16
        and index_q.dtype is not torch.float32
        and index_q.stride(-1) == 1
        and aligned(cache)
    )
