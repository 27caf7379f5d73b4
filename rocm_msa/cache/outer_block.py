"""The outer-block row: every layer's pages of one block on one rank, side by side.

    row of block b = [ main page of layer 0 | ... | main page of layer L-1
                     | index page of each sparse layer, in layer order
                     | pages of the draft model's layers, in layer order ]

Rows of neighbouring blocks follow each other, so a block is one contiguous run of `row.nbytes`
bytes and a KV transfer reads it as one descriptor. vLLM's block-outermost cache layout (BLHNC)
places the pages in this order; the connector compares the addresses it is given with the row
declared here and refuses any difference. Pure Python: no torch.

    nbytes = Σ layers main page + Σ sparse layers index page + Σ draft layers draft page
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import REGION_ALIGN, Page, index_page, main_page
from rocm_msa.config import ModelConfig, RankGeometry
from rocm_msa.layout import Layout, pack

ROW_FORMAT_VERSION = 1
"""Raised whenever the order or alignment below changes; part of every transfer handshake."""

MAIN, INDEX, DRAFT = "main", "index", "draft"


@dataclass(frozen=True)
class RowPage:
    """One page of the row. `offset` is in bytes from the row's start."""

    kind: str
    layer: int
    offset: int
    page: Page

    @property
    def name(self) -> str:
        return f"layer {self.layer} {self.kind}"

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different heads of it; the index key head is on every rank."""
        return self.kind != INDEX


@dataclass(frozen=True)
class OuterBlockRow:
    """Pages in the order of their offsets, each at a multiple of 16 bytes."""

    pages: tuple[RowPage, ...]

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        rank: RankGeometry,
        main: CacheDType,
        index: CacheDType,
        *,
        dense: CacheDType | None = None,
        draft: Sequence[Page] = (),
    ) -> OuterBlockRow:
        """The row that a model and its cache dtypes ask for.

        Args:
            dense: dtype of the dense layers' main pages; None: as `main`.
            draft: main pages of a draft model's layers, if there is one.
        """
        pages: list[tuple[str, int, Page]] = []
        for layer, sparse in enumerate(model.sparse_layers):
            dtype = main if sparse or dense is None else dense
            pages.append((MAIN, layer, main_page(rank.kv_heads, model.head_dim, dtype)))
        for layer, sparse in enumerate(model.sparse_layers):
            if sparse:
                pages.append((INDEX, layer, index_page(model.index_dim, index)))
        pages += [(DRAFT, layer, page) for layer, page in enumerate(draft)]
        sizes = [(f"{kind} {layer}", page.page_bytes) for kind, layer, page in pages]
        layout = pack(sizes, align=REGION_ALIGN)
        return cls(
            tuple(
                RowPage(kind, layer, region.offset, page)
                for region, (kind, layer, page) in zip(layout, pages, strict=True)
            )
        )

    @cached_property
    def layout(self) -> Layout:
        """name -> (offset, bytes) of the whole row."""
        return pack(
            [(page.name, page.page.page_bytes) for page in self.pages],
            align=REGION_ALIGN,
            total_align=REGION_ALIGN,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one block on one rank, every layer and cache."""
        return self.layout.nbytes

    @cached_property
    def digest(self) -> str:
        """Identity of order and byte formats, the same for every number of ranks.

        Covers each page's kind, layer, dtype, head_dim and bytes a head; not the number of heads.
        """
        parts = [f"row {ROW_FORMAT_VERSION}"]
        parts += [
            f"{p.kind} {p.layer} {p.page.dtype.value} {p.page.head_dim} {p.page.head_bytes}"
            for p in self.pages
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
