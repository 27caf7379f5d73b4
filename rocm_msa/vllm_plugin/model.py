"""MiniMax-M3 / M3.1 text model for vLLM, on rocm-msa's attention layers and caches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.utils import (
    make_empty_intermediate_tensors_factory,
    maybe_prefix,
)
from vllm.platforms import current_platform

from rocm_msa.vllm_plugin import cpu_runner, decode_cp, graphs, kernels, mono
from rocm_msa.vllm_plugin.attention import MsaAttention
from rocm_msa.vllm_plugin.loading import load_text_weights
from rocm_msa.vllm_plugin.moe import ExpertMapping, Mlp, Moe, expert_mapping
from rocm_msa.vllm_plugin.verify import Serving, resolve


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP or MoE; the residual is carried beside the hidden states."""

    def __init__(self, serving: Serving, layer_id: int, prefix: str, quant_config) -> None:
        super().__init__()
        model = serving.model
        self.self_attn = MsaAttention(serving, layer_id, f"{prefix}.self_attn", quant_config)
        self.is_moe = model.moe_layers[layer_id]
        if self.is_moe:
            self.block_sparse_moe = Moe(model, f"{prefix}.block_sparse_moe", quant_config)
        else:
            self.mlp = Mlp(model, model.dense_intermediate_size, f"{prefix}.mlp", quant_config)
        self.input_layernorm = GemmaRMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(model.hidden_size, eps=model.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        ffn = self.block_sparse_moe if self.is_moe else self.mlp
        return ffn(hidden_states), residual


class Model(nn.Module, EagleModelMixin):
    """Embedding, decoder layers, final norm.

    mono: runs layers of small decode steps as one launch each; None without the flag.
    replays: counts the steps whose captured graph runs in place of `forward`.
    """

    def __init__(self, vllm_config, serving: Serving, prefix: str) -> None:
        super().__init__()
        config, quant_config = serving.model, _quant_config(vllm_config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.start_layer = 0
        self.layers = nn.ModuleList(
            DecoderLayer(serving, i, f"{prefix}.layers.{i}", quant_config)
            for i in range(config.num_layers)
        )
        self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mono: mono.Mono | None = None
        self.replays = graphs.Replays()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        aux: list[torch.Tensor] = []
        self._maybe_add_hidden_state(aux, 0, hidden_states, residual)
        with self.replays.noted(hidden_states.device):
            step = None if self.mono is None else self.mono.begin(positions, hidden_states)
            for index, layer in enumerate(self.layers):
                run = layer if step is None else step.layer(index) or layer
                hidden_states, residual = run(positions, hidden_states, residual)
                self._maybe_add_hidden_state(aux, index + 1, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return (hidden_states, aux) if aux else hidden_states


class RocmMsaM3ForCausalLM(nn.Module, SupportsEagle3):
    """The architecture MiniMaxM3SparseForCausalLM (and its M3.1 name)."""

    packed_modules_mapping = {  # noqa: RUF012  vLLM reads a plain class attribute
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config, prefix: str = "") -> None:
        super().__init__()
        if current_platform.is_cpu():
            cpu_runner.keep_seeded_draws()
        self.serving = resolve(vllm_config)
        kernels.start(self.serving, vllm_config.model_config.dtype)
        self.config = vllm_config.model_config.hf_text_config
        self.quant_config = _quant_config(vllm_config)
        self.quantized_checkpoint = getattr(
            vllm_config.model_config.hf_config, "quantization_config", None
        )
        self.model = Model(vllm_config, self.serving, maybe_prefix(prefix, "model"))
        shared = decode_cp.start(self.serving, vllm_config)
        attention = [layer.self_attn for layer in self.model.layers]
        warm_up = kernels.WarmUp(self.serving, vllm_config, attention)
        self.model.mono = mono.start(self.serving, vllm_config, attention)
        if self.model.mono is not None:
            graphs.add_size(vllm_config, self.model.mono.most_rows)
        for layer in attention:
            layer.share(shared, warm_up, self.model.mono)
        self.lm_head = ParallelLMHead(
            self.serving.model.vocab_size,
            self.serving.model.hidden_size,
            quant_config=self.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(self.serving.model.vocab_size)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], self.serving.model.hidden_size
        )

    @staticmethod
    def get_model_state_cls() -> type:
        """State class of vLLM's model runner V2; upstream's VL class asks for it."""
        return graphs.model_state_cls()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors=None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def compute_logits_local(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary."""
        return self.logits_processor(self.lm_head, hidden_states, skip_gather=True)

    def get_expert_mapping(self) -> ExpertMapping:
        return expert_mapping(self, self.serving.model)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the public checkpoint's names; a missing or extra tensor is an error naming it."""
        collector = mono.collector(
            self.model.mono, self.serving, self.config, self.quantized_checkpoint
        )
        if collector is not None:
            weights = collector.watch(weights)
        if current_platform.is_cpu() and self.quantized_checkpoint is not None:
            from rocm_msa.checkpoint.read import dequantised_weights

            weights = dequantised_weights(weights, self.quantized_checkpoint)
        loaded = load_text_weights(self, weights)
        if collector is not None:
            collector.finish()
        return loaded


class RocmMsaM3VLTextOnly(RocmMsaM3ForCausalLM):
    """VL checkpoints where vLLM's vision code cannot be imported: the text model alone."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(_text_weights(weights))


_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")


def _text_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not name.startswith(_VISION_PREFIXES):
            yield name.removeprefix("language_model."), tensor


def _quant_config(vllm_config):
    """vLLM's quantisation on a GPU; on the CPU weights are dequantised while loading."""
    return None if current_platform.is_cpu() else vllm_config.quant_config
