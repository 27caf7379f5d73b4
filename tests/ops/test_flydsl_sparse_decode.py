"""sparse_decode as its gfx950 code objects, in the emulator.

Against the reference with the same roundings (reference_fp8.py): what is left is the order of the
fp32 sums, v_exp_f32, p on the edge of a rounding (a step of 2^-8 of p), and the rounding of the
result to q's dtype: half a unit of that dtype, and TOLERANCE of the largest value for the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from gfx950_emu import Checks, CodeObject
from rocm_msa.aot import ServingConfig, compile_builds
from rocm_msa.cache import CacheDType, MainCache
from rocm_msa.kernel_manifest import read
from rocm_msa.ops import sparse_decode
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as module
from rocm_msa.ops.sparse_decode import reference_fp8
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated
from tests.ops import oracle
from tests.ops.cases import (
    DTYPES,
    guarded,
    guards_intact,
    int32,
    make_batch,
    queries,
    random_values,
)
from tests.ops.test_sparse_decode import random_ids

DIM = 128
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TOLERANCE = 2.0**-11
SLOW = pytest.mark.slow
MODES = pytest.mark.parametrize("stored", [False, True], ids=["rows", "pages"])


@dataclass
class Call:
    """Arguments of sparse_decode."""

    q: torch.Tensor
    cache: MainCache
    ids: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    rows_per_request: int = 1
    scale: float = DIM**-0.5

    @property
    def arguments(self) -> tuple:
        return (
            self.q, self.cache, self.ids, self.table, self.lens, self.rows_per_request, self.scale
        )  # fmt: skip

    def builds(self) -> list[module.Build]:
        return list(module.needs(*self.arguments))

    def run(self, stored=None, schedule=None, checks=Checks.ALL, **options):
        """((out, lse), reports of the three launches); no finding."""
        with emulated(self.builds(), schedule=schedule, checks=checks) as reports:
            result = module.run(*self.arguments, all_stored=stored, **options)
        assert_clean(reports, launches=3)
        return result, [report.launches[0] for report in reports]

    def reference(self, fold: int = 0):
        return reference_fp8.run(*self.arguments, fold=fold)

    def row(self, row: int) -> Call:
        """One row alone, as a request of one row."""
        request, step = divmod(row, self.rows_per_request)
        n = max(0, int(self.lens[request]) - self.rows_per_request + step + 1)
        return replace(
            self,
            q=self.q[row : row + 1],
            ids=self.ids[:, row : row + 1],
            table=self.table[request : request + 1],
            lens=int32([n]),
            rows_per_request=1,
        )


def make_call(lens, rows_per_request=1, *, group=16, topk=16, q_dtype=torch.bfloat16, **options):
    """A batch of random values in shuffled pages, with random lists."""
    batch = make_batch(lens, head_dim=DIM, **options)
    seed = options.get("seed", 0)
    rows = len(lens) * rows_per_request
    ids, _ = random_ids(batch, rows_per_request, topk, seed)
    q = queries(seed + 3, rows, batch.main.kv_heads * group, DIM, dtype=q_dtype)
    return Call(q, batch.main, ids, batch.table, batch.seq_lens, rows_per_request)


def assert_close(got, want) -> None:
    out, lse = got
    wanted, wanted_lse = want
    assert not out.isnan().any() and not lse.isnan().any()
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    limit = HALF_UNIT[out.dtype] * wanted.abs() + TOLERANCE * wanted.abs().max()
    worst = ((out.float() - wanted).abs() - limit).max()
    assert worst <= 0, f"{worst} above the tolerance"
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)


def check(call: Call, stored=None, fold: int = 0, **options):
    result, reports = call.run(stored, fold=fold, **options)
    assert_close(result, call.reference(fold))
    return result, reports


# Every schedule


def small(dtype: str) -> Call:
    """Two requests that share a page, tails, a padded request, ids beyond the end, poison."""
    call = make_call([300, 260, 0], 2, dtype=dtype, kv_heads=2, gap=64)
    call.table[1, 0] = call.table[0, 0]
    call.ids[0, 0, 15], call.ids[1, 3, 14] = 77, 3
    return call


@pytest.mark.parametrize(
    ("dtype", "schedules"),
    [
        ("nvfp4", SCHEDULES),
        *((dtype, SCHEDULES[::6]) for dtype in DTYPES[1:]),
        *(pytest.param(dtype, SCHEDULES, marks=SLOW) for dtype in DTYPES[1:]),
    ],
)
def test_schedules(dtype, schedules):
    assert len(SCHEDULES) >= 20
    call = small(dtype)
    want = call.reference()
    first = None
    for number, schedule in enumerate(schedules):
        result, _ = call.run(bool(number % 2), schedule)
        assert_close(result, want)
        first = first or result
        assert torch.equal(result[0], first[0]) and torch.equal(result[1], first[1]), schedule


# Shapes


@pytest.mark.parametrize("rows", range(1, 10))
def test_one_to_nine_rows_a_request(rows):
    check(make_call([150, rows, 0, 385], rows, kv_heads=1, seed=rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 16), (2, 8), (3, 5), (4, 1)])
def test_heads(dtype, kv_heads, group):
    check(make_call([200, 129], 1, kv_heads=kv_heads, group=group, dtype=dtype, gap=32), False)


@MODES
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_requests(requests, stored):
    lens = [(37 * i + 1) % 300 for i in range(requests)]
    check(make_call(lens, kv_heads=1, seed=requests), stored)


@MODES
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2048, 2049])
def test_lengths(n, stored):
    check(make_call([n], kv_heads=1), stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [1, 31, 64, 127])
def test_poisoned_tails(tail, dtype):
    """The tail of the newest page holds NaN patterns, as do free pages."""
    call = make_call([128 + tail, tail], 1, kv_heads=1, dtype=dtype)
    for stored in (False, True):
        check(call, stored)


@pytest.mark.parametrize("topk", [9, *(pytest.param(k, marks=SLOW) for k in (1, 3, 8, 31))])
def test_other_list_lengths(topk):
    check(make_call([1500, 900], kv_heads=1, topk=topk, seed=topk))


@pytest.mark.parametrize("dtype", ["nvfp4", *(pytest.param(d, marks=SLOW) for d in DTYPES[1:])])
def test_fp16_queries_and_results(dtype):
    check(make_call([300, 40], 2, kv_heads=1, dtype=dtype, q_dtype=torch.float16))


def test_contexts_up_to_8192_blocks():
    """A table of 8192 blocks of which a few have pages: the others are never dereferenced."""
    blocks, pages = 8192, 20
    batch = make_batch([128 * pages], head_dim=DIM, kv_heads=1)
    for last in (blocks - 1, 5000, 999):
        ids = torch.full((1, 3, 16), -1, dtype=torch.int32)
        table = torch.full((1, blocks), 2**31 - 1, dtype=torch.int32)
        chosen = torch.randperm(last, generator=torch.Generator().manual_seed(last))[:15].tolist()
        for row in range(3):
            ids[0, row] = int32([*chosen[row:], last, *chosen[:row]])
        table[0, int32([*chosen, last]).long()] = batch.table[0, :16]
        lens = int32([128 * last + 77])
        q = queries(last, 3, 16, DIM)
        check(Call(q, batch.main, ids, table, lens, 3))


def test_offsets_beyond_32_bits():
    """Pages far apart: the stride is the launch's, only touched memory exists."""
    stride = 2**31 + 4096
    batch = make_batch([384], head_dim=DIM, kv_heads=1)
    memory = torch.empty(2 * stride + batch.main.page.page_bytes, dtype=torch.uint8)
    rows = memory.as_strided((3, batch.main.page.page_bytes), (stride, 1))
    rows.copy_(batch.main.pages[batch.table[0, :3].long()])
    cache = MainCache.from_tensor(rows, 1, "nvfp4", head_dim=DIM)
    q = queries(1, 1, 16, DIM)
    ids = int32([[[2, 0, 1, *[-1] * 13]]])
    call = Call(q, cache, ids, int32([[0, 1, 2]]), int32([384]))
    for stored in (False, True):
        check(call, stored)


