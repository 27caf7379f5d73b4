"""sparse_decode with the roundings of the gfx950 kernels, in PyTorch: equal up to summation order.

What the kernels round, and nothing else:

    K, V    NVFP4 through the table of formats/nvfp4_lut.py; FP8 and bf16 as stored
    Q       E4M3 pages: 2^k q = hi + lo, hi = e4m3(2^k q), lo = e4m3(2^k q - hi), k such that the
            largest magnitude of the head is in [128, 256). bf16 pages: bf16
    p       of a page, 2^(x - max x + 8): hi + lo as above; bf16 pages: bf16

A page's l is the sum of the rounded p. Products and sums are in fp64 here, so the difference to a
kernel is the kernel's own: fp32 accumulation, v_exp_f32, and p that round the other way because x
differs in its last bits (at most one step of lo, 2^-8 of p).
"""

from __future__ import annotations

import math

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import MainCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.formats import nvfp4_lut
from rocm_msa.ops.rows import Rows, decode_rows

P_SHIFT = 8
LOG2E = 1.4426950408889634


def run(
    q: torch.Tensor,
    cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    rows_per_request: int,
    sm_scale: float,
    fold: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32, lse fp32); arguments as api.py. Entries that name no page count as nothing.

    fold: exponent of the table, for NVFP4 pages.
    """
    rows = decode_rows(seq_lens, rows_per_request)
    return run_rows(q, cache, block_ids, block_table, rows, sm_scale, fold)


def run_rows(
    q: torch.Tensor,
    cache: MainCache,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    rows: Rows,
    sm_scale: float,
    fold: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run` for rows of any request."""
    group = q.shape[1] // cache.kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    scale = {side: 1.0 if cache.dtype is CacheDType.BF16 else cache.scales[side] for side in "kv"}
    if cache.dtype is CacheDType.NVFP4:
        scale = {side: value * 2.0**-fold for side, value in scale.items()}
    for row in range(q.shape[0]):
        n, request = int(rows.length[row]), int(rows.request[row])
        for head in range(cache.kv_heads):
            mine = slice(head * group, (head + 1) * group)
            query, factor = query_terms(q[row, mine].float(), cache.dtype)
            factor = factor * torch.tensor(sm_scale * LOG2E * scale["k"], dtype=torch.float32)
            parts = []
            for block in block_ids[head, row].tolist():
                if not 0 <= block < -(-n // BLOCK_TOKENS):
                    continue
                page = int(block_table[request, block])
                if 0 <= page < cache.num_blocks:
                    live = min(n - block * BLOCK_TOKENS, BLOCK_TOKENS)
                    k, v = (operand(cache, side, page, head, fold)[:live] for side in "kv")
                    parts.append(attend_page(query, factor, k, v, cache.dtype))
            if parts:
                m, total, o = merge(parts)
                out[row, mine] = o / total[:, None] * scale["v"]
                lse[row, mine] = (m + total.log2() - P_SHIFT) * math.log(2)
    return out.float(), lse.float()


def operand(cache: MainCache, side: str, page: int, head: int, fold: int) -> torch.Tensor:
    """fp64 [128, head_dim]: a side of a page as the matrix pipe sees it, without its scale."""
    data = cache.region(f"{side}_data")[page, head]
    if cache.dtype is CacheDType.NVFP4:
        scales = cache.region(f"{side}_scales")[page, head]
        return nvfp4_lut.dequantize_via_lut(data, scales, fold).double()
    kind = torch.float8_e4m3fn if cache.dtype is CacheDType.FP8 else torch.bfloat16
    return data.view(kind).double()


def two_terms(x: torch.Tensor) -> torch.Tensor:
    """hi + lo as fp64 of an fp32 tensor, |x| <= 448."""
    high = x.to(torch.float8_e4m3fn).float()
    return high.double() + (x - high).to(torch.float8_e4m3fn).double()


def query_terms(q: torch.Tensor, dtype: CacheDType) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp64 [heads, head_dim], fp32 [heads] factor of the products) of fp32 queries."""
    if dtype is CacheDType.BF16:
        return q.to(torch.bfloat16).double(), torch.ones(q.shape[0])
    exponent = (q.abs().amax(dim=1).view(torch.int32) >> 23).clamp(min=8)
    up = ((261 - exponent) << 23).view(torch.float32)
    down = ((exponent - 7) << 23).view(torch.float32)
    return two_terms(q * up[:, None]), down


def attend_page(
    query: torch.Tensor, factor: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: CacheDType
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m [heads], l [heads], o [heads, head_dim]) of a page's live keys, fp64."""
    x = (query @ k.T).float() * factor[:, None]
    m = x.amax(dim=1, keepdim=True)
    p = torch.exp2(x - (m - P_SHIFT))
    p = p.to(torch.bfloat16).double() if dtype is CacheDType.BF16 else two_terms(p)
    return m[:, 0].double(), p.sum(dim=1), p @ v


def merge(parts: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = torch.stack([part[0] for part in parts])
    top = m.amax(dim=0)
    weights = torch.exp2(m - top)
    total = (weights * torch.stack([part[1] for part in parts])).sum(dim=0)
    o = (weights[..., None] * torch.stack([part[2] for part in parts])).sum(dim=0)
    return top, total, o
