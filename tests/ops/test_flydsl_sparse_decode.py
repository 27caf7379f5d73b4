"""sparse_decode as its gfx950 code objects, in the emulator; tolerances: flydsl_decode.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_msa.aot import ServingConfig
from rocm_msa.cache import CacheDType, MainCache
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
from tests.ops.flydsl_decode import DIM, Call, assert_close, check, full, make_call
from tests.ops.test_sparse_decode import random_ids

SLOW = pytest.mark.slow
MODES = pytest.mark.parametrize("mode", [1, 4, "shared"])
"""Parts of the dims that a workgroup has, or a page at a time for all rows: see Call.run."""


# Every schedule


def small(dtype: str) -> Call:
    """Two requests that share a page, tails, a padded request, ids beyond the end, poison."""
    call = make_call([300, 260, 0], 2, dtype=dtype, kv_heads=2, gap=64)
    call.table[1, 0] = call.table[0, 0]
    call.ids[0, 0, 15], call.ids[1, 3, 14] = 77, 3
    return call


@pytest.mark.parametrize("mode", ["rows", "shared"])
@pytest.mark.parametrize(
    ("dtype", "schedules"),
    [
        ("nvfp4", SCHEDULES),
        *((dtype, SCHEDULES[::6]) for dtype in DTYPES[1:]),
        *(pytest.param(dtype, SCHEDULES, marks=SLOW) for dtype in DTYPES[1:]),
    ],
)
def test_schedules(dtype, schedules, mode):
    assert len(SCHEDULES) >= 20
    call = small(dtype)
    want = call.reference()
    parts = module.parts_of(CacheDType(dtype))
    first = None
    for number, schedule in enumerate(schedules):
        result, _ = call.run("shared" if mode == "shared" else parts[number % len(parts)], schedule)
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
    check(make_call([200, 129], 1, kv_heads=kv_heads, group=group, dtype=dtype, gap=32))


@MODES
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_requests(requests, mode):
    lens = [(37 * i + 1) % 300 for i in range(requests)]
    check(make_call(lens, kv_heads=1, seed=requests), mode)


@MODES
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2048, 2049])
def test_lengths(n, mode):
    check(make_call([n], kv_heads=1), mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [1, 31, 64, 127])
def test_poisoned_tails(tail, dtype):
    """The tail of the newest page holds NaN patterns, as do free pages."""
    call = make_call([128 + tail, tail], 1, kv_heads=1, dtype=dtype)
    for mode in (2, "shared"):
        check(call, mode)


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
    for mode in (2, "shared"):
        check(call, mode)


# What contributes nothing


@MODES
def test_ids_and_entries_that_name_nothing(mode):
    call = make_call([600, 600], 1, kv_heads=2)
    clean = call.run(mode)[0]
    nb = 5
    far = [2**30, 2**31 - 1, 2**24, 2**25, -(2**31)]
    call.ids[:, :, nb:] = int32([-1, -7, nb, nb + 1, 8, 10, *far])
    got = call.run(mode)[0]
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])
    # Entries that name no page count as nothing.
    call.table[0, 1], call.table[0, 2], call.table[1, 0] = -1, call.cache.num_blocks, 2**31 - 1
    check(call, mode)


@MODES
def test_rows_without_keys(mode):
    call = make_call([0, 200, 1], 2, kv_heads=1)
    call.ids[0, 3] = -1
    (out, lse), _ = check(call, mode)
    for row in (0, 1, 3, 4):
        assert not out[row].any() and (lse[row] == -torch.inf).all()
    for row in (2, 5):
        assert out[row].any()


def test_one_page_under_two_blocks_of_a_row():
    call = make_call([512, 512], 1, kv_heads=1)
    call.table[0, 1], call.table[1, 2] = call.table[0, 0], call.table[0, 0]
    call.table[1, 3] = call.table[0, 0]
    for mode in (2, "shared"):
        check(call, mode)


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


@pytest.mark.parametrize("dtype", ["nvfp4", *(pytest.param(d, marks=SLOW) for d in DTYPES[1:])])
def test_bits_do_not_depend_on_the_batch(dtype):
    """Alone or not, shared or not, dims together or in parts: the same bits."""
    call = make_call([700, 650, 130], 3, kv_heads=2, dtype=dtype)
    call.table[1, :3] = call.table[0, :3]  # a common prefix
    modes = (*module.parts_of(CacheDType(dtype)), "shared")
    (out, lse), _ = call.run(modes[0])
    for mode in modes[1:]:
        (other, other_lse), _ = call.run(mode)
        assert torch.equal(out, other) and torch.equal(lse, other_lse)
    for row in range(call.q.shape[0]):
        for mode in modes:
            (alone, alone_lse), _ = call.row(row).run(mode)
            assert torch.equal(alone[0], out[row]) and torch.equal(alone_lse[0], lse[row]), row


def test_the_cut_follows_the_grid():
    select = module.select_parts
    assert [select(CacheDType.NVFP4, rows, 1, 256) for rows in (1, 64, 65, 128, 129)] == [
        4,
        4,
        2,
        2,
        1,
    ]
    assert [select(CacheDType.BF16, rows, 2, 256) for rows in (32, 33, 500)] == [4, 2, 2]


# Interface


def test_builds_of_a_configuration():
    config = ServingConfig(16, 1, 1, 128, 64, CacheDType.NVFP4, CacheDType.NVFP4)
    got = module.builds(config)
    call = full(1, 1)
    needed = {*module.needs(*call.arguments, shared_pages=True)}
    needed |= {b for parts in module.PARTS for b in module.needs(*call.arguments, parts=parts)}
    assert set(got) == needed and len({b.symbol for b in got}) == len(got)
    assert not module.builds(replace(config, dtype="fp32"))
    assert not module.builds(replace(config, head_dim=64))
    assert not module.builds(replace(config, q_heads=32))


@pytest.mark.parametrize(
    ("field", "value"),
    [("parts", 3), ("dtype", "int8"), ("dtype", "bf16"), ("q_dtype", "fp32"), ("topk", 32)],
)
def test_builds_that_do_not_exist(field, value):
    good = {"dtype": "fp8", "q_dtype": "bf16", "topk": 16, "parts": 1}
    module.Build(**good)
    with pytest.raises(ValueError, match="parts" if value == "bf16" else field):
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


@pytest.mark.parametrize("shared", [False, True])
def test_through_the_op(shared):
    call = make_call([300, 20], 1, kv_heads=1)
    builds = module.needs(*call.arguments, shared_pages=shared)
    with emulated(builds) as reports:
        out, lse = sparse_decode(
            *call.arguments, backend="flydsl", return_lse=True, shared_pages=shared
        )
    assert_clean(reports, launches=5 if shared else 1)
    assert_close((out, lse), call.reference())


def test_nothing_to_do():
    call = make_call([300], 1, kv_heads=1)
    for shared in (False, True):
        with emulated([]) as reports:
            none = sparse_decode(
                call.q[:0], call.cache, call.ids[:, :0], call.table[:0], call.lens[:0], 1, 1.0,
                backend="flydsl", shared_pages=shared,
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
    kept = batch.main.decode("v", *batch.main.encode("v", values)).double()
    exact, _ = oracle.attention(call.q, [kept], [kept], [(0, 256)], call.ids.tolist(), 1e-4)
    folded, plain = call.reference(-3)[0], call.reference(0)[0]
    assert (folded - exact).norm() < 0.5 * (plain - exact).norm()
