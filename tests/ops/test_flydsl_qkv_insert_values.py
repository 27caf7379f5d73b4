"""qkv_insert on FlyDSL in the emulator: values at the edges of the encodings, byte by byte."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import DTYPES
from tests.ops.flydsl_insert import SMALL, Step, check, run


def nvfp4_edges(g: float, seed: int) -> torch.Tensor:
    """fp32 groups of 16: ties of codes and of scales and their neighbours, for this g."""
    generator = torch.Generator().manual_seed(seed)
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    pick = torch.randint(0, 126, (64, 1), generator=generator)
    d = scale[pick.flatten()][:, None] * torch.tensor(g)
    x = tie.repeat(2)[None] * d
    nudge = torch.randint(-2, 3, x.shape, generator=generator).int()
    x = (x.view(torch.int32) + nudge).view(torch.float32)
    x[:, 7] = 6 * d[:, 0]  # the group's scale is the one meant, or its neighbour
    sign = torch.randint(0, 2, x.shape, generator=generator).float() * 2 - 1
    return x * sign


def special_rows(dim: int) -> torch.Tensor:
    """fp32 rows of one kind each, and mixtures."""
    inf, nan = float("inf"), float("nan")
    tiny = torch.finfo(torch.float32).tiny
    rows = [
        [0.0], [-0.0], [nan], [-nan], [inf], [-inf], [1e-45], [-1e-45], [tiny], [3.3e38],
        [2688.0], [-2689.0], [448.0], [464.0], [465.0], [2.0**-10 * 6], [-(2.0**-9) * 6],
        [nan, 1.0, -2.0, 3.0], [inf, 1.0, -2.0, nan], [-inf, 0.0, -0.0, 1e-30],
        [nan, -nan, 0.0, -0.0], [1.0, -1e-6, 1e-3, -6.0], [tiny, 1e-45, -1e-45, 0.0],
    ]  # fmt: skip
    x = torch.stack([torch.tensor(row).repeat(dim)[:dim] for row in rows])
    x[3] = torch.tensor([-(2**22)], dtype=torch.int32).view(torch.float32)  # a NaN, sign bit set
    return x


@pytest.mark.parametrize("main", DTYPES)
@pytest.mark.parametrize("g", [1.0, 0.0123, 3.7, 2.0**-20, 1e-38, 2.0**100])
def test_special_values(main, g):
    values = special_rows(SMALL.head_dim)
    step = Step(len(values), SMALL, main, "bf16", dtype=torch.float32)
    step.scales = {"k": g, "v": g}
    step.fused[:, SMALL.q + SMALL.kv] = values
    step.fused[:, SMALL.q + SMALL.kv + 1] = -values.flip(1)
    check(step)


@pytest.mark.parametrize("g", [1.0, 0.0123, 3.7, 0.9999, 1e-30])
def test_ties_of_the_encoding(g):
    step = Step(64, SMALL, "nvfp4", "bf16", dtype=torch.float32)
    step.scales = {"v": g, "k": g}
    for i in range(2):
        for half in range(2):
            edges = nvfp4_edges(g, 10 * i + half)
            step.fused[:, SMALL.q + SMALL.kv + i, 16 * half : 16 * half + 16] = edges
    check(step)
    fp8 = Step(64, SMALL, "fp8", "bf16", dtype=torch.float32)
    fp8.scales = {"v": g, "k": g}
    code = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (code[1:] + code[:-1]) / 2 * torch.tensor(g)
    near = (ties.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).int().view(torch.float32)
    near = torch.cat([near.flatten(), -near.flatten()])
    count = 64 * 2 * SMALL.head_dim
    spread = near.repeat(-(-count // len(near)))[:count]
    fp8.fused[:, SMALL.q + SMALL.kv : SMALL.q + 2 * SMALL.kv] = spread.view(64, 2, -1)
    check(fp8)


@pytest.mark.parametrize("g", [0.0123, 3.7, 0.9999])
def test_ties_of_the_block_scale(g):
    """amax / 6 / g at the middle of two E4M3 numbers, and one to three steps beside it."""
    code = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (code[1:] + code[:-1]) / 2 * torch.tensor(6.0) * torch.tensor(g)
    amax = (middle.view(torch.int32)[:, None] + torch.arange(-3, 4)).int().view(torch.float32)
    step = Step(224, SMALL, "nvfp4", "bf16", dtype=torch.float32)
    step.scales = {"v": g, "k": g}
    groups = torch.zeros(224 * 4, 16)
    groups[: amax.numel(), 5] = amax.flatten()
    step.fused[:, SMALL.q + SMALL.kv : SMALL.q + 2 * SMALL.kv] = groups.view(224, 2, 32)
    check(step)


def test_keys_that_are_zero_huge_or_not_finite():
    """Through the norm; a non-finite key row must store no NaN and disturb no other token."""
    step = Step(8, SMALL, "nvfp4", "fp8")
    key = SMALL.q
    step.fused[0, key : key + 2] = 0.0
    step.fused[1, key : key + 2] = 3e38
    step.fused[2, key : key + 2] = 1e-30
    report = check(step)
    assert report.ok
    clean = run(step)[2]
    step.fused[3, key, 5] = float("nan")
    step.fused[4, key, 9] = float("inf")
    main = run(step)[2]
    for t in range(8):
        block, offset = divmod(int(step.main_slots[t]), 128)
        if t not in (3, 4):
            for name in ("k_data", "k_scales", "v_data", "v_scales"):
                got, want = (c.region(name)[block, :, offset] for c in (main, clean))
                assert torch.equal(got, want)
    k, _ = main.read(int(step.main_slots[3]) // 128)
    assert k[int(step.main_slots[3]) % 128].isfinite().all()
