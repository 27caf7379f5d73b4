"""The maker: complete, deterministic, readable by vLLM and transformers, honest about bad input."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch

from rocm_msa.checkpoint import make as maker
from rocm_msa.checkpoint import open_checkpoint
from rocm_msa.checkpoint.make import ARCHS, LAYOUTS, SIZES, make_checkpoint
from rocm_msa.checkpoint.tokenizer import (
    EOS,
    MARKUP_TOKENS,
    NAMESPACE,
    SPECIAL_TOKENS,
    build_tokenizer,
    plain_text_ids,
)
from rocm_msa.checkpoint.weights import gaussian
from rocm_msa.config import ModelConfig


def digest(directory) -> str:
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(directory)
    return directory


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_complete(tmp_path, layout, arch):
    summary = make_checkpoint(tmp_path / "c", layout=layout, arch=arch)
    checkpoint = open_checkpoint(tmp_path / "c")
    checkpoint.check()
    assert len(checkpoint.files) == summary.tensors
    assert set(checkpoint.files.values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == summary.weight_bytes
    model = ModelConfig.from_json(tmp_path / "c")
    assert model.index_heads == model.kv_heads
    assert oct((tmp_path / "c/model-00001-of-00002.safetensors").stat().st_mode)[-3:] == "644"
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_structurally_whole(size):
    text = maker._text_config(SIZES[size], {})
    freq = text["moe_layer_freq"]
    assert 0 < sum(freq) < len(freq) and freq == sorted(freq)
    assert text["intermediate_size"] % (2 * 32) == 0
    assert text["sparse_attention_config"]["sparse_topk_blocks"] == 16
    assert text["max_position_embeddings"] // 128 > 5 * 16


def test_small_has_the_real_group_size(tmp_path):
    make_checkpoint(tmp_path / "c", size="small", layout="nvfp4")
    open_checkpoint(tmp_path / "c").check()
    assert ModelConfig.from_json(tmp_path / "c").group_size == 16


def test_the_same_call_gives_the_same_bytes(tmp_path, tiny):
    make_checkpoint(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(tiny)
    make_checkpoint(tmp_path / "other", seed=1)
    assert digest(tmp_path / "other") != digest(tiny)


def test_the_numbers_do_not_depend_on_the_machine():
    """The generator's own values: integers of a Mersenne Twister, one fp32 product."""
    values = gaussian((4096,), 0, "model.norm.weight")
    assert values.dtype == torch.float32
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "314ef1582f7c8925"
    assert abs(float(values.mean())) < 0.05 and abs(float(values.std()) - 1) < 0.03


def test_text_and_vl_hold_the_same_numbers(tmp_path, tiny):
    make_checkpoint(tmp_path / "vl", arch="vl")
    vl = open_checkpoint(tmp_path / "vl")
    for name, tensor in open_checkpoint(tiny):
        assert torch.equal(tensor, vl.tensor(f"language_model.{name}")), name
    assert any(name.startswith("vision_tower.") for name in vl.files)


def test_one_shard_has_no_index(tmp_path):
    make_checkpoint(tmp_path / "c", shards=1)
    assert (tmp_path / "c/model.safetensors").exists()
    assert not (tmp_path / "c/model.safetensors.index.json").exists()
    open_checkpoint(tmp_path / "c").check()


def test_nothing_is_degenerate(tiny):
    for name, tensor in open_checkpoint(tiny):
        assert tensor.float().std() > 0.01, name
        assert tensor.isfinite().all(), name


def test_overrides(tmp_path):
    make_checkpoint(
        tmp_path / "c",
        num_hidden_layers=3,
        dense_layers=2,
        num_key_value_heads=4,
        sparse_topk_blocks=8,
        num_local_experts=4,
        vocab_size=512,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 16384,
        },
    )
    checkpoint = open_checkpoint(tmp_path / "c")
    checkpoint.check()
    config = checkpoint.config
    assert config["moe_layer_freq"] == [0, 0, 1]
    assert config["sparse_attention_config"]["sparse_attention_freq"] == [0, 0, 1]
    assert config["sparse_attention_config"]["sparse_topk_blocks"] == 8
    assert config["sparse_attention_config"]["sparse_num_index_heads"] == 4
    assert ModelConfig.from_hf(config).rope.max_position == 32768


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "size: expected one of tiny, small, got 'huge'"),
        ({"layout": "int4"}, "layout: expected one of"),
        ({"arch": "audio"}, "arch: expected one of"),
        ({"shards": 0}, "shards"),
        ({"hiden_size": 64}, "overrides: unknown hiden_size"),
        ({"vocab_size": 100}, "vocab_size: expected at least"),
        ({"dense_layers": 9}, "dense_layers: expected 0 to num_hidden_layers = 4"),
        ({"sparse_block_size": 64}, "sparse_block_size"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"layout": "mxfp8", "intermediate_size": 48}, "multiple of 32"),
    ],
)
def test_bad_arguments_are_named_and_leave_nothing(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_checkpoint(tmp_path / "c", **arguments)
    assert os.listdir(tmp_path) == []


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"directory: .* is a file"):
        make_checkpoint(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("mine")
    with pytest.raises(FileExistsError, match=r"directory: .* is not empty"):
        make_checkpoint(tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["precious"]
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "empty")
    open_checkpoint(tmp_path / "empty").check()


def test_an_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"directory: .* cannot be written"):
        make_checkpoint(tmp_path / "file" / "below")
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere: only the path below a file was tried")
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(PermissionError, match=r"directory: .* cannot be written"):
        make_checkpoint(tmp_path / "locked" / "c")


