"""A tiny EAGLE3 drafter for vLLM (LlamaForCausalLMEagle3), taught by heart what a target answers.

Its attention and MLP add nothing, so that what it says of a token hangs on the target's hidden
states alone, as EAGLE3 gives them: those of the layers AUX of the row that the token came from.

    logits = lm_head norm(fc [hidden 1 | hidden 2 | hidden 4])

fc is random, lm_head solves least squares. Its first draft of a step is then right where the hidden
states are those that it was taught; later ones repeat it and are mostly rejected.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.vllm_plugin.engine import VOCAB

AUX = (1, 2, 4)
"""Counted as vLLM does: in front of layer n, 4 behind the last of four."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 256, 4, 2, 64, 256
EPS = 1e-6
GAIN = 8.0  # logit of a token that was taught, the others near 0


def fc() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * (3 * HIDDEN) ** -0.5).bfloat16()


def taught(hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """lm_head bf16 `[VOCAB, HIDDEN]`.

    Args:
        hidden: `[n, 3 HIDDEN]`, of the rows that the target's n tokens came from, several answers
            one after another. tokens: to say after each: the one that follows it.
    """
    x = hidden.float() @ fc().float().T
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    wanted = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()
    return (GAIN * (torch.linalg.pinv(x) @ wanted).T).bfloat16()


def make_drafter(directory: Path, lm_head: torch.Tensor) -> str:
    """Write the checkpoint; the embedding is the target's."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    tensors = {f"midlayer.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    tensors |= {"fc.weight": fc(), "lm_head.weight": lm_head}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": AUX,
    }
    directory.mkdir(parents=True)
    contiguous = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
