"""Formats of the layers' weights as a checkpoint's config says them."""

from __future__ import annotations

import dataclasses

import pytest

from mono_kernel.checkpoint_formats import LAYOUTS, formats_of_config, mono_layers
from mono_kernel.shapes import Formats
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.checkpoint.names import linear_shapes
from rocm_msa.checkpoint.quantisation import quantization_config
from rocm_msa.errors import ConfigError

SPARSE = tuple(range(3, 60))
CONFIG = {
    "num_hidden_layers": 60,
    "hidden_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "num_local_experts": 128,
    "n_shared_experts": 1,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": {
        "sparse_attention_freq": [0] * 3 + [1] * 57,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
    },
}


def config(layout: str, vl: bool = False) -> dict:
    plain = {"text_config": CONFIG} if vl else CONFIG
    return plain | {"quantization_config": quantization_config(layout, [*linear_shapes(plain)], vl)}


@pytest.mark.parametrize("vl", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, vl):
    assert formats_of_config(config(layout, vl), MINIMAX_M3) == LAYOUTS[layout]


def test_a_checkpoint_without_quantisation_is_bf16():
    assert formats_of_config(CONFIG, MINIMAX_M3) == Formats("bf16", "bf16", "bf16")


def test_without_shared_experts_their_format_is_of_no_matter():
    alone = dataclasses.replace(MINIMAX_M3, shared_experts=0)
    assert formats_of_config(config("nvfp4"), alone) == Formats("mxfp8", "nvfp4", "nvfp4")


def test_layers_are_those_with_sparse_attention_and_experts():
    assert mono_layers(MINIMAX_M3) == SPARSE
    dense_mlp = (*MINIMAX_M3.moe_layers[:10], False, *MINIMAX_M3.moe_layers[11:])
    mixed = dataclasses.replace(MINIMAX_M3, moe_layers=dense_mlp)
    assert mono_layers(mixed) == tuple(n for n in SPARSE if n != 10)


def test_linears_of_a_kind_in_different_formats_are_named():
    mixed = config("mxfp8")
    mixed["quantization_config"]["ignored_layers"] += ["layers.7.self_attn.o_proj", "layers.2."]
    with pytest.raises(ConfigError) as error:
        formats_of_config(mixed, MINIMAX_M3)
    assert error.value.reasons == (
        "model.layers.7.self_attn.o_proj: expected mxfp8, as model.layers.3.self_attn.q_proj, "
        "got bf16",
    )
