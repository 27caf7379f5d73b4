"""qkv_insert's FlyDSL kernel in the emulator: the reference's bytes, schedules, counts.

Bytes are compared exactly: each key head is also a query head of the same call, which shows the
value that was encoded; the whole row of every block is compared, the bytes beside the page too.
Queries may differ from the reference's by one unit in the last place of the activation dtype, since
the sum of squares has another order and rsqrt is the hardware's: TOLERANCE, relative; the absolute
part covers a cos - b sin that cancels.
"""

import dataclasses

import pytest
import torch

from gfx950_emu import Schedule
from rocm_msa import aot, launcher
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.ops import Heads, Norms, qkv_insert
from rocm_msa.ops.qkv_insert import flydsl_gfx950
from rocm_msa.ops.qkv_insert.flydsl_gfx950 import Build
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated
from tests.ops.cases import DTYPES, empty_cache, queries, random_values
from tests.ops.test_qkv_insert import MAX_POSITION, norms_of, table_of

TP4, SMALL = Heads(16, 1, 1, 128, 64), Heads(4, 2, 2, 32, 16)
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
RANDOM = Schedule("random", 5, (1, 300))
BLOCKS = 5


class Step:
    """One call over poisoned caches; its key heads are its first query heads as well."""

    def __init__(
        self, tokens=9, heads=TP4, main="nvfp4", index="nvfp4", dtype=torch.bfloat16, gap=32, seed=0
    ):
        self.heads, self.tokens, self.gap = heads, tokens, gap
        self.kinds = {"main": main, "index": index}
        self.qkv = queries(seed + 1, tokens, heads.qkv_columns, dtype=dtype)
        w = norms_of(heads, seed + 50, dtype)
        self.norms = Norms(w.k, w.k, w.index_k, w.index_k)
        self.cos_sin = table_of(heads)
        order = torch.Generator().manual_seed(seed + 2)
        self.positions = torch.randint(0, MAX_POSITION, (tokens,), generator=order)
        self.main_slots = torch.randperm(BLOCKS * 128, generator=order)[:tokens]
        self.index_slots = torch.randperm(BLOCKS * 128, generator=order)[:tokens]
        self.scales = {}

    @property
    def fused(self) -> torch.Tensor:
        """View of qkv, [tokens, heads of the projection, head_dim]."""
        return self.qkv.view(self.tokens, -1, self.heads.head_dim)

    def share_keys(self) -> None:
        h, x = self.heads, self.fused
        x[:, : h.kv] = x[:, h.q : h.q + h.kv].clone()
        if h.index:
            x[:, h.q + 2 * h.kv] = x[:, -1].clone()

    def caches(self):
        h = self.heads
        main = empty_cache(MainCache, BLOCKS, self.kinds["main"], h.kv, h.head_dim, self.gap)
        main.scales.update({k: v for k, v in self.scales.items() if k in main.scales})
        if not h.index:
            return main, None
        index = empty_cache(IndexCache, BLOCKS, self.kinds["index"], 1, h.head_dim, self.gap)
        index.scales["k"] = self.scales.get("index", 1.0)
        return main, index

    def arguments(self, main, index) -> tuple:
        has = self.heads.index > 0
        norms = self.norms if has else dataclasses.replace(self.norms, index_q=None, index_k=None)
        return (
            self.qkv, norms, self.cos_sin, self.positions, main, index if has else None,
            self.main_slots, self.index_slots if has else None, self.heads,
        )  # fmt: skip


def whole_rows(cache) -> torch.Tensor:
    """The cache's memory, the gaps beside its pages included."""
    storage = cache.pages.untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def run(step: Step, schedule: Schedule = RANDOM, op=qkv_insert):
    """(q, index_q, main, index, report) of the kernel."""
    main, index = step.caches()
    arguments = step.arguments(main, index)
    options = {"backend": "flydsl"} if op is qkv_insert else {}
    with emulated(flydsl_gfx950.needs(*arguments), schedule=schedule) as reports:
        q, index_q = op(*arguments, **options)
    assert_clean(reports, launches=1)
    return q, index_q, main, index, reports[0]


def check(step: Step, schedule: Schedule = RANDOM, op=qkv_insert, live=slice(None)):
    """Run, compare queries with the reference and bytes with the encoding; gives the report.

    live: the tokens that are written."""
    step.share_keys()
    h = step.heads
    q, index_q, main, index, report = run(step, schedule, op)
    want_main, want_index = step.caches()
    v = step.fused[live, h.q + h.kv : h.q + 2 * h.kv]
    want_main.write(q[live, : h.kv], v, step.main_slots[live])
    assert torch.equal(whole_rows(main), whole_rows(want_main))
    if h.index:
        want_index.write(index_q[live, 0], step.index_slots[live])
        assert torch.equal(whole_rows(index), whole_rows(want_index))
    want = qkv_insert(*step.arguments(*step.caches()), backend="reference")
    tolerance = TOLERANCE[step.qkv.dtype]
    for got, reference in zip((q, index_q), want, strict=True):
        if got is not None:
            close = {"rtol": tolerance, "atol": max(tolerance * 1e-2, 1e-6), "equal_nan": True}
            torch.testing.assert_close(got, reference, **close)
    return report


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


# Edge values


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
