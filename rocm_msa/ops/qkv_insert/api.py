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

from rocm_msa.cache.paged import IndexCache, MainCache, PagedCache
from rocm_msa.errors import check_int, check_tensor, expect
from rocm_msa.ops.dispatch import choose, flydsl_run, on_host, triton_run
from rocm_msa.ops.qkv_insert import reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int64, torch.int32)

_IMPLEMENTATIONS = {
    "reference": reference.run,
    "triton": triton_run("qkv_insert"),
    "flydsl": flydsl_run("qkv_insert"),
}


@dataclass(frozen=True)
class Heads:
    """Heads of this rank. Dense layers have no index heads (0)."""

    q: int
    kv: int
    index: int
    head_dim: int
    rotary_dim: int

    def __post_init__(self) -> None:
        for name, low in (("q", 1), ("kv", 1), ("index", 0), ("head_dim", 1), ("rotary_dim", 2)):
            check_int(f"heads.{name}", getattr(self, name), low)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                expect("heads.rotary_dim", f"even, 2..{self.head_dim}", self.rotary_dim)
            )

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
        positions: `[tokens]` int64 or int32, 0..max_position-1.
        main_cache, index_cache: written at `main_slots`, `index_slots`.
        main_slots, index_slots: `[tokens]` int64 or int32, distinct; -1 writes nothing.
        heads: head counts and dims of this rank. With heads.index 0, everything of the index
            branch is None.

    Returns:
        q `[tokens, q_heads, head_dim]` and index_q `[tokens, index_heads, head_dim]` (None when
        heads.index is 0), in qkv's dtype.

    Raises:
        TypeError, ValueError: see errors.check_tensor; a position outside of cos_sin; a slot
            outside of the cache, or twice. Nothing is written then. On a GPU positions and slots
            are not read on the host: the Triton kernel ignores slots outside of the cache and takes
            a position outside of the table as its nearest end.
    """
    if not isinstance(heads, Heads):
        raise TypeError(expect("heads", "a Heads", type(heads).__name__))
    check_tensor("qkv", qkv, ["tokens", heads.qkv_columns], FLOATS)
    tokens, device = qkv.shape[0], qkv.device
    shape = ["max_position", heads.rotary_dim]
    check_tensor("cos_sin", cos_sin, shape, FLOATS, device=device)
    check_tensor("positions", positions, [tokens], INTS, device=device)
    if not 0 < norms.eps < float("inf"):
        raise ValueError(expect("norms.eps", "a finite number > 0", norms.eps))
    index_given = {
        "norms.index_q": norms.index_q,
        "norms.index_k": norms.index_k,
        "index_cache": index_cache,
        "index_slots": index_slots,
    }
    for name, value in index_given.items():
        if (value is None) == bool(heads.index):
            wanted = f"{'given' if heads.index else 'None'} (heads.index is {heads.index})"
            raise ValueError(expect(name, wanted, "None" if value is None else "a value"))
    _check_weight("norms.q", norms.q, heads, device)
    _check_weight("norms.k", norms.k, heads, device)
    _check_cache("main_cache", main_cache, MainCache, heads.kv, heads.head_dim, device)
    _check_slots("main_slots", main_slots, main_cache, tokens)
    if heads.index:
        _check_weight("norms.index_q", norms.index_q, heads, device)
        _check_weight("norms.index_k", norms.index_k, heads, device)
        _check_cache("index_cache", index_cache, IndexCache, 1, heads.head_dim, device)
        _check_slots("index_slots", index_slots, index_cache, tokens)
    inside = not (tokens and on_host(positions)) or (
        0 <= int(positions.min()) <= int(positions.max()) < cos_sin.shape[0]
    )
    if not inside:
        raise ValueError(
            expect(
                "positions",
                f"0..{cos_sin.shape[0] - 1} (the RoPE table's reach)",
                f"{int(positions.min())}..{int(positions.max())}",
            )
        )
    run = choose("qkv_insert", backend, _IMPLEMENTATIONS, device)
    return run(
        qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
    )


def _check_weight(name: str, weight: torch.Tensor, heads: Heads, device: torch.device) -> None:
    check_tensor(name, weight, [heads.head_dim], FLOATS, device=device)


def _check_cache(
    name: str, cache: PagedCache, kind: type, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    if not isinstance(cache, kind):
        raise TypeError(expect(name, f"a {kind.__name__}", type(cache).__name__))
    got = (cache.kv_heads, cache.head_dim)
    if got != (kv_heads, head_dim):
        raise ValueError(expect(f"{name} (kv_heads, head_dim)", (kv_heads, head_dim), got))
    if cache.pages.device != device:
        raise ValueError(expect(f"{name}.pages.device", f"{device}, as qkv", cache.pages.device))


def _check_slots(name: str, slots: torch.Tensor, cache: PagedCache, tokens: int) -> None:
    if on_host(slots):
        cache.check_slots(name, slots, tokens)
    else:
        check_tensor(name, slots, [tokens], INTS, device=cache.pages.device)
