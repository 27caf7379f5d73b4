"""Requests of a varlen batch on gfx950: traced, shared by the prefill ops."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.device.memory import Bytes


@flyc.jit
def last_request(cu: Bytes, stride, requests, holds):
    """Largest r <= requests for which `holds(cu[r], r)`, by halving.

    cu: int32 [requests + 1], stride in elements. holds: true at 0, never again once it is false.
    """
    low, high = fx.Int32(0), requests
    while low < high:
        middle = (low + high + 1) // 2
        below = holds(cu.load(fx.Int32, offset=fx.Int64(middle) * stride * 4), middle)
        low = below.select(middle, low)
        high = below.select(high, middle - 1)
    return low
