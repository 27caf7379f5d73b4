"""Everything of vLLM that this package uses, in one place; checked against both pinned versions.

The connector stands on vLLM's public connector base class; nothing of vLLM's own NIXL connector is
used. The request parameters (`kv_transfer_params`) are those of vLLM's NIXL connector in pull mode,
so that its proxies and routers serve this one too.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

HANDED_OVER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""How a prefill request ends when its KV is complete; every other end frees it at once."""

LAYOUT = "BLHNC"


def side_channel(vllm_config: Any) -> tuple[str, int]:
    """Host and port of this engine's side channel; ranks of data parallelism take the next ports.

    The variables are those of vLLM's NIXL connector.
    """
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """layer name -> its cache spec."""
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs.update(spec.kv_cache_specs)
        else:
            specs.update(dict.fromkeys(group.layer_names, spec))
    return specs


def draft_name(vllm_config: Any) -> str:
    """The draft model whose cache is part of the row, or "none"."""
    config = vllm_config.speculative_config
    if config is None or not config.use_eagle():
        return "none"
    return f"{config.method} {config.draft_model_config.model}"


__all__ = [
    "HANDED_OVER",
    "LAYOUT",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "SupportsHMA",
    "create_metric_per_engine",
    "draft_name",
    "get_tensor_model_parallel_rank",
    "layer_specs",
    "side_channel",
]
