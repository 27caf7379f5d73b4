"""Model and parallel geometry, read from the HF config of MiniMax-M3 / M3.1, never assumed.

`ModelConfig.from_hf` takes the text or the VL config, as a dict (config.json) or a transformers
config object, and reports every reason against it in one `ConfigError`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_msa.config_read import (
    Reader,
    as_dict,
    check_switches,
    read_rope,
    refuse_stray_rope,
    refuse_unknown_keys,
)
from rocm_msa.errors import ConfigError, Refusals, expect

BLOCK_TOKENS = 128
"""Tokens in a sparse block and in a cache page; the kernels are written for this size."""

TEXT_ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM31SparseForCausalLM")
VL_ARCHITECTURES = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM31SparseForConditionalGeneration",
)

_POSITIVE = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "q_heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "num_local_experts": "num_experts",
    "intermediate_size": "intermediate_size",
    "dense_intermediate_size": "dense_intermediate_size",
}
"""HF key -> field, for the sizes that must be > 0."""


@dataclass(frozen=True)
class RopeConfig:
    """Partial NeoX RoPE. `factor` > 1 means YaRN from `original_max_position` positions."""

    theta: float
    rotary_dim: int
    original_max_position: int
    factor: float = 1.0

    @property
    def max_position(self) -> int:
        """Positions that the cos/sin table covers."""
        return int(self.original_max_position * self.factor)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of the text model. Sizes in elements; heads are totals over all ranks."""

    hidden_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    vocab_size: int
    sparse_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    index_heads: int
    index_dim: int
    block_tokens: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    dense_intermediate_size: int
    shared_experts: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.sparse_layers)

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_sparse_layers

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a HF config.

        Args:
            config: dict of config.json, or a transformers config object; text or VL.

        Raises:
            ConfigError: with every missing, unknown or unsupported key by name.
        """
        top = as_dict(config)
        refusals = Refusals("unsupported model config")
        text = top
        if "text_config" in top and top["text_config"] is not None:
            text = as_dict(top["text_config"])
            refuse_stray_rope(top, text, refusals)
        reader = Reader(text, refusals)
        sparse = reader.get("sparse_attention_config", dict)
        refuse_unknown_keys(text, sparse, refusals)
        sparse_reader = Reader(sparse, refusals, "sparse_attention_config.")
        num_layers = reader.get("num_hidden_layers", int)
        max_position = reader.get("max_position_embeddings", int)
        head_dim = reader.get("head_dim", int)
        uses_sparse = sparse_reader.get("use_sparse_attention", bool, True)
        sparse_layers = sparse_reader.layers("sparse_attention_freq", num_layers)
        model = cls(
            hidden_size=reader.get("hidden_size", int),
            num_layers=num_layers,
            q_heads=reader.get("num_attention_heads", int),
            kv_heads=reader.get("num_key_value_heads", int),
            head_dim=head_dim,
            rope=RopeConfig(**read_rope(text, head_dim, max_position, refusals)),
            rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
            vocab_size=reader.get("vocab_size", int),
            sparse_layers=sparse_layers,
            moe_layers=reader.layers("moe_layer_freq", num_layers),
            index_heads=sparse_reader.get("sparse_num_index_heads", int),
            index_dim=sparse_reader.get("sparse_index_dim", int),
            block_tokens=sparse_reader.get("sparse_block_size", int),
            topk_blocks=sparse_reader.get("sparse_topk_blocks", int),
            init_blocks=sparse_reader.get("sparse_init_block", int, 0),
            local_blocks=sparse_reader.get("sparse_local_block", int, 1),
            num_experts=reader.get("num_local_experts", int),
            experts_per_token=reader.get("num_experts_per_tok", int),
            intermediate_size=reader.get("intermediate_size", int),
            dense_intermediate_size=reader.get("dense_intermediate_size", int),
            shared_experts=reader.get("n_shared_experts", int, 1),
            routed_scaling_factor=reader.get("routed_scaling_factor", float, 1.0),
            swiglu_alpha=reader.get("swiglu_alpha", float, 1.702),
            swiglu_beta=reader.get("swiglu_beta", float, 1.0),
            swiglu_limit=reader.get("swiglu_limit", float, 7.0),
        )
        refusals.check(uses_sparse, expect("use_sparse_attention", True, uses_sparse))
        check_switches(reader, sparse_reader)
        if reader.complete and sparse_reader.complete:
            _check_geometry(model, refusals)
        refusals.raise_if_any()
        return model

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, or the one in a checkpoint directory."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"model config: no file {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError("unreadable model config", [f"{path}: {error}"]) from None
        return cls.from_hf(data)

    def shard(self, tp: int) -> RankGeometry:
        """Heads of one tensor-parallel rank; KV and index heads are replicated past their count.

        Raises:
            ConfigError: head counts that do not divide.
        """
        refusals = Refusals(f"cannot shard this model over {tp} tensor-parallel ranks")
        refusals.check(tp >= 1, expect("tensor_parallel_size", ">= 1", tp))
        if tp >= 1:
            refusals.check(
                self.q_heads % tp == 0,
                expect("num_attention_heads", f"a multiple of {tp}", self.q_heads),
            )
            refusals.check(
                self.kv_heads % tp == 0 or tp % self.kv_heads == 0,
                expect("num_key_value_heads", f"a multiple or divisor of {tp}", self.kv_heads),
            )
            for name in ("intermediate_size", "dense_intermediate_size"):
                size = getattr(self, name)
                refusals.check(size % tp == 0, expect(name, f"a multiple of {tp}", size))
        refusals.raise_if_any()
        kv_heads = max(1, self.kv_heads // tp)
        return RankGeometry(
            tp=tp,
            q_heads=self.q_heads // tp,
            kv_heads=kv_heads,
            index_heads=kv_heads,
            kv_replicas=max(1, tp // self.kv_heads),
        )


@dataclass(frozen=True)
class RankGeometry:
    """What one tensor-parallel rank holds. The index key head is on every rank."""

    tp: int
    q_heads: int
    kv_heads: int
    index_heads: int
    kv_replicas: int


def _check_geometry(model: ModelConfig, refusals: Refusals) -> None:
    named = {reason.split(":")[0].split(".")[-1] for reason in refusals.reasons}

    def check(name: str, ok: bool, expected: object, got: object) -> None:
        refusals.check(ok or name in named, expect(name, expected, got))

    for name, field in _POSITIVE.items():
        check(name, getattr(model, field) > 0, "> 0", getattr(model, field))
    for name, value in (
        ("rope_theta", model.rope.theta),
        ("max_position_embeddings", model.rope.original_max_position),
    ):
        check(name, value > 0, "> 0", value)
    check("n_shared_experts", model.shared_experts >= 0, ">= 0", model.shared_experts)
    check("sparse_block_size", model.block_tokens == BLOCK_TOKENS, BLOCK_TOKENS, model.block_tokens)
    check(
        "head_dim",
        model.head_dim > 0 and model.head_dim % 32 == 0,
        "a multiple of 32",
        model.head_dim,
    )
    check(
        "sparse_index_dim",
        model.index_dim == model.head_dim,
        f"head_dim ({model.head_dim})",
        model.index_dim,
    )
    check(
        "num_attention_heads",
        model.kv_heads > 0 and model.q_heads % model.kv_heads == 0,
        f"a multiple of num_key_value_heads ({model.kv_heads})",
        model.q_heads,
    )
    check(
        "sparse_num_index_heads",
        model.index_heads == model.kv_heads,
        f"num_key_value_heads ({model.kv_heads}), one a GQA group",
        model.index_heads,
    )
    check(
        "sparse_topk_blocks",
        model.topk_blocks >= max(1, model.init_blocks + model.local_blocks),
        ">= init + local blocks and >= 1",
        model.topk_blocks,
    )
    check(
        "sparse_local_block",
        model.local_blocks >= 1,
        ">= 1 (the newest block is always kept)",
        model.local_blocks,
    )
    check("sparse_init_block", model.init_blocks >= 0, ">= 0", model.init_blocks)
    check(
        "rotary_dim",
        0 < model.rope.rotary_dim <= model.head_dim and model.rope.rotary_dim % 2 == 0,
        f"even, 2..{model.head_dim}",
        model.rope.rotary_dim,
    )
    check(
        "num_experts_per_tok",
        0 < model.experts_per_token <= model.num_experts,
        f"1..{model.num_experts}",
        model.experts_per_token,
    )
