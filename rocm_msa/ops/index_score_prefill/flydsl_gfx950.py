"""index_score_prefill on gfx950: one launch; traced code in flydsl_kernel.py.

A workgroup scores a run of blocks for a group of one request's tokens: 64 (token, head) pairs, so
that keys are dequantised once for 64 columns. The groups of request r begin at number
cu_seqlens_q[r] // group + r, which leaves room for each request's last, partly filled group without
a count of tokens on the host; the last groups are the padding behind cu_seqlens_q[-1].

Rounding as in index_score_decode. Refused: a head_dim other than 128, fp32 queries, fp16 queries on
a bf16 cache, more than 64 heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import expect
from rocm_msa.ops import flydsl_host as host

TILES = 4  # of 16 columns
PAIRS = TILES * host.TILE


@dataclass(frozen=True)
class Build:
    """kind: of the cache, nvfp4, fp8 or bf16. query: bf16 or fp16."""

    kind: str
    query: str

    def __post_init__(self) -> None:
        host.check_score_dtypes(self.kind, self.query)

    @property
    def symbol(self) -> str:
        return f"index_score_prefill_{self.kind}_q{self.query}"

    @property
    def grid(self) -> str:
        return "(max_blocks / run, groups of tokens)"


def builds(config) -> list[Build]:
    """See aot.ServingConfig."""
    served = host.scores_served(config)
    return [Build(config.index_dtype.value, config.dtype)] if served else []


def needs(index_q, index_cache, block_table, cu_seqlens_q, seq_lens, out=None) -> list[Build]:
    """The build for these arguments of index_score_prefill; reads no values."""
    if index_q.shape[1] > PAIRS:
        raise NotImplementedError(expect("heads on flydsl", f"<= {PAIRS}", index_q.shape[1]))
    return [Build(*host.score_dtypes(index_q, index_cache))]


def run(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    builds: list[Build] | None = None,
) -> torch.Tensor:
    """fp32 `[heads, tokens, max_blocks]`; see api.py."""
    (build,) = builds or needs(index_q, index_cache, block_table, cu_seqlens_q, seq_lens)
    tokens, heads, _ = index_q.shape
    requests, max_blocks = block_table.shape
    if out is None:
        out = index_q.new_empty(heads, tokens, max_blocks, dtype=torch.float32)
    if out.numel() == 0:
        return out
    group = PAIRS // heads
    groups = tokens // group + requests + 1
    length = host.run_length(groups, max_blocks, GFX950.compute_units)
    factor, table = host.keys_of(index_cache)
    launcher.launch(
        build, (-(-max_blocks // length), groups),
        [index_q, *host.byte_strides(index_q)[:2], *host.score_cache(index_cache),
         table, block_table, *block_table.stride(),
         cu_seqlens_q, cu_seqlens_q.stride(0), seq_lens, seq_lens.stride(0),
         requests, tokens, group, heads, max_blocks, length,
         factor, out, *out.stride()],
        index_q.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.index_score_prefill import flydsl_kernel

    return flydsl_kernel.compile_build(build)
