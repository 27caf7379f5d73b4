"""Checkpoint names -> parameters, strictly: every tensor must land, every parameter be filled.

Fused parameters (qkv_proj, gate_up_proj, routed experts) are filled shard by shard; the shards that
came are remembered, so that a missing one is named as the checkpoint names it.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.errors import ConfigError

logger = logging.getLogger("vllm.rocm_msa")

_STACKED = (
    (".qkv_proj.", ".q_proj.", "q"),
    (".qkv_proj.", ".k_proj.", "k"),
    (".qkv_proj.", ".v_proj.", "v"),
    (".qkv_proj.", ".index_q_proj.", "index_q"),
    (".qkv_proj.", ".index_k_proj.", "index_k"),
    (".gate_up_proj.", ".gate_proj.", 0),
    (".gate_up_proj.", ".up_proj.", 1),
)
_KV_SCALE = re.compile(r"(.*\.self_attn)\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
_IGNORED = re.compile(r"(^|\.)mtp\.|rotary_emb\.inv_freq$")
_NEEDED = (".weight", ".e_score_correction_bias")
"""Endings of tensors that a checkpoint has to have; what else vLLM's quantisation code declares
(input scales, for one) is not in every public checkpoint."""
_NAMES_SHOWN = 10


def load_text_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load `weights` into a `RocmMsaM3ForCausalLM`.

    Returns:
        names of the loaded parameters.

    Raises:
        ConfigError: extra tensors, missing tensors or wrong shapes, by name.
    """
    params = dict(model.named_parameters())
    experts = {ckpt: rest for *rest, ckpt in _expert_index(model)}
    shards: dict[str, set] = defaultdict(set)
    extra: list[str] = []
    scaled_layers: set[str] = set()
    for name, tensor in weights:
        if _IGNORED.search(name):
            continue
        if scale := _KV_SCALE.match(name):
            _set_kv_scale(model, scale[1], scale[2], tensor)
            scaled_layers.add(scale[1])
            continue
        name = name.replace("weight_scale_inv", "weight_scale")
        target = _target(name, params, experts)
        if target is None:
            extra.append(name)
            continue
        param_name, shard = target
        _load_one(params[param_name], tensor, name, shard)
        shards[param_name].add(shard)
    if not scaled_layers:
        logger.info("rocm-msa: no KV cache scales in the checkpoint, all are 1.0")
    missing = sorted(_missing(params, shards, model))
    scales = [name for name in missing if not name.endswith(_NEEDED)]
    if scales:
        logger.warning("rocm-msa: not in the checkpoint, left as vLLM made them: %s", scales)
    _raise(extra, [name for name in missing if name.endswith(_NEEDED)])
    return set(shards)


def _expert_index(model: nn.Module):
    """(param part, expert, shard, checkpoint part) of every routed expert tensor."""
    for param_part, ckpt_part, expert, shard in model.get_expert_mapping():
        yield param_part, expert, shard, ckpt_part


def _target(name: str, params: dict, experts: dict) -> tuple[str, object] | None:
    """(parameter, shard) that a checkpoint tensor goes to."""
    if match := re.search(r"experts\.\d+\.w[123]\.", name):
        entry = experts.get(match[0])
        if entry is None:
            return None
        part, expert, shard = entry
        param_name = name.replace(match[0], part)
        return (param_name, (expert, shard)) if param_name in params else None
    for part, ckpt_part, shard in _STACKED:
        if ckpt_part in name:
            param_name = name.replace(ckpt_part, part)
            known = param_name in params and _takes(param_name, shard, params)
            return (param_name, shard) if known else None
    return (name, None) if name in params else None


def _load_one(param: nn.Parameter, tensor: torch.Tensor, name: str, shard: object) -> None:
    loader = getattr(param, "weight_loader", default_weight_loader)
    try:
        if isinstance(shard, tuple):
            expert, expert_shard = shard
            loader(param, tensor, name, shard_id=expert_shard, expert_id=expert)
        elif shard is None:
            loader(param, tensor)
        else:
            loader(param, tensor, shard)
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            "checkpoint does not fit the config",
            [f"{name}: shape {list(tensor.shape)} into {list(param.shape)}: {error}"],
        ) from error


def _missing(params: dict, shards: dict, model: nn.Module):
    """Checkpoint names that never came."""
    num_experts = model.serving.model.num_experts
    for name in params:
        came = shards.get(name, set())
        if ".routed_experts.w13_" in name or ".routed_experts.w2_" in name:
            wanted = ("w1", "w3") if "w13_" in name else ("w2",)
            suffix = name.split(".routed_experts.")[1].split("_", 1)[1]
            for expert in range(num_experts):
                for shard in wanted:
                    if (expert, shard) not in came:
                        base = name.split("routed_experts.")[0]
                        yield f"{base}{expert}.{shard}.{suffix}"
        elif any(part in name for part, _, _ in _STACKED):
            for part, ckpt_part, shard in _STACKED:
                if part in name and shard not in came and _takes(name, shard, params):
                    yield name.replace(part, ckpt_part)
        elif not came:
            yield name


def _takes(param_name: str, shard: object, params: dict) -> bool:
    """Whether a fused parameter has this shard: index projections are in sparse layers only."""
    if not str(shard).startswith("index"):
        return True
    return f"{param_name.split('.qkv_proj.')[0]}.index_q_norm.weight" in params


def _raise(extra: list[str], missing: list[str]) -> None:
    reasons = []
    for kind, names in (("missing", missing), ("unexpected", extra)):
        reasons += [f"{kind} tensor {name}" for name in names[:_NAMES_SHOWN]]
        if len(names) > _NAMES_SHOWN:
            reasons.append(f"and {len(names) - _NAMES_SHOWN} more {kind} tensors")
    if reasons:
        raise ConfigError("checkpoint does not match the model config", reasons)


def _set_kv_scale(model: nn.Module, layer: str, side: str, tensor: torch.Tensor) -> None:
    attention = model.get_submodule(layer)
    if attention.serving.main_dtype is CacheDType.BF16:
        logger.warning("rocm-msa: %s.%s_scale is not used: the main cache is bf16", layer, side)
    else:
        attention.kv_scales[side] = float(tensor)
