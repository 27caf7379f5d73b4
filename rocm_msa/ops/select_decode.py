"""Blocks of decode rows: scores, then selection, as one launch where compiled kernels have it.

The result is that of block_topk over index_score_decode, bit for bit, whatever runs. Those two ops
are its contract; the FlyDSL kernel that does both lies in index_select_decode/.
"""

from __future__ import annotations

import torch

from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_tensor, expect
from rocm_msa.ops.attention_checks import check_index_query
from rocm_msa.ops.block_topk.api import block_topk, check_kept
from rocm_msa.ops.dispatch import flydsl_run, fused
from rocm_msa.ops.index_score_decode.api import index_score_decode
from rocm_msa.ops.rows import check_decode_rows, check_paging

_FUSED = flydsl_run("index_select_decode")


def select_decode(
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    num_blocks: torch.Tensor,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    *,
    counters: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Ids of the selected blocks, int32 `[heads, rows, topk]`.

    Args:
        index_q .. rows_per_request: as for index_score_decode.
        num_blocks: int32 `[rows]`, the causal blocks of each row by `seq_lens`.
        topk, init_blocks, local_blocks: as for block_topk.
        counters: int32, one a request at least, zeros; zeros again when the launch has ended, so
            that calls of one stream share them. Without, there are always two launches.
    """
    arguments = (index_q, index_cache, block_table, seq_lens, rows_per_request, topk)
    if counters is not None:
        check_index_query(index_q, index_cache)
        requests = check_paging(block_table, seq_lens, index_q.device)
        check_decode_rows("index_q", index_q, requests, rows_per_request)
        check_tensor("num_blocks", num_blocks, [index_q.shape[0]], torch.int32)
        check_kept(topk, init_blocks, local_blocks)
        check_tensor("counters", counters, ["requests"], torch.int32, device=index_q.device)
        if counters.shape[0] < requests or counters.stride(0) != 1:
            got = f"{counters.shape[0]}, stride {counters.stride(0)}"
            raise ValueError(expect("counters", f">= {requests} contiguous words", got))
        run = fused("index_select_decode", backend, _FUSED, index_q.device, arguments)
        if run is not None:
            return run(*arguments, init_blocks, local_blocks, counters)
    scores = index_score_decode(
        index_q, index_cache, block_table, seq_lens, rows_per_request, backend=backend
    )
    return block_topk(scores, num_blocks, topk, init_blocks, local_blocks, backend=backend)