# What contributes nothing


@MODES
def test_ids_and_entries_that_name_nothing(stored):
    call = make_call([600, 600], 1, kv_heads=2)
    clean = call.run(stored)[0]
    nb = 5
    far = [2**30, 2**31 - 1, 2**24, 2**25, -(2**31)]
    call.ids[:, :, nb:] = int32([-1, -7, nb, nb + 1, 8, 10, *far])
    got = call.run(stored)[0]
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])
    # Entries that name no page count as nothing.
    call.table[0, 1], call.table[0, 2], call.table[1, 0] = -1, call.cache.num_blocks, 2**31 - 1
    check(call, stored)


@MODES
def test_rows_without_keys(stored):
    call = make_call([0, 200, 1], 2, kv_heads=1)
    call.ids[0, 3] = -1
    (out, lse), _ = check(call, stored)
    for row in (0, 1, 3, 4):
        assert not out[row].any() and (lse[row] == -torch.inf).all()
    for row in (2, 5):
        assert out[row].any()


def test_one_page_under_two_blocks_of_a_row():
    call = make_call([512, 512], 1, kv_heads=1)
    call.table[0, 1], call.table[1, 2] = call.table[0, 0], call.table[0, 0]
    call.table[1, 3] = call.table[0, 0]
    for stored in (False, True):
        check(call, stored)


