"""NVFP4: 16 values of 4 bits share one E4M3 scale byte; one fp32 scale g multiplies a tensor.

    x = g * e4m3(scale) * e2m1(code)          even index in the low nibble

Encoding a block of 16; every step is one fp32 operation rounded to nearest even, subnormals
kept, so a kernel that follows the list gives the same bytes:
    1. m_i  = |x_i| in fp32, and 0 where x_i is NaN
    2. amax = max_i m_i
    3. u    = (amax / 6) / g                  two divisions, in this order; no reciprocals
    4. s    = e4m3_rn(min(u, 448))            the scale byte, 0x00..0x7E
    5. d    = e4m3(s) * g                     if d is 0: every code is 0 (step 7 still applies)
    6. q_i  = m_i / d                         a division
    7. code = e2m1_rn(min(q_i, 6)), bit 3 = the sign bit of x_i (of a zero or a NaN too)
Decoding: x = e2m1(code) * (e4m3(scale) * g), two fp32 products, then one rounding to `dtype`.

What follows from it: NaN -> 0 with its sign and does not touch its neighbours; +-inf -> +-6
with scale 448; a block whose u rounds to 0 (u <= 2**-10) is all zeros, signs kept. The scale
codes 0x7F and 0xFF are NaN in the format and decode as 0 here, as they do in the kernels'
table (nvfp4_lut), so that a poisoned page cannot spread; the encoder never writes them.

Refused: dtypes other than fp32 / bf16 / fp16, a last dimension not a multiple of 16, a g that
is not finite, not > 0 or above MAX_GLOBAL_SCALE (there 448 * 6 * g is no fp32 number any more).
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import torch

from rocm_msa.errors import expect
from rocm_msa.formats import e2m1, fp8
from rocm_msa.formats._blocks import (
    check_dtype,
    check_out_dtype,
    check_scales,
    check_values,
    checked_amax,
    host_scalar,
    max_per_block,
    scale_number,
)

BLOCK = 16  # values that share a scale
VALUES_PER_BYTE = 2
SCALE_DTYPE = fp8.DTYPE
MAX_VALUE = fp8.MAX * e2m1.MAX  # 2688, the largest |x| / g
MAX_GLOBAL_SCALE = 1.5 * 2.0**116
# g_amax / b_amax where a block's scale is a normal E4M3 number: 448 / 2**-6.
WINDOW = fp8.MAX / fp8.MIN_NORMAL


def quantize(
    x: torch.Tensor, global_scale: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode by the rules at the top of this module.

    x             fp32 / bf16 / fp16 [..., D], D a multiple of 16; any strides, may be empty
    global_scale  g: a number, or a 0-d fp32 tensor (reading one on a GPU waits for it, so
                  give a number inside a captured graph)
    returns       data uint8 [..., D/2], scales float8_e4m3fn [..., D/16]
    Raises TypeError for a dtype, ValueError for the shape or for g.
    """
    check_values("x", x, BLOCK)
    g = scale_number("global_scale", global_scale, MAX_GLOBAL_SCALE)
    blocks = x.detach().to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    magnitude = blocks.abs().nan_to_num_(nan=0.0, posinf=math.inf)

    # Tensors on the device: a division by a host number may become a product on a GPU.
    unscaled = max_per_block(magnitude) / host_scalar(e2m1.MAX, x.device)
    if g != 1.0:
        unscaled /= host_scalar(g, x.device)
    scales = unscaled.clamp_(max=fp8.MAX).to(SCALE_DTYPE)

    step = scales.to(torch.float32)
    if g != 1.0:
        step *= host_scalar(g, x.device)
    step.masked_fill_(step == 0, math.inf)  # m / inf is 0, the code of every value there
    magnitude /= step.unsqueeze(-1)
    return e2m1.pack(e2m1.encode(magnitude, blocks)).flatten(-2), scales


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode; defined for every data byte and every scale byte, and never gives a NaN.

    data     uint8 [..., D/2], even index in the low nibble
    scales   float8_e4m3fn [..., D/16], or uint8 with the same bytes (as a page holds them)
    dtype    fp32, bf16 or fp16; values above the fp16 range become inf there
    returns  [..., D]
    Raises TypeError for a dtype (float8_e4m3fnuz scales are refused), ValueError for a shape
    or for g.
    """
    scale_bytes = check_packed(data, scales)
    check_out_dtype(dtype)
    g = scale_number("global_scale", global_scale, MAX_GLOBAL_SCALE)
    index = scale_bytes.reshape(-1).to(torch.int32)
    step = _scale_table(data.device).index_select(0, index)
    if g != 1.0:
        step *= host_scalar(g, data.device)
    out = e2m1.decode_packed(data)
    out.view(-1, BLOCK).mul_(step.unsqueeze(-1))
    return out.to(dtype)


def bytes_per_vector(head_dim: int) -> tuple[int, int]:
    """(data bytes, scale bytes) of one vector of `head_dim` values: 128 -> (64, 8).

    Raises ValueError unless head_dim is a positive multiple of 16.
    """
    if head_dim <= 0 or head_dim % BLOCK:
        raise ValueError(expect("head_dim", f"a positive multiple of {BLOCK}", head_dim))
    return head_dim // VALUES_PER_BYTE, head_dim // BLOCK


def global_scale_from_amax(global_amax: float | torch.Tensor) -> float:
    """g = amax / (448 * 6), rounded to fp32: the calibrated largest |x| is the largest code.

    An amax of 0 (or so small that g would round to 0) gives 1.0; g never passes
    MAX_GLOBAL_SCALE. Raises ValueError unless amax is finite and >= 0.
    """
    amax = checked_amax("global_amax", global_amax)
    g = torch.tensor(amax / MAX_VALUE, dtype=torch.float32).item()
    return min(g, MAX_GLOBAL_SCALE) or 1.0


def in_global_scale_window(
    global_amax: float | torch.Tensor, block_amax: float | torch.Tensor
) -> bool:
    """Whether a block of this amax is well conditioned under g = global_amax / 2688.

    True for 1 <= global_amax / block_amax <= 28672, and for an all-zero block: there the
    block's scale is a normal E4M3 number and the error is at most one step, g * scale.
    Raises ValueError unless both are finite and >= 0.
    """
    whole = checked_amax("global_amax", global_amax)
    return not _window_fault(whole, checked_amax("block_amax", block_amax))


def check_global_scale(global_amax: float | torch.Tensor, block_amax: float | torch.Tensor) -> bool:
    """in_global_scale_window, with a UserWarning that says what happens outside the window.

    For g that came without its amax: global_amax = 2688 * g. Below the window the block
    saturates; above it the scale is subnormal and loses bits, and from 458752 on
    (448 / 2**-10) the block becomes zeros.
    """
    whole = checked_amax("global_amax", global_amax)
    block = checked_amax("block_amax", block_amax)
    fault = _window_fault(whole, block)
    if fault:
        warnings.warn(
            f"NVFP4 global scale: global amax {whole:g} against block amax {block:g} is "
            f"outside 1 <= ratio <= {WINDOW:.0f}: {fault}",
            stacklevel=2,
        )
    return not fault


def check_packed(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Refuse a pair that is not NVFP4; return the scale bytes, uint8 [..., D/16].

    Raises TypeError for a dtype, ValueError for shapes that do not match or two devices.
    """
    check_dtype("data", data, torch.uint8)
    check_dtype("scales", scales, SCALE_DTYPE, torch.uint8)
    check_scales("data", data, scales, BLOCK // VALUES_PER_BYTE)
    return scales.view(torch.uint8)


def _window_fault(global_amax: float, block: float) -> str:
    if block == 0.0:
        return ""
    if global_amax < block:
        return f"the block saturates at {global_amax:g}"
    if global_amax / WINDOW > block:
        return "the block's scale is subnormal, its values lose precision or become 0"
    return ""


@lru_cache(maxsize=16)
def _scale_table(device: torch.device) -> torch.Tensor:
    """fp32 [256]: the value of each scale byte, 0 for the two NaN codes."""
    return fp8.value_table(device).nan_to_num(nan=0.0)
