"""Sparse attention on gfx950 by page: plan, build parameters and launches of five FlyDSL kernels.

An entry is one slot of one token's block list, of one KV head: number
(token * kv_heads + head) * topk + slot. A page is dequantised once for the entries that name it, up
to ITEM of them, and gives each a partial result (flydsl_partial.py); a token's result is that of
its slots, as where a workgroup takes a row: the same bits in every batch and chunk.

    prepare   queries as operands; each entry's page and place among those that name the page
    items     places of the pages' runs of entries, and runs cut into items, the work of a workgroup
    place     the entries in order of their pages              these three: flydsl_by_page_list.py
    pages     partial results
    merge     the tokens' results                            these two: flydsl_by_page_kernels.py

The order of entries and items comes from counters that workgroups race for; no result depends on
it. The work is linear in entries and pages. A batch is taken in turns of tokens whose partial
results fit in SCRATCH_BYTES. Nothing is read on the host. Refused: see flydsl_attend.check_call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.errors import expect
from rocm_msa.layout import Layout, pack
from rocm_msa.ops import flydsl_attend as attend

if TYPE_CHECKING:
    from rocm_msa.cache.paged import MainCache

KERNELS = ("prepare", "items", "place", "pages", "merge")
ITEM = 64  # entries
SCRATCH_BYTES = 128 * 2**20
LANES = 256  # of the kernels that take an entry or page a lane
PAGES_WAVES = 8
_PAGES_WORKGROUPS_A_CU = 2


@dataclass(frozen=True)
class Build:
    """kernel: one of KERNELS. The others: see flydsl_attend.check_build."""

    kernel: str
    dtype: str
    q_dtype: str
    topk: int

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(expect("kernel", f"one of {KERNELS}", repr(self.kernel)))
        attend.check_build(self)

    @property
    def symbol(self) -> str:
        return f"attend_by_page_{self.kernel}_{self.dtype}_{self.q_dtype}_k{self.topk}"

    @property
    def grid(self) -> str:
        return {
            "prepare": "(tokens, KV heads)",
            "items": f"(pages * KV heads / {LANES})",
            "place": f"(entries / {LANES})",
            "pages": "(workgroups that are resident)",
            "merge": "(tokens, KV heads)",
        }[self.kernel]


def kernel_builds(dtype: CacheDType, q_dtype: str, topk: int) -> list[Build]:
    return [Build(kernel, dtype.value, q_dtype, topk) for kernel in KERNELS]


def partial_bytes(dtype: CacheDType) -> int:
    """Of an entry's output."""
    return attend.HEADS * attend.HEAD_DIM * (4 if dtype is CacheDType.BF16 else 2)


def scratch_layout(tokens: int, kv_heads: int, topk: int, keys: int, dtype: CacheDType) -> Layout:
    """What the kernels of a turn hand on, in bytes from the start of one buffer.

    counts     int32 [keys + 2]           entries a page, entries in all, items; zero at first
    places     int32 [keys]               first place of a page's entries
    items      int32 [most items, 4]      page's key, first place, entries
    key, rank  int32 [entries]            page's key or -1, place among the page's entries
    live       int32 [entries]            live keys
    order      int32 [entries]
    query      [tokens * kv_heads, 4096]  factors: fp32 [tokens * kv_heads, 16]
    part_x     fp32 [entries, 16]         log2 of the weight
    part_o     [entries, 2048]
    """
    rows, entries = tokens * kv_heads, tokens * kv_heads * topk
    sizes = [
        ("counts", 4 * (keys + 2)),
        ("places", 4 * keys),
        ("items", 16 * most_items(entries, keys)),
        *((name, 4 * entries) for name in ("key", "rank", "live", "order")),
        ("query", attend.Q_BYTES * rows),
        ("factors", 4 * attend.HEADS * rows),
        ("part_x", 4 * attend.HEADS * entries),
        ("part_o", partial_bytes(dtype) * entries),
    ]
    return pack(sizes, align=128)


