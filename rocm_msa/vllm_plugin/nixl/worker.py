"""A rank's side: registers its rows, serves them, and reads other engines' rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.cache.pages import Page
from rocm_msa.vllm_plugin.nixl.agent import RowAgent
from rocm_msa.vllm_plugin.nixl.checks import BlockTable
from rocm_msa.vllm_plugin.nixl.control import ControlClient
from rocm_msa.vllm_plugin.nixl.fingerprint import fingerprint
from rocm_msa.vllm_plugin.nixl.memory import RowMemory, draft_pages, locate
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.peers import Peers
from rocm_msa.vllm_plugin.nixl.reader import RowReader
from rocm_msa.vllm_plugin.nixl.scheduler import StepOrders
from rocm_msa.vllm_plugin.nixl.stats import TransferCounts
from rocm_msa.vllm_plugin.nixl.upstream import (
    KVConnectorHandshakeMetadata,
    draft_name,
    get_tensor_model_parallel_rank,
    layer_specs,
)
from rocm_msa.vllm_plugin.verify import Serving, resolve

logger = logging.getLogger("vllm.rocm_msa.nixl")


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """What a rank registered; goes to the scheduler, which answers handshakes with it."""

    fingerprint: dict[str, Any]
    rank: dict[str, Any]


class RowWorker:
    """One rank's worker half of the connector."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, engine: str, options: TransferOptions
    ):
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.engine, self.options = engine, options
        self.serving: Serving = resolve(vllm_config)
        self.rank = get_tensor_model_parallel_rank()
        self.counts = TransferCounts()
        self.metadata: RankMetadata | None = None
        self._draft: tuple[Page, ...] = ()
        self._sent: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register vLLM's caches as rows.

        Raises:
            ConfigError: they are not where the declared row says.
            RuntimeError: NIXL is missing.
        """
        specs, tp = layer_specs(self.kv_cache_config), self.serving.rank.tp
        self._draft = draft_pages(kv_caches, specs, self.row_at(tp))
        row = self.row_at(tp)
        self.rows = locate(kv_caches, self.kv_cache_config.num_blocks, row)
        self.agent = RowAgent(self.options, self.rows.device_type)
        memory = self.rows.memory
        self.agent.register(memory.base, memory.nbytes, memory.device)
        self.table = self._make_table() if self.options.debug_checks else None
        prints = self._fingerprint(row)
        self.metadata = RankMetadata(
            prints,
            {
                "agent": self.agent.metadata(),
                "rows": memory.as_map(),
                "table": self._table_memory(),
            },
        )
        self.client = ControlClient(self.options.control_timeout_seconds)
        peers = Peers(
            prints,
            self.rank,
            self.serving.model.kv_heads,
            self.row_at,
            self.agent,
            self.client,
        )
        self.reader = RowReader(
            self.engine, self.rows, peers, self.agent, self.client, self.options, self.counts
        )
        logger.info(
            "KV rows of rank %d registered: %d blocks of %d bytes, %d pages a row, one region",
            self.rank,
            memory.blocks,
            row.nbytes,
            len(row.pages),
        )

    def row_at(self, tp: int) -> OuterBlockRow:
        """The declared row of one rank among `tp`, this engine's draft pages included."""
        serving = self.serving
        return OuterBlockRow.of(
            serving.model,
            serving.model.shard(tp),
            serving.main_dtype,
            serving.index_dtype,
            draft=self._draft,
        )

    def start(self, orders: StepOrders) -> None:
        """Carry out a step's orders."""
        for load in orders.loads:
            self.reader.start(load)
        for remote in orders.forgets:
            self.reader.forget(remote)
        if self.table is not None:
            for blocks, identities in orders.published:
                self.table.publish(blocks, identities)
            for blocks in orders.withdrawn:
                self.table.withdraw(blocks)
        self._sent |= orders.released
        if self.rank == 0:
            self.counts.add("expired", orders.expired)
            self.counts.add("released", len(orders.released) - orders.expired)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed) request ids since the last call; failed are also received."""
        sent, self._sent = self._sent, set()
        finished, failed = self.reader.step()
        if finished and self.rows.device_type != "cpu":
            # Writes of the network card must be visible to the kernels of the next step.
            torch.accelerator.synchronize()
        return sent, finished | failed, failed

    def shutdown(self) -> None:
        if self.metadata is not None:
            self.reader.close()
            self.client.close()
            self.agent.close()

    def _make_table(self) -> BlockTable:
        table = BlockTable(self.rows.bytes, self.rows.row)
        tensor = table.table
        self.agent.register(tensor.data_ptr(), tensor.numel() * 8, self.rows.memory.device)
        return table

    def _table_memory(self) -> dict[str, int] | None:
        if self.table is None:
            return None
        tensor, device = self.table.table, self.rows.memory.device
        memory = RowMemory(tensor.data_ptr(), tensor.shape[1] * 8, tensor.shape[0], device)
        return memory.as_map()

    def _fingerprint(self, row: OuterBlockRow) -> dict[str, Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        scales = []
        for name in sorted(layers):
            found = getattr(layers[name], "kv_scales", None)
            if found:
                scales.append((name, float(found["k"]), float(found["v"])))
        return fingerprint(
            self.serving.model,
            row,
            self.serving.main_dtype,
            self.serving.index_dtype,
            tp=self.serving.rank.tp,
            activation_dtype=str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            kv_scales=scales,
            draft=draft_name(self.vllm_config),
            options=self.options,
        )
