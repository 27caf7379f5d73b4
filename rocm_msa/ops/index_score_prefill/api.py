"""Block scores of prefill tokens from the index cache, causal.

The formula and the handling of what lies beyond n(t) are those of index_score_decode; token i of a
request's q_len new tokens has n = seq_len - q_len + i + 1. Tokens at and beyond cu_seqlens_q[-1]
are padding: all -inf.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_output
from rocm_msa.ops import reference_scores
from rocm_msa.ops.attention_checks import check_index_query
from rocm_msa.ops.dispatch import choose, flydsl_run, triton_run
from rocm_msa.ops.rows import check_cu_seqlens, check_paging, prefill_rows


def _reference(index_q, index_cache, block_table, cu_seqlens_q, seq_lens, out=None):
    rows = prefill_rows(cu_seqlens_q, seq_lens, index_q.shape[0])
    return reference_scores.block_scores(index_q, index_cache, block_table, rows)


_IMPLEMENTATIONS = {
    "reference": _reference,
    "triton": triton_run("index_score_prefill"),
    "flydsl": flydsl_run("index_score_prefill"),
}


def index_score_prefill(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of the new tokens of a varlen batch.

    Args:
        index_q: `[tokens, heads, head_dim]` bf16, fp16 or fp32.
        index_cache: index keys, any cache dtype, the new tokens' keys already inserted.
        block_table: `[requests, max_blocks]` int32, logical block -> page.
        cu_seqlens_q: `[requests + 1]` int32, first token of each request.
        seq_lens: `[requests]` int32, keys in the cache with this step's.
        out: `[heads, tokens, max_blocks]` fp32 to write into.

    Returns:
        fp32 `[heads, tokens, max_blocks]`.
    """
    check_index_query(index_q, index_cache)
    check_paging(block_table, seq_lens, index_q.device)
    check_cu_seqlens(cu_seqlens_q, seq_lens, index_q.shape[0])
    if out is not None:
        shape = [index_q.shape[1], index_q.shape[0], block_table.shape[1]]
        check_output(out, shape, torch.float32, index_q.device)
    run = choose("index_score_prefill", backend, _IMPLEMENTATIONS, index_q.device)
    scores = run(index_q, index_cache, block_table, cu_seqlens_q, seq_lens, out=out)
    return scores if out is None or scores is out else out.copy_(scores)
