"""index_score_prefill in Triton, see rocm_msa/ops/triton_scores.py."""

from __future__ import annotations

import torch

from rocm_msa.ops.index_score_prefill.plan import select
from rocm_msa.ops.triton_host import prefill_table
from rocm_msa.ops.triton_scores import score


def run(index_q, index_cache, block_table, cu_seqlens_q, seq_lens, out=None) -> torch.Tensor:
    """fp32 `[heads, tokens, max_blocks]`; see api.py."""
    tokens, heads, _ = index_q.shape
    if out is None:
        shape = (heads, tokens, block_table.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device=index_q.device)
    if tokens == 0 or heads == 0:
        return out
    t = select(tokens, heads, block_table.shape[1])
    score(
        index_q, index_cache, block_table, prefill_table(cu_seqlens_q, seq_lens, tokens), None,
        out, pairs=t.pairs, run=t.run, tile=t.tile, warps=t.warps,
    )  # fmt: skip
    return out
