"""MiniMax-M3's text model in plain PyTorch, the yardstick for the whole serving path.

Written from the contract (docs/formats.md, the model page) and from nothing in rocm_msa.ops.
One prompt at a time, no paging: K, V and index K of every layer are kept as they would be read
back from a cache, that is, quantised and dequantised per token.

Where values are rounded, with activations in `dtype`:
    norms, RoPE      computed in fp32 from the rounded linear output, rounded once at the end
    linears          outputs rounded to `dtype`
    K, V, index K    rounded to `dtype`, then through their cache dtype
    scores, softmax  fp32; the attention output is rounded to `dtype`
    router           fp32 throughout
    experts          each expert's output rounded to `dtype`; the weighted sum with the shared
                     expert in fp32, rounded once
Selection: per index head the largest index score of a block; the first `init` and the newest
`local` blocks always, then the best scores, the lower block at a tie, NaN last.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rocm_msa.checkpoint.names import moe_layers, sparse_layers
from rocm_msa.checkpoint.quantisation import canonical, is_outside, text_config
from rocm_msa.checkpoint.read import open_checkpoint
from rocm_msa.testing.reference_parts import (
    CACHE_DTYPES,
    blocks_to_mask,
    max_position,
    rope_frequencies,
    select_blocks,
    through_cache,
)

_ROW_CHUNK = 256  # query rows a step of the attention: bounds the score matrix


@dataclass
class LayerState:
    """One layer's tokens as read back from its caches, fp32.

    keys, values: [tokens, kv_heads, head_dim]; index_keys: [tokens, index_dim] or None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index_keys: torch.Tensor | None


@dataclass
class Details:
    """What a forward saw: per layer the caches, the chosen blocks and the hidden states.

    selected: layer -> int64 [index_heads, rows, topk], sparse layers only.
    hidden: layer -> [rows, hidden], the output of the layer.
    """

    layers: dict[int, LayerState] = field(default_factory=dict)
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """Greedy tokens, and for each the margin of the best over the second logit."""

    tokens: list[int]
    margins: list[float]
    logits: torch.Tensor


