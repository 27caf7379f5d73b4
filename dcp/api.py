"""The interface of every exchange, its error, and the argument checks that all of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dcp.plan import Batch
from dcp.shard import Shard, Site
from rocm_msa.errors import check_output, check_tensor, expect

if TYPE_CHECKING:
    import torch

    from rocm_msa.cache.paged import IndexCache

_SITES = {
    Site.QUERIES: "the index queries of rank {peer} did not come",
    Site.RESULTS: "the results of rank {peer} did not come",
    Site.SHAPE: "rank {peer} is at another launch or batch",
    Site.START: "rank {peer} did not begin the launch",
}


class DcpError(RuntimeError):
    """An exchange failed; no selection of it may be used, and none comes after it.

    Attributes:
        rank: the rank that found the fault, also where another rank raises it.
        peer: the rank that was waited for, None where it is not known.
        site: where, a `Site`.
        generation: the launch of the exchange, counted from 1 on every rank.
    """

    def __init__(
        self, rank: int, peer: int | None, site: Site | int, generation: int, detail: str = ""
    ):
        self.rank, self.peer, self.generation = rank, peer, generation
        self.site, self.detail = Site(site), detail
        what = _SITES[self.site].format(peer="?" if peer is None else peer)
        super().__init__(
            f"indexer decode context parallelism: rank {rank}: {what} (site {self.site.name}, "
            f"generation {generation})" + (f": {detail}" if detail else "")
        )

    def __reduce__(self):
        return type(self), (self.rank, self.peer, self.site, self.generation, self.detail)


class Exchange(Protocol):
    """One rank's end. All ranks of the group call `select` equally often, with equal shapes.

    `index_cache`, `block_table`, `seq_lens` and every number hold the same on all ranks; the
    queries are each rank's own heads.
    """

    shard: Shard

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
        """Selected blocks of this rank's heads, as one rank alone would select them, bit for bit.

        Args:
            index_q: `[rows, own_heads, head_dim]` bf16, fp16 or fp32, `rows = requests *
                rows_per_request`; a request's last row is its newest token.
            index_cache: index keys, the same bytes on every rank.
            block_table: int32 `[requests, max_blocks]`, logical block -> page.
            seq_lens: int32 `[requests]`, keys in the cache with this step's; 0 for padding.
            rows_per_request: 1 + speculative tokens.
            num_blocks: int32 `[rows]`, causal blocks of each row: ceil(n / 128).
            topk, init_blocks, local_blocks: as in `ops.block_topk`.
            layer: a number on which the ranks must agree, so that one that left out a launch is
                found though the next one's batch looks the same.
            out: int32 `[own_heads, rows, topk]` to write into.

        Returns:
            int32 `[own_heads, rows, topk]`.

        Raises:
            TypeError, ValueError: arguments.
            DcpError: a fault that is known when the call returns; see `check`.
        """
        ...

    def check(self) -> None:
        """Raise the DcpError that any rank has met so far. Does not wait for the device."""
        ...

    def close(self) -> None:
        """Release what the exchange holds; may be called again."""
        ...


def check_select(
    shard: Shard,
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    num_blocks: torch.Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> Batch:
    """Check the arguments of `Exchange.select`; -> the batch's shape.

    Values of tensors are read on the CPU only: on a GPU that would wait for it.
    """
    import torch

    from rocm_msa.ops.attention_checks import check_index_query
    from rocm_msa.ops.block_topk.api import check_kept
    from rocm_msa.ops.dispatch import on_host
    from rocm_msa.ops.rows import check_decode_rows, check_paging, decode_rows

    check_index_query(index_q, index_cache)
    rows, heads = index_q.shape[:2]
    if heads != shard.heads_per_rank:
        raise ValueError(
            expect("index_q.shape[1]", f"{shard.heads_per_rank} heads of this rank", heads)
        )
    requests = check_paging(block_table, seq_lens, index_q.device)
    check_decode_rows("index_q", index_q, requests, rows_per_request)
    check_tensor("num_blocks", num_blocks, [rows], torch.int32, device=index_q.device)
    if on_host(num_blocks):
        wanted = decode_rows(seq_lens, rows_per_request).num_blocks
        wrong = (num_blocks != wanted).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(expect(f"num_blocks[{row}]", int(wanted[row]), int(num_blocks[row])))
    check_kept(topk, init_blocks, local_blocks)
    if out is not None:
        check_output(out, [heads, rows, topk], torch.int32, index_q.device)
    return Batch(requests, rows_per_request, block_table.shape[1])
