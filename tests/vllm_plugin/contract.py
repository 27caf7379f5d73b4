"""What the plugin uses of vLLM, as data; checked against the sources of both pinned versions.

IMPORTS are read off the plugin's own source. SIGNATURES: parameters that we pass or receive by
name. FIELDS: attributes that we read. Static: nothing of the checked version is imported.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[2] / "rocm_msa" / "vllm_plugin"

SIGNATURES = {
    "vllm/v1/attention/backend.py": {
        "AttentionMetadataBuilder.__init__": [
            "kv_cache_spec",
            "layer_names",
            "vllm_config",
            "device",
        ],
        "AttentionMetadataBuilder.build": [
            "common_prefix_len",
            "common_attn_metadata",
            "fast_build",
        ],
        "AttentionMetadataBuilder._init_reorder_batch_threshold": [
            "reorder_batch_threshold",
            "supports_spec_as_decode",
        ],
        "AttentionBackend.get_name": [],
        "AttentionBackend.get_impl_cls": [],
        "AttentionBackend.get_builder_cls": [],
        "AttentionBackend.get_supported_kernel_block_sizes": ["kv_cache_spec"],
        "AttentionBackend.is_sparse": ["cls"],
        "AttentionBackend.supported_kv_cache_layouts": ["cls"],
    },
    "vllm/v1/worker/gpu_model_runner.py": {
        "GPUModelRunner._sample": ["self", "logits"],
        "GPUModelRunner._bookkeeping_sync": ["self", "scheduler_output", "sampler_output"],
    },
    "vllm/v1/attention/backends/utils.py": {
        "split_decodes_and_prefills": [
            "common_attn_metadata",
            "decode_threshold",
            "require_uniform",
        ],
    },
    "vllm/model_executor/layers/attention_layer_base.py": {
        "AttentionLayerBase.bind_kv_cache": ["self", "kv_cache"],
        "AttentionLayerBase.get_attn_backend": ["self"],
        "AttentionLayerBase.get_kv_cache_spec": ["self", "vllm_config"],
    },
    "vllm/model_executor/layers/linear.py": {
        "QKVParallelLinear.__init__": [
            "hidden_size",
            "head_size",
            "total_num_heads",
            "total_num_kv_heads",
            "bias",
            "quant_config",
            "prefix",
        ],
        "MinimaxM3QKVParallelLinearWithIndexer.__init__": [
            "hidden_size",
            "head_size",
            "total_num_heads",
            "total_num_kv_heads",
            "total_num_index_heads",
            "index_head_size",
            "bias",
            "quant_config",
            "prefix",
        ],
        "RowParallelLinear.__init__": [
            "input_size",
            "output_size",
            "bias",
            "reduce_results",
            "quant_config",
            "prefix",
        ],
        "MergedColumnParallelLinear.__init__": [
            "input_size",
            "output_sizes",
            "bias",
            "quant_config",
            "prefix",
        ],
    },
    "vllm/model_executor/layers/layernorm.py": {"GemmaRMSNorm.__init__": ["hidden_size", "eps"]},
    "vllm/model_executor/layers/activation.py": {
        "SiluAndMulWithClamp.__init__": ["swiglu_limit", "alpha", "beta"],
    },
    "vllm/model_executor/layers/rotary_embedding/__init__.py": {
        "get_rope": ["head_size", "max_position", "rope_parameters", "dtype"],
    },
    "vllm/model_executor/layers/fused_moe/router/gate_linear.py": {
        "GateLinear.__init__": [
            "input_size",
            "output_size",
            "bias",
            "params_dtype",
            "out_dtype",
            "prefix",
        ],
    },
    "vllm/model_executor/layers/fused_moe/layer.py": {
        "FusedMoEFactory": [
            "num_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "scoring_func",
            "e_score_correction_bias",
            "renormalize",
            "activation",
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "routed_scaling_factor",
            "router_logits_dtype",
            "shared_experts",
            "quant_config",
            "prefix",
        ],
        "fused_moe_make_expert_params_mapping": [
            "model",
            "ckpt_gate_proj_name",
            "ckpt_down_proj_name",
            "ckpt_up_proj_name",
            "num_experts",
        ],
    },
    "vllm/model_executor/layers/vocab_parallel_embedding.py": {
        "VocabParallelEmbedding.__init__": [
            "num_embeddings",
            "embedding_dim",
            "quant_config",
            "prefix",
        ],
        "ParallelLMHead.__init__": ["num_embeddings", "embedding_dim", "quant_config", "prefix"],
    },
    "vllm/model_executor/layers/logits_processor.py": {
        "LogitsProcessor.__init__": ["vocab_size"],
        "LogitsProcessor.forward": ["lm_head", "hidden_states", "skip_gather"],
    },
    "vllm/model_executor/models/interfaces.py": {
        "EagleModelMixin._maybe_add_hidden_state": [
            "aux_hidden_states",
            "layer_idx",
            "hidden_states",
            "residual",
        ],
    },
    "vllm/model_executor/models/utils.py": {
        "make_empty_intermediate_tensors_factory": ["keys", "hidden_size"],
    },
    "vllm/model_executor/models/config.py": {
        "VerifyAndUpdateConfig.verify_and_update_config": ["vllm_config"],
        "VerifyAndUpdateConfig.verify_and_update_model_config": ["model_config"],
    },
    "vllm/config/attention.py": {"AttentionConfig.resolve_indexer_kv_dtype": ["default"]},
    "vllm/distributed/kv_transfer/kv_connector/factory.py": {
        "KVConnectorFactory.register_connector": ["name", "module_path", "class_name"],
    },
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": {
        "KVConnectorBase_V1.__init__": ["vllm_config", "role", "kv_cache_config"],
        "KVConnectorBase_V1.get_required_kvcache_layout": ["vllm_config"],
        "KVConnectorBase_V1.build_kv_connector_stats": ["data"],
        "KVConnectorBase_V1.on_new_request": ["request"],
        "KVConnectorBase_V1.get_loaded_kv_cache_group_ids": ["request"],
        "KVConnectorBase_V1.get_num_new_matched_tokens": ["request", "num_computed_tokens"],
        "KVConnectorBase_V1.update_state_after_alloc": [
            "request",
            "blocks",
            "num_external_tokens",
        ],
        "KVConnectorBase_V1.build_connector_meta": ["scheduler_output"],
        "KVConnectorBase_V1.update_connector_output": ["connector_output"],
        "KVConnectorBase_V1.request_finished": ["request", "block_ids"],
        "SupportsHMA.request_finished_all_groups": ["request", "block_ids"],
        "KVConnectorBase_V1.set_xfer_handshake_metadata": ["metadata"],
        "KVConnectorBase_V1.register_kv_caches": ["kv_caches"],
        "KVConnectorBase_V1.get_handshake_metadata": [],
        "KVConnectorBase_V1.start_load_kv": ["forward_context", "**kwargs"],
        "KVConnectorBase_V1.get_transfer_results": ["finished_req_ids"],
        "KVConnectorBase_V1.get_kv_connector_stats": [],
        "KVConnectorBase_V1.wait_for_layer_load": ["layer_name"],
        "KVConnectorBase_V1.save_kv_layer": [
            *("layer_name", "kv_layer", "attn_metadata", "**kwargs"),
        ],
        "KVConnectorBase_V1.wait_for_save": [],
        "KVConnectorBase_V1.shutdown": [],
        "KVConnectorBase_V1._get_connector_metadata": [],
    },
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": {
        "KVConnectorPromMetrics.__init__": [
            *("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        ],
        "KVConnectorPromMetrics.observe": ["transfer_stats_data", "engine_idx"],
        "KVConnectorStats.aggregate": ["other"],
        "KVConnectorStats.reduce": [],
        "KVConnectorStats.is_empty": [],
    },
    "vllm/v1/metrics/utils.py": {
        "create_metric_per_engine": ["metric", "per_engine_labelvalues"],
    },
    "vllm/v1/core/kv_cache_manager.py": {"KVCacheBlocks.get_block_ids": []},
    "vllm/config/speculative.py": {"SpeculativeConfig.use_eagle": []},
}

FIELDS = {
    "vllm/v1/kv_cache_interface.py": {
        "KVCacheConfig": ["kv_cache_groups", "num_blocks", "transfer_group_ids"],
        "UniformTypeKVCacheSpecs": ["kv_cache_specs"],
        "AttentionSpec": [
            "num_kv_heads",
            "head_size",
            "dtype",
            "kv_quant_mode",
            "state_content_bytes",
        ],
        "KVCacheSpec": ["block_size"],
        "MLAAttentionSpec": ["cache_role"],
        "SparseCacheRole": ["INDEXER"],
        "KVQuantMode": ["NONE", "NVFP4", "FP8_PER_TENSOR"],
    },
    "vllm/v1/kv_cache_layout.py": {"KVCacheLayout": ["BLHNC", "LBHNC"]},
    "vllm/v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": ["input_batch", "discard_request_mask"],
    },
    "vllm/v1/worker/gpu_input_batch.py": {"InputBatch": ["generators", "num_reqs"]},
    "vllm/v1/attention/backend.py": {
        "CommonAttentionMetadata": [
            "query_start_loc",
            "seq_lens",
            "num_actual_tokens",
            "max_seq_len",
            "block_table_tensor",
        ],
        "AttentionCGSupport": ["NEVER"],
    },
    "vllm/forward_context.py": {"ForwardContext": ["attn_metadata", "slot_mapping"]},
    "vllm/config/attention.py": {
        "AttentionConfig": ["backend", "backend_per_kind", "indexer_kv_dtype", "hisparse_config"],
    },
    "vllm/config/cache.py": {
        "CacheConfig": ["block_size", "cache_dtype", "kv_cache_dtype_skip_layers"],
    },
    "vllm/config/parallel.py": {
        "ParallelConfig": [
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_size",
            "nnodes",
            "enable_dbo",
            "enable_expert_parallel",
        ],
    },
    "vllm/config/scheduler.py": {"SchedulerConfig": ["max_num_seqs", "max_num_batched_tokens"]},
    "vllm/config/speculative.py": {"SpeculativeConfig": ["num_speculative_tokens"]},
    "vllm/distributed/parallel_state.py": {"GroupCoordinator": ["cpu_group"]},
    "vllm/config/compilation.py": {
        "CompilationConfig": ["mode", "cudagraph_mode", "static_forward_context"],
        "CompilationMode": ["NONE"],
        "CUDAGraphMode": ["NONE"],
    },
    "vllm/config/vllm.py": {
        "VllmConfig": [
            "model_config",
            "cache_config",
            "parallel_config",
            "attention_config",
            "compilation_config",
            "device_config",
            "lora_config",
            "scheduler_config",
            "speculative_config",
            "quant_config",
            "kernel_config",
            "additional_config",
            "load_config",
            "weight_transfer_config",
            "aux_output_config",
        ],
    },
    "vllm/config/model.py": {
        "ModelConfig": [
            *("hf_config", "hf_text_config", "max_model_len", "dtype", "enable_sleep_mode"),
        ],
    },
    "vllm/config/load.py": {"LoadConfig": ["load_format"]},
    "vllm/config/aux_output.py": {"AuxOutputConfig": ["enable_return_routed_experts"]},
    "vllm/config/kv_transfer.py": {
        "KVTransferConfig": ["kv_connector", "kv_connector_extra_config", "engine_id"],
    },
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": {
        "KVConnectorBase_V1": ["_kv_cache_config", "_cache_hit_source"],
        "KVConnectorTransferResults": ["finished_sending", "finished_recving", "failed_recving"],
        "KVConnectorRole": ["SCHEDULER", "WORKER"],
    },
    "vllm/v1/metrics/cache_hit_source.py": {"CacheHitSource": ["P2P"]},
    "vllm/v1/outputs.py": {"KVConnectorOutput": ["finished_recving"]},
    "vllm/v1/request.py": {
        "Request": [
            *("request_id", "kv_transfer_params", "prompt_token_ids", "status"),
            *("num_prompt_tokens", "num_computed_tokens"),
        ],
        "RequestStatus": ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"],
    },
}

ONLY_IN = {
    "0.33": {
        "vllm/config/attention.py": {"AttentionConfig": ["minimax_m3_indexer_cp"]},
        "vllm/config/kernel.py": {"KernelConfig": ["monokernel"]},
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py": {
            "KVConnectorBase_V1": ["supports_sleep_mode"],
        },
    },
}


@lru_cache(maxsize=256)
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def plugin_imports() -> set[tuple[str, str]]:
    """(module, name) of every `from vllm... import name` in the plugin."""
    found = set()
    for source in PLUGIN.rglob("*.py"):
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module, alias.name) for alias in node.names}
    return found


def module_binds(root: Path, module: str, name: str) -> bool:
    """Whether a module of the sources under `root` binds `name` at its top level."""
    base = root.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.is_file():
        return False
    if base.is_dir() and ((base / name).is_dir() or (base / f"{name}.py").is_file()):
        return True
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom | ast.Import) and any(
            (a.asname or a.name) == name for a in node.names
        ):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        # vllm/__init__.py: names resolved lazily from a dict of strings
        if isinstance(node, ast.Constant) and node.value == name and base.is_dir():
            return True
    return False


def find(tree: ast.Module, qualname: str) -> ast.AST | None:
    """A function, class or method by dotted name, base classes in the same module included."""
    head, *rest = qualname.split(".")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == head:
            if not rest:
                return node
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == rest[0]:
                    return member
            for base in getattr(node, "bases", ()):
                if isinstance(base, ast.Name):
                    inherited = find(tree, f"{base.id}.{rest[0]}")
                    if inherited is not None:
                        return inherited
    return None


def parameters(node: ast.FunctionDef) -> list[str]:
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return names + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def class_attributes(node: ast.ClassDef) -> set[str]:
    names = set()
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            names.add(member.target.id)
        elif isinstance(member, ast.Assign):
            names |= {t.id for t in member.targets if isinstance(t, ast.Name)}
        elif isinstance(member, ast.FunctionDef):
            names.add(member.name)
            for inner in ast.walk(member):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    names.add(inner.attr)
    return names


def asked_of_the_text_model(root: Path) -> set[str]:
    """Attributes that upstream's VL classes read on `self.language_model`."""
    names = set()
    for vendor in ("amd", "nvidia"):
        for node in ast.walk(parse(root / f"vllm/models/minimax_m3/{vendor}/model.py")):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "language_model"
            ):
                names.add(node.attr)
    return names
