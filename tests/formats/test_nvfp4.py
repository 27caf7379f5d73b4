"""NVFP4 encode and decode against independent implementations.

Oracles: exact rational arithmetic (one scalar at a time, below), ml_dtypes on NumPy arrays,
torch's own FP8 cast, and vLLM's NVFP4 emulation.
"""

import math
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from rocm_msa.formats import e2m1, nvfp4

INF, NAN = math.inf, math.nan
GLOBAL_SCALES = [1.0, 0.3, 7.0, 1 / 2688, 2.0**-60, 2.0**60]
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # entry i lies between codes i and i + 1
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


# --- oracle 1: exact rationals --------------------------------------------------------------


def rne(value: Fraction, mantissa_bits: int, min_exponent: int) -> Fraction:
    """`value` >= 0 rounded to a binary float of unbounded range, ties to even."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, min_exponent) - mantissa_bits)
    return round(value / quantum) * quantum  # round() of a Fraction is half to even


def f32(value: Fraction) -> Fraction:
    return rne(value, 23, -126)


def scalar_encode(block: list[float], g: float) -> tuple[list[int], Fraction]:
    """The encode rules of the contract for 16 fp32 values: codes and scale."""
    g = f32(Fraction(g))
    infinite = any(math.isinf(x) for x in block)
    magnitudes = [
        Fraction(0) if math.isnan(x) else INF if math.isinf(x) else abs(Fraction(x)) for x in block
    ]
    unscaled = 449 if infinite else f32(f32(max(magnitudes) / 6) / g)
    scale = Fraction(448) if unscaled > 448 else rne(unscaled, 3, -6)
    step = f32(scale * g)
    codes = []
    for x, m in zip(block, magnitudes, strict=True):
        if step == 0:
            value = Fraction(0)
        elif m == INF:
            value = Fraction(6)
        else:
            value = min(rne(f32(m / step), 1, 0), Fraction(6))
        codes.append(e2m1.MAGNITUDES.index(value) | (8 if math.copysign(1.0, x) < 0 else 0))
    return codes, scale


# --- oracle 2: ml_dtypes --------------------------------------------------------------------


def numpy_encode(blocks: np.ndarray, g: float) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, 16] -> codes uint8 [n, 16], scale bytes uint8 [n]."""
    g = np.float32(g)
    with np.errstate(all="ignore"):
        magnitude = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks))
        unscaled = magnitude.max(-1) / np.float32(6) / g
        scales = np.minimum(unscaled, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        step = (scales.astype(np.float32) * g)[:, None]
        ratio = np.where(step == 0, np.float32(0), magnitude / step)
    value = np.copysign(np.minimum(ratio, np.float32(6)), blocks)
    return value.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), scales.view(np.uint8)


def encode(blocks: torch.Tensor, g: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., 16 * n] and scale bytes uint8 [..., n]."""
    data, scales = nvfp4.quantize(blocks, g)
    return e2m1.unpack(data), scales.view(torch.uint8)


def assert_same_as_numpy(blocks: torch.Tensor, g: float) -> None:
    codes, scales = encode(blocks, g)
    want_codes, want_scales = numpy_encode(blocks.to(torch.float32).numpy(), g)
    np.testing.assert_array_equal(scales[:, 0].numpy(), want_scales)
    np.testing.assert_array_equal(codes.numpy(), want_codes)


def single(values: torch.Tensor, companion: float = 0.0) -> torch.Tensor:
    """[n] -> [n, 16]: the value at index 5, `companion` at 0, zeros elsewhere."""
    blocks = torch.zeros(len(values), 16, dtype=values.dtype)
    blocks[:, 0] = companion
    blocks[:, 5] = values
    return blocks


def positive_scales() -> torch.Tensor:
    """fp32 [126]: every positive finite E4M3 number."""
    return torch.tensor(np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype("f"))


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale byte with every data byte: data [256, 256], scales [256, 32]."""
    return ALL_BYTES.repeat(256, 1), ALL_BYTES[:, None].repeat(1, 32)


