"""`RocmMsaNixlConnector`: vLLM's KV connector interface over the scheduler and worker halves."""

from __future__ import annotations

import logging
from typing import Any

import torch

from rocm_msa.errors import ConfigError, expect
from rocm_msa.vllm_plugin.nixl.metrics import RowPromMetrics, RowStats
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.scheduler import RowScheduler, StepOrders
from rocm_msa.vllm_plugin.nixl.upstream import (
    LAYOUT,
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from rocm_msa.vllm_plugin.nixl.worker import RankMetadata, RowWorker

logger = logging.getLogger("vllm.rocm_msa.nixl")


class RocmMsaNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands whole outer-block rows from prefill to decode engines.

    Raises:
        ConfigError: options or a model that it cannot serve.
        RuntimeError: NIXL is missing, or the side channel's port is taken.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = TransferOptions.read(transfer.kv_connector_extra_config)
        groups = len(kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise ConfigError(
                "RocmMsaNixlConnector cannot serve this model",
                [expect("KV cache groups", "one block table for all layers", groups)],
            )
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = RowScheduler(vllm_config, transfer.engine_id, options)
        else:
            self._worker = RowWorker(vllm_config, kv_cache_config, transfer.engine_id, options)

    # Class methods

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return LAYOUT

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the registered memory must stay where it is (asked by vLLM 0.33)."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RowStats:
        return RowStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> RowPromMetrics:
        return RowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (ids,) = blocks.get_block_ids()
        self._scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.take_orders()

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loaded(connector_output.finished_recving or set())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (ids,) = block_ids
        return self._scheduler.finished(request, ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankMetadata]) -> None:
        ranks = [metadata[rank].rank for rank in sorted(metadata)]
        self._scheduler.serve(metadata[0].fingerprint, ranks)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankMetadata | None:
        return self._worker.metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(sent, received, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_kv_connector_stats(self) -> RowStats | None:
        if self._worker is None:
            return None
        taken = RowStats(self._worker.counts.take())
        return None if taken.is_empty() else taken

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Rows are whole before a request is scheduled: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Rows are read where they are: nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.shutdown()
