"""Shared arithmetic of the PyTorch references: products of query rows with whole cache pages.

Work items (row, page) are grouped by page into tiles of a fixed number of items, so that a page is
dequantised once for all rows that want it, and so that every product is a matrix product of one
fixed shape: what a row gets does not depend, not in a single bit, on the other rows of the batch,
on padding, or on how a batch was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocm_msa.cache.paged import PagedCache
from rocm_msa.config import BLOCK_TOKENS

TILE = 16
"""Items a tile."""

_TILES_A_CHUNK = 128


@dataclass(frozen=True)
class TileChunk:
    """Some tiles: `pages` int64 `[tiles]`, `items` int64 `[tiles, TILE]` into the item list."""

    pages: torch.Tensor
    items: torch.Tensor

    @property
    def live(self) -> torch.Tensor:
        """bool `[tiles, TILE]`; dead places hold item 0."""
        return self.items >= 0

    @property
    def safe_items(self) -> torch.Tensor:
        return self.items.clamp(min=0)


def tile_chunks(pages: torch.Tensor) -> Iterator[TileChunk]:
    """Group the items whose page is >= 0 by page. `pages` int64 `[items]`."""
    order = torch.argsort(pages, stable=True)
    order = order[int((pages < 0).sum()) :]
    if order.numel() == 0:
        return
    values, counts = torch.unique_consecutive(pages[order], return_counts=True)
    tiles = (counts + TILE - 1) // TILE
    first_tile = tiles.cumsum(0) - tiles
    group = torch.repeat_interleave(torch.arange(len(values), device=pages.device), counts)
    rank = torch.arange(len(order), device=pages.device) - (counts.cumsum(0) - counts)[group]
    items = torch.full((int(tiles.sum()), TILE), -1, dtype=torch.int64, device=pages.device)
    items[first_tile[group] + rank // TILE, rank % TILE] = order
    tile_pages = values.repeat_interleave(tiles)
    for start in range(0, len(items), _TILES_A_CHUNK):
        stop = start + _TILES_A_CHUNK
        yield TileChunk(tile_pages[start:stop], items[start:stop])


def page_vectors(cache: PagedCache, side: str, head: int, pages: torch.Tensor) -> torch.Tensor:
    """fp32 `[tiles, 128, head_dim]` of one head; each page is dequantised once.

    Non-finite values, which only memory that nobody wrote can hold, read as 0.
    """
    unique, inverse = torch.unique(pages, return_inverse=True)
    x = cache.gather(side, unique, head)
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))[inverse]


def key_scores(
    q: torch.Tensor, chunk: TileChunk, rows: torch.Tensor, keys: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Scores of a chunk's items, -inf at and beyond an item's live keys.

    Args:
        q: fp32 `[rows, group, head_dim]`.
        chunk: the tiles.
        rows: row of each item, `[items]`.
        keys: live keys of each item, `[items]`.
        k: fp32 `[tiles, 128, head_dim]`.

    Returns:
        fp32 `[tiles, TILE, group, 128]`; meaningless where `chunk.live` is False.
    """
    tiles, group = len(chunk.pages), q.shape[1]
    q_tile = q[rows[chunk.safe_items]].view(tiles, TILE * group, -1)
    scores = torch.bmm(q_tile, k.transpose(1, 2)).view(tiles, TILE, group, BLOCK_TOKENS)
    position = torch.arange(BLOCK_TOKENS, device=q.device)
    dead = position >= keys[chunk.safe_items][..., None, None]
    return scores.masked_fill_(dead, float("-inf"))
