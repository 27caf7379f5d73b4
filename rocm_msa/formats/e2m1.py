"""E2M1, the 4-bit value of NVFP4 and MXFP4: sign, 2 exponent bits, 1 mantissa bit.

Code 0..7 is 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign, so code 8 is -0. No NaN, no inf.
A byte holds two codes: the EVEN index in the LOW nibble.

Rounding to nearest, ties to the even code. With rne(y) = y rounded to an integer, half to even,
    code(q) = min(rne(2 q), rne(q) + 2, rne(q / 2) + 4, 7)            for q >= 0
because the exact code is a concave chain of the three lines (steps 0.5, 1, 2) and rne is
monotone. So the ties 0.25, 1.25, 2.5, 5 go down and 0.75, 1.75, 3.5 go up.
"""

from __future__ import annotations

from functools import lru_cache

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
SIGN_BIT = 8

# Adding 1.5 * 2**23 to a small fp32 number rounds it to an integer, half to even, and leaves
# the integer in the low bits of the result.
_RNE = 12582912.0


def encode(magnitude: torch.Tensor, sign_source: torch.Tensor) -> torch.Tensor:
    """Codes of `magnitude` with the signs of `sign_source`.

    magnitude    fp32 [...], >= 0 or +inf, no NaN; above 6 gives code 7
    sign_source  fp32 [...], only the sign bit is read (a NaN or a zero has one too)
    returns      uint8 [...], 0..15
    """
    code = torch.mul(magnitude, 2.0).add_(_RNE)
    code = torch.minimum(code, torch.add(magnitude, _RNE + 2.0))  # 2 and 4 keep the parity
    code = torch.minimum(code, torch.mul(magnitude, 0.5).add_(_RNE + 4.0))
    bits = code.clamp_(max=_RNE + 7.0).view(torch.int32)
    bits.bitwise_or_((sign_source.view(torch.int32) >> 28).bitwise_and_(SIGN_BIT))
    return bits.bitwise_and_(0xF).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: uint8 [..., D] of 0..15 -> uint8 [..., D/2], even index low."""
    # A little-endian 16-bit word holds the even code at bit 0 and the odd one at bit 8.
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Codes of packed bytes: uint8 [..., n] -> uint8 [..., 2n], each 0..15."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def decode_packed(data: torch.Tensor) -> torch.Tensor:
    """Values of packed bytes: uint8 [..., n] -> fp32 [..., 2n]. One table look-up a byte."""
    pairs = _byte_table(data.device).index_select(0, data.reshape(-1).to(torch.int32))
    return pairs.view(torch.float32).reshape(*data.shape[:-1], 2 * data.shape[-1])


@lru_cache(maxsize=16)
def _byte_table(device: torch.device) -> torch.Tensor:
    """int64 [256]: the two fp32 values of each byte side by side, moved as one word."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    byte = torch.arange(256)
    table = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)
    return table.view(torch.int64).reshape(256).to(device)
