"""sparse_prefill as its gfx950 code objects, in the emulator.

Against sparse_decode's reference with the same roundings, each token a request of its own. What is
left is as there, and of E4M3 pages the rounding of a partial result to fp16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_msa.aot import ServingConfig
from rocm_msa.cache import CacheDType
from rocm_msa.ops import block_topk, flydsl_by_page, sparse_decode, sparse_prefill
from rocm_msa.ops.flydsl_by_page import KERNELS, Build
from rocm_msa.ops.rows import prefill_rows
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as decode_module
from rocm_msa.ops.sparse_decode import reference_fp8
from rocm_msa.ops.sparse_prefill import flydsl_gfx950 as module
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated, resources, useful
from tests.ops.cases import (
    DTYPES,
    guarded,
    guards_intact,
    int32,
    make_batch,
    queries,
    random_values,
)

DIM = 128
SCALE = DIM**-0.5
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TOLERANCE = 2.0**-10  # of the largest value


class Call:
    """A batch of random values in shuffled pages, with random lists; counts: new tokens."""

    def __init__(self, lens, counts, *, group=16, topk=16, padding=0, q_dtype=None, **options):
        self.batch = make_batch(lens, head_dim=DIM, **options)
        self.cache, self.table = self.batch.main, self.batch.table
        self.cu = torch.tensor([0, *counts]).cumsum(0).int()
        tokens, heads = sum(counts) + padding, self.cache.kv_heads
        seed = options.get("seed", 0)
        rows = prefill_rows(self.cu, self.batch.seq_lens, tokens)
        self.request, self.length = rows.request, rows.length
        scores = random_values(seed + 40, heads, tokens, self.table.shape[1])
        self.ids = block_topk(scores, rows.num_blocks.int(), topk)
        self.q = queries(seed + 3, tokens, heads * group, DIM, dtype=q_dtype or torch.bfloat16)

    @property
    def arguments(self) -> tuple:
        lens = self.batch.seq_lens
        return self.q, self.cache, self.ids, self.table, self.cu, lens, SCALE

    def run(self, schedule=None, **options):
        """((out, lse), reports of the launches); no finding."""
        with emulated(module.needs(*self.arguments), schedule=schedule) as reports:
            result = sparse_prefill(*self.arguments, backend="flydsl", return_lse=True, **options)
        assert_clean(reports)
        return result, reports

    def reference(self):
        table = self.table[self.request.clamp(max=len(self.table) - 1)]
        lens = self.length.int()
        return reference_fp8.run(self.q, self.cache, self.ids, table, lens, 1, SCALE)


def check(call: Call, **options):
    (out, lse), reports = call.run(**options)
    want, want_lse = call.reference()
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    limit = HALF_UNIT[out.dtype] * want.abs() + TOLERANCE * want.abs().max()
    assert ((out.float() - want).abs() - limit).max() <= 0
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    return (out, lse), reports


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_schedule(dtype, schedule):
    check(Call([300, 3], [5, 3], padding=1, dtype=dtype, kv_heads=1, gap=64), schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 16), (2, 5), (4, 16)])
def test_ragged_requests(dtype, kv_heads, group):
    counts = [1, 0, 9, 4]
    check(Call([260, 128, 9, 2300], counts, dtype=dtype, kv_heads=kv_heads, group=group, padding=2))


@pytest.mark.parametrize("topk", [1, 3, 16, 31])
def test_lists_of_any_length(topk):
    check(Call([3000], [4], topk=topk, kv_heads=1, q_dtype=torch.float16))


def test_a_page_that_more_than_one_item_shares():
    call = Call([130], [130], kv_heads=1)
    assert 2 * flydsl_by_page.ITEM < 130
    (out, _), _ = call.run()
    some = [0, 63, 64, 127, 128, 129]
    picked = Call([130], [130], kv_heads=1)
    picked.q, picked.ids = call.q[some], call.ids[:, some]
    picked.request, picked.length = call.request[some], call.length[some]
    want, _ = picked.reference()
    limit = HALF_UNIT[out.dtype] * want.abs() + TOLERANCE * want.abs().max()
    assert ((out[some].float() - want).abs() - limit).max() <= 0


def test_ids_and_entries_that_name_nothing():
    call = Call([500, 200], [3, 2], kv_heads=2)
    call.ids[0, 0, 1:3] = torch.tensor([77, -5])
    call.ids[1, 4] = -1
    call.table[0, 1], call.table[1, 0] = -1, call.cache.num_blocks
    (out, lse), _ = check(call)
    assert (out[4, 16:] == 0).all() and lse[4, 16:].isneginf().all()


def test_turns_and_chunks_give_the_same_bits(monkeypatch):
    call = Call([400], [12], kv_heads=2)
    (whole, lse), _ = call.run()
    layout = flydsl_by_page.scratch_layout(5, 2, 16, 1, CacheDType.NVFP4)
    monkeypatch.setattr(flydsl_by_page, "SCRATCH_BYTES", layout["part_o"].nbytes + 5 * 2**14)
    (again, again_lse), reports = call.run()
    assert len(reports) == 3 * len(KERNELS)
    assert torch.equal(again, whole) and torch.equal(again_lse, lse)
    chunk = Call([400], [12], kv_heads=2)
    chunk.q, chunk.ids, chunk.cu = call.q[7:], call.ids[:, 7:], int32([0, 5])
    assert torch.equal(chunk.run()[0][0], whole[7:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_sparse_decode(dtype):
    """A token and a decode row of the same list and length: nothing tells the two ops apart."""
    call = Call([390, 300], [3, 3], kv_heads=2, dtype=dtype)
    (whole, lse), _ = call.run()
    row = (call.q, call.cache, call.ids, call.table, call.batch.seq_lens, 3, SCALE)
    builds = decode_module.needs(*row)
    with emulated(builds) as reports:
        got, got_lse = sparse_decode(*row, backend="flydsl", return_lse=True)
    assert_clean(reports, launches=1)
    assert torch.equal(got, whole) and torch.equal(got_lse, lse)


def test_out_and_strides():
    call = Call([300], [4], kv_heads=1)
    wide = torch.zeros(4, 16, 2 * DIM, dtype=torch.bfloat16)
    wide[..., :DIM] = call.q
    (plain, _), _ = call.run()
    call.q = wide[..., :DIM]
    buffer, out = guarded([4, 16, DIM], torch.bfloat16)
    (got, _), _ = call.run(out=out)
    assert got.data_ptr() == out.data_ptr() and guards_intact(buffer)
    assert torch.equal(got, plain)


def test_nothing_to_attend_to():
    call = Call([5], [0], kv_heads=1)
    with emulated([]) as reports:
        out, lse = sparse_prefill(*call.arguments, backend="flydsl", return_lse=True)
    assert not reports and out.shape == (0, 16, DIM) and lse.shape == (0, 16)


def test_what_has_no_build_is_refused():
    call = Call([5], [2], kv_heads=1)
    for change, message in (
        ({"q": call.q.float()}, "q.dtype"),
        ({"ids": torch.full((1, 2, 32), -1, dtype=torch.int32)}, "topk.*1..31.*32"),
    ):
        for name, value in change.items():
            bad = Call([5], [2], kv_heads=1)
            setattr(bad, name, value)
        with emulated([]), pytest.raises(NotImplementedError, match=message):
            sparse_prefill(*bad.arguments, backend="flydsl")
    good = Build("pages", "nvfp4", "bf16", 16)
    for name, value in (("kernel", "x"), ("dtype", "int8"), ("q_dtype", "fp32"), ("topk", 32)):
        with pytest.raises(ValueError, match=name):
            replace(good, **{name: value})


def test_builds_of_a_configuration():
    config = ServingConfig(16, 1, 1, DIM, 64, "nvfp4", "nvfp4")
    assert [b.kernel for b in module.builds(config)] == list(KERNELS)
    assert not module.builds(replace(config, head_dim=64))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resources(kernel, dtype):
    used = resources(Build(kernel, dtype, "bf16", 16))
    assert used["scratch_bytes"] == used["vgpr_spills"] == used["sgpr_spills"] == 0


def test_a_page_is_dequantised_once_for_its_entries():
    """8 tokens over the same two blocks: two pages read, 2 x 8 x 2 tiles through the table."""
    call = Call([256], [8], kv_heads=1, extra_blocks=0)
    _, reports = call.run()
    pages = reports[KERNELS.index("pages")]
    assert useful(pages, "v_perm_b32") == 2 * 8 * 2 * 8
    products = 8 * 2 + 9 * 2  # of K in two terms; of V and of the ones, in two terms
    assert useful(pages, "v_mfma") == 16 * products
