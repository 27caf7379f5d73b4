"""MXFP8 and MXFP4 against ml_dtypes and exact rationals."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_msa.formats import e2m1, mxfp

INF, NAN = math.inf, math.nan
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
# name: quantize, dequantize, emax, largest element, smallest step, NumPy element type
FORMATS = {
    "mxfp8": (mxfp.mxfp8_quantize, mxfp.mxfp8_dequantize, 8, 448.0, 2.0**-9,
              ml_dtypes.float8_e4m3fn),
    "mxfp4": (mxfp.mxfp4_quantize, mxfp.mxfp4_dequantize, 2, 6.0, 0.5, ml_dtypes.float4_e2m1fn),
}  # fmt: skip
both = pytest.mark.parametrize("name", FORMATS)


def element_bytes(name: str, elements: torch.Tensor) -> torch.Tensor:
    """One byte an element: the E4M3 byte or the E2M1 code."""
    return elements.view(torch.uint8) if name == "mxfp8" else e2m1.unpack(elements)


def numpy_encode(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """OCP rule on float64 [n, 32]: element bytes uint8 [n, 32], scale codes [n]."""
    _, _, emax, largest, _, element_type = FORMATS[name]
    bad = ~np.isfinite(blocks).all(-1)
    blocks = np.where(bad[:, None], 0.0, blocks)
    amax = np.abs(blocks).max(-1)
    exponent = np.frexp(amax)[1] - 1  # floor(log2(amax)), exactly
    exponent = np.where(amax == 0, -127, np.maximum(exponent - emax, -127))
    scaled = np.clip(np.ldexp(blocks, -exponent[:, None]), -largest, largest)
    scales = np.where(bad, 255, exponent + 127).astype(np.uint8)
    return scaled.astype(np.float32).astype(element_type).view(np.uint8), scales


def assert_same_as_numpy(name: str, blocks: torch.Tensor) -> None:
    elements, scales = FORMATS[name][0](blocks)
    want_elements, want_scales = numpy_encode(name, blocks.to(torch.float64).numpy())
    np.testing.assert_array_equal(scales[:, 0].numpy(), want_scales)
    np.testing.assert_array_equal(element_bytes(name, elements).numpy(), want_elements)


def all_pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale code with every element byte: elements [256, 256], scales [256, n]."""
    elements = ALL_BYTES.repeat(256, 1)
    per_scale = 32 if name == "mxfp8" else 16
    if name == "mxfp8":
        elements = elements.view(torch.float8_e4m3fn)
    return elements, ALL_BYTES[:, None].repeat(1, 256 // per_scale)


@both
def test_decode_all_scales_and_elements(name):
    _, dequantize, _, _, _, element_type = FORMATS[name]
    elements, scales = all_pairs(name)
    codes = element_bytes(name, elements)[0].numpy()
    steps = ALL_BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (steps[:, None] * codes.view(element_type).astype(np.float64)).astype(np.float32)
    for scale_tensor in (scales, scales.view(torch.float8_e8m0fnu)):
        got = dequantize(elements, scale_tensor).numpy()
        np.testing.assert_array_equal(got, want)  # NaN equals NaN here
        zeros = want == 0
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))
        assert np.isnan(got[255]).all()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_alone_in_its_block(name, dtype):
    blocks = torch.zeros(2**16, 32, dtype=dtype)
    blocks[:, 7] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_same_as_numpy(name, blocks)


@both
@pytest.mark.parametrize("companion", [1.0, -448.0, 6.0, 7.9, 2.0**-120, 3e38])
def test_every_bf16_value_beside_another(name, companion):
    blocks = torch.zeros(2**16, 32, dtype=torch.bfloat16)
    blocks[:, 0] = companion
    blocks[:, 7] = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    assert_same_as_numpy(name, blocks)


@both
def test_random_and_subnormal_blocks(name):
    generator = torch.Generator().manual_seed(11)
    blocks = torch.randn(4096, 32, generator=generator)
    blocks *= torch.exp2(torch.linspace(-149, 125, 4096))[:, None]
    assert_same_as_numpy(name, blocks)


@both
def test_scale_is_the_floor_of_log2(name):
    quantize, dequantize, emax, largest, _, _ = FORMATS[name]
    for exponent in range(-149, 128):
        for factor in (1.0, 1.5, 2 - 2.0**-23):
            amax = torch.tensor(factor * 2.0**exponent, dtype=torch.float32)
            if amax == 0 or amax.isinf():
                continue
            true_exponent = math.frexp(amax.item())[1] - 1  # factor may round up a subnormal
            elements, scales = quantize(amax.repeat(32))
            assert scales.item() == max(true_exponent - emax + 127, 0)
            out = dequantize(elements, scales)[0].item()
            step = Fraction(2) ** (scales.item() - 127)
            assert Fraction(out) <= Fraction(largest) * step  # saturates, never overflows
    assert quantize(torch.zeros(32))[1].item() == 0


