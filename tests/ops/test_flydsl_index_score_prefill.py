"""index_score_prefill as its gfx950 code objects in the emulator; rounding as in decode's test."""

from __future__ import annotations

import pytest
import torch

from rocm_msa.ops import index_score_prefill
from rocm_msa.ops.index_score_prefill import flydsl_gfx950 as module
from rocm_msa.ops.index_score_prefill.flydsl_gfx950 import Build
from rocm_msa.selfcheck.rounded import table_rounded
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated, resources, useful
from tests.ops.cases import DTYPES, Batch, guarded, guards_intact, int32, make_batch, queries

TOLERANCE = 128 * 2.0**-23  # of the largest score that the vectors allow: the order of additions
DIM, BLOCK = 128, 128


def batch(lens, dtype="nvfp4", **options) -> Batch:
    return make_batch(lens, index_dtype=dtype, dtype="bf16", head_dim=DIM, kv_heads=1, **options)


def score(q, b: Batch, counts: list[int], schedule=None, **options):
    """(scores of the compiled kernel, report); no finding. counts: new tokens a request."""
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    args = (q, b.index, b.table, cu, b.seq_lens)
    with emulated(module.needs(*args), schedule=schedule) as reports:
        got = index_score_prefill(*args, backend="flydsl", **options)
    assert_clean(reports, launches=1)
    return got, reports[0]


def check(q, b: Batch, counts: list[int], **options):
    got, report = score(q, b, counts, **options)
    cache = table_rounded(b.index) if b.index.dtype.value == "nvfp4" else b.index
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    want = index_score_prefill(q, cache, b.table, cu, b.seq_lens, backend="reference")
    assert torch.equal(got.isinf(), want.isinf())
    largest = max((k.norm(dim=-1).max() for k in b.index_keys if len(k)), default=0.0)
    limit = TOLERANCE * largest * q.float().norm(dim=-1).max().item()
    difference = (got - want)[want.isfinite()].abs()
    assert difference.numel() == 0 or difference.max() <= limit, difference.max()
    return got, report


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_schedule(schedule):
    check(queries(1, 20, 4, DIM), batch([200, 3]), [16, 3], schedule=schedule)  # one is padding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_ragged_requests(dtype, heads):
    counts = [1, 0, 70, 129, 17, 64]
    b = batch([300, 128, 70, 260, 17, 513], dtype, gap=48)
    check(queries(heads, sum(counts) + 5, heads, DIM), b, counts)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_whole_prompts(length):
    check(queries(2, length, 1, DIM), batch([length]), [length])


def test_many_requests_and_fp16_queries():
    lens = [1 + (29 * i) % 150 for i in range(40)]
    counts = [min(n, 1 + i % 5) for i, n in enumerate(lens)]
    check(queries(3, sum(counts), 2, DIM, dtype=torch.float16), batch(lens), counts)


def test_chunks_give_the_bits_of_the_whole():
    b, q = batch([400]), queries(4, 300, 2, DIM)
    whole, _ = score(q, b, [300])
    b.lens[0] = 250
    first, _ = score(q[:150], b, [150])
    assert torch.equal(first[..., :2], whole[:, :150, :2])


def test_out_strides_and_padding_alone():
    b = batch([100])
    q = queries(5, 8, 2, 2 * DIM)[..., :DIM]
    buffer, out = guarded([2, 8, b.table.shape[1]], torch.float32)
    got, _ = score(q, b, [0], out=out)
    assert got.data_ptr() == out.data_ptr() and guards_intact(buffer) and got.isneginf().all()


def test_nothing_to_score():
    b = batch([5])
    with emulated([Build("nvfp4", "bf16")]) as reports:
        args = (queries(1, 0, 4, DIM), b.index, b.table, int32([0, 0]), b.seq_lens)
        got = index_score_prefill(*args, backend="flydsl")
    assert not reports and got.shape == (4, 0, b.table.shape[1])


def test_what_has_no_build_is_refused():
    b = batch([5])
    for q, message in (
        (queries(1, 2, 65, DIM), "heads on flydsl.*<= 64.*65"),
        (queries(1, 2, 1, DIM, dtype=torch.float32), r"index_q\.dtype on flydsl.*float32"),
    ):
        with emulated([]), pytest.raises(NotImplementedError, match=message):
            index_score_prefill(q, b.index, b.table, int32([0, 2]), b.seq_lens, backend="flydsl")


def test_resources_and_counts():
    """64 columns: each key is dequantised once for them; products fill the rest of the time."""
    used = resources(Build("nvfp4", "bf16"))
    assert used["scratch_bytes"] == used["vgpr_spills"] == used["sgpr_spills"] == used["agpr"] == 0
    q = queries(6, 64, 1, DIM)
    reports = [score(q, batch([n * BLOCK + 64]), [64])[1] for n in (4, 8)]
    products = [useful(r, "v_mfma") for r in reports]
    assert products[1] - products[0] == 4 * 8 * 4 * 2  # blocks, token tiles, column tiles, terms
    tables = [useful(r, "v_perm_b32") for r in reports]
    assert tables[1] - tables[0] == 4 * 8 * 8
