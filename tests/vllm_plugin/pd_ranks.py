"""Transfers without an engine: the rows, side channels and NIXL agents of both sides, in a process.

A `Side` is what one engine registers: `tp` ranks with rows of random bytes, a lease table, a side
channel. Everything between the scheduler's orders and the bytes is the product's own.

Leases and reads end by the side's `clock`, which stands still until a test moves it, and messages
have minutes: nothing runs out because the machine is slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.vllm_plugin.nixl.agent import RowAgent
from rocm_msa.vllm_plugin.nixl.checks import BlockTable
from rocm_msa.vllm_plugin.nixl.control import ControlClient, ControlServer
from rocm_msa.vllm_plugin.nixl.fingerprint import fingerprint
from rocm_msa.vllm_plugin.nixl.leases import LeaseTable
from rocm_msa.vllm_plugin.nixl.memory import RowMemory, Rows
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.peers import Peers
from rocm_msa.vllm_plugin.nixl.plan import owned_heads
from rocm_msa.vllm_plugin.nixl.reader import Load, Remote, RowReader
from rocm_msa.vllm_plugin.nixl.stats import TransferCounts

LAYERS = 5
MODEL = dataclasses.replace(
    MINIMAX_M3,
    num_layers=LAYERS,
    sparse_layers=(False, True, True, True, True),
    moe_layers=(False, True, True, True, True),
)
BLOCKS = 48
PATIENCE = 120.0
"""Seconds within which what must happen happens, on any machine."""


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclasses.dataclass
class Rank:
    rows: Rows
    agent: RowAgent
    client: ControlClient
    counts: TransferCounts
    table: BlockTable | None
    reader: RowReader | None = None


class Side:
    """One engine: `ranks[i]` of `tp`. Rows start as random bytes, index pages the same on all."""

    def __init__(
        self, tp: int = 1, main: str = "nvfp4", index: str = "nvfp4", seed: int = 0, **opts
    ):
        self.engine, self.tp, self.clock = f"engine-{uuid.uuid4().hex[:8]}", tp, Clock()
        self.options = TransferOptions.read({"control_timeout_seconds": PATIENCE} | opts)
        self.main, self.index = CacheDType.parse(main), CacheDType.parse(index)
        self.model = MODEL
        self.leases = LeaseTable(self.options.lease_seconds, self.clock)
        self.ranks = [self._rank() for _ in range(tp)]
        self.fill(seed)
        self.fingerprint = fingerprint(
            self.model,
            self.ranks[0].rows.row,
            self.main,
            self.index,
            tp=tp,
            activation_dtype="bfloat16",
            kv_scales=[(1.0, 1.0)] * LAYERS,
            draft="none",
            options=self.options,
        )
        self.server: ControlServer | None = None
        for i, rank in enumerate(self.ranks):
            peers = Peers(
                self.fingerprint, i, self.model.kv_heads, self.row_at, rank.agent, rank.client
            )
            rank.reader = RowReader(
                self.engine,
                rank.rows,
                peers,
                rank.agent,
                rank.client,
                self.options,
                rank.counts,
                self.clock,
            )

    def row_at(self, tp: int) -> OuterBlockRow:
        return OuterBlockRow.of(self.model, self.model.shard(tp), self.main, self.index)

    def _rank(self) -> Rank:
        row = self.row_at(self.tp)
        data = torch.zeros(BLOCKS, row.nbytes, dtype=torch.uint8)
        rows = Rows(RowMemory(data.data_ptr(), row.nbytes, BLOCKS, 0), row, data)
        agent = RowAgent(self.options, "cpu")
        agent.register(rows.memory.base, rows.memory.nbytes, 0)
        table = None
        if self.options.debug_checks:
            table = BlockTable(data, row)
            agent.register(table.table.data_ptr(), table.table.numel() * 8, 0)
        client = ControlClient(self.options.control_timeout_seconds, self.clock)
        return Rank(rows, agent, client, TransferCounts(), table)

    def fill(self, seed: int) -> None:
        """Random bytes: what all heads hold, cut to the ranks."""
        whole = self.row_at(1)
        generator = torch.Generator().manual_seed(seed)
        self.whole = torch.randint(
            0, 256, (BLOCKS, whole.nbytes), dtype=torch.uint8, generator=generator
        )
        for i, rank in enumerate(self.ranks):
            rank.rows.bytes.copy_(self.share(self.whole, i))

    def share(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows out of rows of all heads."""
        parts, heads = [], owned_heads(self.model.kv_heads, self.tp, rank)
        for page in self.row_at(1).pages:
            n = page.page.head_bytes
            for head in heads if page.sharded else range(1):
                parts.append(whole[:, page.offset + head * n : page.offset + (head + 1) * n])
        return torch.cat(parts, dim=1)

    def serve(self) -> Side:
        ranks = []
        for rank in self.ranks:
            table = None
            if rank.table is not None:
                t = rank.table.table
                table = RowMemory(t.data_ptr(), t.shape[1] * 8, t.shape[0], 0).as_map()
            ranks.append(
                {"agent": rank.agent.metadata(), "rows": rank.rows.memory.as_map(), "table": table}
            )
        self.server = ControlServer(
            "127.0.0.1", 0, self.engine, self.fingerprint, ranks, self.leases
        )
        self.port = self.server.port
        return self

    def remote(self, request: str) -> Remote:
        return Remote(self.engine, "127.0.0.1", self.port, request)

    def load(self, source: Side, request: str, local: list[int], remote: list[int], marks=()):
        """Start a load on every rank."""
        for rank in self.ranks:
            rank.reader.start(
                Load(request, source.remote(request), list(local), list(remote), list(marks))
            )

    def run(self, until: str = "") -> list[tuple[set[str], set[str]]]:
        """Step all ranks until no load is left, or every load is at stage `until`.

        Returns:
            (finished, failed) of each rank.
        """
        results = [(set(), set()) for _ in self.ranks]
        end = time.monotonic() + PATIENCE
        while stages := {x.stage for rank in self.ranks for x in rank.reader.loads.values()}:
            if stages == {until}:
                break
            assert time.monotonic() < end, f"loads did not end: {stages}"
            for rank, (finished, failed) in zip(self.ranks, results, strict=True):
                a, b = rank.reader.step()
                finished |= a
                failed |= b
            time.sleep(0.0005)
        return results

    def close(self) -> None:
        for rank in self.ranks:
            rank.reader.close()
            rank.client.close()
        if self.server is not None:
            self.server.close()
        for rank in self.ranks:
            rank.agent.close()


@contextlib.contextmanager
def sides(prefill: dict | None = None, decode: dict | None = None) -> Iterator[tuple[Side, Side]]:
    """A serving prefill side and a decode side with other bytes."""
    source = Side(seed=1, **(prefill or {})).serve()
    target = Side(seed=2, **(decode or {}))
    try:
        yield source, target
    finally:
        target.close()
        source.close()


def only(results: list) -> tuple[set[str], set[str]]:
    """The result of a side with one rank."""
    (result,) = results
    return result
