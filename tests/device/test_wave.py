"""Reductions, transcendentals and conversions of one wave against PyTorch."""

from __future__ import annotations

import flydsl.expr as fx
import torch

from rocm_msa.device import convert, wave
from tests.device.harness import run


def values(seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(seed)) * spread


def test_reductions():
    def body(x, out):
        lane = wave.lane_id()
        v = x.load(fx.Float32, offset=lane * 4)
        bits = fx.Int32(1) << (lane % 32)
        found = [
            wave.wave_max(v),
            wave.wave_sum(v),
            wave.column_max(v),
            wave.column_sum(v),
            wave.wave_or((lane % 5 == 0).select(bits, fx.Int32(0))).bitcast(fx.Float32),
        ]
        for i, value in enumerate(found):
            out.store(value, offset=lane * 4 + 256 * i)

    x = values(1)
    out = torch.zeros(5, 64)
    run(body, [x, out])
    columns = x.view(4, 16)
    assert torch.equal(out[0], x.max().expand(64))
    assert torch.allclose(out[1], x.sum().expand(64), atol=1e-5)
    assert out[1].unique().numel() == 1
    assert torch.equal(out[2], columns.amax(0).repeat(4))
    assert torch.allclose(out[3], columns.sum(0).repeat(4), atol=1e-5)
    want = 0
    for lane in range(0, 64, 5):
        want |= 1 << lane % 32
    assert (out[4].view(torch.int32).to(torch.int64) & 0xFFFFFFFF == want).all()


def test_a_nan_loses_and_minus_infinity_is_kept():
    def body(x, out):
        lane = wave.lane_id()
        out.store(wave.column_max(x.load(fx.Float32, offset=lane * 4)), offset=lane * 4)

    x = torch.full((4, 16), float("-inf"))
    x[2, 3], x[1, 3] = float("nan"), 2.5
    out = torch.zeros(64)
    run(body, [x, out])
    want = torch.full((16,), float("-inf"))
    want[3] = 2.5
    assert torch.equal(out, want.repeat(4))


def test_transcendentals():
    def body(x, out):
        lane = wave.lane_id()
        v = x.load(fx.Float32, offset=lane * 4)
        for i, f in enumerate((wave.exp2, wave.log2, wave.rcp)):
            out.store(f(v), offset=lane * 4 + 256 * i)

    x = values(2).abs() + 0.01
    x[0], x[1] = 0.0, float("inf")
    out = torch.zeros(3, 64)
    report = run(body, [x, out])
    for got, want in zip(out, (x.exp2(), x.log2(), 1 / x), strict=True):
        assert torch.allclose(got, want, rtol=3e-7, atol=3e-7)
    assert {"v_exp_f32", "v_log_f32", "v_rcp_f32"} <= set(report.launches[0].instructions)


def test_uniform_loads_are_scalar():
    def body(table, out):
        at = wave.wave_id() * 16
        words = table.uniform(fx.Int32, 4, offset=at, align=16)
        out.store(words[3] + wave.lane_id(), offset=fx.thread_idx.x * 4)

    table = torch.arange(8, dtype=torch.int32) * 100
    out = torch.zeros(128, dtype=torch.int32)
    report = run(body, [table, out], lanes=128)
    assert torch.equal(out, torch.cat([300 + torch.arange(64), 700 + torch.arange(64)]).int())
    assert not any("global_load" in name for name in report.launches[0].instructions)


def test_conversions():
    def body(x, words, out):
        lane = wave.lane_id()
        v = [x.load(fx.Float32, offset=lane * 16 + 4 * i) for i in range(4)]
        packed = convert.fp8_word(v)
        out.store(packed, offset=lane * 32)
        out.store(convert.bf16_word(v[0], v[1]), offset=lane * 32 + 4)
        out.store(convert.f16_word(v[0], v[1]), offset=lane * 32 + 8)
        for i, value in enumerate(convert.fp8_values(packed)):
            out.store(value, offset=lane * 32 + 12 + 4 * i)
        word = words.load(fx.Uint32, offset=lane * 4)
        sums = [a + b for a, b in (convert.bf16_values(word), convert.f16_values(word))]
        out.store(convert.bf16_word(*sums), offset=lane * 32 + 28)

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3)) * 100
    pairs = torch.randn(64, 2, generator=torch.Generator().manual_seed(4))
    words = pairs.to(torch.bfloat16).view(torch.int32).flatten()
    out = torch.zeros(64, 8, dtype=torch.int32)
    run(body, [x, words, out])
    rounded = x.to(torch.float8_e4m3fn)
    assert torch.equal(out[:, 0], rounded.view(torch.int32).flatten())
    assert torch.equal(out[:, 1], x[:, :2].to(torch.bfloat16).view(torch.int32).flatten())
    assert torch.equal(out[:, 2], x[:, :2].to(torch.float16).view(torch.int32).flatten())
    assert torch.equal(out[:, 3:7].contiguous().view(torch.float32), rounded.float())
    both = [words.view(kind).view(64, 2).float().sum(1) for kind in (torch.bfloat16, torch.float16)]
    want = torch.stack(both, 1).to(torch.bfloat16).view(torch.int32).flatten()
    assert torch.equal(out[:, 7], want)


def test_scalars_of_a_wave():
    def body(x, out):
        lane = wave.lane_id()
        v = x.load(fx.Uint32, offset=lane * 4)
        any_large = wave.wave_any(v > fx.Uint32(4_000_000_000))
        any_small = wave.wave_any(v < fx.Uint32(1000))
        found = [
            wave.high_product(v, v),
            wave.lane_value(v, 17),
            any_large.select(fx.Uint32(1), fx.Uint32(0)),
            any_small.select(fx.Uint32(1), fx.Uint32(0)),
        ]
        for i, value in enumerate(found):
            out.store(value, offset=lane * 4 + 256 * i)

    x = torch.randint(1000, 2**32, (64,), generator=torch.Generator().manual_seed(6))
    x[40] = 2**32 - 1
    words = (x - (x >= 2**31) * 2**32).to(torch.int32)
    out = torch.zeros(4, 64, dtype=torch.int32)
    run(body, [words, out])
    got = out.to(torch.int64) & 0xFFFFFFFF
    assert got[0].tolist() == [v * v >> 32 for v in x.tolist()]
    assert (got[1] == x[17]).all()
    assert (got[2] == 1).all() and (got[3] == 0).all()


def test_two_terms():
    def body(x, out):
        lane = wave.lane_id()
        groups = [[x.load(fx.Float32, offset=lane * 16 + 4 * i) for i in range(4)]]
        for i, words in enumerate(convert.fp8_two_terms(groups)):
            out.store(words[0], offset=lane * 8 + 4 * i)

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(8)) * 100
    out = torch.zeros(64, 2, dtype=torch.int32)
    run(body, [x, out])
    high = x.to(torch.float8_e4m3fn)
    low = (x - high.float()).to(torch.float8_e4m3fn)
    assert torch.equal(out[:, 0], high.view(torch.int32).flatten())
    assert torch.equal(out[:, 1], low.view(torch.int32).flatten())
    error = (x - high.float() - low.float()).abs()
    assert (error <= 2.0**-8 * x.abs() + 2.0**-10).all()
