"""Scores and selection of decode rows on gfx950 in one launch; traced code in flydsl_kernel.py.

Bits as of index_score_decode, then block_topk: the same scores, the same order. The workgroups of a
request meet at a counter that the last one sets back to zero, so that a captured graph may be
replayed. Refused: what index_score_decode refuses, more than 4 (row, head)
pairs a request, a topk above 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.errors import check_int, expect
from rocm_msa.ops import flydsl_host as host

# The last workgroup of a request has a wave a pair. More in turns take longer than a launch of
# block_topk, whose pairs have a workgroup each.
MAX_PAIRS = host.SCORE_WAVES
CANDIDATE_BYTES = 8  # key and id


@dataclass(frozen=True)
class Build:
    """kind: of the cache, nvfp4, fp8 or bf16. query: bf16 or fp16. kept: the largest topk."""

    kind: str
    query: str
    kept: int

    def __post_init__(self) -> None:
        host.check_score_dtypes(self.kind, self.query)
        check_int("kept", self.kept, 1)
        if self.kept > GFX950.wave_size:
            raise ValueError(expect("kept", f"<= {GFX950.wave_size}", self.kept))

    @property
    def symbol(self) -> str:
        return f"index_select_decode_{self.kind}_q{self.query}_k{self.kept}"

    @property
    def grid(self) -> str:
        return "(max_blocks / run, requests)"


def builds(config) -> list[Build]:
    """See aot.ServingConfig."""
    if not host.scores_served(config) or config.index_heads > MAX_PAIRS:
        return []
    return [Build(config.index_dtype.value, config.dtype, config.topk)]


def needs(
    index_q, index_cache, block_table, seq_lens, rows_per_request, topk, *_, **__
) -> list[Build]:
    """The build for these arguments; reads no values."""
    for name, value, limit in (
        ("rows_per_request * heads", rows_per_request * index_q.shape[1], MAX_PAIRS),
        ("topk", topk, GFX950.wave_size),
    ):
        if value > limit:
            raise NotImplementedError(expect(f"{name} on flydsl", f"<= {limit}", value))
    return [Build(*host.score_dtypes(index_q, index_cache), topk)]


def run(
    index_q: torch.Tensor,
    index_cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    counters: torch.Tensor,
    builds: list[Build] | None = None,
) -> torch.Tensor:
    """int32 `[heads, rows, topk]`; see ops/select_decode.py."""
    (build,) = builds or needs(index_q, index_cache, block_table, seq_lens, rows_per_request, topk)
    rows, heads, _ = index_q.shape
    requests, max_blocks = block_table.shape
    out = torch.empty(heads, rows, topk, dtype=torch.int32, device=index_q.device)
    if rows == 0 or heads == 0:
        return out
    if max_blocks == 0:
        return out.fill_(-1)
    length = host.run_length(requests, max_blocks, GFX950.compute_units)
    runs = -(-max_blocks // length)
    lists = torch.empty(
        requests * rows_per_request * heads * runs * topk * CANDIDATE_BYTES,
        dtype=torch.uint8,
        device=index_q.device,
    )
    factor, table = host.keys_of(index_cache)
    launcher.launch(
        build, (runs, requests),
        [index_q, *host.byte_strides(index_q)[:2], *host.score_cache(index_cache),
         table, block_table, *block_table.stride(), seq_lens, seq_lens.stride(0),
         rows_per_request, heads, max_blocks, length, runs, factor,
         topk, init_blocks, local_blocks, lists, counters, out, rows],
        index_q.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.index_select_decode import flydsl_kernel

    return flydsl_kernel.compile_build(build)
