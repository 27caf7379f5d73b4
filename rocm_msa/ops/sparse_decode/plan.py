"""Units of sparse_decode and which rows are put together: functions of the shapes alone.

The unit (aligned slots of a row's list that one program joins) and the tiles of rows do not change
a row's bits, see merge.py: they are chosen for speed, on one H200. On AMD one warp works on a page:
Triton gives the warps of a chain of two products their own rows, and where there are only 16 rows
each of them would decode all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

_FILL = 1024  # programs from which on the next larger unit is faster
_SHARE_ROWS = 192  # (row, KV head) pairs from which on tiles of rows are faster


@dataclass(frozen=True)
class Tuning:
    """How a launch is cut.

    unit: slots a program, a power of two; portable kernels: 1 or 2.
    share: whether rows that selected the same pages are put together, tile_rows at most.
    tile, warps, stages: tokens a step, warps and loads ahead of the portable kernels.
    """

    unit: int
    share: bool
    tile: int = 64
    warps: int = 4
    stages: int = 1
    tile_rows: int = 4

    def __post_init__(self) -> None:
        assert all(n > 0 and n & (n - 1) == 0 for n in (self.unit, self.tile, self.tile_rows))


def select(
    rows: int, kv_heads: int, topk: int, kind: str, shared_pages: bool, target: str
) -> Tuning:
    """kind: "hopper" (its NVFP4 kernels), or the cache dtype of the portable kernels.

    shared_pages: whether requests may have pages in common. target: see triton_host.target_of.
    """
    pairs = rows * kv_heads
    share = shared_pages and pairs >= _SHARE_ROWS and topk > 1
    most = {"hopper": 4, "bf16": 2}.get(kind, 1)
    unit = 1
    while 2 * unit <= min(most, topk // 2) and pairs * -(-topk // (2 * unit)) >= _FILL:
        unit *= 2
    if kind == "hopper":
        return Tuning(unit, share)
    # Tiles of two rows: for larger ones Triton takes an instruction with another order of sums.
    warps, stages = (4, 1 if kind == "nvfp4" else 2) if target == "cuda" else (1, 1)
    return Tuning(unit, share, warps=warps, stages=stages, tile_rows=2)
