"""Checkpoints of the small layer in every layout, as a mapping of tensors."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from mono_kernel import reading, weights
from mono_kernel.shapes import Shape
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.read import open_checkpoint
from rocm_msa.config import ModelConfig
from tests.mono_kernel.cases import EXPERTS, HIDDEN, INTERMEDIATE, KV_HEADS, Q_HEADS

PREFIX = "model.layers.0"
LAYOUTS = ("mxfp8", "mxfp4", "nvfp4")
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": Q_HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "num_hidden_layers": 1,
    "dense_layers": 0,
    "vocab_size": 768,
}


def write(directory: Path, layout: str, seed: int = 0, **changes) -> None:
    make_checkpoint(directory, "tiny", layout, seed=seed, **(SIZES | changes))


@functools.cache
def checkpoint(
    layout: str, seed: int = 0, kv_heads: int = KV_HEADS
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """(config, every tensor of a layer) of a checkpoint with one sparse layer."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "model", layout, seed, num_key_value_heads=kv_heads)
        found = open_checkpoint(Path(folder) / "model")
        tensors = {n: t.clone() for n, t in found if n.startswith(PREFIX)}
        return ModelConfig.from_json(Path(folder) / "model"), tensors


def shape_of(layout: str, tp: int = 1, kv_heads: int = KV_HEADS) -> Shape:
    model, tensors = checkpoint(layout, kv_heads=kv_heads)
    return Shape.of(model, tp, reading.formats_of(tensors, PREFIX))


@functools.cache
def layer_weights(
    layout: str, tp: int = 1, rank: int = 0, layer: int = 0, kv_heads: int = KV_HEADS
) -> weights.LayerWeights:
    """Of one of several layers of the same shape."""
    shape = shape_of(layout, tp, kv_heads)
    return reading.read_layer(shape, rank, checkpoint(layout, layer, kv_heads)[1], PREFIX)
