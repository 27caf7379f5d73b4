"""Attention layers of M3: projections, norms, RoPE, both caches, selection and attention.

One class serves dense layers (no index branch) and sparse ones. It is its own
`AttentionLayerBase`: it declares its cache spec, receives its view of the one flat allocation, and
runs rocm-msa's ops on it. Index keys live in a second cache layer of the same block table.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)

from rocm_msa import ops
from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.vllm_plugin import metrics
from rocm_msa.vllm_plugin.decode_cp import DecodeCp
from rocm_msa.vllm_plugin.kernels import WarmUp
from rocm_msa.vllm_plugin.metadata import MsaBackend, MsaMetadata, Part
from rocm_msa.vllm_plugin.mono import Mono
from rocm_msa.vllm_plugin.verify import Serving

logger = logging.getLogger("vllm.rocm_msa")


class CacheLayer(nn.Module, AttentionLayerBase):
    """A layer with a paged cache that vLLM allocates: `cache` is our view of `kv_cache`.

    vLLM releases the memory by assigning an empty tensor to `kv_cache`; the view goes with it.
    warm_up: what waits for the caches, set by the model.
    """

    def __init__(self, serving: Serving, layer_name: str) -> None:
        super().__init__()
        self.serving, self.layer_name = serving, layer_name
        self.warm_up: WarmUp | None = None
        self.kv_cache = torch.tensor([])
        vllm_config = get_current_vllm_config()
        self.cache_config = vllm_config.cache_config
        layers = vllm_config.compilation_config.static_forward_context
        if layer_name in layers:
            raise ValueError(f"duplicate layer name {layer_name}")
        layers[layer_name] = self

    @property
    def kv_cache(self) -> torch.Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache
        self.cache = self.view(kv_cache) if kv_cache.numel() else None
        if self.warm_up is not None:
            told = self.warm_up.released if self.cache is None else self.warm_up.bound
            told(self.layer_name)

    def view(self, kv_cache: torch.Tensor) -> MainCache | IndexCache:
        """Our cache over the memory `[num_blocks, heads, 128, bytes]` that vLLM gives."""
        raise NotImplementedError

    def get_attn_backend(self) -> type[MsaBackend]:
        return MsaBackend


class IndexCacheLayer(CacheLayer):
    """The index key cache of one sparse layer, as vLLM's cache manager sees it."""

    def view(self, kv_cache: torch.Tensor) -> IndexCache:
        return IndexCache.from_tensor(
            kv_cache, self.serving.index_dtype, head_dim=self.serving.model.index_dim
        )

    def get_kv_cache_spec(self, vllm_config) -> KVCacheSpec:
        page = self.serving.index_page
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=page.head_dim,
            dtype=torch.uint8,
            state_content_bytes=page.token_bytes,
            cache_role=SparseCacheRole.INDEXER,
        )

    def forward(self) -> None:
        raise RuntimeError("an index cache layer has no forward")


