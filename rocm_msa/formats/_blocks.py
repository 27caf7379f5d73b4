"""What the block formats share: argument checks and the largest magnitude of a block.

Refused everywhere in this package: TypeError for a dtype, ValueError for a shape or a range.
"""

from __future__ import annotations

import math
from numbers import Real

import torch

from rocm_msa.errors import check_tensor, expect

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse `x` unless it is a tensor of one of the dtypes `allowed`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(expect(name, "a torch.Tensor", type(x).__name__))
    if x.dtype not in allowed:
        raise TypeError(expect(f"{name}.dtype", " or ".join(map(str, allowed)), x.dtype))


def check_values(name: str, x: torch.Tensor, block: int) -> None:
    """Refuse `x` unless it is [..., D] fp32 / bf16 / fp16 with D a multiple of `block` elements."""
    check_dtype(name, x, *VALUE_DTYPES)
    _check_last_dim(name, x, block)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Refuse an output dtype other than fp32, bf16, fp16."""
    if dtype not in VALUE_DTYPES:
        raise TypeError(expect("dtype", " or ".join(map(str, VALUE_DTYPES)), dtype))


def check_scales(name: str, data: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Refuse unless data is [..., n * block], scales is [..., n] and both are on one device.

    name   of `data` in the message
    block  elements of `data` (values, or bytes of packed values) that share a scale
    """
    _check_last_dim(name, data, block)
    check_tensor("scales", scales, [*data.shape[:-1], data.shape[-1] // block])
    if scales.device != data.device:
        raise ValueError(expect("scales.device", f"{data.device}, as {name}", scales.device))


def scale_number(name: str, scale: float | torch.Tensor, limit: float) -> float:
    """A tensor-wide scale as a host number that fp32 holds exactly.

    scale  a number, rounded to fp32, or a 0-d fp32 tensor
    limit  the largest scale for which every code still decodes to a finite fp32 number
    Raises TypeError for another type, ValueError unless 0 < scale <= limit.
    """
    value = scale
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, [], torch.float32)
        value = value.item()
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(expect(name, "a number or a 0-d float32 tensor", type(value).__name__))
    else:
        value = torch.tensor(float(value), dtype=torch.float32).item()
    if not 0 < value <= limit:
        raise ValueError(expect(name, f"a finite float32 number > 0 and <= {limit:g}", scale))
    return value


def host_scalar(value: float, device: torch.device) -> torch.Tensor:
    """`value` as an fp32 0-d tensor of `device`.

    Dividing by a host number (or a CPU tensor) is a product with its reciprocal on a GPU, which
    rounds differently; dividing by a tensor of the same device is a division.
    """
    return torch.full((), value, dtype=torch.float32, device=device)


def max_per_block(magnitude: torch.Tensor) -> torch.Tensor:
    """Largest of each block: fp32 [..., block] -> fp32 [...], block a power of two.

    A NaN in a block comes out as NaN. Pairwise halving is twice as fast on a CPU as
    `amax` over so short a row, and a maximum does not depend on the order.
    """
    width = magnitude.shape[-1]
    while width > 1:
        width //= 2
        magnitude = torch.maximum(magnitude[..., :width], magnitude[..., width:])
    return magnitude[..., 0]


def checked_amax(name: str, amax: float | torch.Tensor) -> float:
    """A calibrated largest magnitude as a host number; ValueError unless finite and >= 0."""
    value = float(amax)
    if not 0.0 <= value < math.inf:
        raise ValueError(expect(name, "a finite number >= 0", amax))
    return value


def _check_last_dim(name: str, x: torch.Tensor, block: int) -> None:
    if x.ndim == 0 or x.shape[-1] % block:
        expected = f"[..., D], D a multiple of {block}" if block > 1 else "[..., D]"
        raise ValueError(expect(f"{name}.shape", expected, list(x.shape)))
