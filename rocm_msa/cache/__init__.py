"""Paged main and index caches: page layouts, slots, writing, reading, packing conversion.

`MainCache` and `IndexCache` are imported on first use: page arithmetic alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import Page, index_page, main_page

_LAZY = {"MainCache": "rocm_msa.cache.paged", "IndexCache": "rocm_msa.cache.paged"}

__all__ = ["CacheDType", "IndexCache", "MainCache", "Page", "index_page", "main_page"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