def test_extreme_queries_and_scales():
    call = make_call([300, 300, 300, 300], 1, kv_heads=1)
    call.q[0], call.q[1], call.q[2] = 0, 1e-30, call.q[2] * 1e20
    call.q[3, :, 1:] *= 1e-3
    check(call)
    call.scale = -0.3
    call.q[2] = 3
    check(call)


@pytest.mark.parametrize("fold", [0, -3])
def test_folded_table_with_a_calibrated_scale(fold):
    call = make_call([700, 130], 1, kv_heads=1)
    pages = call.cache.pages
    cache = MainCache.from_tensor(pages, 1, "nvfp4", head_dim=DIM, k_scale=0.03, v_scale=0.7)
    check(replace(call, cache=cache, scale=3.0), fold=fold)


def test_strided_arguments():
    call = make_call([300, 140], 2, kv_heads=2)
    rows = call.q.shape[0]
    wide = torch.zeros(rows, 40, 136, dtype=torch.bfloat16)
    wide[:, 3:35, :DIM] = call.q
    call.q = wide[:, 3:35, :DIM]
    call.ids = torch.stack([call.ids, call.ids + 900], dim=-1)[..., 0]
    call.table = torch.stack([call.table, call.table - 7], dim=-1)[..., 0]
    call.lens = torch.stack([call.lens, call.lens * 0], dim=-1)[..., 0]
    buffer, out = guarded([rows, 36, DIM], torch.bfloat16)
    check(call, out=out[:, 2:34])
    assert guards_intact(buffer) and (out[:, :2] == 77.5).all() and (out[:, 34:] == 77.5).all()


# One row, any batch


def test_bits_do_not_depend_on_the_batch():
    """Alone or not, shared or not, in registers or through memory: the same bits."""
    call = make_call([700, 650, 130], 3, kv_heads=2)
    call.table[1, :3] = call.table[0, :3]  # a common prefix
    (out, lse), _ = call.run(False)
    (other, other_lse), _ = call.run(True)
    assert torch.equal(out, other) and torch.equal(lse, other_lse)
    for row in range(call.q.shape[0]):
        for stored in (False, True):
            (alone, alone_lse), _ = call.row(row).run(stored)
            assert torch.equal(alone[0], out[row]) and torch.equal(alone_lse[0], lse[row]), row


# Counts


def dequantised_chunks(report) -> float:
    """Runs of 32 values a lane that went through the table, a lane of a wave."""
    return report.instructions.get("v_perm_b32", 0) / 8


def full(requests: int, rows: int, **options) -> Call:
    """Requests of 16 full blocks, all of them selected."""
    return make_call([2048] * requests, rows, kv_heads=1, **options)


def minimum_bytes(call: Call) -> int:
    """Every byte that a call must touch once: pages, q, out, lse, lists, tables, lengths."""
    pages = call.table[call.table >= 0].unique().numel()
    rows, heads, dim = call.q.shape
    small = call.ids.numel() + call.table.numel() + call.lens.numel() + rows * heads
    return pages * call.cache.page.page_bytes + 4 * rows * heads * dim + 4 * small


