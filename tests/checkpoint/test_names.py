"""The tensor table: public names, shapes and dtypes; and the check against it."""

from __future__ import annotations

import pytest
import torch

from rocm_msa.checkpoint import TensorSpec, check_tensors, expected_tensors, quantisation_of
from rocm_msa.checkpoint.names import linear_shapes
from rocm_msa.checkpoint.quantisation import LAYOUTS, is_outside, quantization_config

BF16, FP32, U8, E4M3 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn


def public_config(layout: str = "bf16", vl: bool = True) -> dict:
    """The released model's sizes (config.json of MiniMax-M3)."""
    freq = [0] * 3 + [1] * 57
    text = {
        "vocab_size": 200064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 128,
        "n_shared_experts": 1,
        "use_routing_bias": True,
        "moe_layer_freq": freq,
        "tie_word_embeddings": False,
        "sparse_attention_config": {
            "sparse_attention_freq": freq,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
        },
    }
    config = {"text_config": text} if vl else dict(text)
    quant = quantization_config(layout, list(linear_shapes(config)), vl)
    if quant:
        config["quantization_config"] = quant
    return config


def test_the_released_checkpoints_counts_and_bytes():
    """23,416 tensors are in the public index, 523 of them vision; 8 bytes a gate entry are fp32."""
    table = expected_tensors(public_config())
    assert len(table) == 23416 - 523
    assert sum(".layers.0." in n for n in table) == 11
    assert sum(".layers.3." in n for n in table) == 401
    mxfp8 = expected_tensors(public_config("mxfp8"))
    assert len(mxfp8) == 45838 - 523


@pytest.mark.parametrize("vl", [False, True])
def test_names_shapes_and_dtypes_of_the_released_model(vl):
    prefix = "language_model." if vl else ""
    table = expected_tensors(public_config(vl=vl))
    layer = f"{prefix}model.layers.3"
    for name, shape, dtype in (
        (f"{prefix}model.embed_tokens.weight", (200064, 6144), BF16),
        (f"{prefix}lm_head.weight", (200064, 6144), BF16),
        (f"{prefix}model.norm.weight", (6144,), BF16),
        (f"{prefix}model.layers.0.mlp.down_proj.weight", (6144, 12288), BF16),
        (f"{layer}.self_attn.q_proj.weight", (8192, 6144), BF16),
        (f"{layer}.self_attn.o_proj.weight", (6144, 8192), BF16),
        (f"{layer}.self_attn.index_q_proj.weight", (512, 6144), BF16),
        (f"{layer}.self_attn.index_k_proj.weight", (128, 6144), BF16),
        (f"{layer}.self_attn.index_k_norm.weight", (128,), BF16),
        (f"{layer}.block_sparse_moe.gate.weight", (128, 6144), FP32),
        (f"{layer}.block_sparse_moe.e_score_correction_bias", (128,), FP32),
        (f"{layer}.block_sparse_moe.experts.127.w2.weight", (6144, 3072), BF16),
        (f"{layer}.block_sparse_moe.shared_experts.up_proj.weight", (3072, 6144), BF16),
    ):
        assert table[name][:2] == (shape, dtype), name
    assert f"{prefix}model.layers.2.self_attn.index_q_proj.weight" not in table
    assert f"{prefix}model.layers.2.block_sparse_moe.gate.weight" not in table


def test_quantised_layouts():
    layer = "language_model.model.layers.3"
    q, w1 = f"{layer}.self_attn.q_proj", f"{layer}.block_sparse_moe.experts.0.w1"
    shared = f"{layer}.block_sparse_moe.shared_experts.gate_proj"

    mxfp8 = expected_tensors(public_config("mxfp8"))
    assert mxfp8[f"{q}.weight"].dtype == E4M3
    assert mxfp8[f"{q}.weight_scale_inv"][:2] == ((8192, 192), U8)
    assert mxfp8[f"{w1}.weight_scale_inv"][:2] == ((3072, 192), U8)
    assert mxfp8["language_model.lm_head.weight"].dtype == BF16

    nvfp4 = expected_tensors(public_config("nvfp4"))
    assert nvfp4[f"{w1}.weight"][:2] == ((3072, 3072), U8)
    assert nvfp4[f"{w1}.weight_scale"][:2] == ((3072, 384), E4M3)
    assert nvfp4[f"{w1}.weight_scale_2"][:2] == ((), FP32)
    assert nvfp4[f"{w1}.input_scale"][:2] == ((), FP32)
    assert nvfp4[f"{shared}.weight"].dtype == E4M3
    assert nvfp4[f"{q}.weight"].dtype == E4M3

    mxfp4 = expected_tensors(public_config("mxfp4"))
    assert mxfp4[f"{w1}.weight"][:2] == ((3072, 3072), U8)
    assert mxfp4[f"{w1}.weight_scale"][:2] == ((3072, 192), U8)
    assert mxfp4[f"{shared}.weight"].dtype == U8
    assert mxfp4[f"{q}.weight"].dtype == BF16
    for table in (mxfp8, nvfp4, mxfp4):
        assert table[f"{layer}.block_sparse_moe.gate.weight"].dtype == FP32


