"""Loads of a decode rank: connect, read, check, commit.

    connect -> read -> (check) -> commit -> finished
       a fault: cancel what is in flight, then connect again, or give up

`step` drives everything and never waits. A load is finished only when the prefill engine answered
its commit with "held": up to then none of the blocks had been released, so nothing stale was read.
A load that gives up is reported once its reads are cancelled: only then may its blocks be reused.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rocm_msa.vllm_plugin.nixl import agent as nixl
from rocm_msa.vllm_plugin.nixl import arrival
from rocm_msa.vllm_plugin.nixl.agent import Read, RowAgent
from rocm_msa.vllm_plugin.nixl.arrival import TableRead
from rocm_msa.vllm_plugin.nixl.control import ControlClient, Refused
from rocm_msa.vllm_plugin.nixl.memory import Rows
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.peers import Peer, PeerKey, Peers
from rocm_msa.vllm_plugin.nixl.plan import descriptors
from rocm_msa.vllm_plugin.nixl.stats import TransferCounts

logger = logging.getLogger("vllm.rocm_msa.nixl")

RETRIED = ("handshake", "read", "check")
"""Faults after which a load starts again. Once a commit was sent nothing is read again: the blocks
may have been given away; the commit itself is sent again when its answer is lost."""


@dataclass(frozen=True)
class Remote:
    """Where a request's KV lies: the prefill engine and its name for the request."""

    engine: str
    host: str
    port: int
    request: str

    @property
    def peer(self) -> PeerKey:
        return self.engine, self.host, self.port


@dataclass
class Load:
    """One request's blocks to read, pairwise.

    identities: of each block, in debug mode. read: names the current attempt at reading.
    """

    request: str
    remote: Remote
    local_blocks: list[int]
    remote_blocks: list[int]
    identities: list[int] = field(default_factory=list)
    attempt: int = 0
    stage: str = "connect"
    started: float = 0.0
    posted: float = 0.0
    read: str = ""
    reads: list[Read] = field(default_factory=list)
    tables: list[TableRead] = field(default_factory=list)
    commit: Future | None = None
    commits: int = 0
    gave_up: bool = False