def most_items(entries: int, keys: int) -> int:
    return entries // ITEM + min(keys, entries)


def turns(tokens: int, kv_heads: int, topk: int, dtype: CacheDType) -> Iterator[range]:
    """Runs of tokens whose partial results fit in SCRATCH_BYTES."""
    each = kv_heads * (topk * (partial_bytes(dtype) + 4 * attend.HEADS) + attend.Q_BYTES)
    step = max(1, SCRATCH_BYTES // each)
    for first in range(0, tokens, step):
        yield range(first, min(tokens, first + step))


def attend_varlen(
    builds: Sequence[Build],
    q: torch.Tensor,
    main_cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    fold: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); arguments as in sparse_prefill/api.py.

    builds: `kernel_builds` of the arguments. fold: see flydsl_attend.scales_and_table.
    """
    tokens, q_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    if block_table.numel() == 0 or main_cache.num_blocks == 0:
        return out.zero_(), lse.fill_(-math.inf)
    kv_heads, topk, dtype = main_cache.kv_heads, block_ids.shape[-1], main_cache.dtype
    keys = kv_heads * main_cache.num_blocks
    scratch = None
    for turn in turns(tokens, kv_heads, topk, dtype):
        layout = scratch_layout(len(turn), kv_heads, topk, keys, dtype)
        if scratch is None:
            scratch = torch.empty(layout.nbytes, dtype=torch.uint8, device=q.device)
        part = {r.name: scratch[r.offset : r.end] for r in layout}
        part["counts"].zero_()
        for build, grid, args in _launches(
            builds, turn, part, keys, q, main_cache, block_ids, block_table, cu_seqlens_q,
            seq_lens, sm_scale, out, lse, fold,
        ):  # fmt: skip
            launcher.launch(build, grid, args, q.device)
    return out, lse


def _launches(
    builds, turn, part, keys, q, cache, block_ids, block_table, cu, seq_lens, sm_scale, out, lse,
    fold,
):  # fmt: skip
    """(build, grid, arguments) of the kernels of a turn."""
    kv_heads, topk, q_heads = cache.kv_heads, block_ids.shape[-1], q.shape[1]
    group, entries = q_heads // kv_heads, len(turn) * kv_heads * topk
    k_factor, v_factor, lut = attend.scales_and_table(cache, q.device, fold)
    factor = float(sm_scale) * attend.LOG2E * k_factor
    of = part.__getitem__
    workers = min(most_items(entries, keys), _PAGES_WORKGROUPS_A_CU * GFX950.compute_units)
    # fmt: off
    arguments = {
        "prepare": [
            q, q.stride(0), q.stride(1), group, block_ids, *block_ids.stride(),
            block_table, *block_table.stride(), block_table.shape[1],
            cu, cu.stride(0), seq_lens, seq_lens.stride(0), seq_lens.shape[0],
            turn.start, kv_heads, cache.num_blocks, factor,
            *map(of, ("counts", "key", "rank", "live", "query", "factors")),
        ],
        "items": [*map(of, ("counts", "places", "items")), keys],
        "place": [*map(of, ("key", "rank", "places", "order")), entries],
        "pages": [
            cache.pages, cache.block_stride, cache.num_blocks, lut,
            *map(of, ("items", "counts", "order", "live", "query", "factors", "part_x", "part_o")),
            keys, workers,
        ],
        "merge": [
            *map(of, ("live", "part_x", "part_o")), v_factor, turn.start, kv_heads, group,
            out, out.stride(0), out.stride(1), lse, q_heads,
        ],
    }
    # fmt: on
    grids = {
        "prepare": (len(turn), kv_heads),
        "items": (-(-keys // LANES),),
        "place": (-(-entries // LANES),),
        "pages": (workers,),
        "merge": (len(turn), kv_heads),
    }
    return [(build, grids[build.kernel], arguments[build.kernel]) for build in builds]


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops import flydsl_by_page_kernels

    return flydsl_by_page_kernels.compile_build(build)
