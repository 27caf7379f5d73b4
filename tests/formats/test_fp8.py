"""FP8: which of the two readings of a byte is ours, the largest value, saturation, NaN."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from rocm_msa.formats import fp8, mxfp, nvfp4, nvfp4_lut

INF, NAN = math.inf, math.nan
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_c42_bytes_are_read_as_fn_not_fnuz():
    raw = torch.tensor([0x40, 0x80], dtype=torch.uint8)
    ours = fp8.dequantize(raw.view(torch.float8_e4m3fn))
    assert ours.tolist() == [2.0, 0.0] and torch.signbit(ours[1])
    other = raw.numpy().view(ml_dtypes.float8_e4m3fnuz).astype("f")
    assert other[0] == 1.0 and np.isnan(other[1])  # what a mix-up would read

    # The same bytes as scales: value 1.0 times 2.0, and a scale of -0.
    data = torch.full((16,), 0x22, dtype=torch.uint8)
    for scales in (raw, raw.view(torch.float8_e4m3fn)):
        assert nvfp4.dequantize(data, scales).tolist() == [2.0] * 16 + [0.0] * 16
        via_lut = nvfp4_lut.dequantize_via_lut(data, scales).to(torch.float32)
        assert via_lut.tolist() == [2.0] * 16 + [0.0] * 16


@pytest.mark.parametrize("function", [fp8.dequantize, mxfp.mxfp8_dequantize, nvfp4.dequantize])
def test_c42_fnuz_tensors_are_refused(function):
    fnuz = torch.zeros(32, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    data = torch.zeros(256, dtype=torch.uint8)
    arguments = {
        fp8.dequantize: (fnuz,),
        mxfp.mxfp8_dequantize: (fnuz, torch.zeros(1, dtype=torch.uint8)),
        nvfp4.dequantize: (data, fnuz),
    }
    with pytest.raises(TypeError, match=r"got torch.float8_e4m3fnuz"):
        function(*arguments[function])


def test_c43_a_row_of_amax_448_uses_the_whole_range():
    x = torch.linspace(-448, 448, 128)
    assert (fp8.dequantize(fp8.quantize(x)) - x).abs().max() <= 16  # half a step at 256..448
    assert fp8.quantize(x)[[0, -1]].view(torch.uint8).tolist() == [0xFE, 0x7E]
    values, scales = mxfp.mxfp8_quantize(x)
    assert scales.tolist() == [127, 126, 126, 127]  # amax in [256, 512), then [128, 256)
    assert mxfp.mxfp8_dequantize(values, scales)[[0, -1]].tolist() == [-448.0, 448.0]
    data, scales = nvfp4.quantize(x)
    # 448 / 6 = 74.67 lies between the scales 72 and 80: 72, and 448 becomes 6 * 72.
    assert scales[[0, -1]].to(torch.float32).tolist() == [72.0, 72.0]
    out = nvfp4.dequantize(data, scales)
    assert out[[0, -1]].tolist() == [-432.0, 432.0]
    assert ((out - x).abs() <= scales.to(torch.float32).repeat_interleave(16)).all()


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-100, 2.0**119])
def test_every_byte_decodes_and_encodes_again(scale):
    out = fp8.dequantize(ALL_BYTES.view(torch.float8_e4m3fn), scale).numpy()
    want = ALL_BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype("f") * np.float32(scale)
    assert np.isnan(out[[0x7F, 0xFF]]).all() and np.isnan(out).sum() == 2
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(out.view(np.uint32)[numbers], want.view(np.uint32)[numbers])
    again = fp8.quantize(torch.from_numpy(out), scale).view(torch.uint8)
    assert torch.equal(again[torch.from_numpy(numbers)], ALL_BYTES[torch.from_numpy(numbers)])


@pytest.mark.parametrize("scale", [1.0, 0.3, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_against_ml_dtypes(dtype, scale):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    wide = x.to(torch.float32).numpy()
    clean = np.copysign(np.nan_to_num(np.abs(wide), nan=0.0, posinf=np.inf), wide)
    with np.errstate(over="ignore"):
        scaled = np.clip(clean / np.float32(scale), np.float32(-448), np.float32(448))
    want = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp8.quantize(x, scale).view(torch.uint8).numpy(), want)


def test_non_finite_and_saturation():
    x = torch.tensor([NAN, -NAN, INF, -INF, 448.0, 463.9, 464.0, 465.0, 1e38, -1e38])
    got = fp8.quantize(x).view(torch.uint8).tolist()
    assert got == [0x00, 0x80, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"x.dtype: expected .*got torch.int64"):
        fp8.quantize(torch.arange(3))
    with pytest.raises(TypeError, match=r"values.dtype: expected .*got torch.uint8"):
        fp8.dequantize(ALL_BYTES)
    for bad in (0.0, -1.0, NAN, INF, 2.0**120):
        with pytest.raises(ValueError, match="scale: expected a finite"):
            fp8.quantize(torch.ones(3), bad)
        with pytest.raises(ValueError, match="scale: expected a finite"):
            fp8.dequantize(ALL_BYTES.view(torch.float8_e4m3fn), bad)
