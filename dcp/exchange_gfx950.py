"""The exchange on gfx950: one launch a layer and rank; traced code in exchange_kernel.py.

All workgroups of a launch must be resident, since they wait for one another and for other ranks:
a launch takes at most WORKGROUPS_A_CU a compute unit, which a build's registers and LDS allow.

Refused: a head_dim other than 128, fp32 queries, fp16 queries on a bf16 cache, more than 64 (row,
head) pairs a request, more requests than MAX_REQUESTS, a topk above 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp.mailbox_layout import MAX_WORKGROUPS, Geometry, launch_digest
from dcp.plan import Batch, Results, choose_results
from dcp.shard import Shard
from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_int, expect
from rocm_msa.ops import flydsl_host as host

MAX_TILES = 4  # of 16 columns
MAX_PAIRS = MAX_TILES * host.TILE
MAX_REQUESTS = 1024
WORKGROUPS_A_CU = 2
RANKS = (2, 4, 8)
QUERY_WORDS = host.HEAD_DIM // 2  # of bf16 or fp16


@dataclass(frozen=True)
class Build:
    """kind: of the cache, nvfp4, fp8 or bf16. query: bf16 or fp16. tiles: of 16 columns.
    ranks, heads: of the group. topk: blocks selected. results: scores or candidates."""

    kind: str
    query: str
    tiles: int
    ranks: int
    heads: int
    topk: int
    results: str

    def __post_init__(self) -> None:
        host.check_score_dtypes(self.kind, self.query)
        for name in ("tiles", "topk"):
            check_int(name, getattr(self, name), 1)
        if self.tiles > MAX_TILES:
            raise ValueError(expect("tiles", f"<= {MAX_TILES}", self.tiles))
        if self.topk > GFX950.wave_size:
            raise ValueError(expect("topk", f"<= {GFX950.wave_size}", self.topk))
        check_int("ranks", self.ranks, 2)
        Results(self.results)
        Shard(0, self.ranks, self.heads)

    @property
    def symbol(self) -> str:
        return (
            f"dcp_exchange_{self.kind}_q{self.query}_t{self.tiles}_p{self.ranks}_h{self.heads}"
            f"_k{self.topk}_{self.results}"
        )

    @property
    def grid(self) -> str:
        return "(workgroups that are resident)"


def builds(config) -> list[Build]:
    """For the group of ranks that a configuration is a share of; see aot.ServingConfig."""
    ranks, heads = config.ranks, config.group_index_heads
    if ranks not in RANKS or not host.scores_served(config):
        return []
    return [
        Build(config.index_dtype.value, config.dtype, tiles, ranks, heads, config.topk, form.value)
        for tiles in range(1, MAX_TILES + 1)
        for form in Results
    ]


def needs(
    shard: Shard, index_q, index_cache, batch: Batch, topk: int, results: Results | None = None
) -> list[Build]:
    """The build for a batch; reads no values. Raises NotImplementedError for what is refused."""
    pairs = batch.rows_per_request * shard.heads
    if pairs > MAX_PAIRS:
        raise NotImplementedError(
            expect("rows_per_request * index heads on flydsl", f"<= {MAX_PAIRS}", pairs)
        )
    if batch.requests > MAX_REQUESTS:
        raise NotImplementedError(
            expect("requests on flydsl", f"<= {MAX_REQUESTS}", batch.requests)
        )
    if topk > GFX950.wave_size:
        raise NotImplementedError(expect("topk on flydsl", f"<= {GFX950.wave_size}", topk))
    kind, query = host.score_dtypes(index_q, index_cache)
    results = results or choose_results(shard, batch.max_blocks, topk)
    tiles = max(1, -(-pairs // host.TILE))
    return [Build(kind, query, tiles, shard.ranks, shard.heads, topk, results.value)]


def check_geometry(geometry: Geometry, shard: Shard, batch: Batch, build: Build) -> None:
    """ValueError, with the size that is too small, for a batch that does not fit."""
    slots = shard.slots(batch.max_blocks)
    found = [
        ("ranks", geometry.ranks == shard.ranks, shard.ranks, geometry.ranks),
        ("heads", geometry.heads == shard.heads, shard.heads, geometry.heads),
        ("topk", geometry.topk == build.topk, build.topk, geometry.topk),
        ("query_words", geometry.query_words == QUERY_WORDS, QUERY_WORDS, geometry.query_words),
        ("rows", batch.rows <= geometry.rows, f">= {batch.rows}", geometry.rows),
        ("slots", slots <= geometry.slots, f">= {slots}", geometry.slots),
    ]
    if build.results == Results.SCORES.value:
        words = geometry.result_words
        found.append(("result_words", slots <= words, f">= {slots}", words))
    for name, good, wanted, got in found:
        if not good:
            raise ValueError(expect(f"geometry.{name}", wanted, got))


def workgroups(requests: int, slots: int) -> int:
    """Of a launch: as many as are resident, fewer when the widest batch has fewer blocks a wave."""
    blocks = max(1, requests * slots)
    most = min(MAX_WORKGROUPS, WORKGROUPS_A_CU * GFX950.compute_units)
    return max(1, min(most, -(-blocks // host.SCORE_WAVES)))


def run(
    shard: Shard,
    geometry: Geometry,
    memory: tuple[torch.Tensor, torch.Tensor],
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    batch: Batch,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor,
    *,
    layer: int = 0,
    results: Results | None = None,
    patience_ms: int = 5000,
    grid: int | None = None,
) -> torch.Tensor:
    """Queue one launch of this rank: no allocation, no wait.

    Args:
        memory: int64 `[ranks + 1]`, addresses of all ranks' mailboxes and of the 8 bytes where the
            host finds the error word; and the state, `Geometry.state.nbytes` bytes.
        index_q: `[rows, own heads, 128]`; only the pusher's is sent. num_blocks: int32 `[rows]`.
        out: int32 `[own heads, rows, topk]`.
        layer: names the launch: ranks at different layers find each other out.
        patience_ms: the shortest bound of a wait; the longest is four times that.
        grid: workgroups, by default `workgroups(...)`; at most what is resident.
    """
    (build,) = needs(shard, index_q, index_cache, batch, topk, results)
    check_geometry(geometry, shard, batch, build)
    most = workgroups(MAX_REQUESTS, geometry.slots)
    grid = grid or workgroups(batch.requests, shard.slots(batch.max_blocks))
    if grid > most:
        raise ValueError(expect("grid", f"<= {most} resident workgroups", grid))
    addresses, state = memory
    factor, table = host.keys_of(index_cache)
    launcher.launch(
        build, (grid,),
        [index_q, *host.byte_strides(index_q)[:2], *host.score_cache(index_cache), table, factor,
         block_table, block_table.stride(0), num_blocks,
         batch.requests, batch.rows_per_request, batch.max_blocks, init_blocks, local_blocks,
         launch_digest(
             batch, shard, topk, init_blocks, local_blocks, layer, Results(build.results)
         ),
         addresses, shard.rank, state, patience_ms, geometry.rows, geometry.slots,
         geometry.result_words, geometry.scrub_chunks, grid, out],
        index_q.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from dcp import exchange_kernel

    return exchange_kernel.compile_build(build)
