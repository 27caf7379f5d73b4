"""The rows that a rank registers: where vLLM put the pages, checked against the declared row."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import DRAFT, INDEX, MAIN, OuterBlockRow
from rocm_msa.cache.pages import Page, main_page
from rocm_msa.errors import ConfigError, Refusals, expect

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_INDEX_SUFFIX = ".index_cache"


@dataclass(frozen=True)
class RowMemory:
    """Rows of a rank. `base` is block 0's address, `stride` bytes from a block to the next."""

    base: int
    stride: int
    blocks: int
    device: int

    @property
    def nbytes(self) -> int:
        return self.stride * self.blocks

    def as_map(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Rows:
    """Registered memory of this rank with the tensor that owns it."""

    memory: RowMemory
    row: OuterBlockRow
    bytes: torch.Tensor

    @property
    def device_type(self) -> str:
        return self.bytes.device.type


def locate(kv_caches: dict[str, torch.Tensor], num_blocks: int, row: OuterBlockRow) -> Rows:
    """Find the rows behind vLLM's cache views.

    Args:
        kv_caches: layer name -> view `[num_blocks, ...]` of one allocation.
        row: the declared row.

    Raises:
        ConfigError: views of several allocations, or a page that is not where the row says.
    """
    refusals = Refusals("RocmMsaNixlConnector cannot register these caches as outer-block rows")
    places = _places(kv_caches, row)
    views = {name: (places[name], view) for name, view in kv_caches.items()}
    if not refusals.check(bool(views), "no caches were given"):
        refusals.raise_if_any()
    storages = {view.untyped_storage().data_ptr() for _, view in views.values()}
    refusals.check(
        len(storages) == 1,
        expect("KV cache allocations", "one for all layers (layout BLHNC)", len(storages)),
    )
    strides = {view.stride(0) * view.element_size() for _, view in views.values()}
    refusals.check(
        len(strides) == 1 and min(strides) >= row.nbytes,
        expect("block stride", f"one of >= {row.nbytes} bytes (layout BLHNC)", sorted(strides)),
    )
    refusals.raise_if_any()
    base = min(view.data_ptr() for _, view in views.values())
    offsets = {place: view.data_ptr() - base for place, view in views.values()}
    declared = {(p.kind, p.layer): p for p in row.pages}
    for place in sorted(offsets.keys() | declared.keys()):
        got = offsets.get(place, "no cache")
        want = declared[place].offset if place in declared else "no page"
        if not refusals.check(
            got == want,
            expect(f"offset of the {place[0]} page of layer {place[1]}", want, got),
        ):
            break
    refusals.raise_if_any()
    view = next(iter(views.values()))[1]
    memory = RowMemory(base, strides.pop(), num_blocks, view.device.index or 0)
    return Rows(memory, row, _byte_rows(view, memory))


def draft_pages(
    kv_caches: dict[str, torch.Tensor], specs: dict[str, Any], row: OuterBlockRow
) -> tuple[Page, ...]:
    """Pages of caches that are not of the main model, in the order of their addresses."""
    places, pages = _places(kv_caches, row), []
    names = [name for name, (kind, _) in places.items() if kind == DRAFT]
    for name in sorted(names, key=places.__getitem__):
        spec = specs[name]
        candidates = [main_page(spec.num_kv_heads, spec.head_size, dtype) for dtype in CacheDType]
        fitting = [p for p in candidates if p.page_bytes == spec.page_size_bytes]
        if not fitting:
            raise ConfigError(
                "RocmMsaNixlConnector cannot describe a draft model's cache",
                [expect(name, "a page of this package", f"{spec.page_size_bytes} bytes a block")],
            )
        pages.append(fitting[0])
    return tuple(pages)


def _places(kv_caches: dict[str, torch.Tensor], row: OuterBlockRow) -> dict[str, tuple[str, int]]:
    """vLLM's name of a cache -> (kind, layer). Draft layers count by their addresses."""
    layers = sum(p.kind == MAIN for p in row.pages)
    places, draft = {}, []
    for name in kv_caches:
        found = _LAYER.search(name)
        layer = int(found[1]) if found else layers
        if name.startswith("draft_model.") or layer >= layers:
            draft.append(name)
        else:
            places[name] = (INDEX if name.endswith(_INDEX_SUFFIX) else MAIN, layer)
    draft.sort(key=lambda name: kv_caches[name].data_ptr())
    return places | {name: (DRAFT, i) for i, name in enumerate(draft)}


def _byte_rows(view: torch.Tensor, memory: RowMemory) -> torch.Tensor:
    """uint8 `[blocks, stride]` over the allocation; row b is block b."""
    flat = torch.empty(0, dtype=torch.uint8, device=view.device)
    storage = view.untyped_storage()
    offset = memory.base - storage.data_ptr()
    flat.set_(storage, offset, (memory.blocks, memory.stride), (memory.stride, 1))
    return flat
