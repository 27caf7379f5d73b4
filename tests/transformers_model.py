"""transformers' own minimax_m3_vl text model with the weights of one of our checkpoints."""

from __future__ import annotations

import torch

from rocm_msa.testing.reference_model import ReferenceModel


def build(model: ReferenceModel):
    """fp32, eager attention, in eval mode; every weight must find its place."""
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    skip = ("architectures", "model_type", "torch_dtype")
    known = configuration.MiniMaxM3VLTextConfig.__dataclass_fields__
    keys = {*known, "sparse_attention_config", "moe_layer_freq"} - set(skip)
    config = configuration.MiniMaxM3VLTextConfig(
        **{k: v for k, v in model.config.items() if k in keys},
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )
    config._attn_implementation = "eager"
    theirs = modeling.MiniMaxM3VLForCausalLM(config).float().eval()
    theirs.load_state_dict(
        to_transformers(model.weights, model.config["num_local_experts"]), strict=True
    )
    return theirs


def to_transformers(weights: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Public tensor names to the names of transformers' MiniMaxM3VLForCausalLM."""
    out = {}
    for name, tensor in weights.items():
        new = name.replace("block_sparse_moe.e_score", "block_sparse_moe.gate.e_score")
        new = new.replace("block_sparse_moe", "mlp")
        for side in ("q", "k"):
            new = new.replace(f"self_attn.index_{side}_", f"self_attn.indexer.{side}_")
        if ".experts." in name or "up_proj" in name:
            continue
        if "gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            out[new.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
            continue
        if name.endswith("block_sparse_moe.gate.weight"):
            base = name.replace("gate.weight", "experts")
            fused = new.replace("gate.weight", "experts")

            def stack(*parts: str, base: str = base) -> torch.Tensor:
                return torch.stack(
                    [
                        torch.cat([weights[f"{base}.{e}.{p}.weight"] for p in parts])
                        for e in range(experts)
                    ]
                )

            out[f"{fused}.gate_up_proj"] = stack("w1", "w3")
            out[f"{fused}.down_proj"] = stack("w2")
        out[new] = tensor
    return out
