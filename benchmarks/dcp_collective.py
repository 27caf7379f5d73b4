"""The same exchange by collectives (NCCL, or gloo for CPU tensors): the way without peer memory.

    all-gather of the queries -> scores of the own blocks for all heads -> their best, by torch.topk
    -> all-gather of candidates -> the best of all, by torch.topk -> the newest block in front

A rank per head (ranks == heads / heads a rank), init_blocks 0, local_blocks 1. Several launches and
two collectives a layer; exact, since candidates are ranked by (score, lower id) in one int64.
"""

from __future__ import annotations

import torch
from torch import distributed

from benchmarks.dcp_cases import BLOCK, TOPK, Work
from dcp.shard import Shard
from rocm_msa import ops

_ID_BITS = 24
_NONE = -(1 << 60)
# Its name since torch 2.13, and the one before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class CollectiveExchange:
    """Args: group: a process group of the tensors' device. Ranks must divide the heads."""

    def __init__(self, group, heads: int) -> None:
        self.group = group
        ranks = distributed.get_world_size(group)
        self.shard = Shard(distributed.get_rank(group), ranks, heads)
        if heads % ranks:
            raise ValueError(f"ranks: expected a divisor of {heads} heads, got {ranks}")

    def select(self, work: Work, index_q: torch.Tensor) -> torch.Tensor:
        """int32 `[own heads, rows, TOPK]`; index_q: this rank's heads."""
        rows, own, dim = index_q.shape
        ranks, heads = self.shard.ranks, self.shard.heads
        queries = self._gather(index_q).permute(1, 0, 2, 3).reshape(rows, heads, dim)
        best = self._ranked(queries, work).topk(TOPK, -1).values  # [heads, rows, TOPK]
        parts = self._gather(best).view(ranks, heads, rows, TOPK)
        at = self.shard.own_heads
        mine = parts[:, at.start : at.stop].permute(1, 2, 0, 3).flatten(2)
        ranked = mine.topk(TOPK - 1, -1).values
        ids = torch.where(ranked > _NONE // 2, -ranked & ((1 << _ID_BITS) - 1), -1).int()
        newest = (work.num_blocks - 1).view(1, rows, 1).expand(own, rows, 1)
        return torch.cat([newest, ids], -1)

    def _ranked(self, queries: torch.Tensor, work: Work) -> torch.Tensor:
        """int64 `[heads, rows, slots]` of the own blocks, unique and ordered as the contract says.

        A candidate block is full, so that all rows of a request see it whole: they are columns of
        one product, as heads are.
        """
        shard, rows = self.shard, work.rows
        requests, max_blocks = work.table.shape
        slots = max(TOPK, shard.slots(max_blocks))
        table = work.table[:, shard.rank :: shard.ranks]
        table = torch.nn.functional.pad(table, (0, slots - table.shape[1]), value=-1).contiguous()
        last = work.num_blocks.view(requests, rows) - 1
        owned = ((last.amax(1) - shard.rank + shard.ranks - 1) // shard.ranks).clamp(min=0)
        columns = queries.reshape(requests, rows * shard.heads, -1)
        scores = ops.index_score_decode(columns, work.cache, table, (owned * BLOCK).int(), 1)
        scores = scores.view(rows, shard.heads, requests, slots).permute(1, 2, 0, 3)
        ids = torch.arange(slots, device=table.device) * shard.ranks + shard.rank
        bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        order = torch.where(scores.isnan(), -(1 << 31), order)
        ranks = (order << _ID_BITS) - ids
        ranks = torch.where(ids < last[None, :, :, None], ranks, _NONE - ids)
        return ranks.reshape(shard.heads, requests * rows, slots)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[ranks, *x.shape]` of all ranks."""
        x = x.contiguous()
        out = x.new_empty(self.shard.ranks, *x.shape)
        _all_gather(out.flatten(0, 1), x, group=self.group)
        return out
