"""sparse_prefill in Triton, see rocm_msa/ops/triton_attention.py."""

from __future__ import annotations

import torch

from rocm_msa.ops.sparse_prefill.plan import select
from rocm_msa.ops.triton_attention import attend
from rocm_msa.ops.triton_host import prefill_table


def run(
    q, main_cache, block_ids, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    rows = prefill_table(cu_seqlens_q, seq_lens, q.shape[0])
    t = select(block_ids.shape[-1])
    lse = attend(
        q, main_cache, block_ids, block_table, rows, None, float(sm_scale), out,
        unit=t.unit, tile=t.tile, warps=t.warps,
    )  # fmt: skip
    return out, lse
