"""NVFP4 pages in vLLM's packing <-> ours: a pure byte permutation.

vLLM stores a page side after side, all heads together, data before scales:

    [ K data | K scales | V data | V scales ],  each [heads, tokens, row] ("HND")
                                                or [tokens, heads, row]  ("NHD")

with linear (not swizzled) scales and the even index in the low nibble, as here. For one KV head
both packings are the same bytes.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import Page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_tensor, expect


def from_vllm(pages: torch.Tensor, page: Page, order: str = "HND") -> torch.Tensor:
    """Pages `[num_blocks, page_bytes]` uint8 in vLLM's packing -> ours, a new tensor."""
    return pages[:, _source_bytes(pages, page, order)]


def to_vllm(pages: torch.Tensor, page: Page, order: str = "HND") -> torch.Tensor:
    """Inverse of `from_vllm`."""
    source = _source_bytes(pages, page, order)
    return pages[:, torch.argsort(source)]


def _source_bytes(pages: torch.Tensor, page: Page, order: str) -> torch.Tensor:
    """For each byte of our page, its position in vLLM's: int64 `[page_bytes]`."""
    check_tensor("pages", pages, ["num_blocks", page.page_bytes], torch.uint8)
    if page.dtype is not CacheDType.NVFP4:
        raise NotImplementedError(expect("page.dtype", "nvfp4", page.dtype.value))
    if order not in ("HND", "NHD"):
        raise ValueError(expect("order", "'HND' or 'NHD'", repr(order)))
    heads, position, parts = page.kv_heads, 0, {}
    for region in page.head_layout:
        row = region.nbytes // BLOCK_TOKENS
        ids = torch.arange(position, position + heads * region.nbytes)
        if order == "HND":
            parts[region.name] = ids.view(heads, region.nbytes)
        else:
            by_token = ids.view(BLOCK_TOKENS, heads, row).transpose(0, 1)
            parts[region.name] = by_token.reshape(heads, region.nbytes)
        position += heads * region.nbytes
    return torch.cat([parts[r.name] for r in page.head_layout], dim=1).flatten().to(pages.device)
