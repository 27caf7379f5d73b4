"""The numbers of a test checkpoint: seeded, the same bits everywhere, and worth comparing.

Each tensor has its own generator, seeded by (seed, text name), so that a tensor is the same in
every layout, architecture and order. The values are near-Gaussian sums of four uniform 16-bit
integers: integer arithmetic and one fp32 product, no libm, hence the same on every machine.

The scales are a compromise that was measured (tests/test_reference_model.py holds it in place).
Every part matters: without attention, without the experts, or with dense instead of sparse
attention the logits move by many times the rounding noise; index heads choose different blocks;
all experts are used; norm weights are not zero. Yet the model is not chaotic: last-bit noise,
which flips a few NVFP4 codes, blocks and experts, leaves most top-2 margins far above its effect.
The ids that are not plain text are kept small in `lm_head` so that generated text can be read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from rocm_msa.checkpoint.quantisation import canonical, text_config

# Standard deviation of the sum of four uniform integers in [0, 65536).
_SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)

# Norm weights: (mean, spread). The norms multiply by 1 + weight.
_NORMS = {
    "q_norm": (0.15, 0.2),
    "k_norm": (0.15, 0.2),
    "index_q_norm": (0.2, 0.2),
    "index_k_norm": (0.2, 0.2),
    "input_layernorm": (0.0, 0.1),
    "post_attention_layernorm": (0.0, 0.1),
    "norm": (0.0, 0.1),
}
# Linears: gain over 1/sqrt(K).
_GAINS = {
    "o_proj": 1.0,
    "down_proj": 0.3,
    "w2": 0.12,
    "gate": 1.5,
    "lm_head": 3.0,
}
_BIAS_SPREAD = 0.1
_MARKUP_HEAD_GAIN = 0.1


def gaussian(shape: tuple[int, ...], seed: int, name: str) -> torch.Tensor:
    """fp32 near-Gaussian values of unit variance, the same bits on every machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    count = math.prod(shape)
    parts = torch.randint(0, 65536, (4, count), generator=generator, dtype=torch.int32)
    centred = 2 * parts.sum(dim=0) - 4 * 65535
    return (centred.to(torch.float32) * (1 / (2 * _SUM_STD))).reshape(shape)


def text_weight(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    config: Mapping[str, Any],
    plain_ids: Collection[int],
) -> torch.Tensor:
    """The fp32 values of one unquantised text tensor, before the rounding to its dtype.

    Args:
        name: the tensor's name, with or without the VL prefix.
        shape: its unquantised shape.
        plain_ids: the token ids that `lm_head` gives its full scale.
    """
    plain = canonical(name)
    values = gaussian(shape, seed, plain)
    if plain.endswith("e_score_correction_bias"):
        return values * _BIAS_SPREAD
    owner = plain.removesuffix(".weight").rpartition(".")[2]
    if owner in _NORMS:
        mean, spread = _NORMS[owner]
        return mean + spread * values
    if owner == "embed_tokens":
        return values
    values = values * (_GAINS.get(owner, 1.0) / math.sqrt(shape[1]))
    if owner == "lm_head":
        gain = torch.full((text_config(config)["vocab_size"], 1), _MARKUP_HEAD_GAIN)
        gain[list(plain_ids)] = 1.0
        values = values * gain
    return values


def vision_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The vision tensors that vLLM's VL class loads, in the public names: name -> shape."""
    vision = config["vision_config"]
    hidden, size = vision["hidden_size"], vision["intermediate_size"]
    compression = vision["img_token_compression_config"]
    text_hidden = text_config(config)["hidden_size"]
    middle = config["projector_hidden_size"]
    patch = (compression["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    base = "vision_tower.vision_model"
    out: dict[str, tuple[int, ...]] = {
        f"{base}.embeddings.patch_embedding.weight": (hidden, vision["num_channels"], *patch)
    }

    def affine(name: str, *shape: int) -> None:
        out[f"{name}.weight"] = shape
        out[f"{name}.bias"] = shape[:1]

    affine(f"{base}.pre_layrnorm", hidden)
    for layer in range(vision["num_hidden_layers"]):
        block = f"{base}.encoder.layers.{layer}"
        affine(f"{block}.layer_norm1", hidden)
        affine(f"{block}.layer_norm2", hidden)
        for proj in ("q_proj", "k_proj", "v_proj", "out_proj"):
            affine(f"{block}.self_attn.{proj}", hidden, hidden)
        affine(f"{block}.mlp.fc1", size, hidden)
        affine(f"{block}.mlp.fc2", hidden, size)
    affine("multi_modal_projector.linear_1", middle, hidden)
    affine("multi_modal_projector.linear_2", text_hidden, middle)
    merged = text_hidden * compression["spatial_merge_size"] ** 2
    affine("patch_merge_mlp.linear_1", middle, merged)
    affine("patch_merge_mlp.linear_2", text_hidden, middle)
    return out


def vision_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The values of one vision tensor, in its public dtype."""
    values = gaussian(shape, seed, name)
    if "patch_embedding" in name:
        return values / math.sqrt(math.prod(shape[1:]))
    if "norm" in name and name.endswith(".weight"):
        values = 1 + 0.1 * values
    elif name.endswith(".bias"):
        values = 0.02 * values
    else:
        values = values / math.sqrt(shape[1])
    return values.to(torch.bfloat16)
