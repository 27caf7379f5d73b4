"""NVFP4: properties over arbitrary inputs, argument checks, shapes and strides."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_msa.formats import e2m1, nvfp4

INF, NAN = math.inf, math.nan
any_float = st.floats(width=32)
finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100, allow_subnormal=False)
blocks_of = lambda elements: st.lists(elements, min_size=16, max_size=16).map(torch.tensor)  # noqa: E731
scale_of_a_tensor = st.floats(min_value=2.0**-60, max_value=2.0**60)


def encode(x, g=1.0):
    data, scales = nvfp4.quantize(x, g)
    return e2m1.unpack(data), scales.view(torch.uint8)


@settings(max_examples=300, deadline=None)
@given(blocks_of(any_float), st.floats(min_value=2.0**-149, max_value=nvfp4.MAX_GLOBAL_SCALE))
def test_any_bits_give_a_valid_block(x, g):
    data, scales = nvfp4.quantize(x, g)
    assert scales.view(torch.uint8).item() <= 0x7E  # not NaN, no sign bit
    out = nvfp4.dequantize(data, scales, g)
    assert out.isfinite().all()
    assert torch.equal(torch.signbit(out), torch.signbit(x))


@settings(max_examples=200, deadline=None)
@given(blocks_of(any_float), scale_of_a_tensor)
def test_sign_symmetry(x, g):
    codes, scales = encode(x, g)
    negated, same_scales = encode(-x, g)
    assert torch.equal(negated, codes ^ 8) and torch.equal(scales, same_scales)


@settings(max_examples=200, deadline=None)
@given(blocks_of(finite), scale_of_a_tensor)
def test_codes_are_monotone_in_the_value(x, g):
    codes, scales = encode(x.sort().values, g)
    values = nvfp4.dequantize(*nvfp4.quantize(x.sort().values, g), g)
    assert (values.diff() >= 0).all(), (codes, scales)


@settings(max_examples=200, deadline=None)
@given(blocks_of(finite), scale_of_a_tensor, st.permutations(range(16)))
def test_a_value_depends_on_its_block_only_through_amax(x, g, order):
    codes, scales = encode(x, g)
    shuffled, same_scales = encode(x[order], g)
    assert torch.equal(shuffled, codes[order]) and torch.equal(scales, same_scales)


@settings(max_examples=300, deadline=None)
@given(blocks_of(finite), scale_of_a_tensor)
def test_error_bound(x, g):
    data, scales = nvfp4.quantize(x, g)
    byte = scales.view(torch.uint8).item()
    g = float(np.float32(g))
    step = scales.to(torch.float64).item() * g
    error = (nvfp4.dequantize(data, scales, g).double() - x.double()).abs().max().item()
    amax = x.abs().max().item()
    slack = 1 + 1e-6
    if amax > 464 * 6 * g:  # saturated: the largest code is 448 * 6 * g
        assert error <= max(amax - 2688 * g, step) * slack
    elif byte >= 3:
        assert error <= step * slack  # half of the widest gap, 4 to 6
    elif byte:
        assert error <= 3 * step * slack  # subnormal scale: the top saturates by up to a half
    else:
        assert error <= 6 * 2.0**-10 * g * slack


@settings(max_examples=300, deadline=None)
@given(blocks_of(finite), scale_of_a_tensor)
def test_encoding_a_decoded_block_again_changes_nothing(x, g):
    first = nvfp4.quantize(x, g)
    byte = first[1].view(torch.uint8).item()
    second = nvfp4.quantize(nvfp4.dequantize(*first, g), g)
    if byte == 0 or byte >= 4:
        assert torch.equal(first[0], second[0])
        assert byte == second[1].view(torch.uint8).item()


def test_the_smallest_scales_may_decay_when_encoded_again():
    """u = 1.6 * 2**-9 rounds to scale 2 and code 4; that block's own u asks for scale 1."""
    x = torch.full((16,), 9.6 * 2.0**-9)
    first = nvfp4.quantize(x)
    second = nvfp4.quantize(nvfp4.dequantize(*first))
    assert first[1].view(torch.uint8).tolist() == [2]
    assert second[1].view(torch.uint8).tolist() == [1]
    third = nvfp4.quantize(nvfp4.dequantize(*second))
    assert torch.equal(second[0], third[0])