def test_a_crash_leaves_nothing(tmp_path, monkeypatch):
    def crash(*_args, **_kwargs):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(maker, "_write_shards", crash)
    with pytest.raises(RuntimeError, match="disk on fire"):
        make_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_config_is_the_last_file_written(tmp_path, monkeypatch):
    """Killed before the end, a work directory has no config.json and cannot be taken for whole."""
    seen = []

    def rename(work, target):
        seen.extend(sorted(work.iterdir(), key=lambda p: p.stat().st_mtime_ns))
        raise KeyboardInterrupt

    monkeypatch.setattr(maker, "_rename", rename)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "c")
    assert seen[-1].name == "config.json"
    assert seen[-1].parent.name.startswith(".c.")
    assert os.listdir(tmp_path) == []


def test_tokenizer_round_trip_and_ids():
    tokenizer = build_tokenizer(1024)
    assert tokenizer.get_vocab_size() == 1024
    assert sorted(tokenizer.get_vocab().values()) == list(range(1024))
    text = "def f(x):\n    return x  # naïve café 中文 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for token in SPECIAL_TOKENS + MARKUP_TOKENS:
        assert tokenizer.encode(f"a{token}b").tokens == ["a", token, "b"]
    kept = f"{NAMESPACE}<tool_call>"
    assert tokenizer.decode(tokenizer.encode(kept).ids, skip_special_tokens=True) == kept
    assert tokenizer.decode(tokenizer.encode(f"a{EOS}").ids, skip_special_tokens=True) == "a"
    assert len(plain_text_ids(tokenizer)) > 600


def test_transformers_loads_the_tokenizer_and_renders_the_template(tiny):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 1024
    config = json.loads((tiny / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] < 1024
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Ask the tool.",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {
                        "name": "get_weather",
                        "arguments": {"city": "Paris", "days": [1, 2], "where": {"unit": "C"}},
                    },
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "assistant", "content": "Sunny."},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    ns = NAMESPACE
    assert text.startswith("]~!b[]~b]system\nBe brief.")
    assert '"get_weather"' in text
    assert "[e~[\n]~b]user\nWeather?[e~[\n]~b]ai\n<mm:think>Ask the tool.</mm:think>" in text
    assert (
        f'{ns}<tool_call>\n{ns}<invoke name="get_weather">{ns}<city>Paris{ns}</city>'
        f"{ns}<days>{ns}<item>1{ns}</item>{ns}<item>2{ns}</item>{ns}</days>"
        f"{ns}<where>{ns}<unit>C{ns}</unit>{ns}</where>{ns}</invoke>\n{ns}</tool_call>[e~[\n"
    ) in text
    assert "]~b]tool\n<response>sunny</response>[e~[\n" in text
    assert text.endswith("]~b]ai\nSunny.[e~[\n]~b]ai\n")
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert plain == (
        "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\nHi[e~[\n]~b]ai\n"
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_reads_the_config(tmp_path, layout, arch):
    pytest.importorskip("vllm")
    from transformers import AutoConfig
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    AutoConfig.register("minimax_m3_text", MiniMaxM3TextConfig, exist_ok=True)
    make_checkpoint(tmp_path / "c", layout=layout, arch=arch)
    config = get_config(str(tmp_path / "c"), trust_remote_code=False)
    text = config.get_text_config()
    assert isinstance(text, MiniMaxM3TextConfig)
    assert text.rope_theta == 5000000 and text.partial_rotary_factor == 0.5
    assert text.sparse_attention_config["sparse_attention_freq"] == [0, 1, 1, 1]
    assert text.moe_layer_freq == [0, 1, 1, 1]
    assert ModelConfig.from_hf(config) == ModelConfig.from_json(tmp_path / "c")


def test_vllm_reads_the_quantisation_as_we_do(tmp_path):
    """Module by module, what vLLM's own quantisation configs make of our quantization_config."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import get_quantization_config

    from rocm_msa.checkpoint import quantisation_of

    moe = "model.layers.1.block_sparse_moe"
    modules = {
        "model.layers.0.self_attn.qkv_proj": "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj": "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj": "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.down_proj": "model.layers.0.mlp.down_proj",
        f"{moe}.shared_experts.gate_up_proj": f"{moe}.shared_experts.gate_proj",
        f"{moe}.experts": f"{moe}.experts.0.w1",
        "lm_head": "lm_head",
    }
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for layout, method in (("mxfp8", "mxfp8"), ("nvfp4", "modelopt_mixed"), ("mxfp4", "quark")):
        for arch in ARCHS:
            directory = tmp_path / f"{layout}-{arch}"
            make_checkpoint(directory, layout=layout, arch=arch)
            config = json.loads((directory / "config.json").read_text())
            ours = quantisation_of(config)
            theirs = get_quantization_config(method).from_config(config["quantization_config"])
            theirs.packed_modules_mapping = packed
            prefix = "language_model." if arch == "vl" else ""
            for fused, single in modules.items():
                expected = ours.algorithm(single)
                if layout == "mxfp8":
                    got = "bf16" if theirs.is_layer_excluded(prefix + fused) else "mxfp8"
                elif layout == "nvfp4":
                    got = (theirs._resolve_quant_algo(prefix + fused) or "bf16").lower()
                else:
                    kind = RoutedExperts if fused.endswith(".experts") else LinearBase
                    target = theirs.get_quant_method_target(prefix + fused, kind)[2]
                    got = "bf16" if target is UnquantizedLinearMethod else "mxfp4"
                assert got == expected, (layout, arch, fused)
