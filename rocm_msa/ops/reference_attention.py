"""Softmax attention of query rows over lists of cache blocks, the reference of three ops.

out(t) = sum_j p_j v_j / sum_j p_j,  p_j = exp(sm_scale * q.k_j - max),  j over the live keys of the
row's blocks; fp32 throughout; blocks are summed in ascending order of their logical id. Rows with
no key give zeros and lse = -inf.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import MainCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.ops.reference_tiles import key_scores, page_vectors, tile_chunks
from rocm_msa.ops.rows import Rows, pages_of

_CHUNK_ELEMENTS = 16 * 2**20


def attend(
    q: torch.Tensor,
    cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row over its blocks.

    Args:
        q: `[rows, q_heads, head_dim]`.
        cache: main cache with kv_heads heads; q_heads / kv_heads query heads share one.
        block_ids: logical ids `[kv_heads or 1, rows, slots]`, -1 for nothing.
        block_table: int32 `[requests, max_blocks]`.
        rows: request and causal length of each row.
        sm_scale: softmax scale.

    Returns:
        out fp32 `[rows, q_heads, head_dim]` and lse fp32 `[rows, q_heads]`, natural log.
    """
    num_rows, q_heads, head_dim = q.shape
    group, slots = q_heads // cache.kv_heads, block_ids.shape[-1]
    out = torch.zeros(num_rows, q_heads, head_dim, device=q.device)
    lse = torch.full((num_rows, q_heads), float("-inf"), device=q.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, slots * group * max(head_dim, BLOCK_TOKENS)))
    for head in range(cache.kv_heads):
        heads = slice(head * group, (head + 1) * group)
        ids = block_ids[head if block_ids.shape[0] > 1 else 0]
        for start in range(0, num_rows, step):
            chunk = slice(start, start + step)
            part = Rows(rows.request[chunk], rows.length[chunk])
            ascending = _ascending(ids[chunk])
            page, keys = pages_of(part, ascending, block_table, cache.num_blocks)
            out[chunk, heads], lse[chunk, heads] = _attend_head(
                q[chunk, heads].float(), cache, head, page, keys, sm_scale
            )
    return out, lse


def _ascending(ids: torch.Tensor) -> torch.Tensor:
    """Ids sorted, the -1 entries last."""
    last = torch.iinfo(ids.dtype).max
    ordered = torch.where(ids < 0, torch.full_like(ids, last), ids).sort(dim=-1).values
    return torch.where(ordered == last, torch.full_like(ids, -1), ordered)


def _attend_head(
    q: torch.Tensor,
    cache: MainCache,
    head: int,
    page: torch.Tensor,
    keys: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One KV head: q fp32 `[rows, group, head_dim]`, page and keys `[rows, slots]`."""
    num_rows, group, head_dim = q.shape
    slots = page.shape[1]
    flat_page, flat_keys = page.flatten(), keys.flatten()
    row_of_item = torch.arange(num_rows, device=q.device).repeat_interleave(slots)
    chunks = list(tile_chunks(flat_page))

    scores = torch.full((num_rows * slots, group, BLOCK_TOKENS), float("-inf"), device=q.device)
    for chunk in chunks:
        k = page_vectors(cache, "k", head, chunk.pages)
        tile = key_scores(q, chunk, row_of_item, flat_keys, k) * sm_scale
        scores[chunk.items[chunk.live]] = tile[chunk.live]

    by_row = scores.view(num_rows, slots, group, BLOCK_TOKENS)
    top = by_row.amax(dim=(1, 3)) if slots else q.new_full((num_rows, group), float("-inf"))
    safe_top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    p = torch.exp(by_row - safe_top[:, None, :, None])
    slot_sums = p.sum(dim=-1)
    p = p.view(num_rows * slots, group, BLOCK_TOKENS)

    partial = torch.zeros(num_rows * slots, group, head_dim, device=q.device)
    for chunk in chunks:
        v = page_vectors(cache, "v", head, chunk.pages)
        p_tile = p[chunk.safe_items].view(len(chunk.pages), -1, BLOCK_TOKENS)
        products = torch.bmm(p_tile, v).view(*chunk.items.shape, group, head_dim)
        partial[chunk.items[chunk.live]] = products[chunk.live]

    partial = partial.view(num_rows, slots, group, head_dim)
    out, total = torch.zeros_like(q), torch.zeros(num_rows, group, device=q.device)
    for slot in range(slots):
        out += partial[:, slot]
        total += slot_sums[:, slot]
    alive = total > 0
    out = torch.where(alive[..., None], out / total[..., None], torch.zeros_like(out))
    lse = torch.where(alive, safe_top + torch.log(total), torch.full_like(total, float("-inf")))
    return out, lse
