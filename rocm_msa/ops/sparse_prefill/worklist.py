"""Which tokens want which page: the inverse of the block lists, made on the device.

An entry is one (token, KV head, slot) whose block is causal and has a page; its number is
(token * kv_heads + head) * topk + slot. Entries are brought together by (head, page) with a
counting sort, and cut into items of at most ITEM entries, each one program's work at a time. The
order of entries, and of items, depends on the race of the counters; nothing that is computed does.

    count_kernel     counts[key] += 1; an entry's rank is what it found there
    item_kernel      places of the keys' runs, and the items
    place_kernel     order[place of the key + rank] = entry * 128 + seen keys of the page - 1

Sizes follow from the shapes alone, nothing is read by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_ENTRIES = 2**24  # `order` holds 128 times an entry in 32 bits

_PLAIN = ["first_token", "rows", "topk", "num_pages", "entries", "keys", "ids_head", "most_items"]
_ANY = ["table", "lengths", "counts", "places", "ranks", "order"]


@triton.jit
def _page_of(
    entry, live, block_ids, ids_head, ids_row, ids_slot, table, table_row, table_column, lengths,
    rows, first_token, topk, num_pages, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """(key, seen keys of the page) of entries; 0 seen where there is nothing to do."""
    slot = entry % topk
    head = (entry // topk) % KV_HEADS
    token = (entry // (topk * KV_HEADS) + first_token).to(tl.int64)
    at = head.to(tl.int64) * ids_head + token * ids_row + slot.to(tl.int64) * ids_slot
    block = tl.load(block_ids + at, mask=live, other=-1)
    request = tl.load(lengths + token, mask=live, other=0).to(tl.int64)
    n = tl.load(lengths + rows + token, mask=live, other=0)
    live = live & (block >= 0) & (block < (n + 127) // 128)
    at = request * table_row + tl.where(live, block, 0).to(tl.int64) * table_column
    page = tl.load(table + at, mask=live, other=-1)
    live = live & (page >= 0) & (page < num_pages)
    return head * num_pages + page, tl.where(live, tl.minimum(n - block * 128, 128), 0)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_ANY)
def count_kernel(
    block_ids,  # int32 [kv_heads, rows, topk]
    ids_head,
    ids_row,
    ids_slot,
    table,  # int32 [requests, max_blocks]
    table_row,
    table_column,
    lengths,  # int32 [2, rows]: request, causal length
    rows,
    first_token,
    topk,
    num_pages,
    entries,
    counts,  # int32 [keys], zero
    ranks,  # int32 [entries] to write
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, seen = _page_of(
        entry, entry < entries, block_ids, ids_head, ids_row, ids_slot, table, table_row,
        table_column, lengths, rows, first_token, topk, num_pages, KV_HEADS,
    )  # fmt: skip
    rank = tl.atomic_add(counts + key, 1, mask=seen > 0, sem="relaxed")
    tl.store(ranks + entry, rank, mask=seen > 0)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_ANY)
def item_kernel(
    counts,  # int32 [keys]
    places,  # int32 [keys] to write: first place of the key's entries
    items,  # int32 [3, most items] to write: key, first place, entries
    most_items,
    totals,  # int32 [3], zero: entries, items, the next item to take
    keys,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + key, mask=key < keys, other=0)
    place = tl.cumsum(count, 0) - count
    place += tl.atomic_add(totals, tl.sum(count, 0), sem="relaxed")
    tl.store(places + key, place, mask=key < keys)
    parts = (count + ITEM - 1) // ITEM
    item = tl.cumsum(parts, 0) - parts
    item += tl.atomic_add(totals + 1, tl.sum(parts, 0), sem="relaxed")
    for part in range(0, tl.max(parts, 0)):
        mine = part < parts
        to = items + item + part
        tl.store(to, key, mask=mine)
        tl.store(to + most_items, place + part * ITEM, mask=mine)
        tl.store(to + 2 * most_items, tl.minimum(count - part * ITEM, ITEM), mask=mine)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_ANY)
def place_kernel(
    block_ids,
    ids_head,
    ids_row,
    ids_slot,
    table,
    table_row,
    table_column,
    lengths,
    rows,
    first_token,
    topk,
    num_pages,
    entries,
    places,  # int32 [keys]
    ranks,  # int32 [entries]
    order,  # int32 [entries] to write: entry * 128 + seen keys of its page - 1
    part_lse,  # fp32 [entries, GROUP]: -inf for entries with nothing to do
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, seen = _page_of(
        entry, entry < entries, block_ids, ids_head, ids_row, ids_slot, table, table_row,
        table_column, lengths, rows, first_token, topk, num_pages, KV_HEADS,
    )  # fmt: skip
    live = seen > 0
    place = tl.load(places + key, mask=live, other=0)
    place += tl.load(ranks + entry, mask=live, other=0)
    tl.store(order + place, entry * 128 + seen - 1, mask=live)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    for h in range(GROUP):
        to = part_lse + entry.to(tl.int64) * GROUP + h
        tl.store(to, nothing, mask=(entry < entries) & (seen == 0))


def build(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    tokens: range,
    num_pages: int,
    item: int,
    part_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Work list of some tokens of the batch.

    Args:
        block_ids: int32 `[kv_heads, rows, topk]`.
        lengths: int32 `[2, rows]`, request and causal length.
        tokens: which rows.
        item: entries an item at most.
        part_lse: fp32 `[entries, group]`, -inf is written where there is nothing to do.

    Returns:
        order int32 `[entries]`, items int32 `[3, most items]`, and totals int32 `[3]`: entries,
        items, and 0.
    """
    kv_heads, rows, topk = block_ids.shape
    entries, keys = len(tokens) * kv_heads * topk, kv_heads * num_pages
    most_items = entries // item + min(keys, entries)
    new = torch.zeros(keys + 3, dtype=torch.int32, device=block_ids.device)
    counts, totals = new[3:], new[:3]
    work = torch.empty(keys + 2 * entries, dtype=torch.int32, device=block_ids.device)
    places, ranks, order = work[:keys], work[keys : keys + entries], work[keys + entries :]
    items = torch.empty(3, most_items, dtype=torch.int32, device=block_ids.device)
    group = part_lse.shape[1]
    lists = (
        block_ids, *block_ids.stride(), block_table, *block_table.stride(), lengths, rows,
        tokens.start, topk, num_pages, entries,
    )  # fmt: skip
    grid = (triton.cdiv(entries, 256),)
    count_kernel[grid](*lists, counts, ranks, KV_HEADS=kv_heads, BLOCK=256)
    item_kernel[(triton.cdiv(keys, 256),)](
        counts, places, items, most_items, totals, keys, ITEM=item, BLOCK=256
    )
    place_kernel[grid](
        *lists, places, ranks, order, part_lse, KV_HEADS=kv_heads, GROUP=group, BLOCK=256
    )
    return order, items, totals
