"""Argument checks shared by the attention ops."""

from __future__ import annotations

import math
from numbers import Real

import torch

from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.errors import check_tensor, expect

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_query(q: torch.Tensor, cache: MainCache, sm_scale: float) -> None:
    """Check `q [rows, q_heads, head_dim]` against the cache's heads, and the softmax scale."""
    if not isinstance(cache, MainCache):
        raise TypeError(expect("main_cache", "a MainCache", type(cache).__name__))
    device = cache.pages.device
    check_tensor("q", q, ["rows", "q_heads", cache.head_dim], QUERY_DTYPES, device=device)
    if q.shape[1] == 0 or q.shape[1] % cache.kv_heads:
        raise ValueError(
            expect("q.shape[1]", f"a multiple of {cache.kv_heads} KV heads", q.shape[1])
        )
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, Real):
        raise TypeError(expect("sm_scale", "a number", type(sm_scale).__name__))
    if not math.isfinite(sm_scale):
        raise ValueError(expect("sm_scale", "a finite number", sm_scale))


def check_index_query(index_q: torch.Tensor, cache: IndexCache) -> None:
    """Check `index_q [rows, heads, head_dim]` against the index cache."""
    if not isinstance(cache, IndexCache):
        raise TypeError(expect("index_cache", "an IndexCache", type(cache).__name__))
    shape = ["rows", "heads", cache.head_dim]
    check_tensor("index_q", index_q, shape, QUERY_DTYPES, device=cache.pages.device)


def check_block_ids(block_ids: torch.Tensor, cache: MainCache, rows: int) -> None:
    """Check `block_ids` int32 `[kv_heads, rows, topk]`: one list a KV head, head-major."""
    shape = [cache.kv_heads, rows, "topk"]
    check_tensor("block_ids", block_ids, shape, torch.int32, device=cache.pages.device)


def give(
    out: torch.Tensor | None,
    q: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Round the result to q's dtype, into `out` when there is one that does not hold it yet."""
    if out is None:
        result = result.to(q.dtype)
    elif result is not out:
        result = out.copy_(result)
    return (result, lse) if return_lse else result
