"""Sparse attention of prefill tokens over the selected blocks, causal.

The formula and the handling of what lies beyond n(t) are those of sparse_decode; token i of a
request's q_len new tokens has n = seq_len - q_len + i + 1. Tokens at and beyond cu_seqlens_q[-1]
are padding: exact zeros.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import MainCache
from rocm_msa.errors import check_output
from rocm_msa.ops.attention_checks import check_block_ids, check_query, give
from rocm_msa.ops.dispatch import choose, flydsl_run, triton_run
from rocm_msa.ops.reference_attention import attend
from rocm_msa.ops.rows import check_cu_seqlens, check_paging, prefill_rows


def _reference(q, main_cache, block_ids, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None):
    rows = prefill_rows(cu_seqlens_q, seq_lens, q.shape[0])
    return attend(q, main_cache, block_ids, block_table, rows, sm_scale)


_IMPLEMENTATIONS = {
    "reference": _reference,
    "triton": triton_run("sparse_prefill"),
    "flydsl": flydsl_run("sparse_prefill"),
}


def sparse_prefill(
    q: torch.Tensor,
    main_cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens of a varlen batch.

    Args:
        q: `[tokens, q_heads, head_dim]` bf16, fp16 or fp32.
        main_cache: K and V, any cache dtype, the new tokens already inserted.
        block_ids: `[kv_heads, tokens, topk]` int32 logical ids, distinct in a row.
        block_table: `[requests, max_blocks]` int32, logical block -> page.
        cu_seqlens_q: `[requests + 1]` int32, first token of each request.
        seq_lens: `[requests]` int32, keys in the cache with this step's.
        sm_scale: softmax scale, head_dim ** -0.5 for M3.
        out: `[tokens, q_heads, head_dim]` to write into.
        return_lse: also return lse fp32 `[tokens, q_heads]`, natural log.

    Returns:
        `[tokens, q_heads, head_dim]` in q's dtype (or lse with it).
    """
    check_query(q, main_cache, sm_scale)
    check_block_ids(block_ids, main_cache, q.shape[0])
    check_paging(block_table, seq_lens, q.device)
    check_cu_seqlens(cu_seqlens_q, seq_lens, q.shape[0])
    if out is not None:
        check_output(out, list(q.shape), q.dtype, q.device)
    run = choose("sparse_prefill", backend, _IMPLEMENTATIONS, q.device)
    result, lse = run(
        q, main_cache, block_ids, block_table, cu_seqlens_q, seq_lens, sm_scale, out=out
    )
    return give(out, q, result, lse, return_lse)