class ReferenceModel:
    """The text model of one checkpoint.

    Args:
        config: HF config as a dict, text or VL.
        weights: unquantised tensors under canonical text names (`model.layers...`).
        dtype: of activations and weights: fp32 or bf16.
        main_dtype, index_dtype: cache dtypes, one of CACHE_DTYPES.
        rope_dtype: what the cos/sin table is rounded to.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        main_dtype: str | None = "none",
        index_dtype: str | None = "none",
        rope_dtype: torch.dtype = torch.float32,
    ):
        self.config = dict(text_config(config))
        self.dtype = dtype
        self.main_dtype = main_dtype or "none"
        self.index_dtype = index_dtype or "none"
        self.rope_dtype = rope_dtype
        for name, value in (("main_dtype", self.main_dtype), ("index_dtype", self.index_dtype)):
            if value not in CACHE_DTYPES:
                raise ValueError(f"{name}: expected one of {CACHE_DTYPES}, got {value!r}")
        self.sparse = sparse_layers(config)
        self.moe = moe_layers(config)
        self.weights = {
            name: tensor.float() if _stays_fp32(name) else tensor.to(dtype)
            for name, tensor in weights.items()
        }
        self.inv_freq, self.rope_scale = rope_frequencies(self.config)

    @classmethod
    def from_checkpoint(
        cls, directory: str | os.PathLike[str] | Path, **options: Any
    ) -> ReferenceModel:
        """Read a checkpoint of any layout; quantised weights are dequantised to bf16."""
        checkpoint = open_checkpoint(directory)
        checkpoint.check()
        weights = {
            canonical(name): tensor
            for name, tensor in checkpoint.dequantised(torch.bfloat16)
            if not is_outside(name)
        }
        return cls(checkpoint.config, weights, **options)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], details: Details | None = None) -> torch.Tensor:
        """Logits fp32 [tokens, vocab] of one prompt; `details` is filled when given."""
        hidden = self._run(token_ids, {}, details)
        return self._logits(hidden)

    @torch.inference_mode()
    def generate_greedy(self, prompt: Sequence[int], count: int) -> Generation:
        """Extend the prompt by `count` greedy tokens, a token at a time over kept K and V."""
        state: dict[int, LayerState] = {}
        tokens: list[int] = []
        margins: list[float] = []
        rows = []
        step: Sequence[int] = list(prompt)
        for _ in range(count):
            logits = self._logits(self._run(step, state, None)[-1:])[0]
            best = logits.topk(2)
            token = int((logits == best.values[0]).nonzero()[0])
            tokens.append(token)
            margins.append(float(best.values[0] - best.values[1]))
            rows.append(logits)
            step = [token]
        return Generation(tokens, margins, torch.stack(rows))

    @torch.inference_mode()
    def continuation_margins(self, prompt: Sequence[int], tokens: Sequence[int]) -> Generation:
        """Score somebody else's continuation: our greedy choice and margin before each token."""
        logits = self.forward([*prompt, *tokens])[len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return Generation(logits.argmax(dim=-1).tolist(), margins, logits)

    def _run(
        self, token_ids: Sequence[int], state: dict[int, LayerState], details: Details | None
    ) -> torch.Tensor:
        """Hidden states [rows, hidden] of new tokens that follow those in `state`."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"token_ids: expected one non-empty list, got shape {list(ids.shape)}")
        start = state[0].keys.shape[0] if state else 0
        limit = max_position(self.config)
        if start + len(ids) > limit:
            raise ValueError(
                f"token_ids: expected at most {limit} positions (RoPE range), "
                f"got {start + len(ids)}"
            )
        positions = torch.arange(start, start + len(ids))
        cos_sin = self._cos_sin(positions)
        hidden = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            base = f"model.layers.{layer}"
            x = self._norm(hidden, f"{base}.input_layernorm")
            hidden = hidden + self._attention(layer, x, cos_sin, start, state, details)
            x = self._norm(hidden, f"{base}.post_attention_layernorm")
            mlp = (
                self._moe(f"{base}.block_sparse_moe", x)
                if self.moe[layer]
                else self._mlp(f"{base}.mlp", x, "gate_proj", "up_proj", "down_proj")
            )
            hidden = hidden + mlp
            if details is not None:
                details.layers[layer] = state[layer]
                details.hidden[layer] = hidden
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self._linear(head, self._norm(hidden, "model.norm")).float()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm_fp32(x, name).to(self.dtype)

    def _norm_fp32(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1.0 + self.weights[f"{name}.weight"].float())

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [rows, 1, rotary/2]."""
        angle = positions.float()[:, None] * self.inv_freq
        cos, sin = angle.cos() * self.rope_scale, angle.sin() * self.rope_scale
        return tuple(t.to(self.rope_dtype).float()[:, None] for t in (cos, sin))

    def _norm_rope(
        self, x: torch.Tensor, name: str, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Per-head norm and partial NeoX rotation of [rows, heads, dim], rounded once."""
        cos, sin = cos_sin
        half = cos.shape[-1]
        x = self._norm_fp32(x, name)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(rotated, dim=-1).to(self.dtype)

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        start: int,
        state: dict[int, LayerState],
        details: Details | None,
    ) -> torch.Tensor:
        base = f"model.layers.{layer}.self_attn"
        dim = self.config["head_dim"]
        q, k, v = (
            self._linear(f"{base}.{p}_proj", x).unflatten(-1, (-1, dim)) for p in ("q", "k", "v")
        )
        q = self._norm_rope(q, f"{base}.q_norm", cos_sin)
        k = self._norm_rope(k, f"{base}.k_norm", cos_sin)
        keys = through_cache(k, self.main_dtype)
        values = through_cache(v, self.main_dtype)
        index_q = index_keys = None
        if self.sparse[layer]:
            index_dim = self.config["sparse_attention_config"]["sparse_index_dim"]
            index_q = self._linear(f"{base}.index_q_proj", x).unflatten(-1, (-1, index_dim))
            index_k = self._linear(f"{base}.index_k_proj", x).unflatten(-1, (1, index_dim))
            index_q = self._norm_rope(index_q, f"{base}.index_q_norm", cos_sin)
            index_k = self._norm_rope(index_k, f"{base}.index_k_norm", cos_sin)
            index_keys = through_cache(index_k[:, 0], self.index_dtype)
        if layer in state:
            old = state[layer]
            keys = torch.cat((old.keys, keys))
            values = torch.cat((old.values, values))
            if index_keys is not None:
                index_keys = torch.cat((old.index_keys, index_keys))
        state[layer] = LayerState(keys, values, index_keys)

        outs, chosen = [], []
        for begin in range(0, len(q), _ROW_CHUNK):
            rows = slice(begin, begin + _ROW_CHUNK)
            causal = start + torch.arange(len(q))[rows] + 1
            visible = None
            if index_q is not None:
                blocks = self._select(index_q[rows], index_keys, causal)
                chosen.append(blocks)
                visible = blocks
            outs.append(self._attend(q[rows], keys, values, causal, visible))
        if details is not None and chosen:
            details.selected[layer] = torch.cat(chosen, dim=1)
        return self._linear(f"{base}.o_proj", torch.cat(outs).to(self.dtype).flatten(1))

    def _select(
        self, index_q: torch.Tensor, index_keys: torch.Tensor, causal: torch.Tensor
    ) -> torch.Tensor:
        """Blocks of each row, int64 [index_heads, rows, topk]; `causal` = keys a row may see."""
        sparse = self.config["sparse_attention_config"]
        size = sparse["sparse_block_size"]
        seen = int(causal.max())
        width = -(-seen // size)
        scores = index_q.float().transpose(0, 1) @ index_keys[:seen].T
        future = torch.arange(seen) >= causal[:, None]
        scores = scores.masked_fill(future, -math.inf)
        scores = F.pad(scores, (0, width * size - seen), value=-math.inf)
        return select_blocks(
            scores.unflatten(-1, (width, size)).amax(dim=-1),
            -(-causal // size),
            sparse["sparse_topk_blocks"],
            sparse.get("sparse_init_block", 0),
            sparse.get("sparse_local_block", 1),
        )

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        causal: torch.Tensor,
        blocks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Softmax attention, fp32 [rows, q_heads, head_dim], over the visible keys only."""
        rows, q_heads, dim = q.shape
        seen = int(causal.max())
        kv_heads = keys.shape[1]
        visible = (torch.arange(seen) < causal[:, None]).expand(kv_heads, rows, seen)
        if blocks is not None:
            size = self.config["sparse_attention_config"]["sparse_block_size"]
            mask = blocks_to_mask(blocks, -(-seen // size))
            visible = visible & mask.repeat_interleave(size, dim=-1)[..., :seen]
        # [kv_heads, rows, group, dim] x [kv_heads, 1, dim, seen]
        grouped = q.float().unflatten(1, (kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        scores = grouped @ keys[:seen].permute(1, 2, 0) * dim**-0.5
        scores = scores.unflatten(1, (rows, -1))
        scores = scores.masked_fill(~visible[:, :, None], -math.inf)
        probabilities = scores.softmax(dim=-1).flatten(1, 2)
        out = probabilities @ values[:seen].transpose(0, 1)
        return out.unflatten(1, (rows, -1)).permute(1, 0, 2, 3).reshape(rows, q_heads, dim)

    def _mlp(self, base: str, x: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
        limit, alpha = self.config["swiglu_limit"], self.config["swiglu_alpha"]
        g = self._linear(f"{base}.{gate}", x).float().clamp(max=limit)
        u = self._linear(f"{base}.{up}", x).float().clamp(min=-limit, max=limit)
        active = g * torch.sigmoid(alpha * g) * (u + self.config.get("swiglu_beta", 1.0))
        return self._linear(f"{base}.{down}", active.to(self.dtype))

    def _moe(self, base: str, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x.float(), self.weights[f"{base}.gate.weight"]).sigmoid()
        ranked = scores
        if self.config.get("use_routing_bias"):
            ranked = scores + self.weights[f"{base}.e_score_correction_bias"]
        top = ranked.topk(self.config["num_experts_per_tok"], dim=-1).indices
        weights = scores.gather(-1, top)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * self.config.get("routed_scaling_factor", 1.0)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in top.unique().tolist():
            token, slot = (top == expert).nonzero(as_tuple=True)
            out = self._mlp(f"{base}.experts.{expert}", x[token], "w1", "w3", "w2")
            total.index_add_(0, token, out.float() * weights[token, slot, None])
        if self.config.get("n_shared_experts"):
            total += self._mlp(
                f"{base}.shared_experts", x, "gate_proj", "up_proj", "down_proj"
            ).float()
        return total.to(self.dtype)


def _stays_fp32(name: str) -> bool:
    return name.endswith((".gate.weight", "e_score_correction_bias"))