def test_the_spelling_of_mxfp8_scales_follows_the_files():
    q = "language_model.model.layers.0.self_attn.q_proj"
    table = expected_tensors(public_config("nvfp4"), found=[f"{q}.weight", f"{q}.weight_scale"])
    assert f"{q}.weight_scale" in table and f"{q}.weight_scale_inv" not in table
    experts = "language_model.model.layers.3.block_sparse_moe.experts.0.w1"
    table = expected_tensors(public_config("nvfp4"), found=[f"{experts}.weight_scale"])
    assert f"{q}.weight_scale_inv" in table


def test_scalars_may_be_stored_as_one_element_and_scales_as_e8m0():
    assert TensorSpec((), FP32).accepts((1,), FP32)
    assert not TensorSpec((), FP32).accepts((2,), FP32)
    scale = expected_tensors(public_config("mxfp8"))[
        "language_model.model.layers.0.self_attn.q_proj.weight_scale_inv"
    ]
    assert scale.accepts((8192, 192), torch.float8_e8m0fnu)


def test_outside_names():
    assert is_outside("vision_tower.vision_model.pre_layrnorm.weight")
    assert is_outside("patch_merge_mlp.linear_1.bias")
    assert is_outside("language_model.model.mtp.layers.0.eh_proj.weight")
    assert is_outside("model.layers.0.self_attn.k_proj.k_scale")
    assert is_outside("language_model.model.layers.0.self_attn.attn.v_scale")
    assert not is_outside("language_model.model.layers.0.self_attn.q_proj.weight")
    assert not is_outside("model.layers.0.self_attn.k_proj.weight_scale")


def test_every_fault_is_named_at_once():
    expected = {f"layer.{i}.weight": TensorSpec((4, 8), BF16) for i in range(30)}
    found = {
        "layer.0.weight": torch.zeros(4, 8, dtype=BF16),
        "layer.1.weight": torch.zeros(8, 4, dtype=BF16),
        "layer.2.weight": ((4, 8), FP32),
        "stray.weight": torch.zeros(1),
        "vision_tower.x.weight": torch.zeros(1),
        "model.mtp.0.weight": torch.zeros(1),
    }
    with pytest.raises(ValueError) as caught:
        check_tensors(expected, found)
    message = str(caught.value)
    assert "missing (27)" in message and "... and 17 more" in message
    assert "layer.3.weight" in message
    assert "extra (1)" in message and "stray.weight" in message
    assert "wrong (2)" in message
    assert "layer.1.weight (expected [4, 8] bfloat16, got [8, 4] bfloat16)" in message
    assert "layer.2.weight (expected [4, 8] bfloat16, got [4, 8] float32)" in message
    assert "vision_tower" not in message and "mtp" not in message
    check_tensors({}, {"vision_tower.x.weight": torch.zeros(1)})


def test_config_faults_are_named():
    config = public_config(vl=False)
    with pytest.raises(ValueError, match="head_dim"):
        expected_tensors({k: v for k, v in config.items() if k != "head_dim"})
    with pytest.raises(ValueError, match="moe_layer_freq: expected 60 entries"):
        expected_tensors({**config, "moe_layer_freq": [1, 1]})
    with pytest.raises(ValueError, match="multiple of 32 for mxfp8, got 48"):
        expected_tensors({**public_config("mxfp8", vl=False), "hidden_size": 48})


def test_quantisation_is_read_as_vllm_reads_it():
    read = quantisation_of(
        {"quantization_config": {"quant_method": "mxfp8", "ignored_layers": ["lm_head", "mlp"]}}
    )
    assert read.algorithm("model.layers.0.self_attn.q_proj") == "mxfp8"
    assert read.algorithm("language_model.model.layers.0.mlp.up_proj") == "bf16"
    read = quantisation_of(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["*self_attn*"],
            }
        }
    )
    assert read.algorithm("model.layers.0.self_attn.q_proj") == "bf16"
    assert read.algorithm("model.layers.3.block_sparse_moe.experts.0.w1") == "nvfp4"
    coarse = {"model.layers.3.block_sparse_moe.experts": {"quant_algo": "NVFP4"}}
    read = quantisation_of(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": coarse},
            }
        }
    )
    assert read.algorithm("language_model.model.layers.3.block_sparse_moe.experts.7.w2") == "nvfp4"
    assert read.algorithm("model.layers.3.self_attn.q_proj") == "bf16"


def test_a_bare_quantization_config_will_do():
    for layout in LAYOUTS[1:]:
        config = public_config(layout)
        assert quantisation_of(config["quantization_config"]) == quantisation_of(config)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8'"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "OCP MX"),
    ],
)
def test_an_unknown_quantisation_is_refused(quant, message):
    with pytest.raises(NotImplementedError, match=message):
        quantisation_of({"quantization_config": quant})


def test_layouts_are_all_covered():
    for layout in LAYOUTS:
        expected_tensors(public_config(layout))
    with pytest.raises(ValueError, match="layout"):
        quantization_config("int4", [], False)
