"""Byte order inside a page, declared once for kernels, references, connector and tests.

Main page of one layer and rank, head after head (a head is one contiguous run, so that ranks with
other head counts can exchange single heads):

    head h: [ k_data | k_scales | v_data | v_scales ]      tokens 0..127 in each region

Index page (one key head): [ k_data | k_scales ]. A region holds one row a token: `data_bytes` of
values or `scale_bytes` of E4M3 block scales. FP8 and bf16 pages have no scale regions. Every region
starts at a multiple of 16 bytes. Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rocm_msa.cache.dtype import NVFP4_GROUP, CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, expect
from rocm_msa.layout import Layout, pack

PAGE_FORMAT_VERSION = 1
"""Raised whenever the byte order below changes; part of every transfer handshake."""

REGION_ALIGN = 16


@dataclass(frozen=True)
class Page:
    """A page of `kv_heads` heads, each with the vectors named in `sides`."""

    kv_heads: int
    head_dim: int
    dtype: CacheDType
    sides: tuple[str, ...]

    def __post_init__(self) -> None:
        check_int("kv_heads", self.kv_heads, 1)
        check_int("head_dim", self.head_dim, 1)
        if self.head_dim % (2 * NVFP4_GROUP):
            raise ValueError(expect("head_dim", f"a multiple of {2 * NVFP4_GROUP}", self.head_dim))

    @cached_property
    def head_layout(self) -> Layout:
        """Regions of one head, bytes from the head's start."""
        sizes = []
        for side in self.sides:
            sizes.append((f"{side}_data", BLOCK_TOKENS * self.dtype.data_bytes(self.head_dim)))
            scales = BLOCK_TOKENS * self.dtype.scale_bytes(self.head_dim)
            if scales:
                sizes.append((f"{side}_scales", scales))
        return pack(sizes, align=REGION_ALIGN, total_align=REGION_ALIGN)

    @property
    def head_bytes(self) -> int:
        return self.head_layout.nbytes

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes, all heads and sides."""
        return self.page_bytes // BLOCK_TOKENS


def main_page(kv_heads: int, head_dim: int, dtype: CacheDType) -> Page:
    """Page of the main cache: K and V of `kv_heads` heads."""
    return Page(kv_heads, head_dim, dtype, ("k", "v"))


def index_page(head_dim: int, dtype: CacheDType) -> Page:
    """Page of the index cache: one shared key head, no value."""
    return Page(1, head_dim, dtype, ("k",))
