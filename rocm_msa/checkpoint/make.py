"""Write a small, complete MiniMax-M3 checkpoint: weights, config, tokenizer, chat template.

`make_checkpoint(directory)` gives what vLLM and transformers load from a public release, in the
public names: safetensors shards with an index, config.json, generation_config.json, tokenizer and
template. Everything is written into a hidden directory next to the target, config.json last, and
renamed at the end, so that a crash leaves nothing that looks whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rocm_msa.checkpoint.names import check_tensors, expected_tensors, linear_shapes
from rocm_msa.checkpoint.quantisation import (
    LAYOUTS,
    quantisation_of,
    quantization_config,
)
from rocm_msa.checkpoint.tokenizer import build_tokenizer, plain_text_ids, write_tokenizer
from rocm_msa.checkpoint.weights import text_weight, vision_shapes, vision_weight
from rocm_msa.config import ModelConfig

ARCHS = ("text", "vl")

# What an NVFP4 expert's activations are taken to reach; ModelOpt calibrates it, here it is fixed.
_NVFP4_INPUT_AMAX = 16.0

_COMMON: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
    "swiglu_limit": 7.0,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "num_mtp_modules": 0,
    "tie_word_embeddings": False,
}
_SPARSE: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 1,
}
# dense_layers is not a key of the config: the first layers with dense attention and a dense MLP.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 128,
        "dense_intermediate_size": 512,
        "num_hidden_layers": 4,
        "dense_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
    },
    "small": {
        "vocab_size": 1536,
        "hidden_size": 512,
        "intermediate_size": 256,
        "dense_intermediate_size": 1024,
        "num_hidden_layers": 6,
        "dense_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "num_local_experts": 16,
        "max_position_embeddings": 32768,
    },
}
_EXTRA_OVERRIDES = ("dense_layers", "rope_scaling", "shared_intermediate_size")
_VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 224,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "rope_theta": 10000.0,
    "vision_segment_max_frames": 4,
    "img_token_compression_config": {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_PREPROCESSOR = {
    "image_processor_type": "MiniMaxM3VLImageProcessor",
    "processor_class": "MiniMaxVLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 224 * 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class CheckpointSummary:
    """What `make_checkpoint` wrote; `weight_bytes` counts tensor data without headers."""

    directory: Path
    size: str
    layout: str
    arch: str
    tensors: int
    weight_bytes: int
    shards: int


def make_checkpoint(
    directory: str | os.PathLike[str],
    size: str = "tiny",
    layout: str = "bf16",
    arch: str = "text",
    seed: int = 0,
    *,
    shards: int = 2,
    **overrides: Any,
) -> CheckpointSummary:
    """Write a checkpoint that a serving engine takes for a small MiniMax-M3.

    Args:
        directory: must not exist, or be empty.
        size: `tiny` (a 5,000-token prompt in seconds on one core) or `small` (the real 16 query
            heads a KV head).
        layout: `bf16`, `mxfp8`, `nvfp4` (routed experts; MXFP8 elsewhere) or `mxfp4`.
        arch: `text`, or `vl` with `text_config` and a one-layer vision tower.
        seed: of the weights; the same seed gives the same unquantised numbers in every layout.
        shards: safetensors files; 1 writes `model.safetensors` without an index.
        overrides: keys of the text config or of its `sparse_attention_config`, and `dense_layers`
            (how many leading layers are dense).

    Raises:
        ValueError: an argument out of range, an unknown override, or a config that cannot be.
        FileExistsError: `directory` is a file or holds something.
        PermissionError: `directory` cannot be written.
    """
    for name, value, known in (
        ("size", size, SIZES),
        ("layout", layout, LAYOUTS),
        ("arch", arch, ARCHS),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards: expected an int of at least 1, got {shards!r}")
    target = Path(directory).absolute()
    text = _text_config(SIZES[size], overrides)
    tokenizer = build_tokenizer(text["vocab_size"])
    plain_ids = plain_text_ids(tokenizer)

    work = _open_work_directory(target)
    try:
        ids = write_tokenizer(work, tokenizer, text["max_position_embeddings"])
        config = _config(text, layout, arch, ids)
        ModelConfig.from_hf(config)
        tensors = _tensors(config, seed, plain_ids)
        total = _write_shards(work, tensors, shards)
        generation = {
            "bos_token_id": ids["bos"],
            "eos_token_id": ids["eos"],
            "pad_token_id": ids["pad"],
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 0.95,
        }
        _write_json(work / "generation_config.json", generation)
        if arch == "vl":
            _write_json(work / "preprocessor_config.json", _PREPROCESSOR)
        if layout == "nvfp4":
            _write_json(work / "hf_quant_config.json", _hf_quant_config(config))
        _write_json(work / "config.json", config)
        _rename(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return CheckpointSummary(target, size, layout, arch, len(tensors), total, shards)


def _text_config(size: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The text config of a size with the overrides in place; layer lists follow the counts."""
    text = {**_COMMON, **size}
    sparse = dict(_SPARSE)
    lists = ("moe_layer_freq", "sparse_attention_freq", "sparse_disable_index_value")
    allowed = {*text, *sparse, *_EXTRA_OVERRIDES, *lists, "sparse_num_index_heads"}
    unknown = sorted(set(overrides) - allowed)
    if unknown:
        raise ValueError(
            f"overrides: unknown {', '.join(unknown)}; expected any of {', '.join(sorted(allowed))}"
        )
    for key, value in overrides.items():
        (sparse if key in sparse else text)[key] = value
    layers, dense = text["num_hidden_layers"], text.pop("dense_layers")
    if not 0 <= dense <= layers:
        raise ValueError(f"dense_layers: expected 0 to num_hidden_layers = {layers}, got {dense}")
    freq = [0] * dense + [1] * (layers - dense)
    text.setdefault("moe_layer_freq", freq)
    text.setdefault("shared_intermediate_size", text["intermediate_size"])
    sparse["sparse_num_index_heads"] = text.pop(
        "sparse_num_index_heads", text["num_key_value_heads"]
    )
    for key in lists[1:]:
        sparse[key] = text.pop(key, freq)
    text["sparse_attention_config"] = sparse
    return text


