"""Compile at start-up what the Triton backend will run, on the caches that it will run on.

Every op is called once for each shape class with padding alone: no key is read, no slot is written.
Nothing is tuned by timing: which kernels there are is a function of the shapes (each op's plan.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

from rocm_msa import ops
from rocm_msa.cache.paged import IndexCache, MainCache

logger = logging.getLogger(__name__)

_MOST_ROWS = 512  # of block_topk: from here on nothing changes


@dataclass(frozen=True)
class Config:
    """What will be served.

    decode: (requests, rows a request) of the decode batches, for instance the captured sizes.
    prefill: token counts of the prefill batches; chunk sizes and one small one.
    max_blocks: width of the block table.
    """

    heads: ops.Heads
    dtype: torch.dtype
    max_blocks: int
    decode: Sequence[tuple[int, int]] = ((1, 1), (32, 1), (256, 1))
    prefill: Sequence[int] = (16, 1024, 16384)
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1


def compiled() -> int:
    """Specialisations that the kernels of this backend hold in this process."""
    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("rocm_msa.ops.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return sum(len(held[0]) for k in kernels.values() for held in k.device_caches.values())


def warmup(config: Config, main_cache: MainCache, index_cache: IndexCache | None) -> int:
    """Compile every specialisation that `config` needs; returns how many were new."""
    before = compiled()
    device = main_cache.pages.device
    for requests, rows in config.decode:
        lens = torch.zeros(requests, dtype=torch.int32, device=device)
        _attention(config, main_cache, index_cache, requests * rows, lens, rows)
    for tokens in config.prefill:
        lens = torch.zeros(1, dtype=torch.int32, device=device)
        _attention(config, main_cache, index_cache, tokens, lens, None)
    _select(config, device)
    for tokens in sorted({r * n for r, n in config.decode} | set(config.prefill)):
        _insert(config, main_cache, index_cache, tokens)
    new = compiled() - before
    logger.info("Triton warm-up: %d kernels compiled, %d held", new, before + new)
    return new


def _attention(config, main_cache, index_cache, rows, lens, rows_per_request) -> None:
    heads, device = config.heads, lens.device
    table = torch.zeros(len(lens), config.max_blocks, dtype=torch.int32, device=device)
    q = torch.zeros(rows, heads.q, heads.head_dim, dtype=config.dtype, device=device)
    cu = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
    scale = heads.head_dim**-0.5
    if not heads.index or index_cache is None:
        ops.dense_attention(q, main_cache, table, cu, lens, scale, backend="triton")
        return
    index_q = q[:, : heads.index].contiguous()
    if rows_per_request is None:
        scores = ops.index_score_prefill(index_q, index_cache, table, cu, lens, backend="triton")
    else:
        scores = ops.index_score_decode(
            index_q, index_cache, table, lens, rows_per_request, backend="triton"
        )
    nb = torch.zeros(rows, dtype=torch.int32, device=device)
    kept = (config.topk, config.init_blocks, config.local_blocks)
    ids = ops.block_topk(scores, nb, *kept, backend="triton")[: heads.kv]
    if rows_per_request is None:
        ops.sparse_prefill(q, main_cache, ids, table, cu, lens, scale, backend="triton")
    else:
        for hint in (False, True):
            ops.sparse_decode(
                q, main_cache, ids, table, lens, rows_per_request, scale, shared_pages=hint,
                backend="triton",
            )  # fmt: skip


def _select(config, device) -> None:
    """block_topk: its chunks and splits depend on the width of the table and on the rows."""
    if not config.heads.index:
        return
    scores = torch.zeros(1, _MOST_ROWS, config.max_blocks, device=device)
    nb = torch.zeros(_MOST_ROWS, dtype=torch.int32, device=device)
    kept = (config.topk, config.init_blocks, config.local_blocks)
    widths = {1 << i for i in range(config.max_blocks.bit_length())} | {config.max_blocks}
    for width in widths:
        for rows in (1 << i for i in range(_MOST_ROWS.bit_length())):
            ops.block_topk(scores[:, :rows, :width], nb[:rows], *kept, backend="triton")


def _insert(config, main_cache, index_cache, tokens) -> None:
    heads, device = config.heads, main_cache.pages.device
    qkv = torch.zeros(tokens, heads.qkv_columns, dtype=config.dtype, device=device)
    weight = torch.zeros(heads.head_dim, dtype=config.dtype, device=device)
    both = (weight, weight) if heads.index else ()
    cos_sin = torch.zeros(1, heads.rotary_dim, dtype=torch.float32, device=device)
    position = torch.zeros(tokens, dtype=torch.int64, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    index = (index_cache, slots) if heads.index else (None, None)
    ops.qkv_insert(
        qkv, ops.Norms(weight, weight, *both), cos_sin, position, main_cache, index[0], slots,
        index[1], heads, backend="triton",
    )  # fmt: skip
