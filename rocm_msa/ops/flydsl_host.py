"""Host side that FlyDSL launchers share: the NVFP4 table on a device, factors, dtypes, splits."""

from __future__ import annotations

import functools

import torch

from rocm_msa import launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import expect
from rocm_msa.formats import nvfp4_lut

HEAD_DIM = 128
TILE = 16  # columns of a matrix tile
SCORE_WAVES = 4  # of a workgroup that scores blocks

_PAGE_ALIGN = 16  # bytes
_WORKGROUPS_A_CU = 8
_LONGEST_RUN = 64  # blocks
QUERY_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def table_fold(*scales: float) -> int:
    """Fold exponent of the table for a cache with these global scales.

    With scales of 1 the block scales are small and 0 rounds best; a calibrated scale lets them
    reach 448, where only the folded table does not saturate.
    """
    return 0 if all(s == 1.0 for s in scales) else nvfp4_lut.RECOMMENDED_FOLD_EXPONENT


@functools.cache
def lut_table(fold: int, device: torch.device) -> torch.Tensor:
    """The NVFP4 table on `device`, uploaded by the first call, which no graph may hold."""
    launcher.refuse_capture(device, f"the NVFP4 table of fold {fold} on {device}")
    return nvfp4_lut.build(fold).to(device)


def keys_of(cache: IndexCache) -> tuple[float, torch.Tensor | None]:
    """(what a product with the cache's FP8 or bf16 values is multiplied by, table for NVFP4)."""
    if cache.dtype is CacheDType.BF16:
        return 1.0, None
    scale = float(cache.scales["k"])
    if cache.dtype is CacheDType.FP8:
        return scale, None
    fold = table_fold(scale)
    return scale * 2.0**-fold, lut_table(fold, cache.pages.device)


def byte_strides(x: torch.Tensor) -> list[int]:
    return [stride * x.element_size() for stride in x.stride()]


def check_score_dtypes(kind: str, query: str) -> None:
    """Build parameters of the scoring ops: the cache's dtype, the query's."""
    CacheDType.parse(kind)
    if query not in ("bf16", "fp16"):
        raise ValueError(expect("query", "bf16 or fp16", query))
    if kind == "bf16" and query != "bf16":
        raise ValueError(expect("query", "bf16 on a bf16 cache", query))


def scores_served(config) -> bool:
    """Whether the scoring kernels serve a configuration, see aot.ServingConfig."""
    bf16 = config.index_dtype is CacheDType.BF16
    return config.head_dim == HEAD_DIM and config.dtype in (("bf16",) if bf16 else ("bf16", "fp16"))


def score_dtypes(index_q: torch.Tensor, cache: IndexCache) -> tuple[str, str]:
    """(dtype of the cache, of the query); NotImplementedError for what no scoring kernel takes."""
    kind, query = cache.dtype.value, QUERY_NAMES.get(index_q.dtype)
    if cache.head_dim != HEAD_DIM:
        raise NotImplementedError(expect("head_dim on flydsl", HEAD_DIM, cache.head_dim))
    if query is None or (kind == "bf16" and query != "bf16"):
        wanted = "bf16" if kind == "bf16" else "bf16 or fp16"
        got = f"{index_q.dtype} on a {kind} cache"
        raise NotImplementedError(expect("index_q.dtype on flydsl", wanted, got))
    if index_q.stride(-1) != 1:
        got = index_q.stride(-1)
        raise NotImplementedError(expect("index_q.stride(-1) on flydsl", 1, got))
    if cache.block_stride % _PAGE_ALIGN or cache.pages.data_ptr() % _PAGE_ALIGN:
        raise NotImplementedError(
            expect("index_cache on flydsl", f"pages aligned to {_PAGE_ALIGN} bytes", "others")
        )
    return kind, query


def score_cache(cache: IndexCache) -> list:
    """Launch arguments: pages, their stride in bytes, their number."""
    return [cache.pages, cache.block_stride, cache.num_blocks]


def run_length(groups: int, max_blocks: int, compute_units: int) -> int:
    """Blocks a workgroup that scores: all waves busy, workgroups enough to even out ragged work.

    groups: of rows that are scored together.
    """
    length = -(-groups * max_blocks // (_WORKGROUPS_A_CU * compute_units))
    return max(SCORE_WAVES, min(_LONGEST_RUN, -(-length // SCORE_WAVES) * SCORE_WAVES))