# --- shapes, strides, arguments -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (3, 4, 128), (0, 4, 128), (5, 0), (2, 0, 16)])
def test_shapes_and_dtypes(shape, dtype):
    x = torch.randn(shape).to(dtype)
    data, scales = nvfp4.quantize(x)
    assert data.shape == (*shape[:-1], shape[-1] // 2) and data.dtype == torch.uint8
    assert scales.shape == (*shape[:-1], shape[-1] // 16)
    assert scales.dtype == torch.float8_e4m3fn
    out = nvfp4.dequantize(data, scales, dtype=dtype)
    assert out.shape == shape and out.dtype == dtype


def test_strides_do_not_matter_and_inputs_are_not_written():
    base = torch.randn(64, 6, 33, 2)
    base[3, 2, 5, 0] = NAN
    kept = base.clone()
    x = base[::2, :, 1:33, 0].transpose(0, 1)
    data, scales = nvfp4.quantize(x)
    want = nvfp4.quantize(x.contiguous())
    assert torch.equal(base.nan_to_num(9), kept.nan_to_num(9))
    assert torch.equal(data, want[0])
    assert torch.equal(scales.view(torch.uint8), want[1].view(torch.uint8))

    page = torch.zeros(6, 32, 64, dtype=torch.uint8)  # rows with gaps, scales beside the data
    page[..., :16], page[..., 20:22] = data, scales.view(torch.uint8)
    got = nvfp4.dequantize(page[..., :16], page[..., 20:22])
    assert torch.equal(got, nvfp4.dequantize(data, scales))


def test_a_tensor_that_requires_grad_is_accepted():
    assert not nvfp4.quantize(torch.randn(16, requires_grad=True))[0].requires_grad


def test_global_scale_as_tensor_and_number_agree():
    x = torch.randn(4, 64)
    for g in (0.3, 3, np.float32(0.7), np.float64(0.7)):
        a, b = nvfp4.quantize(x, g), nvfp4.quantize(x, torch.tensor(float(g)))
        assert torch.equal(a[0], b[0])
        assert torch.equal(nvfp4.dequantize(*a, g), nvfp4.dequantize(*a, torch.tensor(float(g))))


@pytest.mark.parametrize("g", [0.0, -1.0, INF, -INF, NAN, 1e-50, 1e36, 1e300, torch.tensor(0.0)])
def test_bad_global_scale_values(g):
    data, scales = nvfp4.quantize(torch.ones(16))
    with pytest.raises(ValueError, match=r"global_scale: expected .*> 0.*, got"):
        nvfp4.quantize(torch.ones(16), g)
    with pytest.raises(ValueError, match=r"global_scale: expected .*> 0.*, got"):
        nvfp4.dequantize(data, scales, g)


@pytest.mark.parametrize("g", ["1", None, True, torch.tensor(1.0, dtype=torch.float64)])
def test_bad_global_scale_types(g):
    with pytest.raises(TypeError, match="global_scale"):
        nvfp4.quantize(torch.ones(16), g)


def test_bad_arguments_name_themselves():
    data, scales = nvfp4.quantize(torch.ones(2, 32))
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor, got list"):
        nvfp4.quantize([1.0] * 16)
    with pytest.raises(TypeError, match=r"x.dtype: expected .*float32.*, got torch.int32"):
        nvfp4.quantize(torch.ones(16, dtype=torch.int32))
    with pytest.raises(TypeError, match="float64"):
        nvfp4.quantize(torch.ones(16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x.shape: expected .*multiple of 16, got \[2, 24\]"):
        nvfp4.quantize(torch.ones(2, 24))
    with pytest.raises(ValueError, match=r"x.shape"):
        nvfp4.quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match="global_scale"):
        nvfp4.quantize(torch.ones(16), torch.ones(1))
    with pytest.raises(TypeError, match=r"data.dtype: expected torch.uint8, got torch.int8"):
        nvfp4.dequantize(data.view(torch.int8), scales)
    with pytest.raises(TypeError, match=r"scales.dtype: expected .*got torch.float8_e4m3fnuz"):
        nvfp4.dequantize(data, scales.view(torch.float8_e4m3fnuz))
    with pytest.raises(ValueError, match=r"scales.shape: expected \[2, 2\], got \[2, 1\]"):
        nvfp4.dequantize(data, scales[:, :1])
    with pytest.raises(ValueError, match=r"data.shape: expected .*multiple of 8, got \[2, 15\]"):
        nvfp4.dequantize(data[:, :15], scales)
    with pytest.raises(TypeError, match=r"dtype: expected .*got torch.float64"):
        nvfp4.dequantize(data, scales, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"scales.device: expected cpu, as data, got meta"):
        nvfp4.dequantize(data, scales.to("meta"))


def test_bytes_per_vector():
    assert nvfp4.bytes_per_vector(128) == (64, 8)
    assert nvfp4.bytes_per_vector(16) == (8, 1)
    for bad in (0, -16, 24):
        with pytest.raises(ValueError, match="head_dim: expected a positive multiple of 16"):
            nvfp4.bytes_per_vector(bad)
