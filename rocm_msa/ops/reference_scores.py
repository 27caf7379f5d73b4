"""Index scores of query rows against every causal block, the reference of two ops."""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import IndexCache
from rocm_msa.ops.reference_tiles import Items, key_scores, page_vectors
from rocm_msa.ops.rows import Rows, pages_of


def block_scores(
    index_q: torch.Tensor, cache: IndexCache, block_table: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`, -inf at and beyond a row's causal blocks."""
    num_rows, heads, _ = index_q.shape
    q = index_q.float()
    scores = q.new_full((heads, num_rows, block_table.shape[1]), float("-inf"))
    width = int(rows.num_blocks.max()) if num_rows else 0
    if heads == 0 or width == 0:
        return scores
    ids = torch.arange(width, device=q.device).expand(num_rows, width)
    items = Items.of(*pages_of(rows, ids, block_table, cache.num_blocks))
    best = q.new_full((num_rows * width + 1, heads), float("-inf"))
    for chunk in items.chunks(heads):
        k = page_vectors(cache, "k", 0, chunk.pages)
        best[chunk.items] = key_scores(q, chunk, items, k).amax(dim=-1)
    scores[..., :width] = best[:-1].view(num_rows, width, heads).permute(2, 0, 1)
    return scores
