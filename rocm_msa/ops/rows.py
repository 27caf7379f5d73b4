"""Query rows of a batch: which request each belongs to, and how many keys it may see.

Row t of a request with causal length n(t) sees keys 0..n(t)-1, its own included, and
nb(t) = ceil(n(t) / 128) causal blocks. Padding rows have n = 0. Lengths derive from `seq_lens`
only, never from positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, check_tensor, expect
from rocm_msa.ops.dispatch import on_host


@dataclass(frozen=True)
class Rows:
    """Per row: `request` int64 `[rows]` (0 for padding rows) and `length` int64 `[rows]`."""

    request: torch.Tensor
    length: torch.Tensor

    @property
    def num_blocks(self) -> torch.Tensor:
        """Causal blocks a row, int64 `[rows]`."""
        return (self.length + BLOCK_TOKENS - 1) // BLOCK_TOKENS


def decode_rows(seq_lens: torch.Tensor, rows_per_request: int) -> Rows:
    """Rows of a decode batch: row i of q has n = seq_len - q + i + 1; seq_len 0 is padding."""
    requests = seq_lens.shape[0]
    request = torch.arange(requests, device=seq_lens.device).repeat_interleave(rows_per_request)
    step = torch.arange(rows_per_request, device=seq_lens.device).repeat(requests)
    length = seq_lens.to(torch.int64)[request] - rows_per_request + step + 1
    return Rows(request, length.clamp(min=0))


def prefill_rows(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> Rows:
    """Rows of a varlen batch: the request's last `q_len` positions; tokens past the end pad."""
    cu = cu_seqlens_q.to(torch.int64)
    row = torch.arange(tokens, device=cu.device)
    request = torch.searchsorted(cu[1:].contiguous(), row, right=True)
    live = request < seq_lens.shape[0]
    request = torch.where(live, request, torch.zeros_like(request))
    if seq_lens.shape[0] == 0:
        return Rows(request, torch.zeros_like(request))
    length = seq_lens.to(torch.int64)[request] - cu[request + 1] + row + 1
    return Rows(request, torch.where(live, length, torch.zeros_like(length)).clamp(min=0))


def check_paging(block_table: torch.Tensor, seq_lens: torch.Tensor, device: torch.device) -> int:
    """Check `block_table` int32 `[requests, max_blocks]` and `seq_lens` int32; -> requests.

    The range of the lengths is checked on the CPU only: on a GPU that would wait for it.
    """
    check_tensor("block_table", block_table, ["requests", "max_blocks"], torch.int32, device=device)
    requests, max_blocks = block_table.shape
    check_tensor("seq_lens", seq_lens, [requests], torch.int32, device=device)
    if requests and on_host(seq_lens):
        low, high = int(seq_lens.min()), int(seq_lens.max())
        if low < 0 or high > max_blocks * BLOCK_TOKENS:
            raise ValueError(
                expect(
                    "seq_lens",
                    f"0..{max_blocks * BLOCK_TOKENS} (the table's reach)",
                    f"{low}..{high}",
                )
            )
    return requests


def check_cu_seqlens(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> None:
    """Check `cu_seqlens_q` int32 `[requests + 1]`: from 0, rising, within tokens and seq_lens.

    The values are checked on the CPU only: on a GPU that would wait for it.
    """
    requests = seq_lens.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q, [requests + 1], torch.int32, device=seq_lens.device)
    if not on_host(cu_seqlens_q):
        return
    lengths = cu_seqlens_q.diff()
    if int(cu_seqlens_q[0]) != 0 or (requests and int(lengths.min()) < 0):
        raise ValueError(expect("cu_seqlens_q", "rising from 0", cu_seqlens_q.tolist()[:16]))
    if int(cu_seqlens_q[-1]) > tokens:
        raise ValueError(expect("cu_seqlens_q[-1]", f"<= {tokens} tokens", int(cu_seqlens_q[-1])))
    if requests and bool((lengths > seq_lens).any()):
        raise ValueError(
            expect(
                "cu_seqlens_q.diff()",
                f"<= seq_lens {seq_lens.tolist()[:16]}",
                lengths.tolist()[:16],
            )
        )


def check_decode_rows(name: str, x: torch.Tensor, requests: int, rows_per_request: int) -> None:
    """Check that `x [rows, ...]` holds `rows_per_request` rows a request."""
    check_int("rows_per_request", rows_per_request, 1)
    if x.shape[0] != requests * rows_per_request:
        raise ValueError(
            expect(f"{name}.shape[0]", f"{requests} requests * {rows_per_request} rows", x.shape[0])
        )


def pages_of(
    rows: Rows, block_ids: torch.Tensor, block_table: torch.Tensor, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical pages and live keys of logical blocks.

    Args:
        rows: `[rows]`.
        block_ids: logical ids `[rows, slots]`; -1 or >= nb(t) means nothing.
        block_table: int32 `[requests, max_blocks]`.
        num_pages: pages in the cache.

    Returns:
        page int64 `[rows, slots]` (-1 for nothing) and keys int64 `[rows, slots]` (0..128).

    Raises:
        ValueError: a causal block whose table entry is not a page of the cache.
    """
    ids = block_ids.to(torch.int64)
    live = (ids >= 0) & (ids < rows.num_blocks[:, None])
    safe = torch.where(live, ids, torch.zeros_like(ids))
    if block_table.numel() == 0:
        return torch.full_like(ids, -1), torch.zeros_like(ids)
    page = block_table.to(torch.int64)[rows.request[:, None], safe]
    bad = live & ((page < 0) | (page >= num_pages))
    if bool(bad.any()):
        row, slot = bad.nonzero()[0].tolist()
        raise ValueError(
            expect(
                f"block_table[{int(rows.request[row])}, {int(ids[row, slot])}]",
                f"a page id in 0..{num_pages - 1}",
                int(page[row, slot]),
            )
        )
    keys = (rows.length[:, None] - safe * BLOCK_TOKENS).clamp(max=BLOCK_TOKENS)
    nothing = torch.full_like(page, -1)
    return torch.where(live, page, nothing), torch.where(live, keys, torch.zeros_like(keys))
