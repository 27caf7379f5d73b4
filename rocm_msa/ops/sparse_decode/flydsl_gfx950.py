"""sparse_decode on gfx950: plan, build parameters and launch; traced code in flydsl_kernel.py.

One launch. A workgroup has one row of one KV head, and all of its dims or a part: with few rows the
dims of V are cut into 2 or 4 parts, which fills as many times more of the GPU and moves no partial
results. Rows that select the same page read it from the same cache; memory gives it once. A page's
arithmetic, its roundings included, is in ops/flydsl_page.py, flydsl_products.py and
flydsl_partial.py.

With `shared_pages` a page is dequantised once for up to 64 rows that select it, of any requests, by
the kernels of ops/flydsl_by_page.py, which give the same bits.

Refused: head_dim other than 128, more than 16 query heads a KV head, fp32 queries, q, out or pages
that are not 16-byte aligned, topk above 31.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.errors import expect
from rocm_msa.ops import flydsl_attend as attend
from rocm_msa.ops import flydsl_by_page as by_page

if TYPE_CHECKING:
    from rocm_msa.cache.paged import MainCache
    from rocm_msa.flydsl_compile import Compiled

PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Build:
    """dtype: of the cache, a CacheDType's value. q_dtype: bf16 or fp16. topk: slots of a row's
    list, 1..31. parts: of the dims, one of PARTS."""

    dtype: str
    q_dtype: str
    topk: int
    parts: int

    def __post_init__(self) -> None:
        attend.check_build(self)
        allowed = parts_of(CacheDType(self.dtype))
        if self.parts not in allowed:
            raise ValueError(expect("parts", f"one of {allowed}", self.parts))

    @property
    def symbol(self) -> str:
        return f"sparse_decode_{self.dtype}_{self.q_dtype}_k{self.topk}_p{self.parts}"

    @property
    def grid(self) -> str:
        return "(requests, rows of a request, KV heads * parts)"

    @property
    def waves(self) -> int:
        """Of a workgroup: as many as have room for a page's V each in LDS."""
        return 4 if self.dtype == CacheDType.BF16.value else 8

    @property
    def slots_a_wave(self) -> int:
        return -(-self.topk // self.waves)

    @property
    def waves_a_simd(self) -> int:
        """Waves that share a SIMD."""
        return 1 if self.waves == 4 and self.parts == 2 else 2


def parts_of(dtype: CacheDType) -> tuple[int, ...]:
    """The cuts that have a kernel: bf16 pages whole, and their fp32 results, do not fit a wave."""
    return PARTS[1:] if dtype is CacheDType.BF16 else PARTS


def select_parts(
    dtype: CacheDType, rows: int, kv_heads: int, compute_units: int = GFX950.compute_units
) -> int:
    """The finest cut whose workgroups all have a compute unit of their own. Changes no bit."""
    fitting = parts_of(dtype)
    return max([p for p in fitting if rows * kv_heads * p <= compute_units], default=fitting[0])


def builds(config) -> list[Any]:
    """The kernels that serving `config` (aot.ServingConfig) launches; none for what is refused."""
    if not attend.serves(config):
        return []
    dtype, topk = config.main_dtype, config.topk
    own = [Build(dtype.value, config.dtype, topk, parts) for parts in parts_of(dtype)]
    return [*own, *by_page.kernel_builds(dtype, config.dtype, topk)]


def needs(
    q, main_cache, block_ids, *_: Any, out=None, shared_pages=False, parts=None, **__: Any
) -> Sequence[Any]:
    """The builds that `run` launches. Raises NotImplementedError for what is refused."""
    attend.check_call("sparse_decode", q, main_cache, block_ids, out)
    topk, dtype = block_ids.shape[-1], main_cache.dtype
    name = attend.dtype_name(q.dtype)
    if shared_pages:
        return by_page.kernel_builds(dtype, name, topk)
    parts = parts or select_parts(dtype, q.shape[0], main_cache.kv_heads)
    return [Build(dtype.value, name, topk, parts)]


def run(
    q: torch.Tensor,
    main_cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    sm_scale: float,
    out: torch.Tensor | None = None,
    *,
    shared_pages: bool = False,
    fold: int | None = None,
    parts: int | None = None,
    builds: Sequence[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py.

    fold: exponent of the table for NVFP4 pages, see flydsl_attend.scales_and_table. parts: one of
    PARTS, for tests and benchmarks; changes no bit.
    """
    builds = builds or needs(
        q, main_cache, block_ids, out=out, shared_pages=shared_pages, parts=parts
    )
    rows, q_heads, _ = q.shape
    requests, kv_heads = block_table.shape[0], main_cache.kv_heads
    if shared_pages:
        first = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * rows_per_request
        return by_page.attend_varlen(
            builds, q, main_cache, block_ids, block_table, first, seq_lens, sm_scale, out, fold
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    if block_table.numel() == 0 or main_cache.num_blocks == 0:
        return out.zero_(), lse.fill_(-math.inf)
    k_scale, v_scale, lut = attend.scales_and_table(main_cache, q.device, fold)
    (build,) = builds
    launcher.launch(
        build, (requests, rows_per_request, kv_heads * build.parts),
        [q, q.stride(0), q.stride(1), q_heads // kv_heads, block_ids, *block_ids.stride(),
         block_table, *block_table.stride(), block_table.shape[1],
         seq_lens, seq_lens.stride(0), rows_per_request,
         main_cache.pages, main_cache.block_stride, main_cache.num_blocks, lut,
         float(sm_scale) * attend.LOG2E * k_scale, v_scale,
         out, out.stride(0), out.stride(1), lse, q_heads],
        q.device,
    )  # fmt: skip
    return out, lse


def compile_build(build: Build) -> Compiled:
    """Compile one kernel; needs FlyDSL."""
    from rocm_msa.ops.sparse_decode import flydsl_kernel

    return flydsl_kernel.compile_build(build)