def _config(text: dict[str, Any], layout: str, arch: str, ids: dict[str, int]) -> dict[str, Any]:
    """config.json: the text config itself, or the VL config around it."""
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "torch_dtype": "bfloat16",
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["pad"],
        **text,
    }
    config = text
    if arch == "vl":
        config = {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "torch_dtype": "bfloat16",
            "image_token_index": ids["image"],
            "video_token_index": ids["video"],
            "image_seq_length": 576,
            "process_image_mode": "dynamic_res",
            "projector_hidden_act": "gelu",
            "projector_hidden_size": text["hidden_size"],
            "multimodal_projector_bias": True,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "text_config": text,
            "vision_config": {**_VISION, "projection_dim": text["hidden_size"]},
        }
    quant = quantization_config(layout, list(linear_shapes(config)), arch == "vl")
    if quant is not None:
        config["quantization_config"] = quant
    return config


def _hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's second copy of the recipe, which other engines read."""
    quant = config["quantization_config"]
    return {
        "producer": quant["producer"],
        "quantization": {
            "quant_algo": quant["quant_algo"],
            "kv_cache_quant_algo": None,
            "exclude_modules": quant["ignore"],
            "quantized_layers": quant["quantized_layers"],
        },
    }


def _tensors(config: Mapping[str, Any], seed: int, plain_ids: list[int]) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, quantised, in the order of the table."""
    expected = expected_tensors(config)
    modules = linear_shapes(config)
    algorithm = quantisation_of(config).algorithm

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return text_weight(name, shape, seed, config, plain_ids)

    out: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for name, spec in expected.items():
        module = name.rpartition(".")[0]
        if module not in modules or algorithm(module) == "bf16":
            out[name] = value(name, spec.shape).to(spec.dtype)
        elif module not in done:
            done.add(module)
            out.update(_quantised(module, modules[module], algorithm(module), value))
    if "vision_config" in config:
        for name, shape in vision_shapes(config).items():
            out[name] = vision_weight(name, shape, seed)
    check_tensors(expected, out)
    return out


def _quantised(
    module: str,
    shape: tuple[int, int],
    algorithm: str,
    value: Callable[[str, tuple[int, ...]], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The stored parts of one quantised linear, from its weight rounded to bf16 first."""
    from rocm_msa.formats import mxfp, nvfp4

    weight = value(f"{module}.weight", shape).to(torch.bfloat16).float()
    if algorithm == "mxfp8":
        data, scales = mxfp.mxfp8_quantize(weight)
        return {f"{module}.weight": data, f"{module}.weight_scale_inv": scales}
    if algorithm == "mxfp4":
        data, scales = mxfp.mxfp4_quantize(weight)
        return {f"{module}.weight": data, f"{module}.weight_scale": scales}
    # NVFP4: w1 and w3 are one fused GEMM and must share their global scale.
    amax = weight.abs().max()
    parent, _, owner = module.rpartition(".")
    other = {"w1": "w3", "w3": "w1"}.get(owner)
    if other:
        amax = torch.maximum(amax, value(f"{parent}.{other}.weight", shape).bfloat16().abs().max())
    scale_2 = torch.tensor(nvfp4.global_scale_from_amax(amax), dtype=torch.float32)
    data, scales = nvfp4.quantize(weight, global_scale=scale_2)
    input_scale = nvfp4.global_scale_from_amax(_NVFP4_INPUT_AMAX)
    return {
        f"{module}.weight": data,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": scale_2,
        f"{module}.input_scale": torch.tensor(input_scale, dtype=torch.float32),
    }


def _write_shards(work: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> int:
    """Write the shards of about equal size and their index; returns the bytes of tensor data."""
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    total = sum(sizes.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    before = 0
    for name, tensor in tensors.items():
        parts[min(shards - 1, before * shards // max(total, 1))][name] = tensor.contiguous()
        before += sizes[name]
    if shards == 1:
        save_file(parts[0], work / "model.safetensors", metadata={"format": "pt"})
        return total
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, work / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(work / "model.safetensors.index.json", index)
    return total


def _open_work_directory(target: Path) -> Path:
    """A fresh hidden directory beside the target, on the same file system."""
    if target.exists():
        if not target.is_dir():
            raise FileExistsError(f"directory: {target} is a file")
        if any(target.iterdir()):
            raise FileExistsError(f"directory: {target} is not empty")
        if not os.access(target, os.W_OK):
            raise PermissionError(f"directory: {target} cannot be written")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        kind = PermissionError if isinstance(error, PermissionError) else OSError
        raise kind(f"directory: {target} cannot be written: {error}") from error


def _rename(work: Path, target: Path) -> None:
    work.chmod(0o755)
    for path in work.iterdir():
        path.chmod(0o644)
    try:
        os.rename(work, target)
    except OSError as error:
        raise FileExistsError(
            f"directory: {target} was filled by somebody else meanwhile: {error}"
        ) from error


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
