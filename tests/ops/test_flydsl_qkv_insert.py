"""qkv_insert's FlyDSL kernel in the emulator: the reference's bytes, schedules, counts.

How results are compared: flydsl_insert.py.
"""

import dataclasses

import pytest
import torch

from rocm_msa import aot, launcher
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.ops import Heads, Norms, qkv_insert
from rocm_msa.ops.qkv_insert import flydsl_gfx950
from rocm_msa.ops.qkv_insert.flydsl_gfx950 import Build
from tests.launcher.emulated import SCHEDULES, emulated
from tests.ops.cases import DTYPES, random_values
from tests.ops.flydsl_insert import BLOCKS, SMALL, TP4, Step, check, run, whole_rows
from tests.ops.test_qkv_insert import MAX_POSITION, norms_of, table_of


def test_under_all_schedules():
    assert len(SCHEDULES) >= 20
    for schedule in SCHEDULES:
        check(Step(6, SMALL, "nvfp4", "fp8"), schedule)
    for schedule in SCHEDULES[::4]:
        check(Step(6), schedule)


@pytest.mark.parametrize("index", DTYPES)
@pytest.mark.parametrize("main", DTYPES)
def test_cache_dtypes(main, index):
    step = Step(7, main=main, index=index)
    step.scales = {"k": 0.37, "v": 1.0, "index": 5.1}
    check(step)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64])
def test_token_counts(tokens):
    check(Step(tokens, seed=tokens))


@pytest.mark.parametrize(
    "heads",
    [Heads(64, 4, 4, 128, 64), Heads(16, 1, 0, 128, 64), Heads(2, 1, 1, 128, 128),
     Heads(3, 2, 2, 64, 64), Heads(3, 1, 1, 64, 32), Heads(1, 1, 1, 32, 32)],
)  # fmt: skip
def test_geometries(heads):
    check(Step(5, heads, "nvfp4", "fp8"))


@pytest.mark.parametrize("rope", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activation_weight_and_table_dtypes(dtype, rope):
    step = Step(5, SMALL, "nvfp4", "bf16", dtype=dtype)
    step.cos_sin = table_of(SMALL, rope)
    w = norms_of(SMALL, 70, rope)
    step.norms = Norms(w.k, w.k, w.index_k, w.index_k, eps=1e-3)
    check(step)


# Slots, positions, memory


@pytest.mark.parametrize("narrow", [("main_slots",), ("index_slots", "positions"), ()])
def test_slots_of_minus_one_in_int32_and_int64(narrow):
    step = Step(13, SMALL)
    live = torch.tensor([t % 3 != 1 for t in range(13)])
    for name in ("main_slots", "index_slots"):
        setattr(step, name, torch.where(live, getattr(step, name), -1))
    for name in narrow:
        setattr(step, name, getattr(step, name).int())
    check(step, live=live)
    step.main_slots[:] = -1
    step.index_slots[:] = -1
    check(step, live=torch.zeros(13, dtype=torch.bool))


def test_slots_and_positions_outside_are_ignored_and_clamped():
    """What the op cannot check on a GPU; the module is called below the op's checks."""
    step, limit = Step(12, SMALL), BLOCKS * 128
    bad = [limit, limit + 1, -2, -128, 2**31, 2**32 + 5, -(2**40), 2**62]
    for i, slot in enumerate(bad):
        step.main_slots[i] = step.index_slots[i] = slot
    step.positions[0], step.positions[1], step.positions[2] = -1, MAX_POSITION, 2**40
    outside = step.positions.clone()
    step.share_keys()
    q, index_q, main, index, _ = run(step, op=flydsl_gfx950.run)
    want_main, want_index = step.caches()
    live, h = slice(len(bad), None), step.heads
    v = step.fused[live, h.q + h.kv : h.q + 2 * h.kv]
    want_main.write(q[live, : h.kv], v, step.main_slots[live])
    want_index.write(index_q[live, 0], step.index_slots[live])
    assert torch.equal(whole_rows(main), whole_rows(want_main))
    assert torch.equal(whole_rows(index), whole_rows(want_index))
    step.positions = outside.clamp(0, MAX_POSITION - 1)
    assert torch.equal(run(step, op=flydsl_gfx950.run)[0], q)


@pytest.mark.parametrize("gap", [0, 1, 3, 16, 100])
@pytest.mark.parametrize("main", DTYPES)
def test_any_block_stride_and_base(main, gap):
    check(Step(9, SMALL, main, main, gap=gap))


def test_strided_rows_and_vectors():
    step = Step(9, SMALL)
    wide = torch.full((9, SMALL.qkv_columns + 8), 7.0, dtype=torch.bfloat16)
    wide[:, : SMALL.qkv_columns] = step.qkv
    for name in ("positions", "main_slots", "index_slots"):
        both = torch.stack([getattr(step, name), torch.full((9,), -1)], 1)
        setattr(step, name, both[:, 0])
    step.share_keys()
    want = run(step)
    wide[:, : SMALL.qkv_columns] = step.qkv
    step.qkv = wide[:, : SMALL.qkv_columns]
    got = run(step)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    assert torch.equal(whole_rows(got[2]), whole_rows(want[2]))


def test_no_tokens_launch_nothing():
    step = Step(0, SMALL)
    arguments = step.arguments(*step.caches())
    with emulated(flydsl_gfx950.needs(*arguments)) as reports:
        q, index_q = qkv_insert(*arguments, backend="flydsl")
    assert reports == [] and q.shape == (0, 4, 32) and index_q.shape == (0, 2, 32)


# What is compiled, what is refused, what it costs


def test_builds_are_what_serving_needs():
    config = aot.ServingConfig.of(MINIMAX_M3, 4, "nvfp4", "fp8")
    sparse, dense = flydsl_gfx950.builds(config)
    for heads, build in ((TP4, sparse), (Heads(16, 1, 0, 128, 64), dense)):
        step = Step(3, heads, "nvfp4", "fp8")
        assert flydsl_gfx950.needs(*step.arguments(*step.caches())) == [build]
    only = flydsl_gfx950.builds(dataclasses.replace(config, has_dense_layers=False))
    assert only == [sparse]
    assert flydsl_gfx950.builds(dataclasses.replace(config, head_dim=96)) == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"head_dim": 256}, NotImplementedError, "head_dim on flydsl: expected one of"),
        ({"rotary_dim": 48}, NotImplementedError, "rotary_dim on flydsl"),
        ({"rotary_dim": 128, "head_dim": 64}, NotImplementedError, "rotary_dim on flydsl"),
        ({"q": 0}, ValueError, "q: expected >= 1"),
        ({"index": 0}, ValueError, "index_dtype: expected 'none'"),
        ({"main_dtype": "int4"}, ValueError, "int4"),
        ({"dtype": "fp8"}, ValueError, "dtype: expected one of"),
    ],
)
def test_builds_refuse(change, error, words):
    good = Build(16, 1, 1, 128, 64, "nvfp4", "fp8", "bf16", "bf16", "fp32")
    with pytest.raises(error, match=words):
        dataclasses.replace(good, **change)


