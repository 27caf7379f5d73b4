"""Block scores of decode rows from the index cache.

s[h, t, b] = max over keys j of block b, j < n(t), of index_q[t, h] . index_k[j], fp32 accumulation,
no softmax and no scale. Row i of a request with q rows has n = seq_len - q + i + 1. Entries at and
beyond nb(t) are -inf; padding rows (seq_len 0) are all -inf. Blocks beyond nb(t) and keys beyond
n(t) are never dereferenced or contribute nothing, even when the memory there holds NaN.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_output
from rocm_msa.ops import reference_scores
from rocm_msa.ops.attention_checks import check_index_query
from rocm_msa.ops.dispatch import choose, flydsl_run, triton_run
from rocm_msa.ops.rows import check_decode_rows, check_paging, decode_rows


def _reference(index_q, index_cache, block_table, seq_lens, rows_per_request, out=None):
    rows = decode_rows(seq_lens, rows_per_request)
    return reference_scores.block_scores(index_q, index_cache, block_table, rows)


_IMPLEMENTATIONS = {
    "reference": _reference,
    "triton": triton_run("index_score_decode"),
    "flydsl": flydsl_run("index_score_decode"),
}


def index_score_decode(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of `rows = requests * rows_per_request` decode rows.

    Args:
        index_q: `[rows, heads, head_dim]` bf16, fp16 or fp32.
        index_cache: index keys, any cache dtype.
        block_table: `[requests, max_blocks]` int32, logical block -> page.
        seq_lens: `[requests]` int32, keys in the cache with this step's; 0 for padding.
        rows_per_request: 1 + speculative tokens.
        out: `[heads, rows, max_blocks]` fp32 to write into.

    Returns:
        fp32 `[heads, rows, max_blocks]`.
    """
    check_index_query(index_q, index_cache)
    requests = check_paging(block_table, seq_lens, index_q.device)
    check_decode_rows("index_q", index_q, requests, rows_per_request)
    if out is not None:
        shape = [index_q.shape[1], index_q.shape[0], block_table.shape[1]]
        check_output(out, shape, torch.float32, index_q.device)
    run = choose("index_score_decode", backend, _IMPLEMENTATIONS, index_q.device)
    scores = run(index_q, index_cache, block_table, seq_lens, rows_per_request, out=out)
    return scores if out is None or scores is out else out.copy_(scores)
