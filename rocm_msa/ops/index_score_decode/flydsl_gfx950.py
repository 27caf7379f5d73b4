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
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_int, expect
from rocm_msa.formats.nvfp4_lut import RECOMMENDED_FOLD_EXPONENT
from rocm_msa.ops.flydsl_host import key_factor, lut_table, query_dtype

HEAD_DIM = 128
TILE = 16  # columns of a matrix tile
WAVES = 4
MAX_TILES = 4
_WORKGROUPS_A_CU = 8
_LONGEST_RUN = 64  # blocks


@dataclass(frozen=True)
class Build:
    """kind: of the cache, nvfp4, fp8 or bf16. query: bf16 or fp16. tiles: of 16 columns."""

    kind: str
    query: str
    tiles: int

    def __post_init__(self) -> None:
        CacheDType.parse(self.kind)
        if self.query not in ("bf16", "fp16"):
            raise ValueError(expect("query", "bf16 or fp16", self.query))
        if self.kind == "bf16" and self.query != "bf16":
            raise ValueError(expect("query", "bf16 on a bf16 cache", self.query))
        check_int("tiles", self.tiles, 1)
        if self.tiles > MAX_TILES:
            raise ValueError(expect("tiles", f"<= {MAX_TILES}", self.tiles))

    @property
    def symbol(self) -> str:
        return f"index_score_decode_{self.kind}_q{self.query}_t{self.tiles}"

    @property
    def grid(self) -> str:
        return "(max_blocks / run, requests)"


def run_length(requests: int, max_blocks: int) -> int:
    """Blocks a workgroup: all waves busy, workgroups enough to even out ragged requests."""
    wanted = _WORKGROUPS_A_CU * GFX950.compute_units
    length = -(-requests * max_blocks // wanted)
    return max(WAVES, min(_LONGEST_RUN, -(-length // WAVES) * WAVES))


def builds(config) -> list[Build]:
    """For 1 row a request and for as many as 64 pairs allow; see aot.ServingConfig."""
    kind, query = config.index_dtype.value, config.dtype
    if config.head_dim != HEAD_DIM or query == "fp32" or (kind == "bf16" and query != "bf16"):
        return []
    return [Build(kind, query, tiles) for tiles in range(1, MAX_TILES + 1)]


def needs(index_q, index_cache, block_table, seq_lens, rows_per_request, out=None) -> list[Build]:
    """The build for these arguments of index_score_decode; reads no values."""
    if index_cache.head_dim != HEAD_DIM:
        raise NotImplementedError(expect("head_dim on flydsl", HEAD_DIM, index_cache.head_dim))
    if index_q.stride(-1) != 1 or index_cache.block_stride % TILE:
        raise NotImplementedError("flydsl: expected 16-byte aligned pages and dense query vectors")
    pairs = rows_per_request * index_q.shape[1]
    if pairs > MAX_TILES * TILE:
        raise NotImplementedError(
            expect("rows_per_request * heads on flydsl", f"<= {MAX_TILES * TILE}", pairs)
        )
    kind = index_cache.dtype.value
    return [Build(kind, query_dtype(index_q, kind), max(1, -(-pairs // TILE)))]


def run(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 `[heads, rows, max_blocks]`; see api.py."""
    (build,) = needs(index_q, index_cache, block_table, seq_lens, rows_per_request)
    rows, heads, _ = index_q.shape
    requests, max_blocks = block_table.shape
    if out is None:
        out = index_q.new_empty(heads, rows, max_blocks, dtype=torch.float32)
    if out.numel() == 0:
        return out
    length = run_length(requests, max_blocks)
    launcher.launch(
        build, (-(-max_blocks // length), requests),
        [index_q, index_q.stride(0) * index_q.element_size(),
         index_q.stride(1) * index_q.element_size(),
         index_cache.pages, index_cache.block_stride, index_cache.num_blocks,
         lut_table(index_q.device),
         block_table, *block_table.stride(), seq_lens, seq_lens.stride(0),
         rows_per_request, heads, max_blocks, length,
         key_factor(index_cache, "k", RECOMMENDED_FOLD_EXPONENT), out, *out.stride()],
        index_q.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.index_score_decode.flydsl_kernel import compile_kernel

    return compile_kernel(build)
