"""Shared arithmetic of the PyTorch references: products of query rows with whole cache pages.

Work items (row, page) are grouped by page into tiles, so that a page is dequantised once for the
rows that want it. Every product has PRODUCT_ROWS query rows, whatever the batch: what a row gets
does not depend, not in a single bit, on the other rows of the batch, on its place among them, on
padding, or on how a batch was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocm_msa.cache.paged import PagedCache
from rocm_msa.config import BLOCK_TOKENS

PRODUCT_ROWS = 64
"""Query rows (items * query heads an item) of every matrix product."""

_TILES_A_CHUNK = 32  # products stay in the processor's cache


@dataclass(frozen=True)
class TileChunk:
    """Some tiles: `pages` int64 `[tiles]`, `items` int64 `[tiles, items a tile]`.

    `items` are positions in the item list; the dead places of a page's last tile hold the
    list's length.
    """

    pages: torch.Tensor
    items: torch.Tensor


@dataclass(frozen=True)
class Items:
    """Work items in any order, then the one dead item that `TileChunk.items` may name.

    page, row, keys: int64 `[items + 1]`, page -1 for nothing, keys = live keys of the page.
    """

    page: torch.Tensor
    row: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, page: torch.Tensor, keys: torch.Tensor) -> Items:
        """Items of `page`, `keys` `[rows, slots]`, row after row; the dead one sees every key."""
        num_rows, slots = page.shape
        row = torch.arange(num_rows, device=page.device).repeat_interleave(slots)
        return cls(*(_append(x, e) for x, e in ((page, -1), (row, 0), (keys, BLOCK_TOKENS))))

    def chunks(self, group: int) -> Iterator[TileChunk]:
        """The items with a page, grouped by page; `group` query heads an item."""
        live = (self.page >= 0).nonzero().flatten()
        if live.numel() == 0:
            return
        tile = max(1, PRODUCT_ROWS // group)
        page, order = torch.sort(self.page[live], stable=True)
        pages, counts = torch.unique_consecutive(page, return_counts=True)
        tiles = (counts + tile - 1) // tile
        first_place = (tiles.cumsum(0) - tiles) * tile - (counts.cumsum(0) - counts)
        place = torch.arange(len(order), device=page.device)
        place += first_place.repeat_interleave(counts)
        items = page.new_full((int(tiles.sum()) * tile,), len(self.page) - 1)
        items[place] = live[order]
        tile_pages, items = pages.repeat_interleave(tiles), items.view(-1, tile)
        for start in range(0, len(items), _TILES_A_CHUNK):
            stop = start + _TILES_A_CHUNK
            yield TileChunk(tile_pages[start:stop], items[start:stop])


def page_vectors(cache: PagedCache, side: str, head: int, pages: torch.Tensor) -> torch.Tensor:
    """fp32 `[tiles, 128, head_dim]` of one head; each page is dequantised once.

    Non-finite values, which only memory that nobody wrote can hold, read as 0.
    """
    unique, inverse = torch.unique_consecutive(pages, return_inverse=True)
    x = cache.gather(side, unique, head).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return x if len(unique) == len(pages) else x[inverse]


def key_scores(
    q: torch.Tensor, chunk: TileChunk, items: Items, k: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Scores of a chunk's items, -inf at and beyond an item's live keys.

    Args:
        q: fp32 `[rows, group, head_dim]`.
        k: fp32 `[tiles, 128, head_dim]`.
        scale: multiplies the products.

    Returns:
        fp32 `[tiles, items a tile, group, 128]`.
    """
    tiles, tile = chunk.items.shape
    group, head_dim = q.shape[1:]
    q_tile = q[items.row[chunk.items]].view(tiles, tile * group, head_dim)
    scores = _product(q_tile, k.transpose(1, 2))
    if scale != 1.0:
        scores *= scale
    scores = scores.view(tiles, tile, group, BLOCK_TOKENS)
    keys = items.keys[chunk.items]
    if bool((keys < BLOCK_TOKENS).any()):
        position = torch.arange(BLOCK_TOKENS, device=q.device)
        scores.masked_fill_(position >= keys[..., None, None], float("-inf"))
    return scores


def weighted_values(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sums p . v over a page's keys: `[tiles, items a tile, group, 128]` -> `[..., head_dim]`."""
    tiles, tile, group, _ = p.shape
    products = _product(p.view(tiles, tile * group, BLOCK_TOKENS), v)
    return products.view(tiles, tile, group, v.shape[-1])


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, with `a [tiles, rows, n]` padded to PRODUCT_ROWS if the group does not divide it."""
    rows = a.shape[1]
    spare = PRODUCT_ROWS - rows
    if spare <= 0:
        return torch.bmm(a, b)
    padded = torch.nn.functional.pad(a, (0, 0, 0, spare))
    return torch.bmm(padded, b)[:, :rows].contiguous()


def _append(x: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat([x.flatten(), x.new_full((1,), value)])
