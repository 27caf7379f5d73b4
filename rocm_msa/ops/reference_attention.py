"""Softmax attention of query rows over lists of cache blocks, the reference of three ops.

Each block on its own first, with m_b = max over its live keys of sm_scale * q.k_j:

    l_b = sum_j exp(sm_scale * q.k_j - m_b),    o_b = sum_j exp(sm_scale * q.k_j - m_b) v_j

then a row's blocks in ascending order of their logical id, with m = max_b m_b:

    out = sum_b exp(m_b - m) o_b / sum_b exp(m_b - m) l_b,    lse = m + log(that denominator)

fp32 throughout. Rows with no key give zeros and lse = -inf.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import MainCache
from rocm_msa.errors import expect
from rocm_msa.ops.reference_tiles import Items, key_scores, page_vectors, weighted_values
from rocm_msa.ops.rows import Rows, pages_of

_CHUNK_ELEMENTS = 4 * 2**20


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

    Raises:
        ValueError: a causal block twice in a row's list, or without a page of the cache.
    """
    num_rows, q_heads, head_dim = q.shape
    group, slots = q_heads // cache.kv_heads, block_ids.shape[-1]
    out = torch.zeros(num_rows, q_heads, head_dim, device=q.device)
    lse = torch.full((num_rows, q_heads), float("-inf"), device=q.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, slots * group * head_dim))
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        part = Rows(rows.request[chunk], rows.length[chunk])
        for head in range(cache.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            ids = _ascending(block_ids[head if block_ids.shape[0] > 1 else 0, chunk], part)
            page, keys = pages_of(part, ids, block_table, cache.num_blocks)
            _check_distinct(ids, head, start)
            out[chunk, heads], lse[chunk, heads] = _attend_head(
                q[chunk, heads].float(), cache, head, page, keys, sm_scale
            )
    return out, lse


def _ascending(ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Ids of causal blocks ascending, then -1; as many columns as the longest list needs."""
    live = (ids >= 0) & (ids < rows.num_blocks[:, None])
    last = torch.iinfo(ids.dtype).max
    ordered = torch.where(live, ids, torch.full_like(ids, last)).sort(dim=-1).values
    ordered = ordered[:, : int(live.sum(dim=-1).max())]
    return torch.where(ordered == last, torch.full_like(ordered, -1), ordered)


def _check_distinct(ids: torch.Tensor, head: int, start: int) -> None:
    """`ids` from `_ascending`: a block named twice would count its keys twice."""
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if bool(twice.any()):
        row, slot = twice.nonzero()[0].tolist()
        where = f"block_ids[{head}, {start + row}]"
        raise ValueError(expect(where, "distinct ids", f"{int(ids[row, slot])} twice"))


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
    if slots == 0:
        return torch.zeros_like(q), q.new_full((num_rows, group), float("-inf"))
    items = Items.of(page, keys)
    maxima = q.new_full((num_rows * slots + 1, group), float("-inf"))
    sums = torch.zeros_like(maxima)
    partial = q.new_zeros(num_rows * slots + 1, group, head_dim)
    for chunk in items.chunks(group):
        places = chunk.items.flatten()
        k = page_vectors(cache, "k", head, chunk.pages)
        p = key_scores(q, chunk, items, k, sm_scale)
        top = p.amax(dim=-1, keepdim=True)
        p.sub_(top).exp_()
        v = page_vectors(cache, "v", head, chunk.pages)
        maxima.index_copy_(0, places, top.view(-1, group))
        sums.index_copy_(0, places, p.sum(dim=-1).view(-1, group))
        partial.index_copy_(0, places, weighted_values(p, v).view(-1, group, head_dim))

    maxima = maxima[:-1].view(num_rows, slots, group)
    sums, partial = sums[:-1].view_as(maxima), partial[:-1].view(*maxima.shape, head_dim)
    top = maxima.amax(dim=1)
    has_keys = (page >= 0).any(dim=1)[:, None]
    top = torch.where(has_keys, top, torch.zeros_like(top))
    weights = torch.exp(maxima - top[:, None])
    sums *= weights
    partial *= weights[..., None]
    out, total = torch.zeros_like(q), torch.zeros_like(top)
    for slot in range(slots):
        out += partial[:, slot]
        total += sums[:, slot]
    out = torch.where(has_keys[..., None], out / total[..., None], torch.zeros_like(out))
    lse = torch.where(has_keys, top + torch.log(total), torch.full_like(total, float("-inf")))
    return out, lse
