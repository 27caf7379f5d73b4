"""Paged batches for the op tests: shuffled pages, outer-block rows, poison wherever nobody wrote.

Everything that no token owns is poison: free pages, tails of newest blocks, the bytes of a row
beside the page, and table entries beyond a request's blocks are -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa.cache import CacheDType, IndexCache, MainCache, index_page, main_page

BLOCK = 128
DTYPES = ("nvfp4", "fp8", "bf16")
POISON = {"nvfp4": 0xFF, "fp8": 0x7F, "bf16": 0xFF}
SPARE_PAGES = 3


@dataclass
class Batch:
    """Requests with their pages. `keys`, `values`, `index_keys`: what the caches give back."""

    lens: list[int]
    main: MainCache
    index: IndexCache
    table: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    index_keys: list[torch.Tensor]

    @property
    def seq_lens(self) -> torch.Tensor:
        return int32(self.lens)

    def slots(self, request: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return slots_of(self.table[request], self.lens[request])[start:stop]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slots_of(row: torch.Tensor, length: int) -> torch.Tensor:
    position = torch.arange(length)
    return row.to(torch.int64)[position // BLOCK] * BLOCK + position % BLOCK


def random_values(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def queries(seed: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return random_values(seed, *shape).to(dtype)


def empty_cache(kind, pages: int, dtype: str, heads: int, dim: int, gap: int | None = None):
    """A poisoned cache; with `gap`, inside rows that hold `gap` more bytes before and after."""
    d = CacheDType.parse(dtype)
    page = main_page(heads, dim, d) if kind is MainCache else index_page(dim, d)
    side = gap or 0
    rows = torch.full((pages, page.page_bytes + 2 * side), POISON[dtype], dtype=torch.uint8)
    tensor = rows[:, side : side + page.page_bytes]
    if kind is MainCache:
        return MainCache.from_tensor(tensor, heads, dtype, head_dim=dim)
    return IndexCache.from_tensor(tensor, dtype, head_dim=dim)


def make_batch(
    lens: list[int],
    *,
    dtype: str = "nvfp4",
    index_dtype: str | None = None,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    extra_blocks: int = 1,
    gap: int | None = None,
    shuffle: int = 0,
    content: list[int] | None = None,
) -> Batch:
    """Build a batch.

    Args:
        content: seed of each request's values, so that the same request can appear in other
            batches; by default seed + its place.
        shuffle: another page order.
        extra_blocks: width of the table beyond the longest request, blocks.
    """
    need = [-(-n // BLOCK) for n in lens]
    pages = sum(need) + SPARE_PAGES
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed + 7 + shuffle))
    main = empty_cache(MainCache, pages, dtype, kv_heads, head_dim, gap)
    index = empty_cache(IndexCache, pages, index_dtype or dtype, 1, head_dim, gap)
    table = torch.full((len(lens), max(need, default=0) + extra_blocks), -1, dtype=torch.int32)
    keys, values, index_keys, used = [], [], [], 0
    for request, (length, count) in enumerate(zip(lens, need, strict=True)):
        table[request, :count] = order[used : used + count].int()
        used += count
        s = 1000 * (content[request] if content else seed + request)
        k = random_values(s + 1, length, kv_heads, head_dim)
        v = random_values(s + 2, length, kv_heads, head_dim)
        ik = random_values(s + 3, length, head_dim)
        slots = slots_of(table[request], length)
        main.write(k, v, slots)
        index.write(ik, slots)
        keys.append(through(main, "k", k))
        values.append(through(main, "v", v))
        index_keys.append(through(index, "k", ik))
    return Batch(list(lens), main, index, table, keys, values, index_keys)


def through(cache, side: str, x: torch.Tensor) -> torch.Tensor:
    """What the cache gives back for x, fp64."""
    if x.shape[0] == 0:
        return x.double()
    return cache.decode(side, *cache.encode(side, x)).double()


def guarded(shape: list[int], dtype: torch.dtype, guard: int = 64):
    """(buffer, view in its middle): the view is for `out=`, the rest must stay as it is."""
    count = 1
    for size in shape:
        count *= size
    fill = 77 if dtype == torch.int32 else 77.5
    buffer = torch.full((count + 2 * guard,), fill, dtype=dtype)
    return buffer, buffer[guard : guard + count].view(shape)


def guards_intact(buffer: torch.Tensor, guard: int = 64) -> bool:
    fill = 77 if buffer.dtype == torch.int32 else 77.5
    return bool((buffer[:guard] == fill).all() and (buffer[-guard:] == fill).all())
