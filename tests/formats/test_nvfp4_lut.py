"""The FP8 table: every entry, the byte selection of a kernel, what saturates and what flushes."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from rocm_msa.formats import nvfp4, nvfp4_lut

MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
FOLDS = [-32, -22, -9, -3, -1, 0, 1, 3, 32]
ALL_BYTES = np.arange(256, dtype=np.uint8)
NAN_ROWS = (0x7F, 0xFF)


def exact(fold: int) -> list[list[Fraction]]:
    """|scale| * magnitude * 2**fold of every entry, 0 in the NaN rows."""
    scales = np.nan_to_num(ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype("f"), nan=0.0)
    fold_factor = Fraction(2) ** fold
    return [[Fraction(float(abs(s))) * Fraction(m) * fold_factor for m in MAGNITUDES]
            for s in scales]  # fmt: skip


def table_values(fold: int) -> np.ndarray:
    """float64 [256, 8]: what the table's bytes mean."""
    return nvfp4_lut.build(fold).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def half_ulp(value: Fraction) -> Fraction:
    """Half the E4M3 spacing around `value`."""
    exponent = -6 if value < Fraction(1, 64) else math.floor(math.log2(value))
    return Fraction(2) ** (max(exponent, -6) - 4)


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale byte with every data byte: data [256, 256], scale bytes [256, 32]."""
    data = torch.arange(256, dtype=torch.uint8)
    return data.repeat(256, 1), data[:, None].repeat(1, 32)


@pytest.mark.parametrize("fold", FOLDS)
def test_every_entry_is_the_nearest_e4m3(fold):
    values = table_values(fold)
    assert values.shape == (256, 8) and not np.isnan(values).any()
    for row, want_row in zip(values, exact(fold), strict=True):
        for got, want in zip(row, want_row, strict=True):
            if want > 448:
                assert abs(got) == 448
                continue
            error = abs(abs(Fraction(got)) - want)
            assert error <= half_ulp(want)
            if want >= Fraction(1, 64):  # the normal range
                assert error <= want / 16


@pytest.mark.parametrize("fold", FOLDS)
def test_every_entry_against_ml_dtypes(fold):
    """Ties to even and the sign bit of the scale included."""
    scales = np.nan_to_num(ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype("f"), nan=0.0)
    scales[0xFF] = 0.0
    products = scales[:, None] * np.array(MAGNITUDES, np.float32) * np.float32(2.0**fold)
    want = np.clip(products, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(nvfp4_lut.build(fold).numpy(), want)


@pytest.mark.parametrize("fold", [0, -3])
def test_table_bytes(fold):
    table = nvfp4_lut.build(fold)
    assert table.shape == (256, 8) and table.dtype == torch.uint8 and table.is_contiguous()
    assert table.numel() == nvfp4_lut.NBYTES == 2048
    for row in NAN_ROWS:
        assert table[row].tolist() == [0] * 8
    assert torch.equal(table[0x80:0xFF], table[:0x7F] | 0x80)
    # FP8 bytes of positive numbers are ordered like the numbers: rows and columns ascend.
    assert (table[:0x7F].int().diff(dim=0) >= 0).all()
    assert (table[:0x7F].int().diff(dim=1) >= 0).all()


def test_what_saturates_and_what_flushes():
    """The numbers that the documentation gives."""

    def counts(fold):
        products = np.array(exact(fold), dtype=np.float64)[:127]
        flushed = (table_values(fold)[:127] == 0) & (products > 0)
        return int((products > 448).sum()), int(flushed.sum())

    assert counts(0) == (63, 1)
    assert counts(-3) == (0, 18)
    assert counts(-2)[0] > 0  # -3 is the largest fold exponent without saturation
    first = min(row for row in range(127) if max(exact(0)[row]) > 448)
    assert ALL_BYTES[first].view(ml_dtypes.float8_e4m3fn) == 80  # scales above 74.67


def test_recommended_fold_keeps_scales_from_a_quarter_on_at_full_precision():
    fold = nvfp4_lut.RECOMMENDED_FOLD_EXPONENT
    values = table_values(fold) * 2.0**-fold
    for row, want_row in zip(values[:0x7F], exact(0), strict=False):
        for got, want in zip(row, want_row, strict=True):
            error = abs(Fraction(float(got)) - want)
            assert error <= (want / 16 if want >= Fraction(1, 8) else Fraction(1, 128))
            if want <= Fraction(1, 128):
                assert got == 0
    quarter = np.float32(0.25).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert min(row[1] for row in exact(0)[quarter:0x7F]) == Fraction(1, 8)


@pytest.mark.parametrize("fold", [0, -3, 2])
def test_dequantize_via_lut_is_select_and_xor(fold):
    """The reference of a kernel, against the bytes a kernel would build one at a time."""
    data, scales = all_pairs()
    got = nvfp4_lut.dequantize_via_lut(data, scales, fold)
    assert got.dtype == torch.float8_e4m3fn and got.shape == (256, 512)
    table = nvfp4_lut.build(fold).tolist()
    want = [
        [
            table[scale][code & 7] ^ (code & 8) << 4
            for byte in range(256)
            for code in (byte & 15, byte >> 4)
        ]
        for scale in range(256)
    ]
    assert got.view(torch.uint8).tolist() == want


def test_dequantize_via_lut_rounds_what_dequantize_gives():
    data, scales = all_pairs()
    plain = nvfp4.dequantize(data, scales)
    for fold in (0, -3):
        want = (plain * 2.0**fold).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        got = nvfp4_lut.dequantize_via_lut(data, scales.view(torch.float8_e4m3fn), fold)
        assert torch.equal(got.view(torch.uint8), want)  # signs of zeros too


def test_random_page_keeps_shape_strides_and_error():
    x = torch.randn(128, 4, 128, generator=torch.Generator().manual_seed(2))
    data, scales = nvfp4.quantize(x, nvfp4.global_scale_from_amax(x.abs().max()))
    plain = nvfp4.dequantize(data, scales)
    fold = nvfp4_lut.RECOMMENDED_FOLD_EXPONENT
    got = nvfp4_lut.dequantize_via_lut(data, scales, fold).to(torch.float32) * 2.0**-fold
    assert ((got - plain).abs() <= torch.maximum(plain.abs() / 16, torch.tensor(2.0**-7))).all()
    turned = nvfp4_lut.dequantize_via_lut(data.transpose(0, 1), scales.transpose(0, 1), fold)
    assert torch.equal(turned.transpose(0, 1).to(torch.float32) * 2.0**-fold, got)
    assert nvfp4_lut.dequantize_via_lut(data[:0], scales[:0], fold).shape == (0, 4, 128)


def test_fold_exponent_for():
    assert nvfp4_lut.fold_exponent_for(448.0) == nvfp4_lut.RECOMMENDED_FOLD_EXPONENT == -3
    assert nvfp4_lut.fold_exponent_for(72.0) == 0
    assert nvfp4_lut.fold_exponent_for(80.0) == -1
    for scale in ALL_BYTES[1:127].view(ml_dtypes.float8_e4m3fn).astype(float):
        fold = nvfp4_lut.fold_exponent_for(scale)
        assert 6 * scale * 2.0**fold <= 448 < 6 * scale * 2.0 ** (fold + 1)
    for bad in (0.0, -1.0, 449.0, math.nan):
        with pytest.raises(ValueError, match="max_scale"):
            nvfp4_lut.fold_exponent_for(bad)


def test_bad_arguments():
    data, scales = all_pairs()
    for bad in (33, -33):
        with pytest.raises(ValueError, match=r"fold_exponent: expected -32..32, got"):
            nvfp4_lut.build(bad)
    for bad in (1.0, True, "0"):
        with pytest.raises(TypeError, match="fold_exponent: expected an int"):
            nvfp4_lut.dequantize_via_lut(data, scales, bad)
    with pytest.raises(ValueError, match=r"scales.shape"):
        nvfp4_lut.dequantize_via_lut(data, scales[:, 1:])
    with pytest.raises(TypeError, match=r"scales.dtype"):
        nvfp4_lut.dequantize_via_lut(data, scales.to(torch.float32))
