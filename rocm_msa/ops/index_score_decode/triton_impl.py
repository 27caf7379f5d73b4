"""index_score_decode in Triton, see rocm_msa/ops/triton_scores.py."""

from __future__ import annotations

import torch

from rocm_msa.ops.index_score_decode.plan import select
from rocm_msa.ops.triton_scores import score


def run(index_q, index_cache, block_table, seq_lens, rows_per_request, out=None) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`; see api.py."""
    rows, heads, _ = index_q.shape
    if out is None:
        shape = (heads, rows, block_table.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device=index_q.device)
    t = select(seq_lens.shape[0], rows_per_request * heads, block_table.shape[1])
    score(
        index_q, index_cache, block_table, seq_lens, rows_per_request, out,
        pairs=t.pairs, run=t.run, tile=t.tile, warps=t.warps,
    )  # fmt: skip
    return out
