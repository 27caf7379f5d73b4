"""config: reading HF configs of M3 / M3.1, and every reason to refuse one."""

import copy
import json

import pytest

from rocm_msa.config import ModelConfig, RankGeometry, RopeConfig
from rocm_msa.errors import ConfigError

LAYERS = 60
FREQ = [0] * 3 + [1] * (LAYERS - 3)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524288}


def text_dict(**changes) -> dict:
    """The text config of the public checkpoint."""
    config = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "num_mtp_modules": 1,
        "vocab_size": 200064,
        "tie_word_embeddings": False,
        "moe_layer_freq": list(FREQ),
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_disable_index_value": list(FREQ),
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": list(FREQ),
        },
    }
    config.update(copy.deepcopy(changes))
    return config


def with_sparse(**changes) -> dict:
    config = text_dict()
    config["sparse_attention_config"].update(changes)
    return config


def without(key: str) -> dict:
    config = text_dict()
    part = config["sparse_attention_config"] if key.startswith("sparse_") else config
    if key == "sparse_attention_config":
        part = config
    del part[key]
    return config


def reasons(config) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config)
    assert str(caught.value).startswith("unsupported model config:\n  - ")
    return caught.value.reasons


# --- reading ----------------------------------------------------------------------------------


def test_the_public_geometry():
    model = ModelConfig.from_hf(text_dict())
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (6144, 60, 200064)
    assert (model.q_heads, model.kv_heads, model.head_dim, model.group_size) == (64, 4, 128, 16)
    assert (model.index_heads, model.index_dim) == (4, 128)
    assert (model.block_tokens, model.topk_blocks) == (128, 16)
    assert (model.init_blocks, model.local_blocks) == (0, 1)
    assert (model.num_dense_layers, model.num_sparse_layers) == (3, 57)
    assert model.sparse_layers == model.moe_layers == tuple(f == 1 for f in FREQ)
    assert (model.num_experts, model.experts_per_token, model.shared_experts) == (128, 4, 1)
    assert (model.intermediate_size, model.dense_intermediate_size) == (3072, 12288)
    assert (model.swiglu_alpha, model.swiglu_beta, model.swiglu_limit) == (1.702, 1.0, 7.0)
    assert (model.routed_scaling_factor, model.rms_norm_eps) == (2.0, 1e-6)
    assert model.rope == RopeConfig(5e6, 64, 524288, 1.0)


def test_a_vl_config_is_read_from_its_text_config():
    vl = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "vision_config": {"x": 1}}
    assert ModelConfig.from_hf({**vl, "text_config": text_dict()}) == ModelConfig.from_hf(
        text_dict()
    )


@pytest.mark.parametrize("kind", ["MiniMaxM3TextConfig", "MiniMaxM3Config"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_defaults_of_vllms_config_classes(kind, as_dict):
    configs = pytest.importorskip(
        "vllm.transformers_utils.configs.minimax_m3", reason="vllm is not installed"
    )
    config = getattr(configs, kind)()
    got = ModelConfig.from_hf(config.to_dict() if as_dict else config)
    assert got == ModelConfig.from_hf(text_dict())


def test_the_input_is_not_changed():
    config = {"text_config": text_dict(rope_scaling=YARN)}
    before = copy.deepcopy(config)
    ModelConfig.from_hf(config)
    assert config == before


def test_from_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(text_dict()))
    want = ModelConfig.from_hf(text_dict())
    assert ModelConfig.from_json(tmp_path) == want
    assert ModelConfig.from_json(str(tmp_path / "config.json")) == want


def test_from_json_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*config\.json"):
        ModelConfig.from_json(tmp_path)
    for content in (b"{not json", b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"unreadable model config:\n  - .*config\.json"):
            ModelConfig.from_json(tmp_path)


@pytest.mark.parametrize("config", [None, 3, [text_dict()], "config.json"])
def test_not_a_config(config):
    with pytest.raises(TypeError, match="config: expected a dict or a transformers config"):
        ModelConfig.from_hf(config)


# --- RoPE -------------------------------------------------------------------------------------


def test_yarn_factor_2_covers_1048576():
    rope = ModelConfig.from_hf(text_dict(rope_scaling=YARN)).rope
    assert rope == RopeConfig(5e6, 64, 524288, 2.0)
    assert rope.max_position == 1_048_576


def test_without_scaling_the_native_range_is_covered():
    assert ModelConfig.from_hf(text_dict()).rope.max_position == 524_288


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_both_keys_and_both_names_of_the_type(key, name):
    scaling = {name: "yarn", "factor": 2, "original_max_position_embeddings": 524288}
    assert ModelConfig.from_hf(text_dict(**{key: scaling})).rope.max_position == 1_048_576


def test_transformers_5_keeps_theta_and_factor_in_rope_parameters():
    config = text_dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5})
    del config["rope_theta"], config["partial_rotary_factor"], config["rotary_dim"]
    assert ModelConfig.from_hf(config).rope == RopeConfig(1e6, 64, 524288, 1.0)


