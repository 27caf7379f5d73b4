"""Sparse attention of decode rows over the selected blocks.

out[t] = softmax over the keys j < n(t) of the selected blocks, of sm_scale * q . k_j, times v_j,
for the q_heads / kv_heads query heads of each KV head with that head's own block list. Row i of a
request with q rows has n = seq_len - q + i + 1. Ids of -1 or >= nb(t) contribute exactly nothing;
rows with no key give exact zeros and lse = -inf. fp32 accumulation, blocks summed in ascending
order of id.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import MainCache
from rocm_msa.errors import check_output
from rocm_msa.ops.attention_checks import check_block_ids, check_query, give
from rocm_msa.ops.dispatch import choose, flydsl_run, triton_run
from rocm_msa.ops.reference_attention import attend
from rocm_msa.ops.rows import check_decode_rows, check_paging, decode_rows


def _reference(q, main_cache, block_ids, block_table, seq_lens, rows_per_request, sm_scale, **_):
    rows = decode_rows(seq_lens, rows_per_request)
    return attend(q, main_cache, block_ids, block_table, rows, sm_scale)


_IMPLEMENTATIONS = {
    "reference": _reference,
    "triton": triton_run("sparse_decode"),
    "flydsl": flydsl_run("sparse_decode"),
}


def sparse_decode(
    q: torch.Tensor,
    main_cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    sm_scale: float,
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    shared_pages: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of `rows = requests * rows_per_request` decode rows.

    Args:
        q: `[rows, q_heads, head_dim]` bf16, fp16 or fp32.
        main_cache: K and V, any cache dtype.
        block_ids: `[kv_heads, rows, topk]` int32 logical ids, distinct in a row.
        block_table: `[requests, max_blocks]` int32, logical block -> page.
        seq_lens: `[requests]` int32; 0 for padding.
        rows_per_request: 1 + speculative tokens.
        sm_scale: softmax scale, head_dim ** -0.5 for M3.
        out: `[rows, q_heads, head_dim]` to write into.
        return_lse: also return lse fp32 `[rows, q_heads]`, natural log.
        shared_pages: a hint that requests have pages in common (a shared prefix): kernels may
            then work on such a page once for several rows. Changes no bit.

    Returns:
        `[rows, q_heads, head_dim]` in q's dtype (or lse with it).
    """
    check_query(q, main_cache, sm_scale)
    check_block_ids(block_ids, main_cache, q.shape[0])
    requests = check_paging(block_table, seq_lens, q.device)
    check_decode_rows("q", q, requests, rows_per_request)
    if out is not None:
        check_output(out, list(q.shape), q.dtype, q.device)
    run = choose("sparse_decode", backend, _IMPLEMENTATIONS, q.device)
    result, lse = run(
        q, main_cache, block_ids, block_table, seq_lens, rows_per_request, sm_scale, out=out,
        shared_pages=shared_pages,
    )  # fmt: skip
    return give(out, q, result, lse, return_lse)
