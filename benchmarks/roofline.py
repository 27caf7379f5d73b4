"""Floors: the bytes an op must move over the bandwidth measured on this card, in this process."""

from __future__ import annotations

from functools import lru_cache

import torch

from benchmarks.timing import graph_time


@lru_cache(maxsize=1)
def read_bandwidth() -> float:
    """Bytes a second of a large read (a sum over 2 GiB), graph replay."""
    x = torch.empty(2**29, dtype=torch.float32, device="cuda").normal_()
    best = min(graph_time([lambda: x.sum()], 10).median, graph_time([lambda: x.max()], 10).median)
    return x.numel() * 4 / (best * 1e-6)


@lru_cache(maxsize=1)
def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy (2 GiB), graph replay."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / (graph_time([lambda: y.copy_(x)], 10).median * 1e-6)


def copy_us(nbytes: int) -> float:
    """Microseconds for `nbytes` read and written together at the rate of a large copy."""
    return nbytes / copy_bandwidth() * 1e6


def floor_us(read: int, written: int = 0) -> float:
    """Microseconds for `read` bytes and `written` bytes at the read bandwidth."""
    return (read + written) / read_bandwidth() * 1e6
