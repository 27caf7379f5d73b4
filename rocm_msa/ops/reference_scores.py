"""Index scores of query rows against every causal block, the reference of two ops."""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import IndexCache
from rocm_msa.ops.reference_tiles import key_scores, page_vectors, tile_chunks
from rocm_msa.ops.rows import Rows, pages_of


def block_scores(
    index_q: torch.Tensor, cache: IndexCache, block_table: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`, -inf at and beyond a row's causal blocks."""
    num_rows, heads, _ = index_q.shape
    max_blocks = block_table.shape[1]
    q = index_q.float()
    scores = torch.full((num_rows * max_blocks, heads), float("-inf"), device=q.device)
    ids = torch.arange(max_blocks, device=q.device).expand(num_rows, max_blocks)
    page, keys = pages_of(rows, ids, block_table, cache.num_blocks)
    page, keys = page.flatten(), keys.flatten()
    row_of_item = torch.arange(num_rows, device=q.device).repeat_interleave(max_blocks)
    for chunk in tile_chunks(page):
        k = page_vectors(cache, "k", 0, chunk.pages)
        best = key_scores(q, chunk, row_of_item, keys, k).amax(dim=-1)
        scores[chunk.items[chunk.live]] = best[chunk.live]
    return scores.view(num_rows, max_blocks, heads).permute(2, 0, 1).contiguous()
