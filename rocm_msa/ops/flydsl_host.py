"""Host side shared by the FlyDSL launchers: the NVFP4 table on a device, factors, dtypes."""

from __future__ import annotations

import functools

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import PagedCache
from rocm_msa.errors import expect
from rocm_msa.formats import nvfp4_lut

_QUERIES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@functools.cache
def lut_table(device: torch.device) -> torch.Tensor:
    """The table of RECOMMENDED_FOLD_EXPONENT on `device`, uploaded by the first call."""
    return nvfp4_lut.build(nvfp4_lut.RECOMMENDED_FOLD_EXPONENT).to(device)


def key_factor(cache: PagedCache, side: str, fold: int) -> float:
    """What a product with a side's FP8 or bf16 values is multiplied by; `fold`: of the table."""
    if cache.dtype is CacheDType.BF16:
        return 1.0
    scale = float(cache.scales[side])
    return scale * 2.0**-fold if cache.dtype is CacheDType.NVFP4 else scale


def query_dtype(q: torch.Tensor, kind: str) -> str:
    """bf16 or fp16; NotImplementedError for what no kernel takes."""
    name = _QUERIES.get(q.dtype)
    if name is None or (kind == "bf16" and name != "bf16"):
        raise NotImplementedError(expect(f"query on flydsl, {kind} cache", "bf16", q.dtype))
    return name
