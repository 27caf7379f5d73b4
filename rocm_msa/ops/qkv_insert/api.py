"""Per-head norms, RoPE and insertion of the fused projection into the caches.

qkv [tokens, (q | k | v | index_q | index_k)] -> q and index_q out, K, V and index key into pages:

    norm(x)  = x * rsqrt(mean(x^2) + eps) * (1 + w)              per head, fp32 (Gemma RMSNorm)
    rope(x)  = partial NeoX: the first rotary_dim values, halves paired, fp32
    q        = rope(norm(q)), k = rope(norm(k)), likewise index_q, index_k;  v as it is

Everything is fp32 up to one rounding to qkv's dtype; the caches quantise the rounded values, so the
stored bytes are a function of the K, V and index key tensors in qkv's dtype. Slot -1 writes
nothing; q and index_q come out for every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.errors import check_tensor, expect
from rocm_msa.ops.dispatch import choose
from rocm_msa.ops.qkv_insert import reference

_IMPLEMENTATIONS = {"reference": reference.run}


@dataclass(frozen=True)
class Heads:
    """Heads of this rank. Dense layers have no index heads (0)."""

    q: int
    kv: int
    index: int
    head_dim: int
    rotary_dim: int

    @property
    def qkv_columns(self) -> int:
        heads = self.q + 2 * self.kv + (self.index + 1 if self.index else 0)
        return heads * self.head_dim


@dataclass(frozen=True)
class Norms:
    """Gemma norm weights, each `[head_dim]`; the index weights are None in dense layers."""

    q: torch.Tensor
    k: torch.Tensor
    index_q: torch.Tensor | None = None
    index_k: torch.Tensor | None = None
    eps: float = 1e-6


def qkv_insert(
    qkv: torch.Tensor,
    norms: Norms,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    main_cache: MainCache,
    index_cache: IndexCache | None,
    main_slots: torch.Tensor,
    index_slots: torch.Tensor | None,
    heads: Heads,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalise, rotate, insert.

    Args:
        qkv: `[tokens, heads.qkv_columns]` bf16, fp16 or fp32; not changed.
        norms: the weights.
        cos_sin: `[max_position, rotary_dim]`: cos of the rotary_dim / 2 angles, then sin.
        positions: `[tokens]` int64, 0..max_position-1.
        main_cache, index_cache: written at `main_slots`, `index_slots`; index None when
            heads.index is 0.
        main_slots, index_slots: `[tokens]` int64; -1 writes nothing.
        heads: head counts and dims of this rank.

    Returns:
        q `[tokens, q_heads, head_dim]` and index_q `[tokens, index_heads, head_dim]` (None when
        heads.index is 0), in qkv's dtype.

    Raises:
        ValueError: shapes; a position outside of cos_sin; a slot outside of the cache.
    """
    tokens = qkv.shape[0]
    check_tensor(
        "qkv",
        qkv,
        ["tokens", heads.qkv_columns],
        (torch.bfloat16, torch.float16, torch.float32),
    )
    check_tensor("cos_sin", cos_sin, ["max_position", heads.rotary_dim])
    check_tensor("positions", positions, [tokens], (torch.int64, torch.int32))
    check_tensor("norms.q", norms.q, [heads.head_dim])
    check_tensor("norms.k", norms.k, [heads.head_dim])
    _check_cache("main_cache", main_cache, heads.kv, heads.head_dim)
    if heads.index:
        if index_cache is None or index_slots is None or norms.index_q is None:
            raise ValueError(
                expect(
                    "index_cache, index_slots and norms.index_*", "given (heads.index > 0)", "None"
                )
            )
        check_tensor("norms.index_q", norms.index_q, [heads.head_dim])
        check_tensor("norms.index_k", norms.index_k, [heads.head_dim])
        _check_cache("index_cache", index_cache, 1, heads.head_dim)
    if tokens and not 0 <= int(positions.min()) <= int(positions.max()) < cos_sin.shape[0]:
        raise ValueError(
            expect(
                "positions",
                f"0..{cos_sin.shape[0] - 1} (the RoPE table's reach)",
                f"{int(positions.min())}..{int(positions.max())}",
            )
        )
    run = choose("qkv_insert", backend, _IMPLEMENTATIONS)
    return run(
        qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
    )


def _check_cache(name: str, cache: MainCache | IndexCache, kv_heads: int, head_dim: int) -> None:
    got = (cache.kv_heads, cache.head_dim)
    if got != (kv_heads, head_dim):
        raise ValueError(expect(f"{name} (kv_heads, head_dim)", (kv_heads, head_dim), got))
