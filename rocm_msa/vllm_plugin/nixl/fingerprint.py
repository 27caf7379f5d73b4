"""What a prefill and a decode engine must agree on before a byte is read.

A fingerprint is a flat dict of plain values. Both sides compare both fingerprints; a difference is
refused by both, and the refusal names the field with both values. The tensor-parallel size may
differ unless a side forbids it, the packing may differ where the reader converts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rocm_msa import __version__
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import ROW_FORMAT_VERSION, OuterBlockRow
from rocm_msa.cache.pages import PAGE_FORMAT_VERSION
from rocm_msa.config import BLOCK_TOKENS, ModelConfig

WIRE_VERSION = 1
"""Raised whenever the messages of the side channel or the handshake metadata change."""

_MODEL_FIELDS = (
    "hidden_size",
    "num_layers",
    "q_heads",
    "kv_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "index_heads",
    "index_dim",
    "topk_blocks",
    "init_blocks",
    "local_blocks",
)

_NEGOTIATED = ("tp", "allow_unequal_tp", "packing", "convert_packing")


class Incompatible(RuntimeError):
    """The two engines cannot exchange KV; the message names every field with both values."""


def fingerprint(
    model: ModelConfig,
    row: OuterBlockRow,
    main: CacheDType,
    index: CacheDType,
    *,
    tp: int,
    activation_dtype: str,
    kv_scales: list[tuple[float, float]],
    draft: str,
    options: Any,
) -> dict[str, Any]:
    """Args: kv_scales: (k, v) of each layer. draft: the draft model, or "none"."""
    sparse = "".join("s" if s else "d" for s in model.sparse_layers)
    rope = model.rope
    return {
        "package format": WIRE_VERSION,
        "page format": PAGE_FORMAT_VERSION,
        "row format": ROW_FORMAT_VERSION,
        "row layout": row.digest,
        "block tokens": BLOCK_TOKENS,
        "main cache dtype": main.value,
        "index cache dtype": index.value,
        "activation dtype": activation_dtype,
        **{name: getattr(model, name) for name in _MODEL_FIELDS},
        "sparse layers": sparse,
        "rope": f"theta {rope.theta:g}, dim {rope.rotary_dim}, factor {rope.factor:g} over "
        f"{rope.original_max_position}",
        "kv scales": hashlib.sha256(repr(kv_scales).encode()).hexdigest()[:12],
        "draft model": draft,
        "tp": tp,
        "allow_unequal_tp": options.allow_unequal_tp,
        "packing": options.packing,
        "convert_packing": options.convert_packing,
        "debug_checks": options.debug_checks,
        "package": __version__,
    }


def differences(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[str]:
    """Every reason against a transfer, each with both values; empty when it may go on."""
    reasons = []
    for name in dict.fromkeys([*prefill, *decode]):
        if name in _NEGOTIATED or name == "package":
            continue
        mine, theirs = prefill.get(name, "absent"), decode.get(name, "absent")
        if mine != theirs:
            reasons.append(f"{name}: prefill has {mine!r}, decode has {theirs!r}")
    p_tp, d_tp = prefill.get("tp"), decode.get("tp")
    if p_tp != d_tp:
        for side, print_ in (("prefill", prefill), ("decode", decode)):
            if not print_.get("allow_unequal_tp", False):
                reasons.append(
                    f"tensor-parallel size: prefill has {p_tp}, decode has {d_tp}, and "
                    f"{side} has allow_unequal_tp false"
                )
    p_packing, d_packing = prefill.get("packing"), decode.get("packing")
    if p_packing != d_packing:
        if not decode.get("convert_packing", False):
            reasons.append(
                f"packing: prefill has {p_packing!r}, decode has {d_packing!r}; decode can permute "
                "the pages with convert_packing true"
            )
        elif decode.get("main cache dtype") != CacheDType.NVFP4.value:
            reasons.append(
                f"packing: prefill has {p_packing!r}, decode has {d_packing!r}; only nvfp4 pages "
                "can be converted"
            )
        elif p_tp != d_tp:
            reasons.append(
                f"packing: prefill has {p_packing!r}, decode has {d_packing!r}; pages of another "
                f"packing cannot be read head by head (tp: prefill {p_tp}, decode {d_tp})"
            )
    return reasons


def check(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Raises Incompatible with every difference."""
    reasons = differences(prefill, decode)
    if reasons:
        raise Incompatible("KV transfer refused: " + "; ".join(reasons))
