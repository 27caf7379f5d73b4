"""Prefill engines that a decode rank knows: asked, compared, connected to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.vllm_plugin.nixl.agent import RowAgent
from rocm_msa.vllm_plugin.nixl.control import ControlClient, Refused
from rocm_msa.vllm_plugin.nixl.fingerprint import Incompatible, check
from rocm_msa.vllm_plugin.nixl.memory import RowMemory
from rocm_msa.vllm_plugin.nixl.plan import ReadPlan, read_plan

logger = logging.getLogger("vllm.rocm_msa.nixl")

PeerKey = tuple[str, str, int]
"""engine id, host, port of its side channel."""


@dataclass
class Peer:
    """A prefill engine: being asked (`plan` is None), or connected to.

    memory, tables, names: by prefill rank, of the ranks that this rank reads from.
    """

    hello: Future
    fingerprint: dict[str, Any] = field(default_factory=dict)
    plan: ReadPlan | None = None
    row: OuterBlockRow | None = None
    memory: dict[int, RowMemory] = field(default_factory=dict)
    tables: dict[int, RowMemory] = field(default_factory=dict)
    names: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """Why a handshake failed; `final` when asking again cannot help."""

    text: str
    final: bool


class Peers:
    """`row_at(tp)` is the declared row of one rank among `tp`."""

    def __init__(
        self,
        fingerprint: dict[str, Any],
        rank: int,
        kv_heads: int,
        row_at: Callable[[int], OuterBlockRow],
        agent: RowAgent,
        client: ControlClient,
    ):
        self.fingerprint, self.rank, self.kv_heads = fingerprint, rank, kv_heads
        self.row_at, self.agent, self.client = row_at, agent, client
        self._peers: dict[PeerKey, Peer] = {}
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, key: PeerKey) -> Peer | None:
        """A connected peer, or None while it is being asked; asks an unknown one."""
        if key not in self._peers:
            engine, host, port = key
            ask = self.client.ask(host, port, engine, "hello", fingerprint=self.fingerprint)
            self._peers[key] = Peer(ask)
        peer = self._peers[key]
        return None if peer.plan is None else peer

    def replaced_by(self, key: PeerKey) -> list[PeerKey]:
        """Engines that stood at the same address before."""
        return [k for k in self._peers if k[1:] == key[1:] and k != key]

    def advance(self) -> dict[PeerKey, Fault]:
        """Connect to the peers that have answered; those that failed are dropped and returned."""
        faults = {}
        for key, peer in list(self._peers.items()):
            if peer.plan is not None or not peer.hello.done():
                continue
            try:
                self._connect(key, peer, peer.hello.result())
            except Exception as error:
                self.drop(key)
                logger.error("KV handshake with engine %s at %s:%s failed: %s", *key, error)
                faults[key] = Fault(str(error), isinstance(error, Refused | Incompatible))
        return faults

    def drop(self, key: PeerKey) -> None:
        """Disconnect; whoever read from it has cancelled its reads before."""
        peer = self._peers.pop(key, None)
        if peer is not None:
            for name in peer.names.values():
                self.agent.disconnect(name)

    def close(self) -> None:
        for key in list(self._peers):
            self.drop(key)

    def _connect(self, key: PeerKey, peer: Peer, answer: dict[str, Any]) -> None:
        peer.fingerprint = answer["fingerprint"]
        check(peer.fingerprint, self.fingerprint)
        tp, own_tp = peer.fingerprint["tp"], self.fingerprint["tp"]
        peer.row = self.row_at(tp)
        own_row = self.row_at(own_tp)
        plan = read_plan(self.kv_heads, own_row, own_tp, self.rank, peer.row, tp)
        for rank in plan.pieces:
            info = answer["ranks"][rank]
            peer.memory[rank] = RowMemory(**info["rows"])
            if info.get("table"):
                peer.tables[rank] = RowMemory(**info["table"])
            peer.names[rank] = self.agent.connect(info["agent"])
        peer.plan = plan
        path = plan.reason or "a row is one piece, adjacent blocks are one descriptor"
        if path not in self._logged:
            self._logged.add(path)
            logger.info("KV rows from engine %s: %s; %d bytes a block", key[0], path, plan.nbytes)
