"""Dense causal attention over the paged main cache, for the layers without an index branch.

out[t] = softmax over all keys j < n(t) of sm_scale * q . k_j, times v_j. A varlen batch: decode
rows are requests with few new tokens. fp32 accumulation, blocks summed in ascending order, so that
it equals, bit for bit, sparse attention that selected every causal block.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import MainCache
from rocm_msa.errors import check_output
from rocm_msa.ops.attention_checks import check_query, give
from rocm_msa.ops.dispatch import choose, triton_run
from rocm_msa.ops.reference_attention import attend
from rocm_msa.ops.rows import check_cu_seqlens, check_paging, prefill_rows


def _reference(q, main_cache, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None):
    rows = prefill_rows(cu_seqlens_q, seq_lens, q.shape[0])
    slots = int(rows.num_blocks.max()) if q.shape[0] else 0
    ids = torch.arange(slots, device=q.device).expand(1, q.shape[0], slots)
    return attend(q, main_cache, ids, block_table, rows, sm_scale)


_IMPLEMENTATIONS = {"reference": _reference, "triton": triton_run("dense_attention")}


def dense_attention(
    q: torch.Tensor,
    main_cache: MainCache,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens of a varlen batch over their whole context.

    Args and result as in sparse_prefill, without block_ids.
    """
    check_query(q, main_cache, sm_scale)
    check_paging(block_table, seq_lens, q.device)
    check_cu_seqlens(cu_seqlens_q, seq_lens, q.shape[0])
    if out is not None:
        check_output(out, list(q.shape), q.dtype, q.device)
    run = choose("dense_attention", backend, _IMPLEMENTATIONS, q.device)
    result, lse = run(q, main_cache, block_table, cu_seqlens_q, seq_lens, sm_scale, out=out)
    return give(out, q, result, lse, return_lse)