PAGE_CHUNKS = 2 * 128 * DIM // 32 // 64
"""Runs of 32 values, K and V, of a page and head: wave-instructions."""


def test_own_pages_hbm_bytes_and_valu_counts():
    call = full(16, 1)
    _, reports = call.run(False, checks=Checks.NONE)
    assert sum(r.hbm_bytes for r in reports) <= 1.05 * minimum_bytes(call)
    rows = reports[2]
    chunks = dequantised_chunks(rows)
    assert chunks == 16 * 16 * PAGE_CHUNKS
    # All and, shift, permute and bit-operation instructions of the kernel, whatever they are for.
    kinds = ("v_perm_b32", "v_bitop3_b32", "v_and_b32", "v_lshlrev_b32", "v_lshrrev_b32",
             "v_bfe_u32", "v_lshl_or_b32", "v_and_or_b32", "v_or_b32")  # fmt: skip
    assert sum(rows.instructions.get(kind, 0) for kind in kinds) <= 36 * chunks
    assert rows.instructions["v_mfma_f32_16x16x128_f8f6f4"] == 16 * 16 * (8 * 2 + 9 * 2)
    assert rows.counters["lds_conflict_cycles"] == 0
    # Nothing of it is done twice by `pages`.
    assert dequantised_chunks(reports[1]) == 0


@pytest.mark.parametrize(("requests", "rows"), [(64, 1), (3, 8)])
def test_a_shared_page_is_read_and_dequantised_once(requests, rows):
    call = make_call([256] * requests, rows, kv_heads=1)
    call.table[:, :2] = call.table[0, :2]
    call.ids = torch.full_like(call.ids, -1)
    call.ids[..., 3], call.ids[..., 5] = 1, 0
    _, (_, pages, by_rows) = check(call, checks=Checks.NONE)
    assert dequantised_chunks(pages) == 2 * PAGE_CHUNKS and dequantised_chunks(by_rows) == 0
    assert pages.instructions["global_load_dwordx4"] < 2 * 8 * 4 + 2 * requests * rows * 5
    users = 2 * requests * rows
    assert pages.instructions["v_mfma_f32_16x16x128_f8f6f4"] == users * (8 * 2 + 9 * 2)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(manifest entries by kernel, instructions of each) of the NVFP4 kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    builds = module.kernel_builds(CacheDType.NVFP4, "bf16", 16)
    compile_builds(builds, folder, processes=1)
    entries = {b.kernel: read(folder).kernels[b.symbol] for b in builds}
    code = {k: CodeObject.from_file(folder / e.file) for k, e in entries.items()}
    return entries, {k: code[k].kernels[e.symbol].instructions for k, e in entries.items()}


def test_registers_and_lds(compiled):
    """No spills, no scratch; two waves a SIMD, or more where LDS has room for more workgroups."""
    entries, _ = compiled
    for kernel, entry in entries.items():
        r = entry.registers
        assert not r["vgpr_spills"] and not r["sgpr_spills"] and not r["scratch_bytes"], kernel
        assert r["vgpr"] + r["agpr"] <= 256 and entry.static_lds <= 160 * 1024, kernel


def test_a_page_is_in_flight_as_a_whole(compiled):
    """`rows` issues the loads of K, V and scales of 128 tokens before it waits for the first."""
    most, outstanding = 0, 0
    for instruction in compiled[1]["rows"]:
        if "global_load" in instruction.text:
            outstanding += 1
        elif match := re.search(r"vmcnt\((\d+)\)", instruction.text):
            outstanding = min(outstanding, int(match[1]))
        elif "branch" in instruction.text:
            outstanding = 0
        most = max(most, outstanding)
    assert most >= 4 * 8


def test_rows_of_a_request_share_its_pages():
    call = full(4, 4)
    _, (_, pages, by_rows) = check(call, checks=Checks.NONE)
    assert dequantised_chunks(pages) == 4 * 16 * PAGE_CHUNKS
    assert dequantised_chunks(by_rows) == 0


# Interface


