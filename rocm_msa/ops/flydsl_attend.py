"""Host side that the FlyDSL attention ops share: what they take, scales, the NVFP4 table."""

from __future__ import annotations

from typing import Any

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import MainCache
from rocm_msa.errors import expect
from rocm_msa.ops.flydsl_host import HEAD_DIM, QUERY_NAMES, lut_table, table_fold

HEADS = 16  # query heads of a KV head, as columns of a matrix product
MAX_TOPK = 31  # bits of a positive Int32
Q_BYTES = 4096  # of a row's queries as operands
LOG2E = 1.4426950408889634

_ALIGN = 16  # bytes


def check_build(build: Any) -> None:
    """dtype: a CacheDType's value. q_dtype: bf16 or fp16. topk: 1..31."""
    for name, allowed in (
        ("dtype", tuple(d.value for d in CacheDType)),
        ("q_dtype", tuple(QUERY_NAMES.values())),
        ("topk", range(1, MAX_TOPK + 1)),
    ):
        if getattr(build, name) not in allowed:
            raise ValueError(expect(name, f"one of {allowed}", repr(getattr(build, name))))


def serves(config: Any) -> bool:
    """Whether the attention kernels serve a configuration, see aot.ServingConfig."""
    group = config.q_heads // config.kv_heads
    return (
        config.head_dim == HEAD_DIM
        and group <= HEADS
        and config.dtype in QUERY_NAMES.values()
        and config.topk <= MAX_TOPK
    )


def dtype_name(dtype: torch.dtype) -> str | None:
    return QUERY_NAMES.get(dtype)


def check_call(
    op: str, q: torch.Tensor, cache: MainCache, block_ids: torch.Tensor, out: torch.Tensor | None
) -> None:
    """Raises NotImplementedError for arguments that no kernel takes; reads no values."""
    _, q_heads, head_dim = q.shape
    group, topk = q_heads // cache.kv_heads, block_ids.shape[-1]
    wanted = "16-byte aligned heads"
    for what, expected, got, good in (
        ("head_dim", HEAD_DIM, head_dim, head_dim == HEAD_DIM),
        ("query heads a KV head", f"at most {HEADS}", group, group <= HEADS),
        ("q.dtype", "bfloat16 or float16", q.dtype, q.dtype in QUERY_NAMES),
        ("topk", f"1..{MAX_TOPK}", topk, 1 <= topk <= MAX_TOPK),
        ("block_stride", f"a multiple of {_ALIGN}", cache.block_stride, _pages_aligned(cache)),
        ("q", wanted, q.stride(), _heads_aligned(q)),
        ("out", wanted, out is not None and out.stride(), _heads_aligned(out)),
    ):
        if not good:
            raise NotImplementedError(expect(f"{op} on flydsl: {what}", expected, got))


def scales_and_table(
    cache: MainCache, device: torch.device, fold: int | None = None
) -> tuple[float, float, torch.Tensor | None]:
    """(factor of K, factor of V, NVFP4 table on `device` or None) of a cache's values.

    fold: exponent of the table; None for `table_fold` of both scales.
    """
    if cache.dtype is CacheDType.BF16:
        return 1.0, 1.0, None
    k, v = (float(cache.scales[side]) for side in ("k", "v"))
    if cache.dtype is CacheDType.FP8:
        return k, v, None
    fold = table_fold(k, v) if fold is None else fold
    return k * 2.0**-fold, v * 2.0**-fold, lut_table(fold, device)


def _pages_aligned(cache: MainCache) -> bool:
    aligned = cache.pages.data_ptr() % _ALIGN == 0
    return aligned and (cache.num_blocks < 2 or cache.block_stride % _ALIGN == 0)


def _heads_aligned(x: torch.Tensor | None) -> bool:
    """16-byte loads of any head: dims contiguous, heads and rows at multiples of 16 bytes."""
    if x is None or x.numel() == 0:
        return True
    strides = x.stride(0) * (x.shape[0] > 1), x.stride(1) * (x.shape[1] > 1)
    size = x.element_size()
    return (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGN == 0
        and not any(s * size % _ALIGN for s in strides)
    )
