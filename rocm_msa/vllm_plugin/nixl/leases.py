"""Blocks that a prefill engine keeps for decode engines, and until when.

A finished request's blocks stay until every rank of one decode engine has committed its read, or
until the lease ends. The table is the only authority: a decode rank uses what it read only after
its commit was answered "held", which says that the blocks had not been released up to then. It is
used by the scheduler and by the side channel's thread; every method takes the lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_ENDS_KEPT = 1000


@dataclass
class Lease:
    deadline: float
    committed: dict[str, set[int]] = field(default_factory=dict)
    done: bool = False
    cancelled: bool = False

    @property
    def end(self) -> str:
        """How it ended, or will."""
        if self.cancelled:
            return "cancelled by its reader"
        if self.done:
            return f"read by engine {', '.join(self.committed)}"
        return "not renewed in time" if not self.committed else "not read by every rank in time"


@dataclass
class Released:
    """Requests whose blocks may be freed: read, or expired unread."""

    done: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        return self.done | self.expired


class LeaseTable:
    """request id -> lease. `seconds` is the length of a lease and of each renewal."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self._clock = seconds, clock
        self._leases: dict[str, Lease] = {}
        # (request, reader, rank, read) -> until when; a commit whose answer was lost comes again.
        self._held_commits: OrderedDict[tuple[str, str, int, str], float] = OrderedDict()
        # request -> how and when its lease ended, of the last ones: for messages.
        self._ended: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()
        self.unknown_messages = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    def hold(self, request_id: str) -> None:
        with self._lock:
            self._leases[request_id] = Lease(self._clock() + self.seconds)

    def renew(self, request_ids: Iterable[str]) -> dict[str, bool]:
        """request id -> whether its blocks are still held; those that are get a full lease."""
        with self._lock:
            held = {}
            for request_id in request_ids:
                lease = self._live(request_id)
                held[request_id] = lease is not None
                if lease is not None:
                    lease.deadline = self._clock() + self.seconds
            return held

    def commit(self, request_id: str, reader: str, rank: int, ranks: int, read: str = "") -> bool:
        """A rank of decode engine `reader` has read all it needs, or needs nothing any more.

        Args:
            read: names one read of the blocks. Its commit may come again when the answer was lost,
                and gets the same answer; another read of released blocks does not.

        Returns:
            Whether the blocks had been held all along when this read was first committed.
        """
        with self._lock:
            key = (request_id, reader, rank, read)
            if key in self._held_commits:
                return True
            lease = self._live(request_id)
            if lease is None:
                self.unknown_messages += 1
                return False
            seen = lease.committed.setdefault(reader, set())
            seen.add(rank)
            lease.done = len(seen) >= ranks
            if read:
                self._remember(key)
            return True

    def _remember(self, key: tuple[str, str, int, str]) -> None:
        now = self._clock()
        while self._held_commits and next(iter(self._held_commits.values())) < now:
            self._held_commits.popitem(last=False)
        self._held_commits[key] = now + self.seconds

    def cancel(self, request_id: str) -> bool:
        """No rank will read it: release at once. Returns whether it was held."""
        with self._lock:
            lease = self._live(request_id)
            if lease is not None:
                lease.done, lease.cancelled = True, True
            return lease is not None

    def take_released(self) -> Released:
        """Drop and return the leases that have ended; the caller frees their blocks."""
        with self._lock:
            released, now = Released(), self._clock()
            for request_id, lease in list(self._leases.items()):
                if lease.done or lease.deadline <= now:
                    (released.done if lease.done else released.expired).add(request_id)
                    del self._leases[request_id]
                    self._ended[request_id] = (lease.end, now)
            while len(self._ended) > _ENDS_KEPT:
                self._ended.popitem(last=False)
            return released

    def fate(self, request_id: str) -> str:
        """What became of a request's blocks, in words."""
        with self._lock:
            if request_id in self._leases:
                return self._leases[request_id].end
            if request_id not in self._ended:
                return "never held here, or long ago"
            how, when = self._ended[request_id]
            return f"{how}, freed {self._clock() - when:.1f} s ago"

    def _live(self, request_id: str) -> Lease | None:
        lease = self._leases.get(request_id)
        return None if lease is None or lease.done else lease
