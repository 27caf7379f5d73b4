"""Work list of pages that several decode rows share: made on the device, nothing read on the host.

Tiles: up to R rows of one request, or of requests with the same first page (a shared
prefix) among each 64 neighbouring ones, in the order of the batch. A row's list is sorted: causal
blocks ascending, then the rest. A tile takes a unit (aligned slots of the sorted lists) when, slot
by slot, all its rows that have a block there have the same page, and on average two or more have
one. All other units, such as those with the newest block of each request, are left to the kernel
that takes rows one by one. Who works on a unit does not change its result, see triton_impl.py.

A program owns the tile that one row leads, and one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WINDOW = 64  # requests among which a prefix is looked for


@triton.jit
def _members(
    table, table_row, seq_lens, rows_per_request, requests, row,
    R: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(whether `row` leads a tile, bool [R] all the same; the tile's rows int32 [R] or -1)."""
    request = row // rows_per_request
    own = row % rows_per_request
    each = tl.minimum(rows_per_request, R)  # rows of a request in a tile
    r = request // WINDOW * WINDOW + tl.arange(0, WINDOW)
    live = tl.load(seq_lens + r, mask=r < requests, other=0) > 0
    first = tl.load(table + r.to(tl.int64) * table_row, mask=live, other=-1)
    first = tl.where(live, first, -2 - r)  # alone
    mine = tl.sum(tl.where(r == request, first, 0), 0)
    same = (first == mine).to(tl.int32)
    place = tl.cumsum(same, 0) - 1
    my_place = tl.sum(tl.where(r == request, place, 0), 0)
    j = tl.arange(0, R)
    requests_a_tile = tl.where(rows_per_request < R, R // each, 1)
    wanted = my_place + j // each
    match = (place[None, :] == wanted[:, None]) & (same > 0)[None, :]
    member = tl.sum(tl.where(match, r[None, :], 0), 1)
    exists = (tl.sum(match.to(tl.int32), 1) > 0) & (j // each < requests_a_tile)
    offset = own // R * R + j % each
    exists = exists & (offset < rows_per_request)
    leads = (own % R == 0) & (my_place % requests_a_tile == 0)
    leads = (tl.zeros((R,), tl.int32) + tl.where(leads, 1, 0)) > 0
    return leads, tl.where(exists, member * rows_per_request + offset, -1)


@triton.jit(do_not_specialize=["rows_per_request", "requests", "num_pages", "topk", "units"])
def plan_kernel(
    block_ids,  # int32 [kv_heads, rows, topk]
    ids_head,
    ids_row,
    ids_slot,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    seq_lens,  # int32 [requests]
    rows_per_request,
    requests,
    num_pages,
    topk,
    units,
    tile_rows,  # int32 [rows, R]
    slot_keys,  # int32 [rows * kv_heads, R, SLOTS]
    taken,  # int32 [rows * kv_heads * units]
    leading,  # int32 [rows * kv_heads * units]
    work,  # int32 [rows * kv_heads * units, UNIT]
    KV_HEADS: tl.constexpr,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # what follows waits for this grid before it reads the plan
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    leads, member = _members(
        table, table_row, seq_lens, rows_per_request, requests, row, R, WINDOW
    )  # fmt: skip
    j, s = tl.arange(0, R), tl.arange(0, SLOTS)
    is_row = (member >= 0) & leads
    request = tl.where(is_row, member // rows_per_request, 0)
    n = tl.load(seq_lens + request, mask=is_row, other=0)
    n = n - rows_per_request + member % rows_per_request + 1
    at = block_ids + head * ids_head + tl.where(is_row, member, 0).to(tl.int64) * ids_row
    there = is_row[:, None] & (s < topk)[None, :]
    ids = tl.load(at[:, None] + s[None, :] * ids_slot, mask=there, other=-1)
    causal = (ids >= 0) & (ids * 128 < n[:, None])
    entry = table + request.to(tl.int64)[:, None] * table_row
    entry += tl.where(causal, ids, 0).to(tl.int64) * table_column
    page = tl.load(entry, mask=causal, other=-1)
    key = tl.where(causal, ids, 0x7FFFFF00 + s[None, :])
    alive = causal & (page >= 0) & (page < num_pages)
    keys = tl.where(alive, tl.minimum(n[:, None] - ids * 128, 128), 0)
    rank = tl.sum((key[:, None, :] < key[:, :, None]).to(tl.int32), 2)
    here = rank[:, :, None] == s[None, None, :]
    page = tl.sum(tl.where(here & alive[:, :, None], page[:, :, None] + 1, 0), 1) - 1
    keys = tl.sum(tl.where(here, keys[:, :, None], 0), 1)
    leader_head = row.to(tl.int64) * KV_HEADS + head
    lists = leader_head * (R * SLOTS) + j[:, None] * SLOTS + s[None, :]
    whole = (s >= 0)[None, :] & leads[:, None]
    tl.store(slot_keys + lists, keys, mask=whole)
    tl.store(tile_rows + row * R + j, member, mask=leads)

    top = tl.max(page, 0)[None, :]  # [1, slot]
    differ = tl.sum(((page >= 0) & (page != top)).to(tl.int32), 0)[None, :]
    blocks = tl.sum((page >= 0).to(tl.int32), 0)[None, :]
    u = tl.arange(0, SLOTS // UNIT)
    mine = (s // UNIT)[None, :] == u[:, None]  # [unit, slot]
    blocks, differ = tl.where(mine, blocks, 0), tl.where(mine, differ, 0)
    take = (tl.sum(differ, 1) == 0) & (
        tl.sum(blocks, 1) >= 2 * tl.sum((blocks > 0).to(tl.int32), 1)
    )
    take = (take & (tl.sum(blocks, 1) > 0)).to(tl.int32)
    tl.store(work + leader_head * (units * UNIT) + s, tl.maximum(tl.max(page, 0), 0),
             mask=(s < units * UNIT) & tl.max(leads.to(tl.int32), 0) > 0)  # fmt: skip
    flag = (member.to(tl.int64) * KV_HEADS + head)[:, None] * units + u[None, :]
    inside = is_row[:, None] & (u < units)[None, :]
    zero = tl.zeros((R, SLOTS // UNIT), tl.int32)
    tl.store(taken + flag, zero + take[None, :], mask=inside)
    tl.store(
        leading + flag, tl.where((member == row)[:, None], zero + take[None, :], 0), mask=inside
    )


@dataclass(frozen=True)
class Sharing:
    """The plan on the device; shapes beside the kernel's arguments."""

    tile_rows: torch.Tensor
    slot_keys: torch.Tensor
    taken: torch.Tensor
    leading: torch.Tensor
    work: torch.Tensor
    slots: int


def plan(
    block_ids,
    block_table,
    seq_lens,
    rows_per_request: int,
    num_pages: int,
    unit: int,
    tile_rows: int,
    pdl: bool,
) -> Sharing:
    """Launch. unit: slots a program; tile_rows: R, both powers of two; pdl: see the kernel."""
    kv_heads, rows, topk = block_ids.shape
    slots = max(unit, triton.next_power_of_2(topk))
    units = triton.cdiv(topk, unit)

    def table(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=block_ids.device)

    lists = (rows * kv_heads, tile_rows, slots)
    made = Sharing(
        table(rows, tile_rows), table(*lists), table(rows * kv_heads * units),
        table(rows * kv_heads * units), table(rows * kv_heads * units, unit), slots,
    )  # fmt: skip
    plan_kernel[(rows, kv_heads)](
        block_ids, *block_ids.stride(), block_table, *block_table.stride(), seq_lens,
        rows_per_request, len(seq_lens), num_pages, topk, units, made.tile_rows, made.slot_keys,
        made.taken, made.leading, made.work,
        KV_HEADS=kv_heads, R=tile_rows, SLOTS=slots, UNIT=unit, WINDOW=_WINDOW, PDL=pdl,
        num_warps=1,
    )  # fmt: skip
    return made