def test_builds_of_a_configuration():
    config = ServingConfig(16, 1, 1, 128, 64, CacheDType.NVFP4, CacheDType.NVFP4)
    got = module.builds(config)
    assert [b.kernel for b in got] == ["prepare", "pages", "rows"]
    assert got == list(module.needs(*full(1, 1).arguments))
    assert len({b.symbol for b in got}) == 3
    assert not module.builds(replace(config, dtype="fp32"))
    assert not module.builds(replace(config, head_dim=64))
    assert not module.builds(replace(config, q_heads=32))


@pytest.mark.parametrize(
    ("field", "value"),
    [("kernel", "x"), ("dtype", "int8"), ("q_dtype", "fp32"), ("topk", 32)],
)
def test_builds_that_do_not_exist(field, value):
    good = {"kernel": "rows", "dtype": "fp8", "q_dtype": "bf16", "topk": 16}
    module.Build(**good)
    with pytest.raises(ValueError, match=field):
        module.Build(**{**good, field: value})


def test_refusals_name_the_argument():
    call = full(1, 1)

    def refused(match, **changes):
        with pytest.raises(NotImplementedError, match=match):
            module.needs(*replace(call, **changes).arguments)

    refused("q.dtype", q=call.q.float())
    refused("query heads", q=queries(0, 1, 32, DIM))
    refused("topk", ids=call.ids.repeat(1, 1, 2))
    refused("16-byte aligned", q=torch.zeros(1, 16, 132, dtype=torch.bfloat16)[..., 3:131])
    small = make_batch([40], head_dim=32, kv_heads=1)
    refused("head_dim", q=queries(0, 1, 16, 32), cache=small.main)
    rows = torch.zeros(3, call.cache.page.page_bytes + 8, dtype=torch.uint8)
    odd = MainCache.from_tensor(rows[:, : call.cache.page.page_bytes], 1, "nvfp4")
    refused("block_stride", cache=odd)


def test_through_the_op():
    call = make_call([300, 20], 1, kv_heads=1)
    with emulated(call.builds()) as reports:
        out, lse = sparse_decode(*call.arguments, backend="flydsl", return_lse=True)
    assert_clean(reports, launches=3)
    assert_close((out, lse), call.reference())


def test_nothing_to_do():
    call = make_call([300], 1, kv_heads=1)
    with emulated(call.builds()) as reports:
        none = sparse_decode(
            call.q[:0], call.cache, call.ids[:, :0], call.table[:0], call.lens[:0], 1, 1.0,
            backend="flydsl",
        )  # fmt: skip
    assert none.shape == (0, 16, DIM) and not reports


# The distance to attention without the roundings


def test_distance_to_the_unrounded_attention():
    """FP8 pages: two-term q and p leave bf16's precision. NVFP4 pages: the table's rounding."""
    for dtype, limit in (("fp8", 2e-3), ("bf16", 4e-3), ("nvfp4", 4e-2)):
        batch = make_batch([2048], dtype=dtype, head_dim=DIM, kv_heads=1)
        ids, rows = random_ids(batch, 1)
        q = queries(5, 1, 16, DIM)
        out, _ = reference_fp8.run(q, batch.main, ids, batch.table, batch.seq_lens, 1, DIM**-0.5)
        want, _ = oracle.attention(q, batch.keys, batch.values, rows, ids.tolist(), DIM**-0.5)
        error = (out - want).norm() / want.norm()
        assert error < limit, (dtype, float(error))


def test_realistic_magnitudes_need_the_fold():
    """Values of a calibrated cache: block scales up to 448 saturate an unfolded table."""
    batch = make_batch([256], head_dim=DIM, kv_heads=1)
    values = random_values(3, 256, 1, DIM) * 500.0
    slots = batch.slots(0)
    batch.main.write(values, values, slots)
    call = Call(queries(1, 1, 16, DIM), batch.main, int32([[[0, 1, *[-1] * 14]]]), batch.table,
                batch.seq_lens, 1, 1e-4)  # fmt: skip
    check(call, fold=-3)
    stored = batch.main.decode("v", *batch.main.encode("v", values)).double()
    exact, _ = oracle.attention(call.q, [stored], [stored], [(0, 256)], call.ids.tolist(), 1e-4)
    folded, plain = call.reference(-3)[0], call.reference(0)[0]
    assert (folded - exact).norm() < 0.5 * (plain - exact).norm()