def test_c16_scaling_at_the_top_level_only_is_refused_by_name():
    for key in ("rope_scaling", "rope_parameters"):
        (reason,) = reasons({"text_config": text_dict(), key: YARN})
        assert reason.startswith(f"{key} at the top level") and f"set text_config.{key}" in reason


def test_c16_scaling_in_both_places_is_fine_when_equal():
    config = {"text_config": text_dict(rope_scaling=YARN), "rope_scaling": YARN}
    assert ModelConfig.from_hf(config).rope.max_position == 1_048_576
    config["rope_scaling"] = {**YARN, "factor": 4.0}
    assert "text_config.rope_scaling" in reasons(config)[0]


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "linear", "factor": 2.0}, r"rope_scaling\.rope_type.*'yarn'.*'linear'"),
        ({"factor": 2.0}, r"rope_scaling\.rope_type.*'yarn' \(factor is 2\.0\)"),
        ({"rope_type": "default", "factor": 2.0}, r"rope_scaling\.rope_type.*'yarn'"),
        ({**YARN, "factor": 0.5}, r"rope_scaling\.factor.*>= 1.*0\.5"),
        ({**YARN, "factor": float("inf")}, r"rope_scaling\.factor.*finite.*inf"),
        ({**YARN, "factor": float("nan")}, r"rope_scaling\.factor.*finite.*nan"),
        ({**YARN, "factor": "2"}, r"rope_scaling\.factor.*float.*'2'"),
        ({**YARN, "original_max_position_embeddings": 1.5}, r"original_max_position.*int.*1\.5"),
        ({**YARN, "beta_fast": 16}, r"rope_scaling\.beta_fast.*32.*16"),
        ({**YARN, "attention_factor": 1.2}, r"rope_scaling\.attention_factor.*None.*1\.2"),
        ({**YARN, "mrope_section": [8, 12]}, r"rope_scaling\.mrope_section: unknown key"),
        ("yarn", "rope_scaling.*a dict.*'yarn'"),
    ],
)
def test_scaling_that_would_be_ignored_or_is_unknown_is_refused(scaling, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_hf(text_dict(rope_scaling=scaling))


def test_yarn_with_its_default_parameters_spelled_out():
    scaling = {**YARN, "beta_fast": 32, "beta_slow": 1, "attention_factor": None}
    assert ModelConfig.from_hf(text_dict(rope_scaling=scaling)).rope.factor == 2.0


@pytest.mark.parametrize("missing", ["rotary_dim", "partial_rotary_factor"])
def test_the_public_partial_factor_of_one_half(missing):
    assert ModelConfig.from_hf(without(missing)).rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rotary_dim": 32}, r"rotary_dim.*head_dim \* 0\.5 = 64\.0.*32"),
        ({"rotary_dim": 63, "partial_rotary_factor": None}, r"rotary_dim.*even.*63"),
        ({"rotary_dim": 256, "partial_rotary_factor": None}, r"rotary_dim.*2\.\.128.*256"),
        ({"rotary_dim": 0, "partial_rotary_factor": None}, r"rotary_dim.*2\.\.128.*0"),
        ({"partial_rotary_factor": "half"}, r"partial_rotary_factor.*float.*'half'"),
        ({"rope_theta": None}, "rope_theta: missing"),
        ({"rope_theta": "5e6"}, "rope_theta.*float.*'5e6'"),
        ({"rope_theta": -1.0}, r"rope_theta.*> 0.*-1\.0"),
    ],
)
def test_bad_rotary_dimensions_and_theta(change, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_hf(text_dict(**change))


# --- refusals ---------------------------------------------------------------------------------

REQUIRED = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "dense_intermediate_size",
    "moe_layer_freq",
    "sparse_attention_config",
    "sparse_index_dim",
    "sparse_num_index_heads",
    "sparse_topk_blocks",
    "sparse_block_size",
    "sparse_attention_freq",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    assert any(key in reason for reason in reasons(without(key)))


@pytest.mark.parametrize("key", ["rms_norm_eps", "routed_scaling_factor", "n_shared_experts"])
def test_keys_with_a_default(key):
    ModelConfig.from_hf(without(key))


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "sparse_topk_blocks"])
@pytest.mark.parametrize("value", ["64", 64.0, True, [64]])
def test_another_type_is_named(key, value):
    config = with_sparse(**{key: value}) if key.startswith("sparse") else text_dict(**{key: value})
    (reason,) = [r for r in reasons(config) if key in r]
    assert "expected int" in reason and repr(value) in reason