# --- decode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_decode_all_scales_and_codes_against_ml_dtypes(g):
    data, scales = all_pairs()
    got = nvfp4.dequantize(data, scales, g).numpy()
    byte = np.arange(256, dtype=np.uint8)
    values = np.stack((byte & 15, byte >> 4), -1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
    steps = np.nan_to_num(byte.view(ml_dtypes.float8_e4m3fn).astype("f"), nan=0.0) * np.float32(g)
    want = steps[:, None] * values.astype("f")
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))  # zero signs too


def test_decode_nan_scales_are_zero_and_nothing_is_nan():
    data, scales = all_pairs()
    out = nvfp4.dequantize(data, scales)
    assert out.isfinite().all()
    assert (out[[0x7F, 0xFF]] == 0).all()
    assert (out[0x7E].abs().max(), out[0xFE].abs().max()) == (2688.0, 2688.0)


def test_decode_scales_as_torch_casts_them():
    data = torch.full((256, 8), 0x22, dtype=torch.uint8)  # every value 1.0
    scales = ALL_BYTES.view(torch.float8_e4m3fn)[:, None]
    want = scales.to(torch.float32).nan_to_num(nan=0.0).expand(256, 16)
    assert torch.equal(nvfp4.dequantize(data, scales), want)


def test_even_index_is_the_low_nibble():
    data = torch.zeros(8, dtype=torch.uint8)
    data[0], data[7] = 0x72, 0x1F
    out = nvfp4.dequantize(data, torch.full((1,), 0x38, dtype=torch.uint8))
    assert out.tolist() == [1.0, 6.0, *[0.0] * 12, -6.0, 0.5]
    assert torch.equal(nvfp4.quantize(out)[0], data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_output_dtypes(dtype):
    data, scales = all_pairs()
    out = nvfp4.dequantize(data, scales, 0.7, dtype)
    assert out.dtype == dtype
    assert torch.equal(out, nvfp4.dequantize(data, scales, 0.7).to(dtype))
    # With g = 1 a product has at most 6 significant bits: bf16 holds it exactly.
    exact = nvfp4.dequantize(data, scales, 1.0, torch.bfloat16).to(torch.float32)
    assert torch.equal(exact, nvfp4.dequantize(data, scales))


# --- encode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_encode_against_rationals(g):
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randn(48, 16, generator=generator)
    blocks *= g * torch.logspace(-4, 5, 48)[:, None]
    blocks[::5, 3], blocks[::7, 9], blocks[::9, 11] = NAN, -INF, -0.0
    check_against_rationals(blocks, g)


@pytest.mark.parametrize("g", [1.0, 2.0**-149, 3 * 2.0**-149, 2.0**-141, 2.0**-130, 1e-38])
def test_encode_subnormal_inputs_and_global_scales(g):
    integers = torch.arange(1, 16 * 40 + 1, dtype=torch.int32) ** 2
    blocks = integers.view(torch.float32).reshape(40, 16)  # fp32 subnormals, exact multiples
    check_against_rationals(blocks, g)


@pytest.mark.parametrize("g", [2.0**-149, 1e-30, 1.0, 1e30, nvfp4.MAX_GLOBAL_SCALE])
def test_encode_largest_inputs_decode_finite(g):
    biggest = torch.finfo(torch.float32).max
    blocks = torch.tensor([[biggest, -biggest, 1.0, 1e30, -1e37, INF, -INF, NAN] * 2])
    check_against_rationals(blocks, g)
    assert nvfp4.dequantize(*nvfp4.quantize(blocks, g), g).isfinite().all()


def check_against_rationals(blocks: torch.Tensor, g: float) -> None:
    codes, scales = encode(blocks, g)
    values = scales.view(torch.float8_e4m3fn).to(torch.float64)[:, 0].tolist()
    for row, got_codes, got_scale in zip(blocks.tolist(), codes.tolist(), values, strict=True):
        want_codes, want_scale = scalar_encode(row, g)
        assert (got_codes, Fraction(got_scale)) == (want_codes, want_scale), row


@pytest.mark.parametrize("g", [1.0, 0.3, 1 / 2688, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_alone_in_its_block(dtype, g):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_same_as_numpy(single(values), g)


@pytest.mark.parametrize("companion", [6.0, -6 * 448.0, 6 * 0.1015625, 6 * 2.0**-9, 1.0, 100.0])
def test_every_bf16_value_beside_one_that_sets_the_scale(companion):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    values = values[(values.abs() <= abs(companion)) | values.isnan()]
    assert len(values) > 2**15 - 2**13
    assert_same_as_numpy(single(values, companion), 1.0)


@pytest.mark.parametrize("g", [1.0, 2.0**-40])
def test_value_ties_go_to_the_even_code_for_every_scale(g):
    """x is exactly on a tie of x / (g s), one fp32 step below it, one above."""
    scales = positive_scales()
    for below, tie in enumerate(E2M1_TIES):
        x = scales * g * tie
        for value, want in (
            (x, below + below % 2),
            (torch.nextafter(x, torch.tensor(0.0)), below),
            (torch.nextafter(x, torch.tensor(INF)), below + 1),
        ):
            blocks = single(value)
            blocks[:, 0] = 6 * scales * g
            blocks[:, 6] = -value
            codes, scale_bytes = encode(blocks, g)
            assert scale_bytes[:, 0].tolist() == list(range(1, 127))
            assert (codes[:, 5] == want).all() and (codes[:, 6] == want + 8).all()


def test_scale_ties_go_to_the_even_byte():
    """amax / 6 is exactly between two scales, one fp32 step below, one above; and saturates."""
    scales = torch.cat((torch.zeros(1), positive_scales()))
    amax = 6 * (scales[:-1] + scales[1:]) / 2
    lower = torch.arange(126)
    up, down = torch.tensor(INF), torch.tensor(0.0)
    assert torch.equal(encode(single(amax))[1][:, 0].long(), lower + lower % 2)
    # One step of amax may not move the quotient by a step of its own, two do.
    above = torch.nextafter(torch.nextafter(amax, up), up)
    below = torch.nextafter(torch.nextafter(amax, down), down)
    assert torch.equal(encode(single(above))[1][:, 0].long(), lower + 1)
    assert torch.equal(encode(single(below))[1][:, 0].long(), lower)
    large = torch.tensor([2688.0, 2784.0, 2785.0, 1e6, 3e38, INF])
    assert (encode(single(large))[1] == 0x7E).all()


@pytest.mark.parametrize("g", [1.0, 0.3, 1 / 2688])
def test_scales_next_to_ties_follow_the_order_of_the_divisions(g):
    """Within a few fp32 steps of a tie a reciprocal or another order gives other bytes."""
    scales = torch.cat((torch.zeros(1), positive_scales()))
    middle = 6 * np.float32(g) * (scales[:-1] + scales[1:]) / 2
    steps = torch.arange(-6, 7, dtype=torch.int32)[:, None]
    amax = (middle.view(torch.int32) + steps).view(torch.float32).reshape(-1)
    assert_same_as_numpy(single(amax), g)


def test_nan_is_a_signed_zero_and_leaves_its_block_alone():
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    # NaNs are made from bits: PyTorch's bf16 casts and negation lose the sign of a NaN.
    for dtype, integer, bits in (
        (torch.float32, torch.int32, (0x7FC00000, -0x400000)),
        (torch.bfloat16, torch.int16, (0x7FC0, -0x40)),
        (torch.float16, torch.int16, (0x7E00, -0x200)),
    ):
        nan, negative_nan = torch.tensor(bits, dtype=integer).view(dtype)
        clean = values.to(dtype)
        dirty = clean.clone()
        clean[:, 3], clean[:, 8] = 0.0, -0.0
        dirty[:, 3], dirty[:, 8] = nan, negative_nan
        (codes, scales), want = encode(dirty), encode(clean)
        assert torch.equal(codes, want[0]) and torch.equal(scales, want[1])
        assert (codes[:, [3, 8]] == torch.tensor([0, 8])).all()


def test_inf_takes_the_largest_code_at_scale_448():
    x = torch.tensor([INF, -INF, 448.0, -1344.0, 100.0, NAN, -0.0, 0.0] * 2)
    codes, scales = encode(x)
    assert scales.tolist() == [0x7E]
    assert codes.tolist() == [7, 15, 2, 13, 0, 0, 8, 0] * 2
    assert nvfp4.dequantize(*nvfp4.quantize(x, 0.5), 0.5)[:2].tolist() == [1344.0, -1344.0]


def test_scale_that_rounds_to_zero_gives_signed_zeros():
    edge = 6 * 2.0**-10  # u is a tie between 0 and the smallest scale: to even, 0
    x = torch.tensor([[edge, -edge, 0.0, -0.0] * 4])
    codes, scales = encode(x)
    assert scales.tolist() == [[0]] and codes.tolist() == [[0, 8, 0, 8] * 4]
    above = torch.nextafter(torch.nextafter(x, 2 * x), 2 * x)
    codes, scales = encode(above)
    assert scales.tolist() == [[1]] and codes.tolist() == [[5, 13, 0, 8] * 4]


# --- vLLM -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_nvfp4():
    return pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils",
        reason="vLLM is not installed: its NVFP4 emulation is the oracle of this test",
    )


@pytest.mark.parametrize("g", [1.0, 0.3, 2.0**-20])
def test_decode_like_vllm(vllm_nvfp4, g):
    data, scales = all_pairs()
    scales = scales.view(torch.float8_e4m3fn)
    want = vllm_nvfp4.dequantize_to_dtype(
        data, scales, torch.tensor(g), torch.float32, 16, swizzle=False
    )
    numbers = ~want.isnan()
    got = nvfp4.dequantize(data, scales, g)
    assert numbers.sum() == 254 * 512 and torch.equal(got[numbers], want[numbers])


def test_encode_like_vllm(vllm_nvfp4):
    """vLLM takes 1 / g and multiplies by reciprocals: equal except next to a rounding tie."""
    x = torch.randn(2048, 128, generator=torch.Generator().manual_seed(3)) * 3
    values, scales = vllm_nvfp4.ref_nvfp4_quant(x, torch.tensor(4.0), 16)
    data, ours = nvfp4.quantize(x, 0.25)
    same_scale = ours.to(torch.float32) == scales
    assert same_scale.float().mean() > 0.9999
    got = nvfp4.dequantize(data, torch.full_like(ours.view(torch.uint8), 0x38))
    same = (got == values).reshape(2048, 8, 16)[same_scale]
    assert same.float().mean() > 0.9999


# --- global scale (C45), arguments ----------------------------------------------------------


@pytest.mark.parametrize(
    ("global_amax", "inside"),
    [(0.5, False), (1.0, True), (28672.0, True), (28673.0, False), (1e6, False)],
)
def test_global_scale_window(global_amax, inside):
    assert nvfp4.in_global_scale_window(global_amax, 1.0) is inside
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert nvfp4.check_global_scale(torch.tensor(global_amax), 1.0) is inside
    assert [w.category for w in caught] == ([] if inside else [UserWarning])
    for warning in caught:
        assert "28672" in str(warning.message) and f"{global_amax:g}" in str(warning.message)


def test_error_is_flat_inside_the_window_and_grows_outside():
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(5))
    x /= x.abs().amax(-1, keepdim=True)  # every block's amax is 1

    def error(global_amax):
        g = nvfp4.global_scale_from_amax(global_amax)
        return (nvfp4.dequantize(*nvfp4.quantize(x, g), g) - x).square().mean().sqrt().item()

    inside = [error(a) for a in (1.0, 2.0, 17.0, 400.0, 9000.0, 28672.0)]
    assert max(inside) < 1.25 * min(inside) and max(inside) < 0.08
    assert error(0.5) > 3 * max(inside)
    assert error(1e6) == pytest.approx(x.square().mean().sqrt().item())  # all zeros


def test_global_scale_from_amax():
    assert nvfp4.global_scale_from_amax(2688.0) == 1.0
    assert nvfp4.global_scale_from_amax(torch.tensor(1.0)) == np.float32(1 / 2688)
    assert nvfp4.global_scale_from_amax(0.0) == 1.0 == nvfp4.global_scale_from_amax(1e-44)
    assert nvfp4.global_scale_from_amax(3.4e38) == nvfp4.MAX_GLOBAL_SCALE
    assert nvfp4.in_global_scale_window(0.0, 0.0) and nvfp4.in_global_scale_window(1.0, 0.0)
    for bad in (NAN, INF, -1.0):
        with pytest.raises(ValueError, match="global_amax: expected a finite number >= 0"):
            nvfp4.global_scale_from_amax(bad)
        with pytest.raises(ValueError, match="block_amax"):
            nvfp4.check_global_scale(1.0, bad)
