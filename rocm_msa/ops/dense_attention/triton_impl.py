"""dense_attention in Triton: tiles of query rows over runs of whole pages, then a merge.

A program owns one (tile of tokens of one request, KV head, unit of blocks): tokens * query heads
rows. It decodes a page once for the tile and keeps a running maximum:

    s = q k^T,  m' = max(m, max s),  l = l 2^(m - m') + sum 2^(s - m'),  o = o 2^(m - m') + p v

Units are merged in ascending order (triton_prefill_merge.py). Their size is a constant for requests
with more than FEW new tokens, and follows from the request's length for the others (plan.py), which
have launches of their own: the bits of a token depend on its own request alone, not on the batch,
its chunk, or the table. Tokens are taken in turns that bound the memory of partial results.

Table entries that name no page of the cache count as nothing (the reference raises).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_msa.ops.dense_attention.plan import FEW, Tuning, select, select_few
from rocm_msa.ops.triton_host import Geometry, aligned, hopper, scale, target_of
from rocm_msa.ops.triton_prefill import (
    LOG2E,
    factor,
    find_tile,
    operands,
    page_side,
    product,
)
from rocm_msa.ops.triton_prefill_merge import merge


@triton.jit(
    do_not_specialize=["rows", "first_place", "last_place", "requests", "num_pages", "units"],
    do_not_specialize_on_alignment=["table", "cu_seqlens", "seq_lens"],
)
def attend_kernel(
    q_ptr,  # [rows, q_heads, D]
    q_row,
    q_head,
    q_dim,
    rows,
    first_place,  # of this turn: a token, or with FEWER a request
    last_place,
    pages,  # uint8 [num_pages, page bytes]
    block_stride,  # bytes
    num_pages,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    cu_seqlens,  # int32 [requests + 1]
    seq_lens,  # int32 [requests]
    requests,
    qk_scale,  # |sm_scale| * log2(e) * k scale / factor of K
    v_scale,  # v scale / factor of V
    part,  # fp32 [places * kv_heads * units, GROUP, D] to write
    part_lse,  # fp32 [places * kv_heads * units, GROUP], -inf
    units,
    packed,  # with FEWER: whether places are tokens, not FEW a request
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_DATA: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_DATA: tl.constexpr,
    V_SCALES: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    K_TYPE: tl.constexpr,
    Q_PARTS: tl.constexpr,
    V_TYPE: tl.constexpr,
    P_PARTS: tl.constexpr,
    NEGATIVE: tl.constexpr,  # sign of sm_scale
    UNIT: tl.constexpr,  # blocks
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    FEWER: tl.constexpr,  # whether this launch is for requests with at most FEW new tokens
    STAGES: tl.constexpr,
):
    M: tl.constexpr = TOKENS * GROUP_PAD
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if FEWER:
        request = tile // (FEW // TOKENS) + first_place
        begin = tl.load(cu_seqlens + request)
        end = tl.load(cu_seqlens + request + 1)
        first = begin + tile % (FEW // TOKENS) * TOKENS
        place = (request - first_place) * FEW + first - begin
        place = tl.where(packed != 0, first, place)
    else:
        tile += first_place // TOKENS  # the first that can hold a token of this turn
        request, first, end = find_tile(tile, cu_seqlens, requests, rows, TOKENS)
        if request >= requests:
            return
        begin = tl.load(cu_seqlens + request)
        place = first - first_place
    if (first >= end) | ((end - begin <= FEW) != FEWER):
        return
    length = tl.load(seq_lens + request)
    t = tl.arange(0, M) // GROUP_PAD
    h = tl.arange(0, M) % GROUP_PAD
    live = (h < GROUP) & (first + t < end)
    if not FEWER:
        live = live & (first + t >= first_place) & (first + t < last_place)
    n = tl.where(live, length - end + first + t + 1, 0)
    longest = tl.max(n, 0)
    shortest = length - end + first + 1
    unit = UNIT + 0 * units
    if FEWER:
        blocks = (length + 127) // 128
        unit = tl.maximum(UNIT, (blocks + units - 1) // units)
    first_block = tl.program_id(2) * unit
    last_block = tl.minimum(first_block + unit, (longest + 127) // 128)
    if first_block >= last_block:
        return
    d = tl.arange(0, D)
    row = (first + t).to(tl.int64)
    q_at = q_ptr + row * q_row + (head * GROUP + h).to(tl.int64) * q_head
    q = tl.load(q_at[:, None] + d[None, :] * q_dim, mask=live[:, None], other=0.0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    wide = tl.full((), 0, tl.int64)
    entries = table + (wide + request) * table_row
    token = tl.arange(0, 128)
    every = token < 128
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        page = tl.load(entries + (wide + block) * table_column)
        good = (page >= 0) & (page < num_pages)
        base = pages + tl.where(good, page, 0).to(tl.int64) * block_stride + head * HEAD_BYTES
        k = page_side(base, token, every, K_DATA, K_SCALES, D, KIND, K_TYPE, FAST, False)
        s = product(q, tl.trans(k), Q_PARTS)
        if NEGATIVE:
            s = -s
        s = s * qk_scale
        if ((block + 1) * 128 > shortest) | (page < 0) | (page >= num_pages):
            key = block * 128 + token
            s = tl.where(good & (key[None, :] < n[:, None]), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base_of = tl.where(higher > float("-inf"), higher, 0.0)
        p = tl.exp2(s - base_of[:, None])
        again = tl.exp2(top - base_of)
        total = total * again + tl.sum(p, 1)
        v = page_side(base, token, every, V_DATA, V_SCALES, D, KIND, V_TYPE, FAST, True)
        o = product(p, v, P_PARTS, o * again[:, None])
        top = higher
    some = live & (total > 0)
    whole = tl.where(some, total, 1.0)
    o = o * (v_scale / whole)[:, None]
    at = ((place + t).to(tl.int64) * KV_HEADS + head) * units + tl.program_id(2)
    at = at * GROUP + h
    tl.store(part + at[:, None] * D + d[None, :], o, mask=some[:, None])
    tl.store(part_lse + at, top + tl.log2(whole), mask=some)


def run(
    q, main_cache, block_table, cu_seqlens_q, seq_lens, sm_scale, out=None,
    many: Tuning | None = None, few: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out in q's dtype, lse); see api.py."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tokens, q_heads, dim = q.shape
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    requests, max_blocks = block_table.shape
    nothing = requests == 0 or max_blocks == 0 or main_cache.num_blocks == 0
    if tokens <= FEW or nothing:
        out.zero_()
        lse.fill_(float("-inf"))
    if tokens == 0 or nothing:
        return out, lse
    launch = _Launch(q, main_cache, block_table, cu_seqlens_q, seq_lens, float(sm_scale), out, lse)
    wide = operands(q, launch.geometry.kind)[2] > 1
    case = (max_blocks, q_heads, dim, wide, target_of(q))
    few, many = few or select_few(*case), many or select(*case)
    if tokens > FEW:
        for start in range(0, tokens, many.turn):
            launch.many(many, start, min(tokens, start + many.turn))
    if tokens <= min(few.turn, requests * FEW):
        launch.few(few, 0, requests, tokens)
        return out, lse
    turn = few.turn // FEW
    for start in range(0, requests, turn):
        launch.few(few, start, min(requests, start + turn))
    return out, lse


class _Launch:
    """The launches over one batch."""

    def __init__(self, q, cache, block_table, cu_seqlens_q, seq_lens, sm_scale, out, lse):
        self.q, self.cache, self.out, self.lse = q, cache, out, lse
        self.table, self.cu_seqlens, self.seq_lens = block_table, cu_seqlens_q, seq_lens
        self.sm_scale = sm_scale
        self.group = q.shape[1] // cache.kv_heads
        self.pad = triton.next_power_of_2(self.group)
        self.geometry = Geometry.of(cache)
        self.fast = hopper(q) and aligned(cache)

    def many(self, t: Tuning, start: int, stop: int) -> None:
        """Requests with more than FEW new tokens, tokens start..stop - 1; writes every token."""
        count = max(1, t.rows // self.pad)
        tiles = (stop - 1) // count - start // count + self.table.shape[0] + 1
        part, part_lse = self._attend(t, tiles, stop - start, start, stop, count, False)
        merge(
            part, part_lse, t.units, stop - start, self.cu_seqlens, self.out, self.lse,
            self.cache.kv_heads, step=16, warps=1, first_token=start,
        )  # fmt: skip

    def few(self, t: Tuning, start: int, stop: int, packed: int = 0) -> None:
        """Requests start..stop - 1 with at most FEW new tokens; writes theirs alone.

        packed: tokens of the whole batch, to keep results by token instead of FEW a request.
        """
        count = min(FEW, max(1, t.rows // self.pad))
        tiles, places = (stop - start) * FEW // count, packed or (stop - start) * FEW
        part, part_lse = self._attend(t, tiles, places, start, stop, count, True, packed > 0)
        merge(
            part, part_lse, t.units, (stop - start) * FEW, self.cu_seqlens, self.out, self.lse,
            self.cache.kv_heads, step=16, warps=4, first_request=start, few=FEW, packed=packed > 0,
        )  # fmt: skip

    def _attend(self, t, tiles, places, start, stop, count, fewer, packed=False):
        g, kv_heads, q = self.geometry, self.cache.kv_heads, self.q
        size = places * kv_heads * t.units
        k_type, v_type, q_parts, p_parts = operands(q, g.kind)
        part = torch.empty(size, self.group, g.head_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.full((size, self.group), float("-inf"), device=q.device)
        qk_scale = max(abs(self.sm_scale), 1e-30) * LOG2E * scale(self.cache, "k")
        attend_kernel[(tiles, kv_heads, t.units)](
            q, *q.stride(), q.shape[0], start, stop, self.cache.pages, self.cache.block_stride,
            self.cache.num_blocks, self.table, *self.table.stride(), self.cu_seqlens,
            self.seq_lens, self.table.shape[0], qk_scale / factor(g.kind, k_type, self.fast),
            scale(self.cache, "v") / factor(g.kind, v_type, self.fast), part, part_lse, t.units,
            int(packed),
            KV_HEADS=kv_heads, GROUP=self.group, GROUP_PAD=self.pad, HEAD_BYTES=g.head_bytes,
            K_DATA=g.k_data, K_SCALES=g.k_scales, V_DATA=g.v_data, V_SCALES=g.v_scales,
            D=g.head_dim, KIND=g.kind, FAST=self.fast, K_TYPE=k_type,
            Q_PARTS=q_parts, V_TYPE=v_type, P_PARTS=p_parts,
            NEGATIVE=self.sm_scale < 0, UNIT=t.unit, TOKENS=count, FEW=FEW, FEWER=fewer,
            STAGES=t.stages, num_warps=t.warps,
        )  # fmt: skip
        return part, part_lse