class MsaAttention(CacheLayer):
    """Attention of one decoder layer, dense or sparse.

    forward(positions int64 [tokens], hidden_states [tokens, hidden]) -> [tokens, hidden].
    decode_cp: what shares the index scan of decode rows between the ranks; mono: what runs whole
    layers in one launch. The model sets both; the metadata builder asks them for faults.
    """

    def __init__(self, serving: Serving, layer_id: int, prefix: str, quant_config=None) -> None:
        super().__init__(serving, f"{prefix}.attn")
        model, rank = serving.model, serving.rank
        self.layer_id = layer_id
        self.sparse = model.sparse_layers[layer_id]
        self.heads = ops.Heads(
            q=rank.q_heads,
            kv=rank.kv_heads,
            index=rank.index_heads if self.sparse else 0,
            head_dim=model.head_dim,
            rotary_dim=model.rope.rotary_dim,
        )
        self.sm_scale = model.head_dim**-0.5
        self.hidden_size = model.hidden_size
        self.qkv_proj = self._qkv_linear(quant_config, f"{prefix}.qkv_proj")
        self.o_proj = RowParallelLinear(
            model.q_heads * model.head_dim,
            model.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = GemmaRMSNorm(model.head_dim, eps=model.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(model.head_dim, eps=model.rms_norm_eps)
        if self.sparse:
            self.index_q_norm = GemmaRMSNorm(model.index_dim, eps=model.rms_norm_eps)
            self.index_k_norm = GemmaRMSNorm(model.index_dim, eps=model.rms_norm_eps)
            self.index_cache = IndexCacheLayer(serving, f"{self.layer_name}.index_cache")
            requests = get_current_vllm_config().scheduler_config.max_num_seqs
            counters = torch.zeros(requests, dtype=torch.int32)
            self.register_buffer("select_counters", counters, persistent=False)
        self.rotary_emb = _rope(serving)
        self.kv_scales = {"k": 1.0, "v": 1.0}
        self.decode_cp: DecodeCp | None = None
        self.mono: Mono | None = None

    def _qkv_linear(self, quant_config, prefix: str) -> nn.Module:
        model = self.serving.model
        sizes = [model.hidden_size, model.head_dim, model.q_heads, model.kv_heads]
        kind = QKVParallelLinear
        if self.sparse:
            kind = MinimaxM3QKVParallelLinearWithIndexer
            sizes += [model.index_heads, model.index_dim]
        return kind(*sizes, bias=False, quant_config=quant_config, prefix=prefix)

    def view(self, kv_cache: torch.Tensor) -> MainCache:
        cache = MainCache.from_tensor(
            kv_cache,
            self.heads.kv,
            self.serving.main_dtype,
            head_dim=self.heads.head_dim,
            k_scale=self.kv_scales["k"],
            v_scale=self.kv_scales["v"],
        )
        first = self.layer_id == 0 and get_tensor_model_parallel_rank() == 0
        # vLLM measures graphs on a few blocks, before it knows how many there will be.
        if first and self.cache_config.num_gpu_blocks is not None:
            logger.info(self.serving.describe(cache.num_blocks))
            metrics.show_cache(self.serving, cache.num_blocks)
        return cache

    def get_kv_cache_spec(self, vllm_config) -> KVCacheSpec:
        page = self.serving.main_page
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=page.kv_heads,
            head_size=page.head_dim,
            dtype=torch.uint8,
            kv_quant_mode=get_kv_quant_mode(self.serving.main_dtype.value),
            state_content_bytes=page.token_bytes // page.kv_heads,
        )

    def share(self, decode_cp: DecodeCp | None, warm_up: WarmUp, mono: Mono | None = None) -> None:
        """Take what the layers of a model have in common."""
        self.decode_cp, self.mono = decode_cp, mono
        self.warm_up = warm_up
        if self.sparse:
            self.index_cache.warm_up = warm_up

    def norms(self) -> ops.Norms:
        return ops.Norms(
            q=self.q_norm.weight,
            k=self.k_norm.weight,
            index_q=self.index_q_norm.weight if self.sparse else None,
            index_k=self.index_k_norm.weight if self.sparse else None,
            eps=self.serving.model.rms_norm_eps,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        context = get_forward_context()
        slots = context.slot_mapping
        metadata = context.attn_metadata
        attended = qkv.new_zeros(qkv.shape[0], self.heads.q * self.heads.head_dim)
        if isinstance(slots, dict) and self.layer_name in slots and isinstance(metadata, dict):
            self._attend(
                qkv,
                positions,
                slots[self.layer_name],
                slots[self.index_cache.layer_name] if self.sparse else None,
                metadata[self.layer_name],
                attended.view(-1, self.heads.q, self.heads.head_dim),
            )
        output, _ = self.o_proj(attended)
        return output

    def _attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        main_slots: torch.Tensor,
        index_slots: torch.Tensor | None,
        metadata: MsaMetadata,
        out: torch.Tensor,
    ) -> None:
        """Insert the step's tokens, then attend; `out [tokens, q_heads, head_dim]` is written."""
        tokens = metadata.num_tokens
        backend = self.serving.options.backend
        q, index_q = ops.qkv_insert(
            qkv[:tokens],
            self.norms(),
            self.rotary_emb.cos_sin_cache,
            positions[:tokens],
            self.cache,
            self.index_cache.cache if self.sparse else None,
            main_slots[:tokens],
            index_slots[:tokens] if self.sparse else None,
            self.heads,
            backend=backend,
        )
        for part in (metadata.decode, metadata.prefill):
            if part is not None:
                ids = self._select(index_q[part.tokens], part) if self.sparse else None
                self._attend_part(q[part.tokens], ids, part, out[part.tokens])

    def _select(self, index_q: torch.Tensor, part: Part) -> torch.Tensor:
        """Blocks of each row: int32 `[index_heads, rows, topk]`."""
        model, backend = self.serving.model, self.serving.options.backend
        cache = self.index_cache.cache
        kept = (model.topk_blocks, model.init_blocks, model.local_blocks)
        if part.rows_per_request is not None:
            if self.decode_cp is not None:
                ids = self.decode_cp.select(self.layer_id, index_q, cache, part)
                if ids is not None:
                    return ids
            fits = part.seq_lens.shape[0] <= self.select_counters.shape[0]
            return ops.select_decode(
                index_q,
                cache,
                part.block_table,
                part.seq_lens,
                part.rows_per_request,
                part.num_blocks,
                *kept,
                counters=self.select_counters if fits else None,
                backend=backend,
            )
        scores = ops.index_score_prefill(
            index_q,
            cache,
            part.block_table,
            part.cu_seqlens_q,
            part.seq_lens,
            backend=backend,
        )
        return ops.block_topk(scores, part.num_blocks, *kept, backend=backend)

    def _attend_part(
        self, q: torch.Tensor, ids: torch.Tensor | None, part: Part, out: torch.Tensor
    ) -> None:
        table, lens, cu = part.block_table, part.seq_lens, part.cu_seqlens_q
        options = {"out": out, "backend": self.serving.options.backend}
        if ids is None:
            ops.dense_attention(q, self.cache, table, cu, lens, self.sm_scale, **options)
        elif part.rows_per_request is not None:
            rows = part.rows_per_request
            ops.sparse_decode(q, self.cache, ids, table, lens, rows, self.sm_scale, **options)
        else:
            ops.sparse_prefill(q, self.cache, ids, table, cu, lens, self.sm_scale, **options)


def _rope(serving: Serving) -> nn.Module:
    """vLLM's rotary table in fp32: cos_sin_cache `[max_position, rotary_dim]`."""
    model = serving.model
    rope = model.rope
    parameters = {
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.rotary_dim / model.head_dim,
        "rope_type": "default",
    }
    if rope.factor > 1.0:
        parameters |= {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return get_rope(
        model.head_dim,
        max_position=rope.original_max_position,
        rope_parameters=parameters,
        dtype=torch.float32,
    )
