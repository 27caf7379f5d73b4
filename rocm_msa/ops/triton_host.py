"""Host side shared by the Triton launchers: what a kernel wants to know of a cache, row tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import PagedCache
from rocm_msa.errors import expect
from rocm_msa.ops.triton_common import rows_kernel

KINDS = {CacheDType.NVFP4: 0, CacheDType.FP8: 1, CacheDType.BF16: 2}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Geometry:
    """Constants of a cache for the kernels; offsets in bytes from a head's start."""

    kind: int
    head_dim: int
    head_bytes: int
    k_data: int
    k_scales: int
    v_data: int
    v_scales: int

    @classmethod
    def of(cls, cache: PagedCache) -> Geometry:
        dim = cache.head_dim
        if dim & (dim - 1) or dim < 32:
            raise NotImplementedError(expect("head_dim on triton", "a power of two >= 32", dim))
        layout = cache.page.head_layout

        def at(name: str) -> int:
            return layout[name].offset if name in layout else 0

        return cls(
            KINDS[cache.dtype],
            dim,
            cache.page.head_bytes,
            at("k_data"),
            at("k_scales"),
            at("v_data"),
            at("v_scales"),
        )


def scale(cache: PagedCache, side: str) -> float:
    """Global scale of a side; bf16 values are stored without one."""
    return 1.0 if cache.dtype is CacheDType.BF16 else float(cache.scales[side])


def operand_types(q: torch.Tensor, cache: PagedCache) -> tuple[tl.dtype, tl.dtype]:
    """Types of the two products, q . k and p . v: 16 bits where nothing of K and V is lost."""
    bf16_pages = cache.dtype is CacheDType.BF16
    if q.dtype is torch.float32 or (q.dtype is torch.float16 and bf16_pages):
        return tl.float32, tl.float32
    return _TYPES[q.dtype], tl.bfloat16 if bf16_pages else tl.float16


def aligned(cache: PagedCache) -> bool:
    """Whether every region can be read 16 bytes at a time."""
    return cache.pages.data_ptr() % 16 == 0 and cache.block_stride % 16 == 0


def prefill_table(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> torch.Tensor:
    """int32 `[2, tokens]`: request and causal length of each token, made on the device."""
    table = torch.empty(2, tokens, dtype=torch.int32, device=seq_lens.device)
    if tokens:
        grid = (triton.cdiv(tokens, 256),)
        rows_kernel[grid](cu_seqlens_q, seq_lens, table, seq_lens.shape[0], tokens, BLOCK=256)
    return table


def target_of(x: torch.Tensor) -> str:
    """What kernels on this tensor are compiled for: "cuda", an AMD name such as "gfx950", "cpu"."""
    if not x.is_cuda:
        return "cpu"
    if torch.version.hip is None:
        return "cuda"
    return torch.cuda.get_device_properties(x.device).gcnArchName.split(":")[0]


def hopper(x: torch.Tensor) -> bool:
    """Whether the Gluon kernels for sm_90 run on this tensor's device."""
    return (
        x.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )


def converts_e4m3(x: torch.Tensor) -> bool:
    """Whether this tensor's device has an instruction from E4M3 to fp16 that Triton uses."""
    return (
        x.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )
