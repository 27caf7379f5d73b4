"""Tiles of qkv_insert: a function of the token count alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """tokens: of one head a program owns (a power of two)."""

    tokens: int
    warps: int


def select(tokens: int) -> Tuning:
    return Tuning(2, 1) if tokens < 512 else Tuning(16, 4)