POSITIVE = [k for k in REQUIRED[:11] if k not in ("num_experts_per_tok",)]


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_are_positive(key, value):
    assert any(key in r for r in reasons(text_dict(**{key: value})))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (with_sparse(sparse_block_size=64), "sparse_block_size: expected 128, got 64"),
        (with_sparse(sparse_index_dim=64), r"sparse_index_dim.*head_dim \(128\).*64"),
        (with_sparse(sparse_num_index_heads=1), r"sparse_num_index_heads.*\(4\).*1"),
        (with_sparse(sparse_topk_blocks=0), "sparse_topk_blocks.*got 0"),
        (with_sparse(sparse_topk_blocks=2, sparse_init_block=2), "sparse_topk_blocks.*got 2"),
        (with_sparse(sparse_local_block=0), "sparse_local_block.*>= 1.*0"),
        (with_sparse(sparse_init_block=-1), "sparse_init_block.*>= 0.*-1"),
        (with_sparse(sparse_score_type="lse"), "sparse_score_type.*'max'.*'lse'"),
        (with_sparse(use_sparse_attention=False), "use_sparse_attention.*True.*False"),
        (with_sparse(sparse_window=4), r"sparse_attention_config\.sparse_window: unknown key"),
        (with_sparse(index_rope_dim=4), r"sparse_attention_config\.index_rope_dim: unknown key"),
        (with_sparse(sparse_attention_freq=FREQ[:-1]), "sparse_attention_freq.*60 entries.*59"),
        (with_sparse(sparse_attention_freq=1), "sparse_attention_freq.*a list.*1"),
        (with_sparse(sparse_attention_freq=[*FREQ[:-1], 2]), r"sparse_attention_freq.*\[2\]"),
        (with_sparse(sparse_disable_index_value=[0] * 60), "disable_index_value.*layers \\[3, 4"),
        (with_sparse(sparse_disable_index_value=True), "disable_index_value.*a list.*True"),
        (text_dict(moe_layer_freq=[*FREQ, 1]), "moe_layer_freq.*60 entries.*61"),
        (text_dict(moe_layer_freq=["x"] * 60), "moe_layer_freq.*entries 0 or 1.*'x'"),
        (text_dict(num_attention_heads=62), r"num_attention_heads.*multiple of .*\(4\).*62"),
        (text_dict(num_key_value_heads=3), r"num_attention_heads.*multiple of .*\(3\).*64"),
        (text_dict(head_dim=120), "head_dim.*multiple of 32.*120"),
        (text_dict(num_experts_per_tok=129), r"num_experts_per_tok.*1\.\.128.*129"),
        (text_dict(num_experts_per_tok=0), r"num_experts_per_tok.*1\.\.128.*0"),
        (text_dict(n_shared_experts=-1), "n_shared_experts.*>= 0.*-1"),
        (text_dict(rms_norm_eps=0.0), "rms_norm_eps.*> 0"),
        (text_dict(hidden_act="silu"), "hidden_act.*'swigluoai'.*'silu'"),
        (text_dict(qk_norm_type="per_layer"), "qk_norm_type.*'per_head'.*'per_layer'"),
        (text_dict(scoring_func="softmax"), "scoring_func.*'sigmoid'.*'softmax'"),
        (text_dict(use_gemma_norm=False), "use_gemma_norm.*True.*False"),
        (text_dict(use_qk_norm=False), "use_qk_norm.*True.*False"),
        (text_dict(attention_output_gate=True), "attention_output_gate.*False.*True"),
        (text_dict(swiglu_gamma=1.0), "swiglu_gamma: unknown key"),
        (text_dict(index_topk=2048), "index_topk: unknown key"),
        (text_dict(sparse_attention_config=[]), r"sparse_attention_config.*dict.*\[\]"),
    ],
)
def test_each_refusal_names_its_key(config, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_hf(config)


def test_all_reasons_at_once():
    config = with_sparse(sparse_block_size=64, sparse_score_type="lse", sparse_window=1)
    config.update(head_dim="128", hidden_act="gelu", rope_scaling={"rope_type": "ntk"})
    del config["vocab_size"]
    text = "\n".join(reasons({"text_config": config, "rope_scaling": YARN}))
    for key in (
        "sparse_score_type",
        "sparse_window",
        "head_dim",
        "hidden_act",
        "rope_scaling.rope_type",
        "vocab_size",
        "text_config.rope_scaling",
    ):
        assert key in text
    geometry = with_sparse(sparse_block_size=64, sparse_num_index_heads=3, sparse_window=1)
    geometry.update(num_attention_heads=62, rope_theta=None)
    assert len(reasons(geometry)) == 5


def test_other_unknown_keys_are_none_of_our_business():
    ModelConfig.from_hf(text_dict(bos_token_id=1, torch_dtype="bfloat16", auto_map={}))


# --- tensor parallel --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "want"),
    [
        (1, RankGeometry(1, 64, 4, 4, 1)),
        (2, RankGeometry(2, 32, 2, 2, 1)),
        (4, RankGeometry(4, 16, 1, 1, 1)),
        (8, RankGeometry(8, 8, 1, 1, 2)),
        (16, RankGeometry(16, 4, 1, 1, 4)),
    ],
)
def test_shards(tp, want):
    assert ModelConfig.from_hf(text_dict()).shard(tp) == want


@pytest.mark.parametrize(
    ("tp", "named"),
    [
        (0, ["tensor_parallel_size"]),
        (-1, ["tensor_parallel_size"]),
        (3, ["num_attention_heads", "num_key_value_heads"]),
        (6, ["num_attention_heads", "num_key_value_heads"]),
        (5, ["num_attention_heads", "num_key_value_heads", "intermediate_size", "dense_inter"]),
    ],
)
def test_shards_that_do_not_divide_are_refused_with_all_reasons(tp, named):
    with pytest.raises(ConfigError, match=f"over {tp} tensor-parallel ranks") as caught:
        ModelConfig.from_hf(text_dict()).shard(tp)
    assert len(caught.value.reasons) == len(named)
    for reason, name in zip(caught.value.reasons, named, strict=True):
        assert reason.startswith(name)
