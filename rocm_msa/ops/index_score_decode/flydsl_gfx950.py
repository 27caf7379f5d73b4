"""index_score_decode on gfx950: one launch; traced code in flydsl_kernel.py.

A workgroup scores a run of blocks of one request for all its (row, head) pairs, which are columns
of 16x16 matrix tiles, so that a page is read and dequantised once. The query enters exactly
(device/query.py); keys of an NVFP4 cache are rounded to E4M3 by the table (formats/nvfp4_lut.py):
the scores are those of the keys that nvfp4_lut.dequantize_via_lut gives.

Refused: a head_dim other than 128, fp32 queries, fp16 queries on a bf16 cache, more than 64 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_int, expect
from rocm_msa.ops import flydsl_host as host

MAX_TILES = 4  # of 16 columns
MAX_PAIRS = MAX_TILES * host.TILE


@dataclass(frozen=True)
class Build:
    """kind: of the cache, nvfp4, fp8 or bf16. query: bf16 or fp16. tiles: of 16 columns."""

    kind: str
    query: str
    tiles: int

    def __post_init__(self) -> None:
        host.check_score_dtypes(self.kind, self.query)
        check_int("tiles", self.tiles, 1)
        if self.tiles > MAX_TILES:
            raise ValueError(expect("tiles", f"<= {MAX_TILES}", self.tiles))

    @property
    def symbol(self) -> str:
        return f"index_score_decode_{self.kind}_q{self.query}_t{self.tiles}"

    @property
    def grid(self) -> str:
        return "(max_blocks / run, requests)"


def builds(config) -> list[Build]:
    """For every number of pairs; see aot.ServingConfig."""
    tiles = range(1, MAX_TILES + 1) if host.scores_served(config) else ()
    return [Build(config.index_dtype.value, config.dtype, count) for count in tiles]


def needs(index_q, index_cache, block_table, seq_lens, rows_per_request, out=None) -> list[Build]:
    """The build for these arguments of index_score_decode; reads no values."""
    pairs = rows_per_request * index_q.shape[1]
    if pairs > MAX_PAIRS:
        raise NotImplementedError(
            expect("rows_per_request * heads on flydsl", f"<= {MAX_PAIRS}", pairs)
        )
    kind, query = host.score_dtypes(index_q, index_cache)
    return [Build(kind, query, max(1, -(-pairs // host.TILE)))]


def run(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    out: torch.Tensor | None = None,
    *,
    builds: list[Build] | None = None,
) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`; see api.py."""
    (build,) = builds or needs(index_q, index_cache, block_table, seq_lens, rows_per_request)
    rows, heads, _ = index_q.shape
    requests, max_blocks = block_table.shape
    if out is None:
        out = index_q.new_empty(heads, rows, max_blocks, dtype=torch.float32)
    if out.numel() == 0:
        return out
    length = host.run_length(requests, max_blocks, GFX950.compute_units)
    factor, table = host.keys_of(index_cache)
    launcher.launch(
        build, (-(-max_blocks // length), requests),
        [index_q, *host.byte_strides(index_q)[:2], *host.score_cache(index_cache),
         table, block_table, *block_table.stride(),
         seq_lens, seq_lens.stride(0), rows_per_request, heads, max_blocks, length,
         factor, out, *out.stride()],
        index_q.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.index_score_decode import flydsl_kernel

    return flydsl_kernel.compile_build(build)
