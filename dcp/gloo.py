"""The exchange over torch.distributed, for CPU tensors: gloo, point to point, bounded waits.

A launch sends every peer three messages: a header that says which launch and batch this is, the
queries of the heads that this rank pushes, and the results for the heads that the peer owns. The
headers are compared first, so that a peer at another batch is found before sizes disagree.
Every wait ends, at the latest after `timeout_s`, with the name of the peer; the first fault stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from dcp import reference
from dcp.api import DcpError, check_select
from dcp.plan import Results, choose_results
from dcp.shard import Shard, Site
from rocm_msa.cache.paged import IndexCache
from rocm_msa.comm.messages import PeerFault, swap
from rocm_msa.errors import expect
from rocm_msa.ops.attention_checks import QUERY_DTYPES


class GlooExchange:
    """One process's end of an exchange over `group`; see api.Exchange.

    Args:
        group: a process group of a backend for CPU tensors; None is the default group. Nothing
            else may send point to point in it while a launch runs.
        heads: index heads of the model.
        timeout_s: seconds that one message may take.
        results: form of the results; None: by bytes. The same on all ranks.
        backend: of the ops.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        heads: int,
        *,
        timeout_s: float = 60.0,
        results: Results | None = None,
        backend: str | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(expect("timeout_s", "> 0", timeout_s))
        self.group = group
        self.shard = Shard(dist.get_rank(group), dist.get_world_size(group), heads)
        self.timeout = timedelta(seconds=timeout_s)
        self.results, self.backend = results, backend
        self.generation = 0
        self._error: DcpError | None = None
        self._closed = False

    def select(
        self,
        index_q: torch.Tensor,
        index_cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows_per_request: int,
        num_blocks: torch.Tensor,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
        *,
        layer: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.check()
        if self._closed:
            raise RuntimeError("the exchange is closed")
        if index_q.device.type != "cpu":
            raise NotImplementedError(expect("index_q.device", "cpu", index_q.device))
        paging = (index_cache, block_table, seq_lens, rows_per_request)
        kept = (topk, init_blocks, local_blocks)
        shard = self.shard
        batch = check_select(shard, index_q, *paging, num_blocks, *kept, out)
        form = self.results or choose_results(shard, batch.max_blocks, topk)
        self.generation += 1
        self._agree(
            {
                "generation": self.generation,
                "layer": layer,
                "index heads": shard.heads,
                "requests": batch.requests,
                "rows_per_request": rows_per_request,
                "max_blocks": batch.max_blocks,
                "topk": topk,
                "init_blocks": init_blocks,
                "local_blocks": local_blocks,
                "place of index_q.dtype in QUERY_DTYPES": QUERY_DTYPES.index(index_q.dtype),
                "index_q.shape[2]": index_q.shape[2],
                "form of the results": list(Results).index(form),
                "sum of seq_lens": int(seq_lens.sum()),
            }
        )
        queries = self._queries(index_q)
        scores = reference.score(shard, queries, *paging, backend=self.backend)
        sent = reference.message(shard, scores, num_blocks, topk, form, backend=self.backend)
        received = self._results(sent)
        return reference.select(
            shard, received, num_blocks, batch.max_blocks, *kept, form, out=out,
            backend=self.backend,
        )  # fmt: skip

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The group stays: it is the caller's."""
        self._closed = True

    # --- messages ---

    def _agree(self, header: dict[str, int]) -> None:
        """Every peer is at this launch, with this batch."""
        mine = torch.tensor(list(header.values()), dtype=torch.int64)
        theirs = {peer: torch.empty_like(mine) for peer in self.shard.peers}
        self._swap(dict.fromkeys(self.shard.peers, mine), theirs, Site.START)
        for peer, values in theirs.items():
            for (name, want), got in zip(header.items(), values.tolist(), strict=True):
                if got != want:
                    self._fail(peer, Site.SHAPE, expect(name, want, got))

    def _queries(self, index_q: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, dim]`, every head from its pusher."""
        shard = self.shard
        mine = index_q[:, : len(shard.pushed_heads)].contiguous()
        parts = {
            r: mine.new_empty(len(mine), len(shard.of(r).pushed_heads), index_q.shape[2])
            for r in range(shard.ranks)
        }
        parts[shard.rank] = mine
        to = dict.fromkeys(shard.peers, mine)
        self._swap(to, {p: parts[p] for p in shard.peers}, Site.QUERIES)
        return torch.cat(list(parts.values()), dim=1)

    def _results(self, sent: torch.Tensor) -> torch.Tensor:
        """int32 `[heads, rows, words]` of this rank -> `[ranks, own_heads, rows, words]`."""
        shard = self.shard

        def of(rank: int) -> torch.Tensor:
            own = shard.of(rank).own_heads
            return sent[own.start : own.stop].contiguous()

        received = sent.new_empty(shard.ranks, shard.heads_per_rank, *sent.shape[1:])
        received[shard.rank] = of(shard.rank)
        to = {peer: of(peer) for peer in shard.peers}
        self._swap(to, {peer: received[peer] for peer in shard.peers}, Site.RESULTS)
        return received

    def _swap(
        self, to: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor], site: Site
    ) -> None:
        """Send `to[peer]` and receive `into[peer]`, all at once; nothing that is empty."""
        try:
            swap(self.group, to, into, self.timeout)
        except PeerFault as fault:
            self._fail(fault.peer, site, str(fault), cause=fault.__cause__)

    def _fail(
        self, peer: int, site: Site, detail: str, cause: BaseException | None = None
    ) -> NoReturn:
        self._error = DcpError(self.shard.rank, peer, site, self.generation, detail)
        raise self._error from cause
