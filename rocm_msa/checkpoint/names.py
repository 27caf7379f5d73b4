"""The tensors a MiniMax-M3 checkpoint holds, in the public checkpoint's names.

From an HF config (text or VL, unquantised or quantised) to name -> (shape, dtype), and the check
of what a directory really holds against it. A VL checkpoint has `language_model.` before every
text name. Vision tensors (`vision_tower.`, `multi_modal_projector.`, `patch_merge_mlp.`), `mtp.`
tensors and calibrated `k_scale` / `v_scale` are outside of the table: recognised, neither required
nor refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from rocm_msa.checkpoint.quantisation import (
    MX_GROUP,
    NVFP4_GROUP,
    VL_PREFIX,
    is_outside,
    is_vl,
    quantisation_of,
    text_config,
)

BF16 = torch.bfloat16
FP32 = torch.float32
E4M3 = torch.float8_e4m3fn
U8 = torch.uint8
E8M0 = torch.float8_e8m0fnu

_SHOWN = 10
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor.

    Attributes:
        shape: a scalar, (), may also be stored as [1].
        dtype: the public checkpoint's dtype, the one that `make_checkpoint` writes.
        also: other dtypes that load just as well.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    also: tuple[torch.dtype, ...] = ()

    def accepts(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        same_shape = shape == self.shape or (self.shape == () and shape == (1,))
        return same_shape and (dtype == self.dtype or dtype in self.also)


def sparse_layers(config: Mapping[str, Any]) -> list[bool]:
    """Per layer: has it the index branch (sparse attention)?"""
    text = text_config(config)
    sparse = text.get("sparse_attention_config") or {}
    return _flags(text, sparse.get("sparse_attention_freq"), "sparse_attention_freq", False)


def moe_layers(config: Mapping[str, Any]) -> list[bool]:
    """Per layer: is its MLP a mixture of experts (no `moe_layer_freq` means all are)?"""
    text = text_config(config)
    return _flags(text, text.get("moe_layer_freq"), "moe_layer_freq", True)


def _flags(text: Mapping[str, Any], freq: list[int] | None, key: str, default: bool) -> list[bool]:
    layers = text["num_hidden_layers"]
    if freq is None:
        return [default] * layers
    if len(freq) != layers:
        raise ValueError(f"{key}: expected {layers} entries (num_hidden_layers), got {len(freq)}")
    return [bool(f) for f in freq]


def linear_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Every linear of the layers that can be quantised: module in file naming -> (N, K)."""
    text = text_config(config)
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    q_size = text["num_attention_heads"] * head_dim
    kv_size = text["num_key_value_heads"] * head_dim
    sparse = text.get("sparse_attention_config") or {}
    out: dict[str, tuple[int, int]] = {}

    def mlp(prefix: str, size: int, gate: str, up: str, down: str) -> None:
        out[f"{prefix}.{gate}"] = (size, hidden)
        out[f"{prefix}.{up}"] = (size, hidden)
        out[f"{prefix}.{down}"] = (hidden, size)

    for layer, (is_sparse, is_moe) in enumerate(
        zip(sparse_layers(config), moe_layers(config), strict=True)
    ):
        base = f"{_prefix(config)}model.layers.{layer}"
        out[f"{base}.self_attn.q_proj"] = (q_size, hidden)
        out[f"{base}.self_attn.k_proj"] = (kv_size, hidden)
        out[f"{base}.self_attn.v_proj"] = (kv_size, hidden)
        out[f"{base}.self_attn.o_proj"] = (hidden, q_size)
        if is_sparse:
            dim = sparse["sparse_index_dim"]
            heads = sparse["sparse_num_index_heads"]
            out[f"{base}.self_attn.index_q_proj"] = (heads * dim, hidden)
            out[f"{base}.self_attn.index_k_proj"] = (dim, hidden)
        if not is_moe:
            size = text["dense_intermediate_size"]
            mlp(f"{base}.mlp", size, "gate_proj", "up_proj", "down_proj")
            continue
        moe = f"{base}.block_sparse_moe"
        for expert in range(text["num_local_experts"]):
            mlp(f"{moe}.experts.{expert}", text["intermediate_size"], "w1", "w3", "w2")
        shared = shared_size(text)
        if shared:
            mlp(f"{moe}.shared_experts", shared, "gate_proj", "up_proj", "down_proj")
    return out


def shared_size(text: Mapping[str, Any]) -> int:
    """Width of the shared expert(s), 0 without any."""
    count = text.get("n_shared_experts") or 0
    return count * (text.get("shared_intermediate_size") or text["intermediate_size"])


def _prefix(config: Mapping[str, Any]) -> str:
    return VL_PREFIX if is_vl(config) else ""


