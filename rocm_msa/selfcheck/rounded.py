"""Caches as a kernel's NVFP4 table rounds them: the references of what computes in FP8."""

from __future__ import annotations

import torch

from rocm_msa.cache import IndexCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.formats import nvfp4_lut
from rocm_msa.ops.flydsl_host import table_fold


def table_rounded(cache: IndexCache) -> IndexCache:
    """An FP8 cache with the bytes that the kernel's table makes of an NVFP4 one."""
    fold = table_fold(cache.scales["k"])
    layout, tokens = cache.page.head_layout, (cache.num_blocks, BLOCK_TOKENS)
    data, scales = (
        cache.pages[:, layout[name].offset : layout[name].offset + layout[name].nbytes]
        for name in ("k_data", "k_scales")
    )
    values = nvfp4_lut.dequantize_via_lut(
        data.reshape(*tokens, cache.head_dim // 2),
        scales.reshape(*tokens, cache.head_dim // 16),
        fold,
    )
    pages = values.view(torch.uint8).reshape(cache.num_blocks, -1)
    scale = cache.scales["k"] * 2.0**-fold
    return IndexCache.from_tensor(pages, "fp8", head_dim=cache.head_dim, k_scale=scale)
