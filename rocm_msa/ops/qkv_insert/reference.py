"""Reference of qkv_insert, see api.py."""

from __future__ import annotations

import torch


def run(
    qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
) -> tuple[torch.Tensor, torch.Tensor | None]:
    counts = [heads.q, heads.kv, heads.kv]
    if heads.index:
        counts += [heads.index, 1]
    parts = qkv.split([c * heads.head_dim for c in counts], dim=-1)
    parts = [p.reshape(qkv.shape[0], c, heads.head_dim) for p, c in zip(parts, counts, strict=True)]
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rope(gemma_norm(x, weight, norms.eps), cos, sin).to(qkv.dtype)

    q, k, v = parts[:3]
    main_cache.write(turned(k, norms.k), v, main_slots)
    if not heads.index:
        return turned(q, norms.q), None
    index_q, index_k = parts[3:]
    index_cache.write(turned(index_k, norms.index_k)[:, 0], index_slots)
    return turned(q, norms.q), turned(index_q, norms.index_q)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 Gemma RMSNorm over the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Partial NeoX rotation of fp32 `x [tokens, heads, dim]`; cos, sin `[tokens, rotary / 2]`."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
