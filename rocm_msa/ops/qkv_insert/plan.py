"""Tiles of qkv_insert: a function of the token count and the target alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """tokens: of one head a program owns (a power of two)."""

    tokens: int
    warps: int


def select(tokens: int, target: str) -> Tuning:
    """target: see triton_host.target_of. A wave of AMD takes twice the columns of a warp."""
    if target == "cuda":
        return Tuning(4 if tokens < 512 else 8 if tokens < 2048 else 16, 4)
    return Tuning(2, 1) if tokens < 512 else Tuning(16, 4)
