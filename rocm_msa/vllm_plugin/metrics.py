"""What the worker processes count, as Prometheus metrics on vLLM's own /metrics.

vLLM's server shows the metrics of its own process, or, where PROMETHEUS_MULTIPROC_DIR names a
folder, the sums over all processes; `rocm-msa serve` sets that variable. The ops count in plain
dictionaries. A thread adds what is new to the Prometheus counters every few seconds, so that a step
pays nothing. The metrics of KV transfers are in nixl/metrics.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_msa.ops import dispatch

if TYPE_CHECKING:
    from rocm_msa.vllm_plugin.verify import Serving

PERIOD_SECONDS = 2.0
_CACHE_LABELS = ("main_dtype", "index_dtype")


@dataclass(frozen=True)
class Count:
    """A counter `rocm_msa_NAME_total`, summed over the ranks.

    source: label values -> the number so far in this process.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    source: Callable[[], Mapping[tuple[str, ...], int]]


@dataclass(frozen=True)
class Level:
    """A gauge `rocm_msa_NAME`; the ranks have equal values."""

    name: str
    text: str


def _of(module: str, counter: str) -> Callable[[], Mapping[tuple[str, ...], int]]:
    """A counter of a module of the plugin that only some configurations import."""

    def source() -> Mapping[tuple[str, ...], int]:
        found = sys.modules.get(f"rocm_msa.vllm_plugin.{module}")
        return getattr(found, counter) if found else {}

    return source


def _triton_compiles() -> Mapping[tuple[str, ...], int]:
    names = list(sys.modules)  # copied: other threads import meanwhile
    if not any(n.startswith("rocm_msa.ops.") and n.endswith(".triton_impl") for n in names):
        return {}
    from rocm_msa.ops.triton_warmup import compiled

    return {(): compiled()}


def serving_begins() -> None:
    """The warm-up is over: what is compiled from now on is late."""
    global _compiled_in_warm_up
    _compiled_in_warm_up = _triton_compiles().get((), 0)


def _late_compiles() -> Mapping[tuple[str, ...], int]:
    if _compiled_in_warm_up is None:
        return {}
    return {(): _triton_compiles().get((), 0) - _compiled_in_warm_up}


COUNTS = (
    Count(
        "op_calls",
        "Calls of an op by the backend that ran it and the reason for that choice.",
        ("op", "backend", "reason"),
        lambda: dispatch.chosen,
    ),
    Count(
        "decode_cp_calls",
        "Layer calls with decode rows whose index scan the ranks shared, or did not, and why.",
        ("path", "reason"),
        _of("decode_cp", "taken"),
    ),
    Count(
        "decode_cp_faults",
        "Faults of the exchange between the ranks, by the place where it was found.",
        ("site",),
        _of("decode_cp", "faults"),
    ),
    Count(
        "mono_steps",
        "Model steps by path: the mono kernel or the ordinary layers, and why.",
        ("path", "reason"),
        _of("mono", "steps"),
    ),
    Count(
        "mono_faults",
        "Launches of the mono kernel that failed, by the place of the wait that ended in vain.",
        ("site",),
        _of("mono", "faults"),
    ),
    Count(
        "triton_compiles",
        "Triton kernels compiled; after start-up this must not grow.",
        (),
        _triton_compiles,
    ),
    Count(
        "compiles_while_serving",
        "Kernels compiled after the warm-up; must stay 0.",
        (),
        _late_compiles,
    ),
)
LEVELS = (
    Level("cache_block_bytes", "Bytes of one block of 128 tokens on one rank, all layers."),
    Level("cache_blocks", "Blocks of the KV cache of one rank."),
)

_added: list[Count] = []
_compiled_in_warm_up: int | None = None
_lock = threading.Lock()
_published: dict[tuple[str, tuple[str, ...]], int] = {}


@functools.cache
def _counter(count: Count) -> Any:
    from prometheus_client import Counter

    return Counter(f"rocm_msa_{count.name}", count.text, count.labels)


@functools.cache
def _gauge(level: Level) -> Any:
    from prometheus_client import Gauge

    name = f"rocm_msa_{level.name}"
    return Gauge(name, level.text, _CACHE_LABELS, multiprocess_mode="mostrecent")


def add(*counts: Count) -> None:
    """Publish these too, from now on: what only a debugging backend counts."""
    with _lock:
        _added.extend(count for count in counts if count not in _added)


def publish() -> None:
    """Add to the Prometheus counters what was counted since the last call."""
    with _lock:
        for count in (*COUNTS, *_added):
            for labels, total in dict(count.source()).items():
                new = total - _published.get((count.name, labels), 0)
                _published[count.name, labels] = total
                counter = _counter(count)  # one without labels is shown from now on, as 0
                if new > 0:
                    (counter.labels(*labels) if labels else counter).inc(new)


def show_cache(serving: Serving, num_blocks: int) -> None:
    """Set the gauges, once the caches exist."""
    labels = (serving.main_dtype.value, serving.index_dtype.value)
    for level, value in zip(LEVELS, (serving.block_bytes, num_blocks), strict=True):
        _gauge(level).labels(*labels).set(value)


@functools.cache
def start() -> threading.Event:
    """Publish in the background from now on; setting what comes back ends that."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(PERIOD_SECONDS):
            publish()

    threading.Thread(target=run, name="rocm-msa-metrics", daemon=True).start()
    return ended
