"""dense_attention in Triton: every causal block in ascending order, a program a token and KV head.

See rocm_msa/ops/triton_attention.py. Simple, not fast: a page is read once for each token. The
unit is a constant, so a token's result depends on its own context alone; tokens are taken in turns
that bound the memory of the partial results.
"""

from __future__ import annotations

import torch

from rocm_msa.ops.triton_attention import attend
from rocm_msa.ops.triton_host import prefill_table

_UNIT = 64  # blocks a program
_WORKSPACE = 2**28  # bytes of partial results


def run(
    q, main_cache, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, q_heads, dim = q.shape
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    rows = prefill_table(cu_seqlens_q, seq_lens, tokens)
    units = -(-block_table.shape[1] // _UNIT)
    step = max(1, _WORKSPACE // max(1, units * max(q_heads, 16 * main_cache.kv_heads) * dim * 4))
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        lse[part] = attend(
            q[part], main_cache, None, block_table, rows[:, part].contiguous(), None,
            float(sm_scale), out[part], unit=_UNIT,
        )  # fmt: skip
    return out, lse
