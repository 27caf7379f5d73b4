"""sparse_decode against the oracle, and what must not change its results."""

import math

import pytest
import torch

from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops import block_topk, index_score_decode, sparse_decode
from tests.ops import oracle
from tests.ops.cases import (
    DTYPES,
    guarded,
    guards_intact,
    int32,
    make_batch,
    queries,
    random_values,
    slots_of,
)

LENS = [2500, 0, 1, 128, 129, 3000]


def random_ids(batch, q, topk=16, seed=0):
    """Each head and row selects at random: int32 `[kv_heads, rows, topk]`, and its row lengths."""
    rows = oracle.row_lengths(batch.lens, [q] * len(batch.lens))
    nb = int32([oracle.blocks(n) for _, n in rows])
    scores = random_values(seed + 40, batch.main.kv_heads, len(rows), batch.table.shape[1])
    return block_topk(scores, nb, topk=topk), rows


def run(batch, q_tensor, ids, q=1, scale=0.2, **options):
    return sparse_decode(
        q_tensor, batch.main, ids, batch.table, batch.seq_lens, q, scale, **options
    )


def check(batch, q_tensor, ids, rows, q=1, scale=0.2):
    """fp32 query in, fp32 out: only the order of the sums differs from the oracle."""
    out, lse = run(batch, q_tensor.float(), ids, q, scale, return_lse=True)
    want = oracle.attention(q_tensor, batch.keys, batch.values, rows, ids.tolist(), scale)
    torch.testing.assert_close(out.double(), want[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=2e-5)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 4, 32), (1, 16, 128), (4, 1, 64)])
def test_against_the_oracle(dtype, kv_heads, group, head_dim):
    batch = make_batch(LENS, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, gap=48)
    ids, rows = random_ids(batch, 1)
    check(batch, queries(1, len(LENS), kv_heads * group, head_dim), ids, rows)


@pytest.mark.parametrize("group", [3, 5, 12, 96])
def test_groups_that_do_not_divide_the_tile(group):
    batch = make_batch([300, 40], kv_heads=1)
    ids, rows = random_ids(batch, 2)
    check(batch, queries(2, 4, group, 32), ids, rows, 2)


