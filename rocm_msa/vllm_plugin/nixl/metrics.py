"""The counts in vLLM's metrics: the periodic log line and Prometheus."""

from __future__ import annotations

from typing import Any

from rocm_msa.vllm_plugin.nixl import stats
from rocm_msa.vllm_plugin.nixl.upstream import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

_PREFIX = "vllm:rocm_msa_kv"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_BYTES = tuple(2.0**k for k in range(12, 37, 2))
_DESCRIPTORS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 100000)


class RowStats(KVConnectorStats):
    """`TransferCounts` of all ranks and steps."""

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data=data or stats.empty())

    def reset(self) -> None:
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        stats.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        return stats.is_empty(self.data)


class RowPromMetrics(KVConnectorPromMetrics):
    """Histograms of reads, counters of everything else."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        labels = list(labelnames)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            metric = self._histogram_cls(
                name=f"{_PREFIX}_{name}", documentation=text, buckets=buckets, labelnames=labels
            )
            return create_metric_per_engine(metric, labelvalues)

        def counter(name: str, text: str) -> Any:
            metric = self._counter_cls(
                name=f"{_PREFIX}_{name}", documentation=text, labelnames=labels
            )
            return create_metric_per_engine(metric, labelvalues)

        self._histograms = {
            "seconds": histogram("read_seconds", "Time of a request's KV read.", _SECONDS),
            "nbytes": histogram("read_bytes", "Bytes of a request's KV read.", _BYTES),
            "descriptors": histogram(
                "read_descriptors", "NIXL descriptors of a request's KV read.", _DESCRIPTORS
            ),
            "blocks": histogram("read_blocks", "Blocks of a request's KV read.", _DESCRIPTORS),
        }
        self._counters = {
            "retries": counter("retries", "KV loads that were tried again."),
            "expired": counter("expired", "Prefilled requests whose KV nobody read in time."),
            "released": counter("released", "Prefilled requests whose KV was read and freed."),
        }
        for name in stats.FAILURES:
            self._counters[f"failed_{name}"] = counter(
                f"failed_{name}", f"KV loads that failed: {name}."
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metric in self._histograms.items():
            for value in transfer_stats_data[name]:
                metric[engine_idx].observe(value)
        for name, metric in self._counters.items():
            if transfer_stats_data[name]:
                metric[engine_idx].inc(transfer_stats_data[name])
