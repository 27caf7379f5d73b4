"""The table that turns NVFP4 into FP8 inside a kernel: 256 rows of 8 bytes, 2048 B of LDS.

    lut[b][m] = e4m3_rn(|e4m3(b)| * magnitude[m] * 2**fold_exponent), the sign bit of b on top
    magnitude = 0, 0.5, 1, 1.5, 2, 3, 4, 6

Rounding is to nearest even, saturating at 448. Rows 0x7F and 0xFF (NaN scales) are zeros.
A kernel reads row b (8 bytes), picks byte `code & 7` of it (v_perm_b32) and XORs
`(code & 8) << 4`, the sign of the value. The encoder never writes a scale with the sign bit; a
foreign page may, and since those rows carry the sign bit the XOR still gives the sign of the
product. So the table agrees with nvfp4.dequantize for all 256 x 16 pairs, up to its rounding.

The fold. Products go up to 2688 and E4M3 ends at 448, so a power of two is folded in and undone
where it costs nothing: 2**-fold_exponent goes into the softmax scale or, as byte
127 - fold_exponent, into the E8M0 scale of the matrix instruction.
    RECOMMENDED_FOLD_EXPONENT = -3: 2688 / 8 = 336, no scale code saturates. A product p is
    rounded by at most 2**-4 * p when p >= 2**-3, which holds for every non-zero magnitude of the
    scale codes >= 0.25, and by at most 2**-7 below that; p <= 2**-7 becomes 0.
    fold 0: scales above 74.67 saturate; the bound 2**-4 holds for p >= 2**-6, so it is the
    better table when a global scale of 1 keeps the scale codes small.
fold_exponent_for(max_scale) gives the largest fold without saturation for a known largest scale.

The reference of a kernel that computes in FP8 is dequantize_via_lut: the same bytes.
Refused: a fold exponent that is not an integer in [-32, 32].
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from rocm_msa.errors import expect
from rocm_msa.formats import e2m1, fp8, nvfp4

ROWS = 256  # scale codes
ROW_BYTES = len(e2m1.MAGNITUDES)
NBYTES = ROWS * ROW_BYTES
RECOMMENDED_FOLD_EXPONENT = -3
MAX_ABS_FOLD_EXPONENT = 32


def build(fold_exponent: int = 0) -> torch.Tensor:
    """The table as E4M3 bytes, uint8 [256 scale codes, 8 magnitudes] on the CPU.

    Raises TypeError unless fold_exponent is an int, ValueError outside [-32, 32].
    """
    _check_fold(fold_exponent)
    scale_bytes = torch.arange(ROWS, dtype=torch.uint8)
    scales = fp8.value_table(scale_bytes.device).abs().nan_to_num_(nan=0.0)
    magnitudes = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float32) * 2.0**fold_exponent
    table = fp8.quantize(scales[:, None] * magnitudes).view(torch.uint8)  # products are exact
    sign = scale_bytes & 0x80
    sign[0xFF] = 0
    return table | sign[:, None]


def dequantize_via_lut(
    data: torch.Tensor, scales: torch.Tensor, fold_exponent: int = 0
) -> torch.Tensor:
    """What a kernel holds after the table: x / g * 2**fold_exponent, rounded to FP8.

    data     uint8 [..., D/2], even index in the low nibble
    scales   float8_e4m3fn [..., D/16], or uint8 with the same bytes
    returns  float8_e4m3fn [..., D], never a NaN
    Raises TypeError for a dtype, ValueError for a shape or for the fold exponent.
    """
    _check_fold(fold_exponent)
    scale_bytes = nvfp4.check_packed(data, scales)
    blocks = data.reshape(*scale_bytes.shape, nvfp4.BLOCK // nvfp4.VALUES_PER_BYTE)
    index = blocks.to(torch.int32).add_(scale_bytes.to(torch.int32).unsqueeze(-1) << 8)
    pairs = _pair_table(fold_exponent, data.device).index_select(0, index.reshape(-1))
    out = pairs.view(fp8.DTYPE)
    return out.reshape(*data.shape[:-1], nvfp4.VALUES_PER_BYTE * data.shape[-1])


def fold_exponent_for(max_scale: float) -> int:
    """The largest fold exponent with which no scale up to `max_scale` saturates.

    448 gives -3. Raises ValueError unless max_scale is in [2**-9, 448], the E4M3 scales.
    """
    if not fp8.MIN_SUBNORMAL <= max_scale <= fp8.MAX:
        raise ValueError(expect("max_scale", "a number in [2**-9, 448]", max_scale))
    return math.floor(math.log2(fp8.MAX / (max_scale * e2m1.MAX)))


def _check_fold(fold_exponent: int) -> None:
    if isinstance(fold_exponent, bool) or not isinstance(fold_exponent, int):
        raise TypeError(expect("fold_exponent", "an int", type(fold_exponent).__name__))
    if abs(fold_exponent) > MAX_ABS_FOLD_EXPONENT:
        limit = MAX_ABS_FOLD_EXPONENT
        raise ValueError(expect("fold_exponent", f"-{limit}..{limit}", fold_exponent))


@lru_cache(maxsize=16)
def _pair_table(fold_exponent: int, device: torch.device) -> torch.Tensor:
    """int16 [65536]: the two FP8 bytes of (scale byte << 8 | data byte), moved as one word."""
    lut = build(fold_exponent)
    codes = e2m1.unpack(torch.arange(256, dtype=torch.uint8)).to(torch.int32)
    signed = lut[:, codes & 7] ^ ((codes & e2m1.SIGN_BIT) << 4).to(torch.uint8)
    return signed.view(torch.int16).reshape(-1).to(device)