@pytest.mark.parametrize("q", [*range(1, 10)])
def test_each_row_of_a_request_has_its_own_length(q):
    batch = make_batch([128 + q // 2, 2100])
    ids, rows = random_ids(batch, q)
    check(batch, queries(3, 2 * q, 4, 32), ids, rows, q)


def test_c21_verify_batch_of_three_requests_with_four_rows():
    batch = make_batch([130, 5, 2049])
    ids, rows = random_ids(batch, 4)
    assert [n for _, n in rows] == [127, 128, 129, 130, 2, 3, 4, 5, 2046, 2047, 2048, 2049]
    check(batch, queries(4, 12, 4, 32), ids, rows, 4)


def test_rows_without_a_key_are_exact_zeros():
    batch = make_batch([2, 0])
    ids, _ = random_ids(batch, 4)
    out, lse = run(batch, queries(5, 8, 4, 32), ids, 4, return_lse=True)
    dead = [0, 1, 4, 5, 6, 7]
    assert torch.equal(out[dead].view(torch.int16), torch.zeros(6, 4, 32, dtype=torch.int16))
    assert (lse[dead] == -math.inf).all()
    assert lse[[2, 3]].isfinite().all() and (out[[2, 3]] != 0).any()


def test_a_list_of_nothing_gives_zeros():
    batch = make_batch([300])
    ids = torch.full((2, 1, 16), -1, dtype=torch.int32)
    out, lse = run(batch, queries(6, 1, 4, 32), ids, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = run(batch, queries(6, 1, 4, 32), ids[..., :0], return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("noise", [-1, -7, 8, 100, 2**31 - 1])
def test_ids_of_nothing_contribute_exactly_nothing(noise):
    """-1 and ids >= nb, at any place of the list, also twice, also past the table."""
    batch = make_batch([1000])
    q = queries(7, 1, 4, 32)
    ids = int32([[[7, 0, 3]], [[7, 2, 1]]])
    want = run(batch, q, ids, return_lse=True)
    for order in ([3, 0, 4, 1, 2], [0, 1, 2, 3, 4], [3, 4, 2, 1, 0]):
        padded = torch.cat([ids, torch.full((2, 1, 2), noise, dtype=torch.int32)], -1)
        got = run(batch, q, padded[..., order], return_lse=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_order_of_the_list_does_not_matter():
    batch = make_batch([2500])
    ids, _ = random_ids(batch, 1)
    q = queries(8, 1, 4, 32)
    want = run(batch, q, ids)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(batch, q, ids[..., order]), want)


def test_the_newest_block_of_an_earlier_row_ends_at_its_own_length():
    batch = make_batch([130], dtype="bf16")
    ids = int32([[[0, 1]] * 2] * 2)
    q = queries(9, 2, 4, 32)
    before = run(batch, q, ids, 2)
    batch.main.write(*(torch.full((1, 2, 32), 9.0),) * 2, batch.slots(0)[129:])
    after = run(batch, q, ids, 2)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_c10_each_kv_head_uses_its_own_list():
    """4 heads, 32 blocks, head h selects {8h..8h+7}; V holds its block's number."""
    cache = MainCache.allocate(32, 4, "bf16", head_dim=32)
    table = torch.randperm(32, generator=torch.Generator().manual_seed(1)).int()[None]
    block = (torch.arange(4096) // 128).float()[:, None, None].expand(4096, 4, 32)
    cache.write(torch.zeros(4096, 4, 32), block, slots_of(table[0], 4096))
    ids = torch.full((4, 1, 16), -1, dtype=torch.int32)
    for head in range(4):
        ids[head, 0, :8] = torch.arange(8 * head, 8 * head + 8)
    out = sparse_decode(queries(1, 1, 8, 32), cache, ids, table, int32([4096]), 1, 1.0)
    assert out[0, :, 0].tolist() == [3.5, 3.5, 11.5, 11.5, 19.5, 19.5, 27.5, 27.5]


def test_hand_computed_softmax_and_natural_log():
    cache = MainCache.allocate(1, 1, "bf16", head_dim=32)
    k, v = torch.zeros(2, 1, 32), torch.zeros(2, 1, 32)
    k[1, 0, 0], v[0, 0, 0], v[1, 0, 0] = 2.0, 1.0, 5.0
    cache.write(k, v, torch.tensor([0, 1]))
    q = torch.zeros(1, 1, 32)
    q[0, 0, 0] = math.log(3) / 2
    out, lse = sparse_decode(
        q, cache, int32([[[0]]]), int32([[0]]), int32([2]), 1, 1.0, return_lse=True
    )
    assert out[0, 0, 0].item() == pytest.approx(0.25 * 1 + 0.75 * 5, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 50.0])
def test_soft_and_sharp_softmax(scale):
    batch = make_batch([2500], dtype="bf16")
    ids, rows = random_ids(batch, 1)
    q = queries(10, 1, 4, 32).float()
    out, lse = run(batch, q, ids, scale=scale, return_lse=True)
    want = oracle.attention(q, batch.keys, batch.values, rows, ids.tolist(), scale)
    # a sharp softmax magnifies the rounding of the scores: |s| ~ 1e3, so 1e-4 absolute in s
    tolerance = 2e-5 if scale < 1 else 2e-3
    torch.testing.assert_close(out.double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=2e-5)


def test_a_nan_query_is_not_hidden():
    batch = make_batch([300, 300])
    ids, _ = random_ids(batch, 1)
    q = queries(11, 2, 4, 32)
    q[0, 1, 0] = math.nan
    out, lse = run(batch, q, ids, return_lse=True)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    assert not out[0, [0, 2, 3]].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_changes_nothing(dtype):
    poisoned = make_batch(LENS, dtype=dtype, gap=16)
    clean = make_batch(LENS, dtype=dtype, gap=16)
    clean.main.pages.zero_()
    for r in range(len(LENS)):
        clean.main.write(clean.keys[r].float(), clean.values[r].float(), clean.slots(r))
    ids, _ = random_ids(poisoned, 2)
    q = queries(12, 2 * len(LENS), 4, 32)
    got = run(poisoned, q, ids, 2, return_lse=True)
    want = run(clean, q, ids, 2, return_lse=True)
    assert not got[0].isnan().any()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_bitwise_alone_in_a_batch_and_in_any_order():
    batch = make_batch(LENS, content=[1, 2, 3, 4, 5, 6])
    ids, _ = random_ids(batch, 2)
    q = queries(13, 2 * len(LENS), 4, 32)
    whole, lse = run(batch, q, ids, 2, return_lse=True)
    for r, length in enumerate(LENS):
        alone = make_batch([length], content=[r + 1], extra_blocks=3, gap=64, shuffle=r)
        two = slice(2 * r, 2 * r + 2)
        got = run(alone, q[two], ids[:, two], 2, return_lse=True)
        assert torch.equal(got[0], whole[two]) and torch.equal(got[1], lse[two])
    back = make_batch(LENS[::-1], content=[6, 5, 4, 3, 2, 1])
    flip = torch.arange(2 * len(LENS)).view(-1, 2).flip(0).flatten()
    assert torch.equal(run(back, q[flip], ids[:, flip], 2)[flip], whole)


def test_bitwise_for_any_number_of_rows_that_share_pages():
    batch = make_batch([2500], kv_heads=1)
    table = batch.table.expand(600, -1).contiguous()
    scores = random_values(1, 1, 600, batch.table.shape[1])
    ids = block_topk(scores, int32([20] * 600))
    q = queries(14, 600, 16, 32)
    lens = int32([2500] * 600)
    whole = sparse_decode(q, batch.main, ids, table, lens, 1, 0.2)
    for rows in (1, 2, 3, 4, 5, 17, 64, 257):
        some = slice(600 - rows, 600)
        args = (q[some], batch.main, ids[:, some], table[some], lens[some])
        assert torch.equal(sparse_decode(*args, 1, 0.2), whole[some])


def test_bitwise_for_any_number_of_threads():
    batch = make_batch([3000] * 8, head_dim=64)
    ids, _ = random_ids(batch, 4)
    q = queries(15, 32, 16, 64)
    one = run(batch, q, ids, 4)
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, q, ids, 4), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("live", "padded", "q"), [(5, 8, 1), (3, 4, 4)])
def test_c13_padded_requests(live, padded, q):
    batch = make_batch([500 * (r + 1) for r in range(live)])
    ids, _ = random_ids(batch, q)
    query = queries(16, padded * q, 4, 32)
    want = run(batch, query[: live * q], ids, q)
    pad = padded - live
    for garbage in (-1, 0, 2**31 - 1):
        table = torch.cat([batch.table, torch.full_like(batch.table, garbage)[:1].expand(pad, -1)])
        stale = torch.full((2, pad * q, 16), garbage, dtype=torch.int32)  # one id 16 times
        buffer, out = guarded([padded * q, 4, 32], torch.bfloat16)
        got = sparse_decode(
            query,
            batch.main,
            torch.cat([ids, stale], 1),
            table,
            torch.cat([batch.seq_lens, int32([0] * pad)]),
            q,
            0.2,
            out=out,
        )
        assert torch.equal(got[: live * q], want)
        assert (got[live * q :] == 0).all()
        assert guards_intact(buffer)


def test_c14_no_requests():
    batch = make_batch([10])
    args = (batch.main, int32([[]] * 2).view(2, 0, 16 * 0), batch.table[:0], int32([]))
    out, lse = sparse_decode(queries(1, 0, 4, 32), *args, 1, 0.2, return_lse=True)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)


def test_c11_slices_of_persistent_buffers():
    batch = make_batch([2500, 300])
    ids, _ = random_ids(batch, 1)
    q = queries(17, 2, 4, 32)
    want = run(batch, q, ids)
    by_token = torch.full((64, 2, 16), 99, dtype=torch.int32)
    by_token[:2] = ids.transpose(0, 1)
    table = torch.full((64, 100), -1, dtype=torch.int32)
    table[:2, : batch.table.shape[1]] = batch.table
    lens = torch.full((64,), 7, dtype=torch.int32)
    lens[:2] = batch.seq_lens
    big_q = torch.full((64, 6, 64), math.nan, dtype=torch.bfloat16)
    big_q[:2, 1:5, :32] = q
    big_out = torch.full((64, 6, 64), 5.5, dtype=torch.bfloat16)
    got = sparse_decode(
        big_q[:2, 1:5, :32],
        batch.main,
        by_token[:2].transpose(0, 1),
        table[:2],
        lens[:2],
        1,
        0.2,
        out=big_out[:2, 1:5, :32],
    )
    assert torch.equal(got, want)
    big_out[:2, 1:5, :32] = 5.5
    assert (big_out == 5.5).all()


def test_out_may_be_the_query():
    batch = make_batch([2500])
    ids, _ = random_ids(batch, 1)
    q = queries(18, 1, 4, 32)
    want = run(batch, q, ids)
    assert torch.equal(run(batch, q, ids, out=q), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_is_the_fp32_one_rounded_once(dtype):
    batch = make_batch([2500])
    ids, _ = random_ids(batch, 1)
    q = queries(19, 1, 4, 32)
    exact = run(batch, q.float(), ids)
    assert torch.equal(run(batch, q.to(dtype), ids), exact.to(dtype))


def test_score_select_attend_keeps_the_needle():
    """A key that matches the query in an old block must be found among 40 blocks."""
    batch = make_batch([5000], kv_heads=1, dtype="nvfp4")
    needle = 6 * batch.index_keys[0][1234].float().sign()
    batch.index.write(needle[None], batch.slots(0)[1234:1235])
    scores = index_score_decode(needle[None, None], batch.index, batch.table, batch.seq_lens, 1)
    ids = block_topk(scores, int32([40]))
    assert ids[0, 0, :2].tolist() == [39, 1234 // 128]


BATCH = make_batch([300, 40])
IDS = int32([[[2, 0], [0, -1]]] * 2)
GOOD = {
    "q": queries(1, 2, 4, 32),
    "main_cache": BATCH.main,
    "block_ids": IDS,
    "block_table": BATCH.table,
    "seq_lens": BATCH.seq_lens,
    "rows_per_request": 1,
    "sm_scale": 0.2,
}
BAD = [
    ({"q": queries(1, 2, 3, 32)}, ValueError, r"q\.shape\[1\].*multiple of 2 KV heads.*3"),
    ({"q": queries(1, 2, 0, 32)}, ValueError, r"q\.shape\[1\].*multiple of 2 KV heads.*0"),
    ({"q": queries(1, 2, 4, 64)}, ValueError, r"q\.shape.*32.*64"),
    ({"q": queries(1, 2, 4, 32).double()}, TypeError, r"q\.dtype.*float64"),
    ({"q": queries(1, 3, 4, 32)}, ValueError, r"block_ids\.shape.*3"),
    ({"q": queries(1, 2, 4, 32).to("meta")}, ValueError, r"q\.device.*cpu.*meta"),
    ({"main_cache": BATCH.index}, TypeError, "main_cache.*MainCache.*IndexCache"),
    ({"block_ids": IDS.long()}, TypeError, r"block_ids\.dtype.*int32.*int64"),
    ({"block_ids": IDS[:1]}, ValueError, r"block_ids\.shape.*\[2, 2, topk\].*\[1, 2, 2\]"),
    ({"block_ids": IDS.transpose(0, 1)[:1]}, ValueError, r"block_ids\.shape"),
    ({"block_ids": int32([[[2, 0], [0, 0]]] * 2)}, ValueError, r"block_ids\[0, 1\].*0 twice"),
    ({"block_table": BATCH.table[:1]}, ValueError, r"seq_lens\.shape.*\[1\].*\[2\]"),
    ({"block_table": -torch.ones_like(BATCH.table)}, ValueError, r"block_table\[0, 0\].*got -1"),
    ({"seq_lens": int32([300, 513])}, ValueError, r"seq_lens.*0\.\.512.*513"),
    ({"rows_per_request": 2}, ValueError, r"q\.shape\[0\].*2 requests \* 2 rows.*2"),
    ({"rows_per_request": -1}, ValueError, "rows_per_request.*>= 1.*-1"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale.*finite.*nan"),
    ({"sm_scale": "0.2"}, TypeError, "sm_scale.*a number.*str"),
    ({"sm_scale": None}, TypeError, "sm_scale.*a number.*NoneType"),
    ({"out": torch.zeros(2, 4, 32)}, TypeError, r"out\.dtype.*bfloat16.*float32"),
    ({"out": queries(1, 2, 4, 64)}, ValueError, r"out\.shape.*32.*64"),
    ({"out": queries(1, 1, 4, 32).expand(2, 4, 32)}, ValueError, r"out\.stride"),
    ({"backend": "auto"}, ValueError, "backend.*'auto'"),
    ({"backend": "triton"}, NotImplementedError, "sparse_decode backend.*'triton'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    sparse_decode(**GOOD)
    with pytest.raises(error, match=message):
        sparse_decode(**{**GOOD, **change})


def test_an_index_cache_has_no_values():
    with pytest.raises(TypeError, match="main_cache"):
        sparse_decode(**{**GOOD, "main_cache": IndexCache.allocate(4, "fp8", head_dim=32)})


def test_the_hint_of_shared_pages_changes_nothing_in_the_reference():
    batch = make_batch([300, 300])
    q = queries(1, 2, 4, batch.main.head_dim)
    ids = int32([[[0, 1, 2]] * 2] * 2)
    arguments = (q, batch.main, ids, batch.table, batch.seq_lens, 1, 0.1)
    got = sparse_decode(*arguments, shared_pages=True)
    assert torch.equal(got, sparse_decode(*arguments))
