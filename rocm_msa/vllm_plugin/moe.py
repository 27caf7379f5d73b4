"""MLP and MoE of M3.

    routing: s = sigmoid(x W_gate) in fp32; the top-k of s + bias; weights s / sum(s) * scaling
    experts: SwiGLU-OAI, gate * sigmoid(alpha * gate) * (up + beta), gate <= limit, |up| <= limit

On the CPU the routed experts are `CpuExperts`: vLLM's fused MoE has no SwiGLU-OAI there. On a GPU
they are vLLM's fused MoE with its own quantisation code.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.activation import SiluAndMulWithClamp
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

from rocm_msa.config import ModelConfig

ExpertMapping = list[tuple[str, str, int, str]]
"""(parameter name, checkpoint name, expert id, shard id) a tensor of a checkpoint."""


class Mlp(nn.Module):
    """SwiGLU-OAI MLP, dense layers and shared experts. `[tokens, hidden] -> [tokens, hidden]`."""

    def __init__(
        self, model: ModelConfig, size: int, prefix: str, quant_config=None, reduce: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            model.hidden_size,
            [size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            size,
            model.hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=reduce,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMulWithClamp(
            swiglu_limit=model.swiglu_limit, alpha=model.swiglu_alpha, beta=model.swiglu_beta
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out


class Moe(nn.Module):
    """Sigmoid-routed experts with a selection bias, and the shared expert."""

    def __init__(self, model: ModelConfig, prefix: str, quant_config=None) -> None:
        super().__init__()
        self.gate = GateLinear(
            model.hidden_size,
            model.num_experts,
            bias=False,
            params_dtype=torch.float32,
            out_dtype=torch.float32,
            prefix=f"{prefix}.gate",
        )
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(model.num_experts, dtype=torch.float32)
        )
        self.shared_experts = None
        if model.shared_experts:
            self.shared_experts = Mlp(
                model,
                model.intermediate_size * model.shared_experts,
                f"{prefix}.shared_experts",
                quant_config,
                reduce=False,
            )
        self.on_cpu = current_platform.is_cpu()
        if self.on_cpu:
            self.experts = CpuExperts(model)
        else:
            self.experts = self._fused_experts(model, prefix, quant_config)

    def _fused_experts(self, model: ModelConfig, prefix: str, quant_config) -> nn.Module:
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        return FusedMoEFactory(
            num_experts=model.num_experts,
            top_k=model.experts_per_token,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            scoring_func="sigmoid",
            e_score_correction_bias=self.e_score_correction_bias,
            renormalize=True,
            activation="swigluoai_uninterleave",
            swiglu_limit=model.swiglu_limit,
            swiglu_alpha=model.swiglu_alpha,
            swiglu_beta=model.swiglu_beta,
            routed_scaling_factor=model.routed_scaling_factor,
            router_logits_dtype=torch.float32,
            shared_experts=self.shared_experts,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router_logits, _ = self.gate(x)
        if not self.on_cpu:
            return self.experts(hidden_states=x, router_logits=router_logits)
        out = self.experts(x, router_logits, self.e_score_correction_bias)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return tensor_model_parallel_all_reduce(out)


class CpuExperts(nn.Module):
    """Routed experts in PyTorch, sharded over the ranks along the intermediate size.

    Parameters: routed_experts.w13_weight `[experts, 2 * size, hidden]` (gates, then ups) and
    routed_experts.w2_weight `[experts, hidden, size]`, size = intermediate / ranks.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.size = model.intermediate_size // get_tensor_model_parallel_world_size()
        self.routed_experts = nn.Module()
        for name, shape in (
            ("w13_weight", (model.num_experts, 2 * self.size, model.hidden_size)),
            ("w2_weight", (model.num_experts, model.hidden_size, self.size)),
        ):
            parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
            parameter.weight_loader = self._load
            setattr(self.routed_experts, name, parameter)

    def _load(
        self, param: nn.Parameter, weight: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        start = get_tensor_model_parallel_rank() * self.size
        if shard_id == "w2":
            param.data[expert_id].copy_(weight[:, start : start + self.size])
            return
        rows = slice(0, self.size) if shard_id == "w1" else slice(self.size, 2 * self.size)
        param.data[expert_id, rows].copy_(weight[start : start + self.size])

    def route(
        self, router_logits: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts `[tokens, k]` int64 and their weights `[tokens, k]` fp32."""
        scores = torch.sigmoid(router_logits.float())
        choice = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
        experts = choice[:, : self.model.experts_per_token]
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * self.model.routed_scaling_factor

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """`x [tokens, hidden]`, `router_logits [tokens, experts]` -> this rank's partial sum."""
        model, weights = self.model, self.routed_experts
        experts, gates = self.route(router_logits, bias)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in experts.unique().tolist():
            token, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], weights.w13_weight[expert]).chunk(2, dim=-1)
            gate = gate.clamp(max=model.swiglu_limit)
            up = up.clamp(-model.swiglu_limit, model.swiglu_limit)
            hidden = gate * torch.sigmoid(model.swiglu_alpha * gate) * (up + model.swiglu_beta)
            y = F.linear(hidden, weights.w2_weight[expert])
            out.index_add_(0, token, y.float() * gates[token, place, None])
        return out.to(x.dtype)


def expert_mapping(model: nn.Module, config: ModelConfig) -> ExpertMapping:
    """Where the checkpoint's experts.E.{w1, w2, w3} go; w1 gate, w2 down, w3 up."""
    if current_platform.is_cpu():
        return list(_cpu_mapping(config.num_experts))
    from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping

    return fused_moe_make_expert_params_mapping(
        model,
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        num_experts=config.num_experts,
    )


def _cpu_mapping(num_experts: int) -> Iterator[tuple[str, str, int, str]]:
    for expert in range(num_experts):
        for shard, target in (("w1", "w13_"), ("w2", "w2_"), ("w3", "w13_")):
            yield f"experts.routed_experts.{target}", f"experts.{expert}.{shard}.", expert, shard
