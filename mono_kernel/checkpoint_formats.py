"""How a checkpoint stores the weights of its sparse MoE layers, by its config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mono_kernel.shapes import Formats
from rocm_msa.checkpoint.quantisation import quantisation_of
from rocm_msa.config import ModelConfig
from rocm_msa.errors import Refusals, expect

LAYOUTS = {
    "mxfp8": Formats("mxfp8", "mxfp8", "mxfp8"),
    "mxfp4": Formats("bf16", "mxfp4", "mxfp4"),
    "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8"),
}
"""Of the checkpoint layouts that the kernel reads; see rocm_msa/checkpoint/quantisation.py."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj", "o_proj")
_ROUTED = ("w1", "w2", "w3")
_SHARED = ("gate_proj", "up_proj", "down_proj")


def mono_layers(model: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers that the kernel is for: sparse attention, then experts."""
    both = zip(model.sparse_layers, model.moe_layers, strict=True)
    return tuple(number for number, flags in enumerate(both) if all(flags))


def formats_of_config(config: Mapping[str, Any], model: ModelConfig) -> Formats:
    """Formats of the layers in `mono_layers`, which must be alike.

    Args:
        config: the HF config, with its `quantization_config`; text or VL. model: read from it.

    Raises:
        NotImplementedError: a quantisation that the package does not read.
        ConfigError: linears of one kind in different formats, by name.
    """
    quantisation = quantisation_of(config)
    refusals = Refusals("the mono kernel needs one format a kind of linear")
    first: dict[str, tuple[str, str]] = {}
    for kind, name in _linears(model):
        found = quantisation.algorithm(name)
        where, wanted = first.setdefault(kind, (name, found))
        refusals.check(found == wanted, expect(name, f"{wanted}, as {where}", found))
    refusals.raise_if_any()
    routed = first["routed"][1]
    shared = first["shared"][1] if model.shared_experts else routed
    return Formats(first["attention"][1], routed, shared)


def _linears(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(kind, name) of every linear of the layers."""
    for number in mono_layers(model):
        layer, moe = f"model.layers.{number}", f"model.layers.{number}.block_sparse_moe"
        yield from (("attention", f"{layer}.self_attn.{name}") for name in _ATTENTION)
        for expert in range(model.num_experts):
            yield from (("routed", f"{moe}.experts.{expert}.{name}") for name in _ROUTED)
        if model.shared_experts:
            yield from (("shared", f"{moe}.shared_experts.{name}") for name in _SHARED)
