"""Timing of GPU work: CUDA graph replay over rotating inputs, median and spread.

A case gives `calls`: functions that do the same work on different memory. All are captured in one
graph, so that a replay walks over more memory than the L2 cache holds twice, and each call finds
its inputs cold. The time of a call is a replay's time over the number of calls: gaps between the
launches of a graph are in it, the host is not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REPLAYS = 30


@dataclass(frozen=True)
class Time:
    """Microseconds a call."""

    median: float
    low: float
    high: float
    calls: int

    def __str__(self) -> str:
        return f"{self.median:8.1f} ({self.low:.1f}..{self.high:.1f})"


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def copies_for(bytes_a_call: int, most: int = 256) -> int:
    """Distinct inputs that a rotation needs: together more than twice the L2 cache."""
    return max(4, min(most, 1 + int(2.2 * l2_bytes()) // max(1, bytes_a_call)))


def graph_time(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Time:
    """Capture all `calls` in one graph and time its replays."""
    torch.cuda.synchronize()  # the inputs are made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    keep = []
    with torch.cuda.graph(graph):
        for call in calls:
            keep.append(call())
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return Time(statistics.median(times), min(times), max(times), len(calls))
