"""sparse_decode on gfx950: plan, build parameters and launches of three FlyDSL kernels.

The kernels are in flydsl_gfx950_kernels.py and _prepare.py; the arithmetic of a page, its roundings
included, is in ops/flydsl_page.py and ops/flydsl_products.py.

A page of 128 keys gives a row a partial result (m, l, O); a row's result is the fold of its slots'
in one fixed tree: slot after slot within a wave, then wave after wave. Where a partial comes from
does not change its bits, so a row's result depends on its own list alone:

    a page that several items name     -> dequantised once, by `pages`, a partial an item
    a page that one item names         -> by `rows`, in registers; no partial in memory
    few rows                           -> all by `pages`, so that 16 times the workgroups are busy

Who names which page is found on the device: nothing is read on the host, and the launches are the
same for every batch of a shape.

Refused: head_dim other than 128, more than 16 query heads a KV head, fp32 queries, q, out or pages
that are not 16-byte aligned, topk above 31.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.layout import Layout, pack
from rocm_msa.ops.flydsl_attend import (
    HEAD_DIM,
    HEADS,
    LOG2E,
    Q_BYTES,
    check_build,
    check_call,
    dtype_name,
    scales_and_table,
    serves,
)

if TYPE_CHECKING:
    import torch

    from rocm_msa.cache.paged import MainCache
    from rocm_msa.flydsl_compile import Compiled

PREPARE_WAVES, PAGES_WAVES = 8, 8  # of a workgroup
ITEMS_A_PASS = 4096  # that `pages` looks through at a time
PARTIAL_O_BYTES = 4 * HEADS * HEAD_DIM
PARTIAL_ML_BYTES = 4 * 2 * HEADS
# An item's task word: live keys in the low byte, then flags.
TASK_LIVE = 0xFF
TASK_STORED = 1 << 8  # `pages` computes it
TASK_LEADER = 1 << 9  # the first item that names the page: its workgroup does the work
TASK_SHARED = 1 << 10  # others name the page too
KERNELS = ("prepare", "pages", "rows")


@dataclass(frozen=True)
class Build:
    """Build parameters of one kernel.

    kernel: one of KERNELS. dtype: of the cache, a CacheDType's value. q_dtype: bf16 or fp16.
    topk: slots of a row's list, 1..31.
    """

    kernel: str
    dtype: str
    q_dtype: str
    topk: int

    def __post_init__(self) -> None:
        check_build(self, KERNELS)

    @property
    def symbol(self) -> str:
        return f"sparse_decode_{self.kernel}_{self.dtype}_{self.q_dtype}_k{self.topk}"

    @property
    def grid(self) -> str:
        return "(items of a KV head, KV heads)" if self.kernel == "pages" else "(rows, KV heads)"

    @property
    def rows_waves(self) -> int:
        """Waves of a workgroup of `rows`: as many as have room for a page's V each in LDS."""
        return 4 if self.dtype == CacheDType.BF16.value else 8

    @property
    def slots_a_wave(self) -> int:
        """Of `rows`: wave w takes slots w * n .. w * n + n - 1."""
        return -(-self.topk // self.rows_waves)


def kernel_builds(dtype: CacheDType, q_dtype: str, topk: int) -> list[Build]:
    return [Build(kernel, dtype.value, q_dtype, topk) for kernel in KERNELS]


def builds(config) -> list[Build]:
    """The kernels that serving `config` (aot.ServingConfig) launches; none for what is refused."""
    if not serves(config):
        return []
    return kernel_builds(config.main_dtype, config.dtype, config.topk)


def compile_build(build: Build) -> Compiled:
    """Compile one kernel; needs FlyDSL."""
    from rocm_msa.ops.sparse_decode.flydsl_gfx950_kernels import compile_kernel

    return compile_kernel(build)


def scratch_layout(kv_heads: int, rows: int, topk: int) -> Layout:
    """What the kernels hand on, in bytes from the start of one buffer.

    page, task      int32 [kv_heads, rows * topk]         written by prepare
    query           [kv_heads, rows, 4096]                 written by prepare
    factors         fp32 [kv_heads, rows, 16]              written by prepare
    part_ml         fp32 [kv_heads, rows * topk, 2, 16]    written by pages
    part_o          fp32 [kv_heads, rows * topk, 2048]     written by pages
    """
    items = kv_heads * rows * topk
    sizes = [
        ("page", 4 * items),
        ("task", 4 * items),
        ("query", Q_BYTES * kv_heads * rows),
        ("factors", 4 * HEADS * kv_heads * rows),
        ("part_ml", PARTIAL_ML_BYTES * items),
        ("part_o", PARTIAL_O_BYTES * items),
    ]
    return pack(sizes, align=128)


def stores_all(rows: int, kv_heads: int, compute_units: int = GFX950.compute_units) -> bool:
    """Whether `pages` takes every item: when `rows` alone would leave most of the GPU idle."""
    return 2 * rows * kv_heads < compute_units


def launches(
    q: torch.Tensor,
    cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: torch.Tensor,
    *,
    fold: int | None = None,
    all_stored: bool | None = None,
) -> list[tuple[Build, tuple[int, int], list[Any]]]:
    """(build, grid, arguments) of the three kernels, in order.

    Args:
        scratch: uint8, `scratch_layout(...).nbytes` bytes; needs no initial value.
        fold: exponent of the table for NVFP4 pages, see flydsl_attend.scales_and_table.
        all_stored: None for `stores_all`. Changes no result.
    """
    rows, q_heads, _ = q.shape
    kv_heads, topk = cache.kv_heads, block_ids.shape[-1]
    k_scale, v_scale, lut = scales_and_table(cache, q.device, fold)
    if all_stored is None:
        all_stored = stores_all(rows, kv_heads)
    layout = scratch_layout(kv_heads, rows, topk)
    part = {r.name: scratch[r.offset : r.end] for r in layout}
    handed = [part[name] for name in ("page", "task", "query", "factors")]
    group = q_heads // kv_heads
    prepare, pages, by_rows = kernel_builds(cache.dtype, dtype_name(q.dtype), topk)
    # fmt: off
    first = [
        q, q.stride(0), q.stride(1), group, block_ids, *block_ids.stride(), block_table,
        *block_table.stride(), block_table.shape[1], seq_lens, seq_lens.stride(0), rows_per_request,
        -(-(1 << 30) // rows_per_request), rows, cache.num_blocks,
        float(sm_scale) * LOG2E * k_scale, int(all_stored), *handed,
    ]
    page_arguments = [
        cache.pages, cache.block_stride, lut, rows, *handed, part["part_o"], part["part_ml"],
    ]
    # fmt: on
    last = [*page_arguments, v_scale, out, out.stride(0), out.stride(1), lse, group, q_heads]
    return [
        (prepare, (rows, kv_heads), first),
        (pages, (rows * topk, kv_heads), page_arguments),
        (by_rows, (rows, kv_heads), last),
    ]


def needs(q, main_cache, block_ids, *_: Any, out=None, **__: Any) -> Sequence[Build]:
    """The builds that `run` launches. Raises NotImplementedError for what is refused."""
    check_call("sparse_decode", q, main_cache, block_ids, out)
    return kernel_builds(main_cache.dtype, dtype_name(q.dtype), block_ids.shape[-1])


def run(
    q, main_cache, block_ids, block_table, seq_lens, rows_per_request, sm_scale, out=None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py. options: see `launches`."""
    import torch

    from rocm_msa import launcher

    needs(q, main_cache, block_ids, out=out)
    rows, q_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    if block_table.numel() == 0 or main_cache.num_blocks == 0:
        return out.zero_(), lse.fill_(-math.inf)
    layout = scratch_layout(main_cache.kv_heads, rows, block_ids.shape[-1])
    scratch = torch.empty(layout.nbytes, dtype=torch.uint8, device=q.device)
    for build, grid, args in launches(
        q, main_cache, block_ids, block_table, seq_lens, rows_per_request, sm_scale, out, lse,
        scratch, **options,
    ):  # fmt: skip
        launcher.launch(build, grid, args, q.device)
    return out, lse
