"""FP8 E4M3 as OCP defines it ("fn"): 4 exponent bits of bias 7, 3 mantissa bits, no inf.

    max 448 (0x7E), smallest normal 2**-6, smallest 2**-9, NaN at 0x7F and 0xFF only.

The other reading, "fnuz" (bias 8, max 240, 0x80 is NaN), belongs to an older generation.
The same byte means another number there (0x40 is 2.0 here and 1.0 there), so every function
of this package refuses a float8_e4m3fnuz tensor instead of casting it.

    quantize:   byte = e4m3_rn(x / scale), one fp32 division, nearest even, saturating:
                above 448 and +-inf -> +-448, NaN -> 0 with its sign kept
    dequantize: x = e4m3(byte) * scale, one fp32 product

A cache written with it never holds a NaN. Decoding is the plain format: 0x7F and 0xFF, which
the encoder never writes, come out as NaN, as they do in an FP8 matrix instruction.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rocm_msa.formats._blocks import (
    check_dtype,
    check_out_dtype,
    check_values,
    host_scalar,
    scale_number,
)

DTYPE = torch.float8_e4m3fn
MAX = 448.0
MIN_NORMAL = 2.0**-6
MIN_SUBNORMAL = 2.0**-9
MAX_SCALE = 2.0**119


def quantize(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Encode; never gives a NaN.

    x        fp32 / bf16 / fp16 [..., D], any strides
    scale    a number or a 0-d fp32 tensor, 0 < scale <= 2**119
    returns  float8_e4m3fn [..., D]
    Raises TypeError for a dtype, ValueError for a 0-d x or for the scale.
    """
    check_values("x", x, 1)
    number = scale_number("scale", scale, MAX_SCALE)
    x = x.detach().to(torch.float32)
    scaled = x if number == 1.0 else x / host_scalar(number, x.device)
    zero = torch.copysign(host_scalar(0.0, x.device), x)
    # The clamp comes first: what a bare cast does above 448 differs between PyTorch versions.
    return torch.where(x.isnan(), zero, scaled).clamp(-MAX, MAX).to(DTYPE)


def dequantize(
    values: torch.Tensor,
    scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode float8_e4m3fn [...] to fp32 / bf16 / fp16 [...]; the two NaN codes give NaN.

    Raises TypeError for another dtype, float8_e4m3fnuz and raw uint8 included; ValueError for
    the scale.
    """
    check_dtype("values", values, DTYPE)
    check_out_dtype(dtype)
    number = scale_number("scale", scale, MAX_SCALE)
    out = decode(values)
    if number != 1.0:
        out *= host_scalar(number, values.device)
    return out.to(dtype)


def decode(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [...] -> fp32 [...], a new tensor; a table look-up, faster than a CPU cast."""
    index = values.view(torch.uint8).reshape(-1).to(torch.int32)
    return value_table(values.device).index_select(0, index).reshape(values.shape)


@lru_cache(maxsize=16)
def value_table(device: torch.device) -> torch.Tensor:
    """fp32 [256]: the value of each byte, NaN at 0x7F and 0xFF. Shared: do not write to it."""
    return torch.arange(256, dtype=torch.uint8).view(DTYPE).to(torch.float32).to(device)
