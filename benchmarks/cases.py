"""Synthetic work for the benchmarks: pools of random pages, tables and selections at TP4 shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa.cache import CacheDType, IndexCache, MainCache, index_page, main_page

DIM, Q_HEADS, TOPK, BLOCK = 128, 16, 16, 128


def random_pages(pages: int, page) -> torch.Tensor:
    """uint8 `[pages, page_bytes]`: random data; block scales and FP8 values of moderate size."""
    if page.dtype is CacheDType.BF16:
        x = torch.randn(pages, page.page_bytes // 2, dtype=torch.bfloat16, device="cuda")
        return x.view(torch.uint8)
    x = torch.randint(0, 256, (pages, page.page_bytes), dtype=torch.uint8, device="cuda")
    if page.dtype is CacheDType.FP8:
        return (x & 0x80) | (x & 0x7F).clamp_(max=0x40)
    for head in range(page.kv_heads):
        for region in page.head_layout:
            if region.name.endswith("scales"):
                at = head * page.head_bytes + region.offset
                part = x[:, at : at + region.nbytes]
                part.bitwise_and_(0x1F).add_(0x28)
    return x


def main_cache(pages: int, dtype: str) -> MainCache:
    d = CacheDType.parse(dtype)
    return MainCache.from_tensor(random_pages(pages, main_page(1, DIM, d)), 1, dtype)


def index_cache(pages: int, dtype: str) -> IndexCache:
    d = CacheDType.parse(dtype)
    return IndexCache.from_tensor(random_pages(pages, index_page(DIM, d)), dtype)


@dataclass(frozen=True)
class Decode:
    """One call of a decode op; rows of a request select the same number of distinct blocks."""

    q: torch.Tensor
    ids: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor


def decode_calls(requests: int, rows: int, copies: int, pages: int) -> list[Decode]:
    """Each call has its own pages of the pool, as far as it goes; every row its own 16 blocks."""
    blocks = rows * TOPK
    calls = []
    order = torch.randperm(pages, device="cuda").int()
    for c in range(copies):
        at = torch.arange(requests * blocks, device="cuda") + c * requests * blocks
        table = order[at % pages].view(requests, blocks)
        lens = torch.full((requests,), blocks * BLOCK, dtype=torch.int32, device="cuda")
        q = torch.randn(requests * rows, Q_HEADS, DIM, device="cuda").bfloat16()
        ids = torch.arange(blocks, device="cuda", dtype=torch.int32).view(1, rows, TOPK)
        # The last row's list ends with the newest block, as block_topk gives it first.
        ids = ids.flip(-1).repeat(requests, 1, 1).reshape(1, requests * rows, TOPK).contiguous()
        calls.append(Decode(q, ids, table.contiguous(), lens))
    return calls
