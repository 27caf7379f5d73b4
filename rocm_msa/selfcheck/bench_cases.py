"""Calls of the ops whose times are modelled and measured: one GPU of four (TP 4), as in service.

A case is (shape in words, least bytes that the op must move, the call): a functools.partial on CPU
tensors of an op that still takes `backend`. A call's caches hold random bytes: what a kernel does
hardly depends on them, how much not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.selfcheck.kernels import BLOCK, DIM, HEADS, KINDS, TOPK

Case = tuple[str, int, functools.partial]


def later(op: Callable, *args: object) -> functools.partial:
    return functools.partial(op, *args)


def caches(blocks: int, dtype: str) -> tuple[MainCache, IndexCache]:
    main = MainCache.allocate(blocks, HEADS.kv, dtype)
    index = IndexCache.allocate(blocks, dtype)
    for cache in (main, index):
        cache.pages.random_(0, 256, generator=torch.Generator().manual_seed(blocks))
    return main, index


def table_of(requests: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block table, seq_lens): every block has a page of its own."""
    table = torch.randperm(requests * (length // BLOCK)).int().view(requests, -1)
    return table, torch.full((requests,), length, dtype=torch.int32)


def q_of(rows: int, heads: int) -> torch.Tensor:
    return torch.randn(rows, heads, DIM).bfloat16()


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def lists_of(rows: int, blocks: int) -> torch.Tensor:
    ids = [torch.randperm(blocks)[:TOPK] for _ in range(rows)]
    return torch.stack(ids).int().view(1, rows, -1)


def qkv_insert(dtype: str) -> Iterator[Case]:
    for tokens in (32, 1024):
        main, index = caches(-(-tokens // BLOCK), dtype)
        qkv = torch.randn(tokens, HEADS.qkv_columns).bfloat16()
        norms = ops.Norms(*(torch.zeros(DIM).bfloat16() for _ in range(4)))
        angles, where = torch.randn(tokens, HEADS.rotary_dim), torch.arange(tokens)
        stored = tokens * (main.page.page_bytes + index.page.page_bytes) // BLOCK
        least = size(qkv) + tokens * (HEADS.q + HEADS.index) * DIM * 2 + stored + size(angles)
        yield (
            f"{tokens} tokens",
            least + 3 * size(where),
            later(ops.qkv_insert, qkv, norms, angles, where, main, index, where, where + 0, HEADS),
        )


def index_score_decode(dtype: str) -> Iterator[Case]:
    for requests, rows, length in ((16, 1, 16384), (8, 4, 16384)):
        _, index = caches(requests * length // BLOCK, dtype)
        table, lens = table_of(requests, length)
        q = q_of(requests * rows, HEADS.index)
        out = q.shape[0] * HEADS.index * table.shape[1] * 4
        yield (
            f"{requests} x {rows} rows of {length // 1024}K",
            size(q, table, lens, index.pages) + out,
            later(ops.index_score_decode, q, index, table, lens, rows),
        )


def index_score_prefill(dtype: str) -> Iterator[Case]:
    tokens, length = 1024, 8192
    _, index = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.index), torch.tensor([0, tokens], dtype=torch.int32)
    out = tokens * HEADS.index * table.shape[1] * 4
    yield (
        f"{tokens} tokens at {length // 1024}K",
        size(q, table, lens, index.pages) + out,
        later(ops.index_score_prefill, q, index, table, cu, lens),
    )


def block_topk(dtype: str) -> Iterator[Case]:
    if dtype != KINDS[0]:
        return
    for rows, blocks in ((32, 1024), (512, 1024), (1, 8192)):
        scores = torch.randn(1, rows, blocks)
        nb = torch.full((rows,), blocks, dtype=torch.int32)
        yield (
            f"{rows} rows of {blocks} blocks",
            size(scores, nb) + rows * TOPK * 4,
            later(ops.block_topk, scores, nb),
        )


def select_decode(dtype: str) -> Iterator[Case]:
    for requests, rows, length in ((16, 1, 16384), (8, 4, 16384), (1, 1, 8192 * BLOCK)):
        stored = min(length, 16384)  # longer contexts: the same pages again
        _, index = caches(requests * stored // BLOCK, dtype)
        table, lens = table_of(requests, stored)
        table, lens = table.repeat(1, length // stored), lens * (length // stored)
        q = q_of(requests * rows, HEADS.index)
        blocks = torch.full((q.shape[0],), length // BLOCK, dtype=torch.int32)
        counters = torch.zeros(requests, dtype=torch.int32)
        yield (
            f"{requests} x {rows} rows of {length // 1024}K",
            size(q, table, lens, index.pages) + q.shape[0] * HEADS.index * TOPK * 4,
            functools.partial(
                ops.select_decode, q, index, table, lens, rows, blocks, TOPK, counters=counters
            ),
        )


def sparse_decode(dtype: str) -> Iterator[Case]:
    for requests, rows in ((128, 1), (32, 4)):
        count = requests * rows
        main, _ = caches(count * TOPK, dtype)
        table, lens = table_of(requests, rows * TOPK * BLOCK)
        ids = torch.arange(rows * TOPK).int().view(1, rows, TOPK).repeat(1, requests, 1)
        q = q_of(count, HEADS.q)
        yield (
            f"{requests} x {rows} rows",
            size(q, q, table, lens, ids, main.pages) + count * HEADS.q * 4,
            later(ops.sparse_decode, q, main, ids, table, lens, rows, 0.09),
        )


def sparse_prefill(dtype: str) -> Iterator[Case]:
    tokens, length = 256, 8192
    main, _ = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.q), torch.tensor([0, tokens], dtype=torch.int32)
    ids = lists_of(tokens, length // BLOCK)
    yield (
        f"{tokens} tokens at {length // 1024}K",
        size(q, q, table, lens, ids, main.pages) + tokens * HEADS.q * 4,
        later(ops.sparse_prefill, q, main, ids, table, cu, lens, 0.09),
    )


def dense_attention(dtype: str) -> Iterator[Case]:
    tokens = length = 256
    main, _ = caches(length // BLOCK, dtype)
    table, lens = table_of(1, length)
    q, cu = q_of(tokens, HEADS.q), torch.tensor([0, tokens], dtype=torch.int32)
    yield (
        f"{tokens} tokens at {length}",
        size(q, q, table, lens, main.pages) + tokens * HEADS.q * 4,
        later(ops.dense_attention, q, main, table, cu, lens, 0.09),
    )


OPS = (
    qkv_insert,
    index_score_decode,
    index_score_prefill,
    block_topk,
    select_decode,
    sparse_decode,
    sparse_prefill,
    dense_attention,
)


def cases_of(op: Callable[[str], Iterator[Case]], dtype: str) -> Iterator[Case]:
    """The calls of one of OPS, the same values every time."""
    torch.manual_seed(0)
    yield from op(dtype)
