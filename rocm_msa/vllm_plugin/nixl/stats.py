"""What a rank counts of its transfers, as a serialisable dict, and its summary.

Lists have one entry a read (successes) or are added up (counters); `merge` joins ranks and steps.
"""

from __future__ import annotations

from typing import Any

READ_LISTS = ("seconds", "nbytes", "descriptors", "blocks")
FAILURES = ("handshake", "read", "timeout", "stale", "check", "commit")
"""Why a request's KV was not taken: `stale` = released before the read was committed, `check` =
identity or checksum (debug mode), `commit` = the prefill engine did not answer."""

COUNTERS = ("retries", "expired", "released", *(f"failed_{name}" for name in FAILURES))


class TransferCounts:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self.data = empty()

    def read(self, seconds: float, nbytes: int, descriptors: int, blocks: int) -> None:
        values = (seconds, nbytes, descriptors, blocks)
        for name, value in zip(READ_LISTS, values, strict=True):
            self.data[name].append(value)

    def add(self, counter: str, count: int = 1) -> None:
        self.data[counter] += count

    def take(self) -> dict[str, Any]:
        data, self.data = self.data, empty()
        return data


def empty() -> dict[str, Any]:
    return {name: [] for name in READ_LISTS} | dict.fromkeys(COUNTERS, 0)


def is_empty(data: dict[str, Any]) -> bool:
    return not any(data.values())


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name in READ_LISTS:
        into[name].extend(other[name])
    for name in COUNTERS:
        into[name] += other[name]


def failures(data: dict[str, Any]) -> int:
    return sum(data[f"failed_{name}"] for name in FAILURES)


def summary(data: dict[str, Any]) -> dict[str, float]:
    """For vLLM's periodic log line."""
    reads, seconds = len(data["seconds"]), sum(data["seconds"])
    megabytes = sum(data["nbytes"]) / 2**20
    return {
        "KV reads": reads,
        "MiB read": round(megabytes, 3),
        "MiB/s": round(megabytes / seconds, 1) if seconds else 0.0,
        "descriptors a block": round(sum(data["descriptors"]) / max(1, sum(data["blocks"])), 3),
        "retries": data["retries"],
        "failed": failures(data),
        "expired": data["expired"],
    }
