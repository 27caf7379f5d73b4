"""Tiles of qkv_insert: a function of the token count alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """tokens: of one head a program owns (a power of two)."""

    tokens: int
    warps: int


def select(tokens: int) -> Tuning:
    return Tuning(4 if tokens < 512 else 8 if tokens < 2048 else 16, 4)
