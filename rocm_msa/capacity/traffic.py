"""Bytes that decode reads, that prefill exchanges, and that weights take. Computed only.

Unless said otherwise a byte count is of one rank, token and layer. Pure Python: no torch.
"""

from __future__ import annotations

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity.caches import CacheDTypes, Term
from rocm_msa.config import BLOCK_TOKENS, ModelConfig, RankGeometry
from rocm_msa.errors import expect

BF16_BYTES = 2
MX_GROUP = 32
"""Values an E8M0 scale byte of an MX format covers."""

WEIGHT_DTYPES = ("bf16", "mxfp8", "nvfp4", "mxfp4")


def decode_reads(model: ModelConfig, dtypes: CacheDTypes) -> tuple[Term, ...]:
    """Bytes one decode row reads a layer: the scan, what it replaces, and what follows it."""
    index = dtypes.index.vector_bytes(model.index_dim)
    fp8 = CacheDType.FP8.vector_bytes(model.head_dim)
    vector = dtypes.main.vector_bytes(model.head_dim)
    selected = model.topk_blocks * BLOCK_TOKENS
    return (
        Term(
            "index scan, a token of context",
            f"1 index key of {index} B ({dtypes.index.value})",
            index,
        ),
        Term(
            "dense FP8 K/V, a token of context",
            f"{model.kv_heads} heads × 2 × {fp8} B, for comparison",
            2 * model.kv_heads * fp8,
        ),
        Term(
            "selected K/V, a row",
            f"{selected:,} tokens × {model.kv_heads} heads × 2 × {vector} B ({dtypes.main.value})",
            selected * 2 * model.kv_heads * vector,
        ),
    )


def all_reduce_bytes(model: ModelConfig, tp: int) -> tuple[Term, ...]:
    """Two ring all-reduces of the bf16 hidden state: bytes sent a token, layer and GPU."""
    nbytes = 2 * (tp - 1) * model.hidden_size * BF16_BYTES // tp
    formula = f"2 × {tp - 1}/{tp} × {model.hidden_size} × 2 B"
    return tuple(
        Term(f"ring all-reduce after {where}", formula, nbytes)
        for where in ("attention", "the MoE")
    )


def sequence_parallel_bytes(model: ModelConfig, tp: int) -> tuple[Term, ...]:
    """Sequence-parallel exchanges: bytes sent a token, layer and GPU."""

    def sent(name: str, width: int, mxfp8: bool) -> Term:
        share = f"{tp - 1}/{tp} × {width}"
        if not mxfp8:
            return Term(f"bf16 {name}", f"{share} × 2 B", (tp - 1) * width * BF16_BYTES // tp)
        nbytes = (tp - 1) * width * (MX_GROUP + 1) // (tp * MX_GROUP)
        return Term(f"MXFP8 {name}", f"{share} × {MX_GROUP + 1}/{MX_GROUP} B", nbytes)

    attended = model.q_heads * model.head_dim // tp
    return (
        sent("all-gather before QKV", model.hidden_size, True),
        sent("all-to-all of the attention output", attended, True),
        sent("all-gather before the MoE", model.hidden_size, True),
        sent("reduce-scatter of the MoE output", model.hidden_size, False),
    )


def weight_terms(model: ModelConfig, rank: RankGeometry, dtype: str) -> tuple[Term, ...]:
    """Estimate of one rank's text weights from the config; norms and biases are left out.

    `nvfp4`: routed experts NVFP4, other linears MXFP8. `mxfp4`: experts MXFP4, the rest bf16.
    Embeddings, head and router stay bf16 in every layout.

    Raises:
        ValueError: a dtype that is not in `WEIGHT_DTYPES`.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(expect("weight dtype", f"one of {list(WEIGHT_DTYPES)}", repr(dtype)))
    linear = {"bf16": "bf16", "mxfp8": "mxfp8", "nvfp4": "mxfp8", "mxfp4": "bf16"}[dtype]
    shared = "mxfp4" if dtype == "mxfp4" else linear
    hidden, tp = model.hidden_size, rank.tp
    moe = sum(model.moe_layers)
    dense = model.num_layers - moe
    heads = 2 * rank.q_heads + 2 * rank.kv_heads
    attention = model.num_layers * hidden * heads * model.head_dim
    index = model.num_sparse_layers * hidden * (rank.index_heads + 1) * model.index_dim
    expert = 3 * hidden * model.intermediate_size // tp
    return (
        _weights("embeddings and head", 2 * model.vocab_size * hidden // tp, "bf16"),
        _weights("attention projections", attention, linear),
        _weights("index projections", index, linear),
        _weights("dense MLPs", dense * 3 * hidden * model.dense_intermediate_size // tp, linear),
        _weights("routers", moe * hidden * model.num_experts, "bf16"),
        _weights("routed experts", moe * model.num_experts * expert, dtype),
        _weights("shared experts", moe * model.shared_experts * expert, shared),
    )


_WEIGHT_BITS = {"bf16": 16.0, "mxfp8": 8.25, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits a value with its share of the block scale."""


def _weights(name: str, values: int, dtype: str) -> Term:
    bits = _WEIGHT_BITS[dtype]
    formula = f"{values / 1e9:,.2f} G values × {bits / 8:g} B ({dtype})"
    return Term(name, formula, int(values * bits / 8))
