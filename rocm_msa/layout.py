"""Byte layouts: named regions of a buffer, declared once and used by kernels, host code and tests.

A layout is an ordered table name -> (offset, bytes). Pure Python: no torch, no flydsl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Region:
    """A contiguous run of bytes. `offset` and `nbytes` are in bytes from the layout's start."""

    name: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """An ordered table of regions that do not overlap, and the total size in bytes."""

    regions: tuple[Region, ...]
    nbytes: int
    _by_name: dict[str, Region] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {r.name: r for r in self.regions})
        if len(self._by_name) != len(self.regions):
            raise ValueError(f"duplicate region names in {[r.name for r in self.regions]}")
        end = 0
        for region in self.regions:
            if region.offset < end or region.nbytes < 0:
                raise ValueError(f"region {region} overlaps the one before it")
            end = region.end
        if self.nbytes < end:
            raise ValueError(f"layout of {self.nbytes} bytes ends before its last region ({end})")

    def __getitem__(self, name: str) -> Region:
        if name not in self._by_name:
            raise KeyError(f"no region {name!r}; have {list(self._by_name)}")
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)


def pack(sizes: list[tuple[str, int]], *, align: int = 1, total_align: int = 1) -> Layout:
    """Lay regions out in order, each aligned to `align` bytes, the total to `total_align`."""
    regions, offset = [], 0
    for name, nbytes in sizes:
        offset = round_up(offset, align)
        regions.append(Region(name, offset, nbytes))
        offset += nbytes
    return Layout(tuple(regions), round_up(offset, total_align))