class RowReader:
    """The loads of one rank of a decode engine. `clock` gives seconds."""

    def __init__(
        self,
        engine: str,
        rows: Rows,
        peers: Peers,
        agent: RowAgent,
        client: ControlClient,
        options: TransferOptions,
        counts: TransferCounts,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.engine, self.rows, self.peers = engine, rows, peers
        self.agent, self.client, self.options, self.counts = agent, client, options, counts
        self._clock = clock
        self.loads: dict[str, Load] = {}

    def start(self, load: Load) -> None:
        """Begin a load; its blocks must not be used before `step` reports it."""
        if len(load.local_blocks) != len(load.remote_blocks):
            logger.error(
                "KV of request %s: %d blocks offered for %d",
                load.request,
                len(load.remote_blocks),
                len(load.local_blocks),
            )
            load.gave_up = True
            self.counts.add("failed_read")
        load.started = self._clock()
        self.loads[load.request] = load

    def forget(self, remote: Remote) -> None:
        """This rank needs nothing (more) of a request; nobody waits for the answer."""
        self._commit(remote, "", courtesy=True)

    def _commit(self, remote: Remote, read: str, *, courtesy: bool = False) -> Future:
        return self.client.ask(
            remote.host,
            remote.port,
            remote.engine,
            "commit",
            courtesy=courtesy,
            request=remote.request,
            reader=self.engine,
            rank=self.peers.rank,
            ranks=self.peers.fingerprint["tp"],
            read=read,
        )

    def step(self) -> tuple[set[str], set[str]]:
        """Move every load on; returns (finished, failed) request ids, each reported once."""
        for key, fault in self.peers.advance().items():
            for load in self._reading_from(key):
                self._fault(load, "handshake", fault.text, final=fault.final)
        finished, failed = set(), set()
        for load in list(self.loads.values()):
            if not load.gave_up:
                self._drive(load)
            if load.gave_up and self._release(load):
                failed.add(load.request)
            elif load.stage == "finished":
                finished.add(load.request)
        for request in finished | failed:
            del self.loads[request]
        return finished, failed

    def close(self) -> None:
        for load in self.loads.values():
            self._release(load)
        self.loads.clear()
        self.peers.close()

    def _drive(self, load: Load) -> None:
        """One step of a load; any error is a fault of this load, not of the engine."""
        limit = self.options.read_timeout_seconds
        if self._clock() - load.started > limit:
            self._fault(load, "timeout", f"not there after {limit} s (stage {load.stage})")
            return
        stages = {
            "connect": self._on_connect,
            "read": self._on_read,
            "check": self._on_check,
            "commit": self._on_commit,
        }
        try:
            stages[load.stage](load)
        except Exception as error:
            self._fault(load, "read", f"{type(error).__name__}: {error}")

    def _on_connect(self, load: Load) -> None:
        key = load.remote.peer
        for old in self.peers.replaced_by(key):
            self._drop(old)
        peer = self.peers.get(key)
        if peer is not None:
            self._post(load, peer)

    def _post(self, load: Load, peer: Peer) -> None:
        load.posted, load.read = self._clock(), uuid.uuid4().hex
        here = self.rows.memory
        for rank, pieces in peer.plan.pieces.items():
            there = peer.memory[rank]
            if not 0 <= min(load.remote_blocks) <= max(load.remote_blocks) < there.blocks:
                raise ValueError(f"remote blocks not all in 0..{there.blocks - 1}")
            local, remote = descriptors(
                pieces,
                here.base,
                here.stride,
                load.local_blocks,
                there.base,
                there.stride,
                load.remote_blocks,
            )
            read = self.agent.read(peer.names[rank], local, remote, here.device, there.device)
            load.reads.append(read)
        load.stage = "read"

    def _on_read(self, load: Load) -> None:
        states = {self.agent.state(read) for read in load.reads}
        if nixl.FAILED in states:
            self._fault(load, "read", "NIXL reported an error")
        elif states == {nixl.DONE}:
            self.counts.read(
                self._clock() - load.posted,
                sum(read.nbytes for read in load.reads),
                sum(self.agent.telemetry_descriptors(read) for read in load.reads),
                len(load.local_blocks),
            )
            self._release(load)
            load.stage = "check"
            self._on_check(load)

    def _on_check(self, load: Load) -> None:
        peer = self.peers.get(load.remote.peer)
        if load.identities:
            if not load.tables:
                load.tables = arrival.post_tables(
                    self.agent,
                    peer,
                    load.remote_blocks,
                    self.rows.memory.device,
                    self.rows.bytes.device,
                )
            state = arrival.tables_state(self.agent, load.tables)
            if state == nixl.FAILED:
                raise RuntimeError("NIXL reported an error on the table of checks")
            if state == nixl.BUSY:
                return
            if arrival.unpublished(load.tables):
                # The prefill engine publishes one of its steps later than it answers.
                arrival.release_tables(self.agent, load.tables)
                return
            problem = arrival.verify(
                self.rows, load.local_blocks, load.identities, peer, load.tables
            )
            arrival.release_tables(self.agent, load.tables)
            if problem:
                self._fault(load, "check", problem)
                return
        arrival.convert(
            self.rows, load.local_blocks, peer.fingerprint["packing"], self.options.packing
        )
        load.commit, load.stage = self._commit(load.remote, load.read), "commit"

    def _on_commit(self, load: Load) -> None:
        if not load.commit.done():
            return
        try:
            answer = load.commit.result()
        except Exception as error:
            if isinstance(error, Refused) or load.commits >= self.options.retries:
                self._fault(load, "commit", str(error))
            else:
                self.counts.add("retries")
                load.commits += 1
                load.commit = self._commit(load.remote, load.read)
            return
        if answer["held"]:
            load.stage = "finished"
        else:
            why = answer.get("why", "unknown")
            self._fault(load, "stale", f"its blocks were released before the commit: {why}")

    def _fault(self, load: Load, kind: str, text: str, *, final: bool = False) -> None:
        """Try the load again, or give it up. Cancels its reads in either case."""
        again = kind in RETRIED and not final and load.attempt < self.options.retries
        logger.log(
            logging.WARNING if again else logging.ERROR,
            "KV of request %s from engine %s: %s: %s; %s",
            load.request,
            load.remote.engine,
            kind,
            text,
            "trying again" if again else "given up",
        )
        if not self._release(load) or kind in ("read", "timeout"):
            # Closing the connection ends what could not be cancelled.
            self._drop(load.remote.peer)
        if again:
            self.counts.add("retries")
            load.attempt += 1
            load.stage, load.started = "connect", self._clock()
        else:
            self.counts.add(f"failed_{kind}")
            load.gave_up = True
            if kind not in ("stale", "commit"):
                self.forget(load.remote)

    def _release(self, load: Load) -> bool:
        """Free or cancel a load's reads; False while one is still active."""
        load.reads = [read for read in load.reads if not self.agent.release(read)]
        return arrival.release_tables(self.agent, load.tables) and not load.reads

    def _drop(self, key: PeerKey) -> None:
        """Disconnect from a peer; other loads that were reading from it start again."""
        for load in self._reading_from(key):
            self._release(load)
            if load.stage in ("read", "check"):
                load.stage = "connect"
        self.peers.drop(key)

    def _reading_from(self, key: PeerKey) -> list[Load]:
        return [x for x in self.loads.values() if x.remote.peer == key and not x.gave_up]
