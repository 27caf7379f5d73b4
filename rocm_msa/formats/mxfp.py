"""MXFP8 and MXFP4 (OCP Microscaling): 32 values share one E8M0 scale byte.

    x = 2**(scale - 127) * element        scale 255 is NaN: the whole block is NaN
    MXFP8: element E4M3 (OCP), emax 8, max 448
    MXFP4: element E2M1, emax 2, max 6, two a byte with the even index in the low nibble

Encoding a block of 32, all exact but the last rounding:
    scale   = floor(log2(amax)) - emax + 127, at least 0; floor(log2(amax)) + 127 is the
              exponent field of the fp32 number amax, so scale = max(field(amax) - emax, 0)
    element = rn(x * 2**(127 - scale)), nearest even, saturating
The floor is the rule of the OCP specification: the scaled amax lies in [256, 512) or [4, 8), and
what is above 448 or 6 saturates, at a relative error of up to 12.5 % or 25 %.
An all-zero block has scale 0; signs of zeros are kept.

Non-finite inputs are not hidden here, unlike in a cache: a block that holds a NaN or an inf gets
scale 255 and zero elements, and decodes to 32 NaNs. Activations that went wrong stay visible.
The encoder writes 0..246 (MXFP8), 0..252 (MXFP4) or 255; other codes decode by the formula in
fp32, where a product may overflow to inf.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rocm_msa.formats import e2m1, fp8
from rocm_msa.formats._blocks import (
    check_dtype,
    check_out_dtype,
    check_scales,
    check_values,
    max_per_block,
)

BLOCK = 32  # values that share a scale
SCALE_BIAS = 127
SCALE_NAN = 255
MXFP8_EMAX = 8  # exponent of 448
MXFP4_EMAX = 2  # exponent of 6

_FP32_MANTISSA_BITS = 23
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode fp32 / bf16 / fp16 [..., D], D a multiple of 32, any strides.

    returns  values float8_e4m3fn [..., D], scales uint8 [..., D/32] (E8M0)
    Raises TypeError for a dtype, ValueError for the shape.
    """
    scaled, scales = _scale_blocks(x, MXFP8_EMAX)
    values = scaled.clamp_(-fp8.MAX, fp8.MAX).to(fp8.DTYPE)
    return values.flatten(-2), scales


def mxfp8_dequantize(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode values float8_e4m3fn [..., D] and scales [..., D/32], uint8 or float8_e8m0fnu.

    returns  [..., D] of `dtype`: fp32, bf16 or fp16
    Raises TypeError for a dtype, ValueError for shapes that do not match.
    """
    check_dtype("values", values, fp8.DTYPE)
    check_dtype("scales", scales, *_SCALE_DTYPES)
    check_scales("values", values, scales, BLOCK)
    check_out_dtype(dtype)
    return _unscale(fp8.decode(values), scales).to(dtype)


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode fp32 / bf16 / fp16 [..., D], D a multiple of 32, any strides.

    returns  data uint8 [..., D/2], even index in the low nibble; scales uint8 [..., D/32] (E8M0)
    Raises TypeError for a dtype, ValueError for the shape.
    """
    scaled, scales = _scale_blocks(x, MXFP4_EMAX)
    return e2m1.pack(e2m1.encode(scaled.abs(), scaled)).flatten(-2), scales


def mxfp4_dequantize(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode data uint8 [..., D/2] and scales [..., D/32], uint8 or float8_e8m0fnu.

    returns  [..., D] of `dtype`: fp32, bf16 or fp16
    Raises TypeError for a dtype, ValueError for shapes that do not match.
    """
    check_dtype("data", data, torch.uint8)
    check_dtype("scales", scales, *_SCALE_DTYPES)
    check_scales("data", data, scales, BLOCK // 2)
    check_out_dtype(dtype)
    return _unscale(e2m1.decode_packed(data), scales).to(dtype)


def _scale_blocks(x: torch.Tensor, emax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x / 2**(scale - 127) as fp32 [..., D/32, 32] (0 in a NaN block), scales uint8 [..., D/32]."""
    check_values("x", x, BLOCK)
    blocks = x.detach().to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    field = max_per_block(blocks.abs()).view(torch.int32) >> _FP32_MANTISSA_BITS
    not_finite = field == 0xFF
    scales = (field - emax).clamp_(min=0).masked_fill_(not_finite, SCALE_NAN)
    # 2**(127 - scale) is the fp32 number with exponent field 254 - scale: normal for 0..253.
    inverse = ((2 * SCALE_BIAS - scales) << _FP32_MANTISSA_BITS).view(torch.float32)
    scaled = blocks * inverse.unsqueeze(-1)
    scaled.masked_fill_(not_finite.unsqueeze(-1), 0.0)
    return scaled, scales.to(torch.uint8)


def _unscale(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """elements fp32 [..., D], a tensor of our own, times the scales of its blocks, in place."""
    index = scales.view(torch.uint8).reshape(-1).to(torch.int32)
    step = _scale_table(scales.device).index_select(0, index)
    elements.view(-1, BLOCK).mul_(step.unsqueeze(-1))
    return elements


@lru_cache(maxsize=16)
def _scale_table(device: torch.device) -> torch.Tensor:
    """fp32 [256]: 2**(code - 127), exact (code 0 is an fp32 subnormal), NaN at 255."""
    table = torch.ldexp(torch.ones(256), torch.arange(256) - SCALE_BIAS)
    table[SCALE_NAN] = torch.nan
    return table.to(device)
