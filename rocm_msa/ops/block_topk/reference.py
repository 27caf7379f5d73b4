"""Reference of block_topk: one unique 64-bit rank a block, then torch.topk.

rank = order(score) * 2^24 - id, with order() the monotone map of fp32 to int32; kept blocks get
ranks above, blocks beyond nb below every score.
"""

from __future__ import annotations

import torch

_ID_BITS = 24
_KEPT = 1 << 58
_BEYOND = -(1 << 60)


def run(
    scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, init_blocks: int, local_blocks: int
) -> torch.Tensor:
    """int32 `[heads, rows, topk]`; see api.py."""
    heads, rows, _ = scores.shape
    max_blocks = int(num_blocks.max()) if rows else 0
    scores = scores[..., :max_blocks]
    ids = torch.arange(max_blocks, device=scores.device)
    count = num_blocks.to(torch.int64)[:, None]
    rank = (_order(scores) << _ID_BITS) - ids
    init = (ids < init_blocks) & (ids < count)
    local = (ids >= count - local_blocks) & (ids < count)
    rank = torch.where(local, _KEPT - ids, rank)
    rank = torch.where(init, 2 * _KEPT - ids, rank)
    rank = torch.where(ids >= count, _BEYOND - ids, rank)
    kept = min(topk, max_blocks)
    value, index = torch.topk(rank, kept, dim=-1, sorted=True)
    selected = torch.full((heads, rows, topk), -1, dtype=torch.int32, device=scores.device)
    selected[..., :kept] = torch.where(value > _BEYOND // 2, index, -1).to(torch.int32)
    return selected


def _order(scores: torch.Tensor) -> torch.Tensor:
    """Monotone int64 of fp32: -0 equals +0, NaN below -inf."""
    clean = torch.where(scores == 0, torch.zeros_like(scores), scores).contiguous()
    bits = clean.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return torch.where(scores.isnan(), torch.full_like(ordered, -(1 << 31)), ordered)