@both
def test_ties_and_saturation(name):
    quantize, dequantize, emax, largest, _, _ = FORMATS[name]
    top = 2.0 ** (emax + 1)  # scaled amax lies below
    ties = {
        "mxfp8": [(17.0, 16.0), (19.0, 20.0), (2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8)],
        "mxfp4": [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0)],
    }[name]
    x = torch.zeros(32)
    x[0] = largest
    x[1] = top - 2.0**-10
    for index, (value, _) in enumerate(ties):
        x[2 + index], x[16 + index] = value, -value
    elements, scales = quantize(x)
    out = dequantize(elements, scales)
    assert scales.item() == 127
    assert out[:2].tolist() == [largest, largest]
    for index, (_, want) in enumerate(ties):
        assert out[2 + index] == want and out[16 + index] == -want
    assert torch.signbit(out[16])


@both
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_non_finite_blocks_decode_to_nan_and_spare_the_others(name, bad):
    quantize, dequantize = FORMATS[name][:2]
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(4))
    want = dequantize(*quantize(x))
    x[1, 40] = bad
    elements, scales = quantize(x)
    assert scales[1, 1] == 255 and (scales != 255).sum() == 8
    assert (element_bytes(name, elements)[1, 32:64] == 0).all()
    got = dequantize(elements, scales)
    assert got[1, 32:64].isnan().all() and got.isnan().sum() == 32
    assert torch.equal(got[~got.isnan()], want[~got.isnan()])


block_of_floats = st.lists(
    st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=32, max_size=32
).map(torch.tensor)


@both
@settings(max_examples=150, deadline=None)
@given(x=block_of_floats)
def test_properties(name, x):
    quantize, dequantize, _, largest, smallest, _ = FORMATS[name]
    elements, scales = quantize(x)
    out = dequantize(elements, scales)
    step = 2.0 ** (scales.item() - 127)
    # Sign symmetry, order, and idempotence: the largest element keeps the exponent of amax.
    assert torch.equal(dequantize(*quantize(-x)), -out)
    assert torch.equal(torch.signbit(out), torch.signbit(x))
    order = x.argsort()
    assert (out[order].diff() >= 0).all()
    again = quantize(out)
    assert torch.equal(dequantize(*again), out)
    # Error: half the spacing of the element format, or the saturated part.
    mantissa_bits = 3 if name == "mxfp8" else 1
    for value, got in zip(x.double().tolist(), out.double().tolist(), strict=True):
        bound = max(abs(value) * 2.0 ** -(mantissa_bits + 1), smallest / 2 * step)
        if abs(value) > largest * step:
            bound = abs(value) - largest * step
            assert bound <= abs(value) * (0.125 if name == "mxfp8" else 0.25)
        assert abs(value - got) <= bound


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (3, 4, 96), (0, 64), (5, 0)])
def test_shapes_and_dtypes(name, shape, dtype):
    quantize, dequantize = FORMATS[name][:2]
    elements, scales = quantize(torch.randn(shape).to(dtype))
    assert element_bytes(name, elements).shape == shape
    assert elements.dtype == (torch.float8_e4m3fn if name == "mxfp8" else torch.uint8)
    assert scales.shape == (*shape[:-1], shape[-1] // 32) and scales.dtype == torch.uint8
    out = dequantize(elements, scales, dtype)
    assert out.shape == shape and out.dtype == dtype


@both
def test_strides_do_not_matter(name):
    quantize, dequantize = FORMATS[name][:2]
    x = torch.randn(64, 6, 33)[::2, :, 1:].transpose(0, 1)
    a, b = quantize(x), quantize(x.contiguous())
    assert torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8))
    assert torch.equal(a[1], b[1])
    turned = dequantize(a[0].transpose(0, 1), a[1].transpose(0, 1))
    assert torch.equal(turned.transpose(0, 1), dequantize(*b))


def test_mxfp4_even_index_is_the_low_nibble():
    x = torch.zeros(32)
    x[0], x[1], x[31] = 1.0, 6.0, -0.5
    data, scales = mxfp.mxfp4_quantize(x)
    assert scales.item() == 127
    assert data.tolist() == [0x72, *[0] * 14, 0x90]


@both
def test_bad_arguments(name):
    quantize, dequantize = FORMATS[name][:2]
    elements, scales = quantize(torch.ones(2, 64))
    with pytest.raises(TypeError, match=r"x.dtype: expected .*got torch.float64"):
        quantize(torch.ones(32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x.shape: expected .*multiple of 32, got \[2, 48\]"):
        quantize(torch.ones(2, 48))
    with pytest.raises(TypeError, match=r"dtype: expected .*got torch.int8"):
        dequantize(elements.view(torch.int8), scales)
    with pytest.raises(TypeError, match=r"scales.dtype: expected .*got torch.float32"):
        dequantize(elements, scales.to(torch.float32))
    with pytest.raises(ValueError, match=r"scales.shape: expected \[2, 2\], got \[2, 1\]"):
        dequantize(elements, scales[:, :1])
    with pytest.raises(TypeError, match="dtype: expected"):
        dequantize(elements, scales, torch.float64)
