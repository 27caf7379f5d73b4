"""Select the blocks that a row attends to, from its block scores.

For row t with nb = num_blocks[t] causal blocks: the `local_blocks` newest blocks (so always block
nb-1) and the first `init_blocks` are kept by construction, whatever their scores. The rest follow
by score, highest first; ties: the lower id; NaN ranks below every number, also below -inf; -0
equals +0. Output order: kept init blocks ascending, kept newest blocks ascending, then the rest in
rank order; min(topk, nb) distinct ids in [0, nb), then -1. nb = 0 gives all -1. A row's selection
depends on nothing but its own scores.
"""

from __future__ import annotations

import torch

from rocm_msa.errors import check_int, check_output, check_tensor, expect
from rocm_msa.ops.block_topk import reference
from rocm_msa.ops.dispatch import choose, flydsl_run, on_host, triton_run


def _reference(scores, num_blocks, topk, init_blocks, local_blocks, out=None):
    return reference.run(scores, num_blocks, topk, init_blocks, local_blocks)


_IMPLEMENTATIONS = {
    "reference": _reference,
    "triton": triton_run("block_topk"),
    "flydsl": flydsl_run("block_topk"),
}


def check_kept(topk: int, init_blocks: int, local_blocks: int) -> None:
    """Check the counts of blocks; see block_topk."""
    check_int("local_blocks", local_blocks, 1)  # the newest block is kept
    check_int("init_blocks", init_blocks, 0)
    check_int("topk", topk, 1)
    if topk < init_blocks + local_blocks:
        raise ValueError(expect("topk", f">= {init_blocks + local_blocks} kept blocks", topk))


def block_topk(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Ids of the selected blocks.

    Args:
        scores: `[heads, rows, max_blocks]` fp32, any strides; entries at and beyond nb are ignored.
        num_blocks: `[rows]` int32, 0..max_blocks.
        topk: blocks to keep, >= init_blocks + local_blocks.
        init_blocks: oldest blocks that are always kept, >= 0.
        local_blocks: newest blocks that are always kept, >= 1.
        out: `[heads, rows, topk]` int32 to write into.

    Returns:
        int32 `[heads, rows, topk]`.

    Raises:
        TypeError, ValueError: see errors.check_tensor; counts out of range (of num_blocks only on
            the CPU: on a GPU no value is read on the host; nb above max_blocks counts as that).
    """
    check_tensor("scores", scores, ["heads", "rows", "max_blocks"], torch.float32)
    heads, rows, max_blocks = scores.shape
    check_tensor("num_blocks", num_blocks, [rows], torch.int32, device=scores.device)
    check_kept(topk, init_blocks, local_blocks)
    if (
        rows
        and on_host(num_blocks)
        and (int(num_blocks.min()) < 0 or int(num_blocks.max()) > max_blocks)
    ):
        raise ValueError(
            expect(
                "num_blocks",
                f"0..{max_blocks}",
                f"{int(num_blocks.min())}..{int(num_blocks.max())}",
            )
        )
    if out is not None:
        check_output(out, [heads, rows, topk], torch.int32, scores.device)
    run = choose("block_topk", backend, _IMPLEMENTATIONS, scores.device)
    ids = run(scores, num_blocks, topk, init_blocks, local_blocks, out=out)
    return ids if out is None or ids is out else out.copy_(ids)
