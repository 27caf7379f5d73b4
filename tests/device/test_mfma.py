"""The operand order that device/mfma.py states, written down again here, against PyTorch."""

from __future__ import annotations

import flydsl.expr as fx
import pytest
import torch

from rocm_msa.device import mfma, wave
from rocm_msa.formats import e2m1
from tests.device.harness import run

LANE = torch.arange(64)
ROW, GROUP = LANE % 16, LANE // 16


def fp8_operand(x: torch.Tensor) -> torch.Tensor:
    """uint8 [16, 128] -> [64 lanes, 32 bytes]."""
    j = torch.arange(32)
    k = (j // 16) * 64 + 16 * GROUP[:, None] + j % 16
    return x[ROW[:, None], k].contiguous()


def fp4_operand(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [16, 128] -> [64 lanes, 16 bytes]."""
    mine = codes[ROW[:, None], 32 * GROUP[:, None] + torch.arange(32)]
    return (mine[:, 0::2] | mine[:, 1::2] << 4).contiguous()


def matrix(out: torch.Tensor) -> torch.Tensor:
    """fp32 [64 lanes, 4] -> [16, 16]."""
    found = torch.empty(16, 16)
    for r in range(4):
        found[4 * GROUP + r, ROW] = out[:, r]
    return found


def random_fp8(seed: int) -> torch.Tensor:
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.float8_e4m3fn)


def test_fp8():
    def body(a, b, out):
        lane = wave.lane_id()
        left, right = (
            [x.load(fx.Uint32, 4, offset=lane * 32 + i) for i in (0, 16)] for x in (a, b)
        )
        left, right = (lo.shuffle(hi, list(range(8))) for lo, hi in (left, right))
        out.store(mfma.mfma_fp8(left, right, mfma.zeros()), offset=lane * 16)

    a, b = random_fp8(1), random_fp8(2)
    out = torch.zeros(64, 4)
    run(body, [fp8_operand(a.view(torch.uint8)), fp8_operand(b.view(torch.uint8)), out])
    assert torch.allclose(matrix(out), a.float() @ b.float().T, atol=1e-4)


def test_fp4_with_fp8():
    def body(a, b, out):
        lane = wave.lane_id()
        left = a.load(fx.Uint32, 4, offset=lane * 16)
        lo, hi = (b.load(fx.Uint32, 4, offset=lane * 32 + i) for i in (0, 16))
        right = lo.shuffle(hi, list(range(8)))
        out.store(mfma.mfma_fp4_fp8(left, right, mfma.zeros()), offset=lane * 16)

    codes = torch.randint(0, 16, (16, 128), generator=torch.Generator().manual_seed(3))
    codes = codes.to(torch.uint8)
    b = random_fp8(4)
    out = torch.zeros(64, 4)
    run(body, [fp4_operand(codes), fp8_operand(b.view(torch.uint8)), out])
    a = torch.tensor([*e2m1.MAGNITUDES, *(-m for m in e2m1.MAGNITUDES)])[codes.long()]
    assert torch.allclose(matrix(out), a @ b.float().T, atol=1e-4)


def scaled(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """fp32 [16, 128] times 2^exponents [16, 4] by blocks of 32."""
    return values * (2.0 ** exponents.float()).repeat_interleave(32, 1)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_scales_by_block(kind):
    def body(a, b, scales, out):
        lane = wave.lane_id()
        lo, hi = (b.load(fx.Uint32, 4, offset=lane * 32 + i) for i in (0, 16))
        right = lo.shuffle(hi, list(range(8)))
        if kind == "fp4":
            left = a.load(fx.Uint32, 4, offset=lane * 16)
        else:
            lo, hi = (a.load(fx.Uint32, 4, offset=lane * 32 + i) for i in (0, 16))
            left = lo.shuffle(hi, list(range(8)))
        scale = fx.Int32(scales.load(fx.Uint8, offset=lane)) & 0xFF
        total = mfma.mfma_mx(left, right, mfma.zeros(), scale)
        out.store(mfma.mfma_mx(left, right, total, scale, b_exponent=-4), offset=lane * 16)

    exponents = torch.randint(-3, 4, (16, 4), generator=torch.Generator().manual_seed(5))
    b, out = random_fp8(6), torch.zeros(64, 4)
    scales = (exponents[ROW, GROUP] + 127).to(torch.uint8)
    if kind == "fp4":
        codes = torch.randint(0, 16, (16, 128), generator=torch.Generator().manual_seed(7))
        values = torch.tensor([*e2m1.MAGNITUDES, *(-m for m in e2m1.MAGNITUDES)])[codes]
        left = fp4_operand(codes.to(torch.uint8))
    else:
        values = random_fp8(8).float()
        left = fp8_operand(random_fp8(8).view(torch.uint8))
    run(body, [left, fp8_operand(b.view(torch.uint8)), scales, out])
    want = scaled(values, exponents) @ b.float().T * (1 + 2.0**-4)
    assert torch.allclose(matrix(out), want, atol=1e-3)


def test_bf16_accumulates():
    def body(a, b, out):
        lane = wave.lane_id()
        left, right = (x.load(fx.Uint32, 4, offset=lane * 16) for x in (a, b))
        total = mfma.mfma_bf16(left, right, mfma.zeros())
        out.store(mfma.mfma_bf16(left, right, total), offset=lane * 16)

    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    k = 8 * GROUP[:, None] + torch.arange(8)
    a, b = (m[ROW[:, None], k].contiguous() for m in x)
    out = torch.zeros(64, 4)
    run(body, [a, b, out])
    assert torch.allclose(matrix(out), 2 * (x[0].float() @ x[1].float().T), atol=1e-4)
