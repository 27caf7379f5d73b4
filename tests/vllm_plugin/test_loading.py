"""Checkpoint loading: every layout, VL names, and every tensor accounted for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.errors import ConfigError
from tests.vllm_plugin.engine import attention_layers, engine, generate
from tests.vllm_plugin.test_parity_reference import (
    BF16_TYPICAL,
    COUNT,
    Yardstick,
    check,
    prompts,
)


@pytest.mark.parametrize(
    ("layout", "arch"),
    [("bf16", "vl"), ("mxfp8", "text"), ("nvfp4", "text"), ("mxfp4", "text"), ("nvfp4", "vl")],
)
def test_layouts(layout, arch, tmp_path):
    """Quantised weights are dequantised while loading; the text part of a VL checkpoint serves.

    vLLM takes quantised checkpoints in bf16 only.
    """
    make_checkpoint(tmp_path / "made", layout=layout, arch=arch)
    asked = [prompts()[i] for i in (4, 11)]
    with engine(str(tmp_path / "made"), dtype="bfloat16") as llm:
        answers = generate(llm, asked, COUNT)
    yardstick = Yardstick(str(tmp_path / "made"))
    check(yardstick, asked, answers, dtype=torch.bfloat16, typical=BF16_TYPICAL)


def _edit_tensors(checkpoint: str, target: Path, edit) -> str:
    """A copy in one shard whose tensors went through `edit(dict)`."""
    shutil.copytree(checkpoint, target)
    tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (target / "model.safetensors.index.json").unlink()
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


EDITS = {
    "missing linear": (
        lambda t: t.pop("model.layers.1.self_attn.index_k_proj.weight"),
        ["missing tensor model.layers.1.self_attn.index_k_proj.weight"],
    ),
    "missing expert": (
        lambda t: t.pop("model.layers.2.block_sparse_moe.experts.3.w3.weight"),
        ["missing tensor model.layers.2.block_sparse_moe.experts.3.w3.weight"],
    ),
    "missing norm and bias": (
        lambda t: (
            t.pop("model.norm.weight"),
            t.pop("model.layers.1.block_sparse_moe.e_score_correction_bias"),
        ),
        [
            "missing tensor model.layers.1.block_sparse_moe.e_score_correction_bias",
            "missing tensor model.norm.weight",
        ],
    ),
    "extra": (
        lambda t: t.update({"model.layers.0.self_attn.sink.weight": torch.zeros(4)}),
        ["unexpected tensor model.layers.0.self_attn.sink.weight"],
    ),
    "index projection of a dense layer": (
        lambda t: t.update(
            {
                "model.layers.0.self_attn.index_q_proj.weight": t[
                    "model.layers.1.self_attn.index_q_proj.weight"
                ].clone()
            }
        ),
        ["unexpected tensor model.layers.0.self_attn.index_q_proj.weight"],
    ),
    "expert out of range": (
        lambda t: t.update(
            {"model.layers.1.block_sparse_moe.experts.8.w1.weight": torch.zeros(128, 256)}
        ),
        ["unexpected tensor model.layers.1.block_sparse_moe.experts.8.w1.weight"],
    ),
    "wrong shape": (
        lambda t: t.update({"model.layers.1.self_attn.o_proj.weight": torch.zeros(256, 512)}),
        ["model.layers.1.self_attn.o_proj.weight", "[256, 512]"],
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_every_tensor_is_accounted_for(name, checkpoint, tmp_path):
    edit, words = EDITS[name]
    edited = _edit_tensors(checkpoint, tmp_path / "edited", edit)
    with pytest.raises(ConfigError) as caught, engine(edited):
        pass
    for word in words:
        assert word in str(caught.value)


def test_kv_scales_of_the_checkpoint(checkpoint, tmp_path, caplog):
    """C45: scales in the checkpoint reach the caches; without them 1.0, and a line says so."""
    scales = {"k": 0.5, "v": 0.25}

    def edit(tensors):
        for side, value in scales.items():
            name = f"model.layers.2.self_attn.{side}_proj.{side}_scale"
            tensors[name] = torch.tensor(value)

    edited = _edit_tensors(checkpoint, tmp_path / "edited", edit)
    with engine(edited, main="fp8") as llm:
        layers = attention_layers(llm)
        assert layers["model.layers.2.self_attn.attn"].cache.scales == scales
        assert layers["model.layers.1.self_attn.attn"].cache.scales == {"k": 1.0, "v": 1.0}
        generate(llm, prompts()[2:3], 4)


def test_config_of_a_vl_checkpoint_names_its_architecture(tmp_path):
    make_checkpoint(tmp_path / "vl", arch="vl")
    config = json.loads((tmp_path / "vl" / "config.json").read_text())
    assert config["architectures"] == ["MiniMaxM3SparseForConditionalGeneration"]
