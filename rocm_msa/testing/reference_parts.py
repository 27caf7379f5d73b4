"""The parts of the reference model that stand alone: cache rounding, selection, RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rocm_msa.formats import nvfp4

CACHE_DTYPES = ("none", "bf16", "fp8", "nvfp4")
_FP8_MAX = 448.0


def through_cache(x: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    """What a cache gives back for x [..., head_dim]: quantised and dequantised, in fp32.

    `none` keeps x; `bf16` rounds; `fp8` is a saturating E4M3 cast with scale 1 that never keeps
    a NaN; `nvfp4` has the global scale 1.
    """
    x = x.float()
    if cache_dtype == "none":
        return x
    if cache_dtype == "bf16":
        return x.to(torch.bfloat16).float()
    if cache_dtype == "fp8":
        x = torch.where(x.isnan(), torch.zeros_like(x), x)
        return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
    if cache_dtype == "nvfp4":
        data, scales = nvfp4.quantize(x, 1.0)
        return nvfp4.dequantize(data, scales, 1.0, torch.float32)
    raise ValueError(f"cache dtype: expected one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}")


def select_blocks(
    scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, init: int, local: int
) -> torch.Tensor:
    """The selection rule, in its most literal form.

    Args:
        scores: fp32 [heads, rows, max_blocks].
        num_blocks: int [rows], the causal blocks of each row.

    Returns:
        int64 [heads, rows, topk]: forced blocks first (rising id), then by score; -1 after them.
    """
    heads, rows, width = scores.shape
    ids = torch.arange(width)
    nb = num_blocks[:, None]
    allowed = ids < nb
    forced = allowed & ((ids < init) | (ids >= nb - local))
    nan = scores.isnan()
    clean = torch.where(nan, torch.full_like(scores, -math.inf), scores) + 0.0
    # 0 forced, 1 a number, 2 NaN, 3 not causal; stable sorts, the last key weighs most.
    kind = torch.where(nan, 2, 1)
    kind = torch.where(forced, 0, kind)
    kind = torch.where(allowed.expand_as(kind), kind, 3)
    clean = torch.where(kind == 0, torch.zeros_like(clean), clean)
    order = clean.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, kind.gather(-1, order).sort(dim=-1, stable=True).indices)
    chosen = torch.full((heads, rows, topk), -1, dtype=torch.int64)
    count = min(topk, width)
    best = order[..., :count]
    chosen[..., :count] = torch.where(kind.gather(-1, best) == 3, -1, best)
    return chosen


def blocks_to_mask(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """Selected ids [..., topk] as a bool mask [..., width]."""
    slots = torch.where(chosen < 0, width, chosen)
    mask = torch.zeros(*chosen.shape[:-1], width + 1, dtype=torch.bool)
    return mask.scatter_(-1, slots, True)[..., :width]


def max_position(config: Mapping[str, Any]) -> int:
    """Positions that RoPE covers: the native range, or its YaRN multiple."""
    scaling = config.get("rope_scaling") or {}
    limit = config["max_position_embeddings"]
    if not scaling:
        return limit
    return int(scaling.get("original_max_position_embeddings", limit) * scaling.get("factor", 1.0))


def rope_frequencies(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 [rotary/2] and the factor on cos and sin, plain or YaRN."""
    dim, theta = config["rotary_dim"], float(config["rope_theta"])
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / theta**exponent
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind != "yarn":
        raise NotImplementedError(f"rope_scaling.rope_type: expected yarn, got {kind!r}")
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])

    def dimension(rotations: float) -> float:
        wave = original / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    keep = 1.0 - ramp.clamp(0, 1)
    scale = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return plain / factor * (1 - keep) + plain * keep, float(scale)