def expected_tensors(config: Mapping[str, Any], found: Iterable[str] = ()) -> dict[str, TensorSpec]:
    """Every text tensor that a checkpoint with this config holds.

    Args:
        config: the HF config as a dict.
        found: the names that a checkpoint has. MXFP8 scales are called `weight_scale_inv` in
            MiniMax's files and `weight_scale` in ModelOpt's; the spelling found is expected.

    Raises:
        ValueError: a size is missing from the config, or does not divide into scale groups.
    """
    text = text_config(config)
    missing = [key for key in _REQUIRED if text.get(key) is None]
    if missing:
        raise ValueError(f"config: these keys are missing: {', '.join(missing)}")
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    prefix = _prefix(config)
    quantisation = quantisation_of(config)
    mxfp8_scale = _mxfp8_scale_name(found, quantisation.algorithm)

    out = {f"{prefix}model.embed_tokens.weight": TensorSpec((vocab, hidden), BF16)}
    for module, shape in linear_shapes(config).items():
        algorithm = quantisation.algorithm(module)
        for suffix, spec in _parts(module, shape, algorithm, mxfp8_scale):
            out[f"{module}.{suffix}"] = spec
    head_dim = text["head_dim"]
    sparse = text.get("sparse_attention_config") or {}
    for layer, (is_sparse, is_moe) in enumerate(
        zip(sparse_layers(config), moe_layers(config), strict=True)
    ):
        base = f"{prefix}model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{base}.{norm}.weight"] = TensorSpec((hidden,), BF16)
        for norm in ("q_norm", "k_norm"):
            out[f"{base}.self_attn.{norm}.weight"] = TensorSpec((head_dim,), BF16)
        if is_sparse:
            for norm in ("index_q_norm", "index_k_norm"):
                spec = TensorSpec((sparse["sparse_index_dim"],), BF16)
                out[f"{base}.self_attn.{norm}.weight"] = spec
        if is_moe:
            experts = text["num_local_experts"]
            moe = f"{base}.block_sparse_moe"
            out[f"{moe}.gate.weight"] = TensorSpec((experts, hidden), FP32, (BF16,))
            if text.get("use_routing_bias"):
                out[f"{moe}.e_score_correction_bias"] = TensorSpec((experts,), FP32, (BF16,))
    out[f"{prefix}model.norm.weight"] = TensorSpec((hidden,), BF16)
    if not text.get("tie_word_embeddings"):
        head = f"{prefix}lm_head"
        for suffix, spec in _parts(
            head, (vocab, hidden), quantisation.algorithm(head), mxfp8_scale
        ):
            out[f"{head}.{suffix}"] = spec
    return out


def _mxfp8_scale_name(found: Iterable[str], algorithm: Callable[[str], str]) -> str:
    for name in found:
        module, _, suffix = name.rpartition(".")
        if suffix in ("weight_scale", "weight_scale_inv") and algorithm(module) == "mxfp8":
            return suffix
    return "weight_scale_inv"


def _parts(
    module: str, shape: tuple[int, int], algorithm: str, mxfp8_scale: str
) -> Iterator[tuple[str, TensorSpec]]:
    n, k = shape
    group = {"bf16": 1, "nvfp4": NVFP4_GROUP}.get(algorithm, MX_GROUP)
    if k % group:
        raise ValueError(
            f"{module}: expected an input size that is a multiple of {group} for {algorithm}, "
            f"got {k}"
        )
    if algorithm == "bf16":
        yield "weight", TensorSpec((n, k), BF16)
    elif algorithm == "mxfp8":
        yield "weight", TensorSpec((n, k), E4M3)
        yield mxfp8_scale, TensorSpec((n, k // MX_GROUP), U8, (E8M0,))
    elif algorithm == "nvfp4":
        yield "weight", TensorSpec((n, k // 2), U8)
        yield "weight_scale", TensorSpec((n, k // NVFP4_GROUP), E4M3)
        yield "weight_scale_2", TensorSpec((), FP32)
        yield "input_scale", TensorSpec((), FP32)
    elif algorithm == "mxfp4":
        yield "weight", TensorSpec((n, k // 2), U8)
        yield "weight_scale", TensorSpec((n, k // MX_GROUP), U8, (E8M0,))
    else:
        raise ValueError(f"{module}: unknown algorithm {algorithm!r}")


def check_tensors(
    expected: Mapping[str, TensorSpec],
    found: Mapping[str, torch.Tensor | tuple[tuple[int, ...], torch.dtype]],
) -> None:
    """Compare what a checkpoint holds with the table; all faults in one error.

    Args:
        expected: from `expected_tensors`.
        found: name -> tensor, or name -> (shape, dtype). Vision and MTP names are passed over.

    Raises:
        ValueError: names every missing, extra and wrong tensor, the first ten of each kind.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not is_outside(name)]
    wrong = []
    for name, spec in expected.items():
        if name not in found:
            continue
        shape, dtype = _shape_and_dtype(found[name])
        if not spec.accepts(shape, dtype):
            wrong.append(
                f"{name} (expected {list(spec.shape)} {_short(spec.dtype)}, "
                f"got {list(shape)} {_short(dtype)})"
            )
    lines = [
        _list(kind, names)
        for kind, names in (("missing", missing), ("extra", extra), ("wrong", wrong))
        if names
    ]
    if lines:
        raise ValueError("the checkpoint does not match its config:\n" + "\n".join(lines))


def _shape_and_dtype(item: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(item, torch.Tensor):
        return tuple(item.shape), item.dtype
    return tuple(item[0]), item[1]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(kind: str, names: list[str]) -> str:
    shown = "".join(f"\n    {name}" for name in names[:_SHOWN])
    more = f"\n    ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"  {kind} ({len(names)}):{shown}{more}"
