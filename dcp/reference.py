"""The exchange in PyTorch: its steps as functions, and a group of ranks run in one process.

A launch on rank r of P:
    queries   [rows, heads, dim]: every head from its pusher
    scores    fp32 [heads, rows, slots] of the blocks r, r + P, ...: position i is block i P + r
    messages  int32 [heads, rows, words] to the heads' owners: all scores, or the shard's best
    select    of the P messages of an own head: what block_topk makes of the whole row's scores

Everything rests on the public ops, whose rows depend on nothing but themselves: the scores are
those of one rank bit for bit, and so is the selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp.api import check_select
from dcp.plan import Batch, Results, choose_results
from dcp.shard import Shard
from rocm_msa import ops
from rocm_msa.cache.paged import IndexCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, expect
from rocm_msa.ops.rows import decode_rows


def owned_keys(shard: Shard, lengths: torch.Tensor) -> torch.Tensor:
    """`Shard.owned_keys` of every row: int64 `[rows]` -> int64 `[rows]`."""
    num_blocks = (lengths + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    owned = owned_blocks(shard, num_blocks)
    newest_is_mine = (num_blocks > 0) & ((num_blocks - 1) % shard.ranks == shard.rank)
    missing = torch.where(newest_is_mine, num_blocks * BLOCK_TOKENS - lengths, 0)
    return owned * BLOCK_TOKENS - missing


def owned_blocks(shard: Shard, num_blocks: torch.Tensor) -> torch.Tensor:
    """`Shard.owned_blocks` of every row, same shape and dtype."""
    return ((num_blocks - shard.rank + shard.ranks - 1) // shard.ranks).clamp(min=0)


def score(
    shard: Shard,
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of this rank's blocks for all heads.

    Args:
        index_q: `[rows, heads, dim]`, all heads.

    Returns:
        fp32 `[heads, rows, slots]`; -inf where the row has no such block.
    """
    # A row's blocks here are a request of their own, with fewer keys.
    lengths = owned_keys(shard, decode_rows(seq_lens, rows_per_request).length).to(torch.int32)
    table = block_table[:, shard.rank :: shard.ranks]
    table = table.repeat_interleave(rows_per_request, dim=0)
    scores = ops.index_score_decode(index_q, index_cache, table, lengths, 1, backend=backend)
    spare = shard.slots(block_table.shape[1]) - table.shape[1]
    return torch.nn.functional.pad(scores, (0, spare), value=float("-inf"))


def message(
    shard: Shard,
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    topk: int,
    form: Results,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """What this rank sends of its scores.

    Args:
        scores: fp32 `[heads, rows, slots]`.
        num_blocks: int32 `[rows]`, of the whole rows.

    Returns:
        int32 `[heads, rows, slots]`, the scores' bits, or `[heads, rows, topk * 2]`: score bits and
        logical block id of the best, id -1 after the last.
    """
    if form is Results.SCORES:
        return scores.view(torch.int32)
    # block_topk keeps the newest block of a row: an extra one, which then leaves the list.
    owned = owned_blocks(shard, num_blocks)
    widened = torch.nn.functional.pad(scores, (0, 1))
    ids = ops.block_topk(widened, owned + 1, topk + 1, backend=backend)[..., 1:].to(torch.int64)
    best = widened.gather(2, ids.clamp(min=0))
    blocks = torch.where(ids >= 0, ids * shard.ranks + shard.rank, -1).to(torch.int32)
    return torch.stack([best.view(torch.int32), blocks], dim=-1).flatten(2)


def select(
    shard: Shard,
    messages: torch.Tensor,
    num_blocks: torch.Tensor,
    max_blocks: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    form: Results,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The selection of own heads from `messages` int32 `[ranks, own_heads, rows, words]`.

    Blocks that no candidate names get NaN, the lowest rank: at least `topk` candidates of their
    rank come before them, so they are not selected.
    """
    ranks, heads, rows, words = messages.shape
    if form is Results.SCORES:
        scores = messages.view(torch.float32).permute(1, 2, 3, 0).flatten(2)
        scores = scores[..., :max_blocks]
    else:
        pairs = messages.view(ranks, heads, rows, words // 2, 2).permute(1, 2, 0, 3, 4)
        best, blocks = pairs.flatten(2, 3).unbind(-1)
        nothing = blocks.new_full((), max_blocks)
        places = torch.where(blocks >= 0, blocks, nothing).to(torch.int64)
        dense = best.new_zeros((heads, rows, max_blocks + 1)).view(torch.float32)
        scores = dense.fill_(float("nan")).scatter_(2, places, best.view(torch.float32))
        scores = scores[..., :max_blocks]
    return ops.block_topk(
        scores, num_blocks, topk, init_blocks, local_blocks, out=out, backend=backend
    )


class Group:
    """All ranks of a group in this process, in lockstep.

    Args:
        ranks: ranks of the group.
        heads: index heads of the model.
        results: form of the messages; None: by bytes, as in serving.
        backend: of the ops.
    """

    def __init__(
        self,
        ranks: int,
        heads: int,
        *,
        results: Results | None = None,
        backend: str | None = None,
    ) -> None:
        check_int("ranks", ranks, 1)
        self.shards = [Shard(rank, ranks, heads) for rank in range(ranks)]
        self.results, self.backend = results, backend

    def select(
        self,
        index_q: Sequence[torch.Tensor],
        index_cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows_per_request: int,
        num_blocks: torch.Tensor,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
    ) -> list[torch.Tensor]:
        """Every rank's selection; `index_q[rank]` `[rows, own_heads, dim]`. See api.Exchange."""
        if len(index_q) != len(self.shards):
            raise ValueError(expect("len(index_q)", f"{len(self.shards)} ranks", len(index_q)))
        paging = (index_cache, block_table, seq_lens, rows_per_request)
        kept = (topk, init_blocks, local_blocks)
        for shard, q in zip(self.shards, index_q, strict=True):
            batch = check_select(shard, q, *paging, num_blocks, *kept)
        queries = self._gather(index_q)
        form = self.results or choose_results(self.shards[0], batch.max_blocks, topk)
        sent = []
        for shard in self.shards:
            scores = score(shard, queries, *paging, backend=self.backend)
            sent.append(message(shard, scores, num_blocks, topk, form, backend=self.backend))
        return [self._merge(s, sent, num_blocks, batch, kept, form) for s in self.shards]

    def _gather(self, index_q: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[rows, heads, dim]`, every head from its pusher."""
        pushed = [q[:, : len(s.pushed_heads)] for s, q in zip(self.shards, index_q, strict=True)]
        return torch.cat(pushed, dim=1)

    def _merge(
        self,
        shard: Shard,
        sent: Sequence[torch.Tensor],
        num_blocks: torch.Tensor,
        batch: Batch,
        kept: tuple[int, int, int],
        form: Results,
    ) -> torch.Tensor:
        own = slice(shard.own_heads.start, shard.own_heads.stop)
        received = torch.stack([m[own] for m in sent])
        return select(
            shard, received, num_blocks, batch.max_blocks, *kept, form, backend=self.backend
        )
