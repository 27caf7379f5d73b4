"""index_score_decode as its gfx950 code objects, in the emulator.

NVFP4 keys enter as the table rounds them, so their reference is the same op on an FP8 cache that
holds the table's bytes; FP8 and bf16 keys enter as they are, and the query exactly. What is left is
the order of 128 fp32 additions: TOLERANCE of the largest score that the vectors allow.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from rocm_msa.cache import IndexCache
from rocm_msa.ops import index_score_decode
from rocm_msa.ops.index_score_decode import flydsl_gfx950 as module
from rocm_msa.ops.index_score_decode.flydsl_gfx950 import Build
from rocm_msa.selfcheck.rounded import table_rounded
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated, resources, useful
from tests.ops.cases import DTYPES, Batch, guarded, guards_intact, make_batch, queries

TOLERANCE = 128 * 2.0**-23
DIM, BLOCK = 128, 128
DEQUANTISE = ("v_and_", "v_perm_", "v_bitop3_", "v_lshlrev_", "v_lshrrev_")


def batch(lens, dtype="nvfp4", **options) -> Batch:
    return make_batch(lens, index_dtype=dtype, dtype="bf16", head_dim=DIM, kv_heads=1, **options)


def expected(q, b: Batch, rows: int) -> torch.Tensor:
    cache = table_rounded(b.index) if b.index.dtype.value == "nvfp4" else b.index
    return index_score_decode(q, cache, b.table, b.seq_lens, rows, backend="reference")


def score(q, b: Batch, rows: int, schedule=None, **options):
    """(scores of the compiled kernel, report); no finding."""
    builds = module.needs(q, b.index, b.table, b.seq_lens, rows)
    with emulated(builds, schedule=schedule) as reports:
        got = index_score_decode(q, b.index, b.table, b.seq_lens, rows, backend="flydsl", **options)
    assert_clean(reports, launches=1)
    return got, reports[0]


def check(q, b: Batch, rows: int, **options):
    got, report = score(q, b, rows, **options)
    want = expected(q, b, rows)
    assert torch.equal(got.isinf(), want.isinf())
    largest = max((k.norm(dim=-1).max() for k in b.index_keys if len(k)), default=0.0)
    limit = TOLERANCE * largest * q.float().norm(dim=-1).max().item()
    live = want.isfinite()
    difference = (got - want)[live].abs()
    assert difference.numel() == 0 or difference.max() <= limit, difference.max()
    return got, report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_schedule(dtype, schedule):
    b = batch([300, 1, 0], dtype)
    check(queries(3, 12, 2, DIM), b, 4, schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_rows_and_heads(dtype, heads, rows):
    b = batch([9, 257, 128, 511], dtype, gap=48, seed=rows)
    check(queries(rows, 4 * rows, heads, DIM), b, rows)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1024, 1025, 2400])
def test_lengths(length):
    check(queries(1, 2, 4, DIM), batch([length, 3]), 1)


def test_64_requests_and_fp16_queries():
    b = batch([(37 * i) % 300 for i in range(64)])
    check(queries(2, 128, 1, DIM, dtype=torch.float16), b, 2)


def test_rows_longer_than_the_request_see_nothing():
    got, _ = check(queries(4, 4, 2, DIM), batch([2]), 4)
    assert got[:, :2].isneginf().all() and got[:, 2:, 0].isfinite().all()


def test_long_context_with_few_pages():
    """8,192 blocks that all lie in two pages: offsets and splits, not memory."""
    b = batch([256])
    b.table = b.table[:, :2].repeat(1, 4096).contiguous()
    b.lens[0] = 8192 * BLOCK - 5
    got, _ = score(queries(5, 1, 1, DIM), b, 1)
    want = expected(queries(5, 1, 1, DIM), b, 1)
    assert (got - want)[..., :-1].abs().max() < 1e-3 and got.shape == (1, 1, 8192)


def test_entries_that_name_no_page_score_nothing():
    b = batch([500])
    b.table[0, 1], b.table[0, 2] = -1, b.index.num_blocks
    got, _ = score(queries(6, 2, 2, DIM), b, 2)
    assert got[..., 1:3].isneginf().all() and got[..., 0].isfinite().all()


@pytest.mark.parametrize("scale", [2.0**-120, 1e-4, 3e4])
def test_queries_of_any_size(scale):
    b = batch([200], "fp8")
    q = (queries(7, 1, 4, DIM).float() * scale).to(torch.bfloat16)
    q[0, 1] = 0
    q[0, 2, 5] = 100 * scale
    check(q, b, 1)


def test_a_calibrated_scale_folds_the_table():
    """Block scales up to 448: an unfolded table would saturate above 74."""
    b = batch([300])
    wide = b.index.region("k_scales").view(torch.uint8)
    wide[wide < 0x7F] |= 0x40  # scales of 2 and more
    b.index = IndexCache.from_tensor(b.index.pages, "nvfp4", head_dim=DIM, k_scale=2.0**-8)
    q = queries(12, 1, 4, DIM)
    got, _ = score(q, b, 1)
    want = expected(q, b, 1)
    assert (got - want)[want.isfinite()].abs().max() <= 1e-5 * want[want.isfinite()].abs().max()
    exact = index_score_decode(q, b.index, b.table, b.seq_lens, 1, backend="reference")
    assert (want - exact)[exact.isfinite()].norm() < 0.05 * exact[exact.isfinite()].norm()


def test_a_row_does_not_depend_on_its_neighbours():
    b = batch([700, 40])
    q = queries(8, 8, 2, DIM)
    whole, _ = score(q, b, 4)
    alone = batch([700], content=[0])
    one, _ = score(q[:4], alone, 4)
    assert torch.equal(one[..., :6], whole[:, :4, :6])


def test_out_and_strides():
    b = batch([300, 20])
    q = queries(9, 2, 3, 2 * DIM)[..., :DIM]
    buffer, out = guarded([3, 2, b.table.shape[1]], torch.float32)
    got, _ = score(q, b, 1, out=out)
    assert got.data_ptr() == out.data_ptr() and guards_intact(buffer)
    assert torch.equal(got, score(q.contiguous(), b, 1)[0])


def test_nothing_to_score():
    b = batch([5])
    with emulated([Build("nvfp4", "bf16", 1)]) as reports:
        got = index_score_decode(
            queries(1, 0, 4, DIM), b.index, b.table[:0], b.seq_lens[:0], 1, backend="flydsl"
        )
    assert not reports and got.shape == (4, 0, b.table.shape[1])


def test_what_has_no_build_is_refused():
    b = batch([5])
    for q, rows, message in (
        (queries(1, 17, 4, DIM), 17, r"rows_per_request \* heads.*<= 64.*68"),
        (queries(1, 1, 1, DIM, dtype=torch.float32), 1, r"index_q\.dtype on flydsl.*float32"),
    ):
        with emulated([]), pytest.raises(NotImplementedError, match=message):
            index_score_decode(q, b.index, b.table, b.seq_lens, rows, backend="flydsl")
    good = asdict(Build("nvfp4", "bf16", 1))
    for bad in ({"kind": "int8"}, {"query": "fp32"}, {"tiles": 0}, {"tiles": 5}):
        with pytest.raises(ValueError):
            Build(**{**good, **bad})
    with pytest.raises(ValueError, match=r"query.*bf16"):
        Build("bf16", "fp16", 1)


@pytest.mark.parametrize(
    "build", [Build("nvfp4", "bf16", 1), Build("nvfp4", "bf16", 4), Build("fp8", "bf16", 2)]
)
def test_resources(build):
    used = resources(build)
    assert used["scratch_bytes"] == used["vgpr_spills"] == used["sgpr_spills"] == used["agpr"] == 0


def test_counts_of_4_heads_and_4_rows(monkeypatch):
    """16 columns: two products a tile of 16 tokens, one read of each byte."""
    monkeypatch.setattr(module.host, "run_length", lambda *_: 64)
    q = queries(10, 4, 4, DIM)
    short, long = (score(q, batch([n * BLOCK]), 4)[1] for n in (8, 16))
    blocks, words = 8, 8 * 8  # blocks more; 32-value words of a lane in them
    assert useful(long, "v_mfma") - useful(short, "v_mfma") == blocks * 8 * 2
    counts = [
        (sum(useful(r, name) for name in DEQUANTISE), r.launches[0].pipes["valu"])
        for r in (short, long)
    ]
    assert (counts[1][0] - counts[0][0]) / words <= 36  # 32 values: table addresses and bytes
    assert (counts[1][1] - counts[0][1]) / words <= 40  # and maxima, page addresses
    b = batch([16 * BLOCK])
    least = 16 * b.index.page.page_bytes + q.nbytes + 2048 + 4 * 16 * b.table.shape[1]
    assert long.launches[0].hbm_bytes <= 1.05 * least