def test_calls_without_a_kernel():
    def refused(words, **changes):
        step = Step(4, SMALL)
        for name, change in changes.items():
            setattr(step, name, change(getattr(step, name)))
        with pytest.raises(NotImplementedError, match=words):
            flydsl_gfx950.needs(*step.arguments(*step.caches()))

    refused("qkv on flydsl", qkv=lambda x: x.T.contiguous().T)
    refused("qkv on flydsl", qkv=lambda x: torch.cat([x, x[:, :1]], 1)[:, : x.shape[1]])
    refused("cos_sin on flydsl", cos_sin=lambda x: x.flatten()[1:-15].view(-1, 16))
    half = {"k": random_values(1, 32).half()}
    refused(r"norms\.\*\.dtype on flydsl", norms=lambda n: dataclasses.replace(n, **half))
    every_second = {"k": random_values(1, 64).bfloat16()[::2]}
    refused("norms on flydsl", norms=lambda n: dataclasses.replace(n, **every_second))


def lines(*runs) -> int:
    """128-byte lines that tensors, or (address, bytes) runs, lie in."""
    found = set()
    for run_ in runs:
        first, size = (
            (run_.data_ptr(), run_.numel() * run_.element_size())
            if isinstance(run_, torch.Tensor)
            else run_
        )
        found.update(range(first // 128, (first + size - 1) // 128 + 1))
    return len(found)


def least_bytes(step: Step, main, index, q, index_q) -> int:
    """HBM bytes of one call: every input and output line once."""
    rows = [step.cos_sin[p] for p in step.positions]
    norms = [step.norms.q, step.norms.k, step.norms.index_q, step.norms.index_k]
    read = lines(step.qkv, step.positions, step.main_slots, step.index_slots, *norms, *rows)
    stored = []
    for cache, slots in ((main, step.main_slots), (index, step.index_slots)):
        for name in cache.page.head_layout:
            region = cache.region(name.name)
            for slot in slots.tolist():
                stored += [region[slot // 128, h, slot % 128] for h in range(cache.kv_heads)]
    return 128 * (read + lines(q, index_q, *stored))


def test_bytes_and_instructions():
    """Counted in the emulator, TP 4 geometry: few enough instructions to stay memory-bound."""
    step = Step(256)
    step.main_slots = torch.arange(256) + 128
    step.index_slots = step.main_slots.clone()
    q, index_q, main, index, report = run(step)
    (launch,) = report.launches
    assert launch.hbm_bytes <= 1.05 * least_bytes(step, main, index, q, index_q)
    waves = 64 * 20
    assert launch.pipes["valu"] <= 152 * waves
    assert launch.pipes["vmem"] <= 12 * waves
    times = launch.model_time()
    assert times["bound"] == times["hbm"]


def test_no_spills_no_scratch_no_lds(tmp_path):
    config = aot.ServingConfig.of(MINIMAX_M3, 4)
    aot.compile_builds(flydsl_gfx950.builds(config), tmp_path, processes=1)
    for entry, _ in launcher.check(tmp_path):
        registers = entry.registers
        assert registers["vgpr_spills"] == registers["sgpr_spills"] == 0
        assert registers["scratch_bytes"] == 0 and entry.static_lds == entry.dynamic_lds == 0
        assert registers["vgpr"] <= 64  # eight waves a SIMD
