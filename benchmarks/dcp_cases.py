"""Work for the benchmark and the GPU tests of the indexer exchange: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp.shard import Shard
from rocm_msa import ops
from rocm_msa.cache import CacheDType, IndexCache, index_page
from rocm_msa.ops.rows import decode_rows

HEADS, DIM, BLOCK, TOPK = 4, 128, 128, 16
POOL_BYTES = 8 * 2**30
"""Most bytes of index pages that a case is given."""


@dataclass(frozen=True)
class Shape:
    """lens: tokens of each request; blocks: width of the block table."""

    name: str
    lens: tuple[int, ...]
    rows: int
    blocks: int

    @property
    def pages(self) -> int:
        return sum(-(-n // BLOCK) for n in self.lens)


def uniform(requests: int, rows: int, context: int) -> Shape:
    name = f"{requests}x{rows} {context // 1024}K"
    return Shape(name, (context,) * requests, rows, -(-context // BLOCK))


def ragged(requests: int, rows: int, low: int = 30_000, high: int = 210_000) -> Shape:
    """Lengths drawn once from low..high, the same for everybody."""
    generator = torch.Generator().manual_seed(requests)
    lens = torch.randint(low, high + 1, (requests,), generator=generator)
    name = f"{requests}x{rows} {low // 1000}K-{high // 1000}K"
    return Shape(name, tuple(lens.tolist()), rows, -(-high // BLOCK))


def random_cache(pages: int, dtype: str, device: torch.device, seed: int = 5) -> IndexCache:
    """Index pages of random finite content with moderate scales."""
    kind = CacheDType.parse(dtype)
    page = index_page(DIM, kind)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape, low, high):
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=device, generator=generator
        )

    x = draw((pages, page.page_bytes), 0, 256)
    if kind is CacheDType.FP8:
        x = (x & 0x80) | (x & 0x7F).clamp_(max=0x40)
    if kind is CacheDType.NVFP4:
        scales = page.head_layout["k_scales"]
        x[:, scales.offset : scales.end] = draw((pages, scales.nbytes), 0x28, 0x48)
    return IndexCache.from_tensor(x, dtype)


@dataclass
class Work:
    """Arguments of Exchange.select for all heads, `[rows, HEADS, DIM]` queries."""

    index_q: torch.Tensor
    cache: IndexCache
    table: torch.Tensor
    lens: torch.Tensor
    rows: int
    num_blocks: torch.Tensor

    def queries(self, shard: Shard) -> torch.Tensor:
        own = shard.own_heads
        return self.index_q[:, own.start : own.stop].contiguous()

    def paging(self) -> tuple:
        return self.cache, self.table, self.lens, self.rows, self.num_blocks


def make_work(shape: Shape, cache: IndexCache, seed: int = 0) -> Work:
    """Queries and a table for `cache`; requests share pages where the pool has too few."""
    device = cache.pages.device
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(cache.num_blocks, generator=generator).int()
    table = torch.full((len(shape.lens), shape.blocks), -1, dtype=torch.int32)
    at = 0
    for request, length in enumerate(shape.lens):
        count = -(-length // BLOCK)
        table[request, :count] = order[(torch.arange(count) + at) % len(order)]
        at += count
    rows = len(shape.lens) * shape.rows
    index_q = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
    lens = torch.tensor(shape.lens, dtype=torch.int32)
    num_blocks = decode_rows(lens, shape.rows).num_blocks.int()
    tensors = (t.to(device) for t in (index_q, table, lens, num_blocks))
    index_q, table, lens, num_blocks = tensors
    return Work(index_q, cache, table, lens, shape.rows, num_blocks)


def select_alone(work: Work, heads: range) -> torch.Tensor:
    """int32 `[heads, rows, TOPK]` of one rank's ops."""
    q = work.index_q[:, heads.start : heads.stop].contiguous()
    scores = ops.index_score_decode(q, work.cache, work.table, work.lens, work.rows)
    return ops.block_topk(scores, work.num_blocks, TOPK)
