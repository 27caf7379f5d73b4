"""Paged main and index caches: page layouts, slots, writing, reading, packing conversion."""

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.cache.pages import Page, index_page, main_page

__all__ = ["CacheDType", "IndexCache", "MainCache", "Page", "index_page", "main_page"]
