"""Configurations that cannot be served are refused before any worker starts, with all reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.vllm_plugin.drafter import HIDDEN, make_drafter
from tests.vllm_plugin.engine import NGRAM, VOCAB


def config(checkpoint: str, **options):
    """The VllmConfig that vLLM makes of these arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    defaults = {"block_size": 128, "kv_cache_dtype": "nvfp4", "max_model_len": 2048}
    return EngineArgs(model=checkpoint, **(defaults | options)).create_engine_config()


def refusal(checkpoint: str, **options) -> str:
    with pytest.raises(ValueError) as caught:
        config(checkpoint, **options)
    return str(caught.value)


def edited(checkpoint: str, tmp_path: Path, edit) -> str:
    """A copy of the checkpoint whose config.json went through `edit(dict)`."""
    copy = tmp_path / "edited"
    shutil.copytree(checkpoint, copy)
    data = json.loads((copy / "config.json").read_text())
    edit(data)
    (copy / "config.json").write_text(json.dumps(data))
    return str(copy)


def test_the_missions_flags_are_accepted(checkpoint):
    made = config(checkpoint, attention_config={"indexer_kv_dtype": "nvfp4"})
    assert made.cache_config.cache_dtype == "nvfp4"
    assert made.attention_config.indexer_kv_dtype == "nvfp4"
    assert made.attention_config.indexer_decode_cp is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 64}, ["--block-size: expected 128", "got 64"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype", "'fp8_e5m2'"]),
        ({"kv_cache_dtype": "nvfp4_4over6"}, ["--kv-cache-dtype", "'nvfp4_4over6'"]),
        ({"attention_config": {"indexer_kv_dtype": "mxfp4"}}, ["indexer_kv_dtype", "'mxfp4'"]),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, ["--attention-backend"]),
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size: expected 1, got 2"]),
        ({"tensor_parallel_size": 3}, ["num_attention_heads: expected a multiple of 3, got 8"]),
        ({"kv_cache_dtype_skip_layers": ["0"]}, ["--kv-cache-dtype-skip-layers"]),
        (
            {"additional_config": {"rocm_msa": {"bakend": "triton"}}},
            ["additional_config.rocm_msa.bakend: unknown key"],
        ),
        (
            {"additional_config": {"rocm_msa": {"backend": "cuda"}}},
            ["additional_config.rocm_msa.backend: expected one of"],
        ),
        (
            {"additional_config": {"rocm_msa": {"code_objects": 7}}},
            ["additional_config.rocm_msa.code_objects: expected a folder, got 7"],
        ),
        (
            {"additional_config": {"rocm_msa": {"code_objects": "/nowhere"}}},
            ["rocm_msa.code_objects: no compiled kernels: /nowhere/manifest.json does not exist"],
        ),
        (
            {"additional_config": {"rocm_msa": {"indexer_decode_cp": "yes"}}},
            ["additional_config.rocm_msa.indexer_decode_cp: expected a bool, got yes"],
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused(options, words, checkpoint):
    message = refusal(checkpoint, **options)
    for word in words:
        assert word in message


def test_layouts(checkpoint, monkeypatch):
    """C36: another layout is refused before workers start, with the valid ones listed."""
    for layout in ("BLHNC", "LBHNC"):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        config(checkpoint)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert "expected one of ['BLHNC', 'LBHNC'] or unset, got 'LBNHC'" in refusal(checkpoint)


def test_a_drafters_cache_needs_a_dtype_of_its_own(checkpoint, tmp_path):
    drafter = make_drafter(tmp_path / "drafter", torch.zeros(VOCAB, HIDDEN))
    how = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    words = "speculative_config.kv_cache_dtype: expected a dtype of the drafter's attention"
    assert words in refusal(checkpoint, speculative_config=how)
    config(checkpoint, speculative_config=how | {"kv_cache_dtype": "auto"})
    config(checkpoint, speculative_config=how, kv_cache_dtype="fp8")
    config(checkpoint, speculative_config=NGRAM)


def test_all_reasons_come_at_once(checkpoint):
    message = refusal(
        checkpoint, block_size=64, pipeline_parallel_size=2, kv_cache_dtype="fp8_e5m2"
    )
    assert "--block-size" in message
    assert "--pipeline-parallel-size" in message
    assert "--kv-cache-dtype" in message


def test_context_beyond_rope(checkpoint, monkeypatch):
    """C16: refused, and the message names the key of the text config."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    message = refusal(checkpoint, max_model_len=32768)
    assert "--max-model-len: expected <= 16384" in message
    assert "text_config.rope_scaling" in message


def test_yarn_covers_twice_the_context(checkpoint, tmp_path):
    """C16: with YaRN factor 2 the table covers 32768 positions."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}

    def edit(data):
        data["rope_scaling"] = yarn
        data["max_position_embeddings"] = 32768

    made = config(edited(checkpoint, tmp_path, edit), max_model_len=32768)
    assert made.model_config.max_model_len == 32768


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda d: d["sparse_attention_config"].update(sparse_top_k=3),
            "sparse_attention_config.sparse_top_k: unknown key",
        ),
        (
            lambda d: d["sparse_attention_config"].update(sparse_block_size=64),
            "sparse_block_size: expected 128, got 64",
        ),
        (lambda d: d.update(num_key_value_heads=3), "num_attention_heads: expected a multiple of"),
        (lambda d: d.update(hidden_act="gelu"), "hidden_act: expected 'swigluoai', got 'gelu'"),
    ],
)
def test_bad_model_config(edit, words, checkpoint, tmp_path):
    assert words in refusal(edited(checkpoint, tmp_path, edit))


def test_truncated_safetensors_file(checkpoint, tmp_path):
    path = Path(edited(checkpoint, tmp_path, lambda d: None))
    shard = sorted(path.glob("*.safetensors"))[0]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1000)
    message = refusal(str(path))
    assert shard.name in message
    assert str(size - 1000) in message


def test_command_line_forms(checkpoint):
    """JSON and dotted forms of the flag; an unknown key stays an error."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    model = ["--model", checkpoint]
    given = '{"indexer_kv_dtype": "nvfp4", "indexer_decode_cp": true}'
    args = EngineArgs.from_cli_args(parser.parse_args([*model, "--attention-config", given]))
    assert args.attention_config.indexer_decode_cp is True
    dotted = parser.parse_args([*model, "--attention-config.indexer_decode_cp", "true"])
    assert EngineArgs.from_cli_args(dotted).attention_config.indexer_decode_cp is True
    with pytest.raises(SystemExit):
        parser.parse_args([*model, "--attention-config", '{"indexer_kv_dtyp": "nvfp4"}'])


def test_the_added_field_is_a_real_one():
    import pickle

    from vllm.config.attention import AttentionConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    on, off = AttentionConfig(indexer_decode_cp=True), AttentionConfig()
    assert pickle.loads(pickle.dumps(on)).indexer_decode_cp is True
    assert on.compute_hash() != off.compute_hash()
    with pytest.raises(ValueError, match="boolean"):
        AttentionConfig(indexer_decode_cp="banana")
