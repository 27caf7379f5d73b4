"""index_score_decode against the oracle, and what must not change its results."""

import math

import pytest
import torch

from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops import index_score_decode
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

LENS = [300, 0, 1, 128, 129, 1000]


def expected(batch, index_q, q):
    rows = oracle.row_lengths(batch.lens, [q] * len(batch.lens))
    return oracle.scores(index_q, batch.index_keys, rows, batch.table.shape[1])


def run(batch, index_q, q=1, **options):
    return index_score_decode(index_q, batch.index, batch.table, batch.seq_lens, q, **options)


def close(got, want):
    """Equal where infinite; fp32 rounding elsewhere: a few ulp of a sum of head_dim products."""
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_against_the_oracle(dtype, head_dim):
    batch = make_batch(LENS, dtype=dtype, head_dim=head_dim, gap=48)
    index_q = queries(1, len(LENS), 4, head_dim)
    close(run(batch, index_q), expected(batch, index_q, 1))


@pytest.mark.parametrize("q", [*range(1, 10)])
def test_each_row_of_a_request_has_its_own_length(q):
    batch = make_batch([128 + q // 2, 9, 400])  # the rows of the first straddle a block
    index_q = queries(2, 3 * q, 2, 32)
    close(run(batch, index_q, q), expected(batch, index_q, q))


def test_rows_before_the_first_key_are_all_minus_infinity():
    batch = make_batch([2, 300])
    got = run(batch, queries(3, 8, 2, 32), 4)
    assert (got[:, :2] == -math.inf).all()
    assert (got[:, 2:4, 0] > -math.inf).all()


def test_beyond_the_causal_blocks_is_minus_infinity():
    batch = make_batch([129, 1000], extra_blocks=4)
    got = run(batch, queries(4, 2, 2, 32))
    assert (got[:, 0, 2:] == -math.inf).all()
    assert (got[:, 1, 8:] == -math.inf).all()


def test_hand_computed_maximum():
    cache = IndexCache.allocate(2, "bf16", head_dim=32)
    keys = torch.zeros(130, 32)
    keys[5, 0], keys[127, 1], keys[128, 0], keys[129, 0] = 3.0, -2.0, -4.0, 7.0
    cache.write(keys, slots_of(int32([1, 0]), 130))
    index_q = torch.zeros(1, 2, 32)
    index_q[0, 0, 0], index_q[0, 1, 1] = 2.0, -1.5
    table = int32([[1, 0]])
    got = index_score_decode(index_q, cache, table, int32([130]), 1)
    assert got[:, 0].tolist() == [[6.0, 14.0], [3.0, 0.0]]
    got = index_score_decode(index_q, cache, table, int32([129]), 1)
    assert got[:, 0].tolist() == [[6.0, -8.0], [3.0, 0.0]]


def test_all_negative_scores_stay_negative():
    """A maximum that starts at 0, or that sees the zeros of dead keys."""
    cache = IndexCache.allocate(2, "nvfp4", head_dim=32)
    cache.write(random_values(1, 130, 32).abs() + 0.5, slots_of(int32([1, 0]), 130))
    got = index_score_decode(-torch.ones(1, 1, 32), cache, int32([[1, 0]]), int32([130]), 1)
    assert (got < 0).all()


def test_a_nan_query_gives_nan_where_there_are_keys():
    batch = make_batch([130, 200])
    index_q = queries(5, 2, 2, 32)
    index_q[0, 0, 3] = math.nan
    got = run(batch, index_q)
    assert got[0, 0, :2].isnan().all()
    assert not got[1, 0].isnan().any()
    assert not got[:, 1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_changes_nothing(dtype):
    """Free pages, tails, bytes beside the pages: NaN against zeros, bitwise."""
    poisoned = make_batch(LENS, dtype=dtype, gap=16)
    clean = make_batch(LENS, dtype=dtype, gap=16)
    clean.index.pages.zero_()
    for request in range(len(LENS)):
        clean.index.write(clean.index_keys[request].float(), clean.slots(request))
    index_q = queries(6, len(LENS), 2, 32)
    got = run(poisoned, index_q)
    assert not got.isnan().any()
    assert torch.equal(run(clean, index_q), got)


def test_one_head_does_not_touch_another():
    batch = make_batch([700])
    index_q = queries(7, 1, 4, 32)
    whole = run(batch, index_q)
    for head in range(4):
        assert torch.equal(run(batch, index_q[:, head : head + 1])[0], whole[head])


def test_bitwise_alone_in_a_batch_and_in_any_order():
    batch = make_batch(LENS, content=[1, 2, 3, 4, 5, 6])
    index_q = queries(8, 2 * len(LENS), 4, 32)
    whole = run(batch, index_q, 2)
    for r, length in enumerate(LENS):
        alone = make_batch([length], content=[r + 1], extra_blocks=3, gap=64, shuffle=r)
        got = run(alone, index_q[2 * r : 2 * r + 2], 2)
        nb = -(-length // 128)
        assert torch.equal(got[..., :nb], whole[:, 2 * r : 2 * r + 2, :nb])
    back = make_batch(LENS[::-1], content=[6, 5, 4, 3, 2, 1])
    flipped = index_q.view(len(LENS), 2, 4, 32).flip(0).reshape(-1, 4, 32)
    got = run(back, flipped, 2).view(4, len(LENS), 2, -1).flip(1).reshape(4, 2 * len(LENS), -1)
    assert torch.equal(got, whole)


def test_bitwise_for_any_number_of_rows_that_share_pages():
    batch = make_batch([500])
    index_q = queries(9, 150, 4, 32)
    table = batch.table.expand(150, -1).contiguous()
    whole = index_score_decode(index_q, batch.index, table, int32([500] * 150), 1)
    for rows in (1, 2, 15, 16, 17, 31, 65):
        got = index_score_decode(index_q[:rows], batch.index, table[:rows], int32([500] * rows), 1)
        assert torch.equal(got, whole[:, :rows])


def test_bitwise_for_any_number_of_threads():
    batch = make_batch([3000] * 8)
    index_q = queries(10, 8, 4, 32)
    one = run(batch, index_q)
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, index_q), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("live", "padded", "q"), [(5, 8, 1), (3, 4, 4)])
def test_c13_padded_requests(live, padded, q):
    """Padding has seq_len 0 and a table row of anything; live rows do not change."""
    batch = make_batch([100 * (r + 1) for r in range(live)])
    index_q = queries(11, padded * q, 2, 32)
    want = run(batch, index_q[: live * q], q)
    for garbage in (-1, 0, 2**31 - 1):
        rows = torch.full((padded - live, batch.table.shape[1]), garbage, dtype=torch.int32)
        table = torch.cat([batch.table, rows])
        lens = torch.cat([batch.seq_lens, int32([0] * (padded - live))])
        got = index_score_decode(index_q, batch.index, table, lens, q)
        assert torch.equal(got[:, : live * q], want)
        assert (got[:, live * q :] == -math.inf).all()


def test_c14_no_requests():
    batch = make_batch([10])
    got = index_score_decode(queries(1, 0, 2, 32), batch.index, batch.table[:0], int32([]), 1)
    assert got.shape == (2, 0, batch.table.shape[1])


def test_strided_query_and_out_of_larger_buffers():
    batch = make_batch([300, 40])
    big = torch.full((8, 6, 64), math.nan, dtype=torch.bfloat16)
    big[:2, 1:3, :32] = queries(12, 2, 2, 32)
    index_q = big[:2, 1:3, :32]
    want = run(batch, index_q.contiguous())
    buffer = torch.full((8, 2, 20), 5.5)
    out = buffer[:2, :, : want.shape[2]].transpose(0, 1)
    assert run(batch, index_q, out=out) is out
    assert torch.equal(out, want)
    assert (buffer[2:] == 5.5).all() and (buffer[..., want.shape[2] :] == 5.5).all()


def test_out_writes_nothing_beside_it():
    batch = make_batch([300, 0])
    buffer, out = guarded([2, 2, batch.table.shape[1]], torch.float32)
    run(batch, queries(13, 2, 2, 32), out=out)
    assert guards_intact(buffer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_query_dtypes(dtype):
    batch = make_batch([300])
    index_q = queries(14, 1, 2, 32, dtype=dtype)
    close(run(batch, index_q), expected(batch, index_q, 1))


BATCH = make_batch([300, 40])
GOOD = {
    "index_q": queries(15, 4, 2, 32),
    "index_cache": BATCH.index,
    "block_table": BATCH.table,
    "seq_lens": BATCH.seq_lens,
    "rows_per_request": 2,
}
PAST_THE_CACHE = BATCH.table.clone()
PAST_THE_CACHE[0, 1] = BATCH.index.num_blocks
BAD = [
    ({"index_q": queries(1, 4, 2, 64)}, ValueError, r"index_q\.shape.*32.*64"),
    ({"index_q": random_values(1, 4, 2, 32).double()}, TypeError, r"index_q\.dtype.*float64"),
    ({"index_q": queries(1, 3, 2, 32)}, ValueError, r"index_q\.shape\[0\].*2 requests \* 2.*3"),
    ({"index_q": None}, TypeError, "index_q.*torch.Tensor.*NoneType"),
    ({"index_cache": BATCH.main}, TypeError, "index_cache.*IndexCache.*MainCache"),
    ({"block_table": BATCH.table.long()}, TypeError, r"block_table\.dtype.*int32.*int64"),
    ({"block_table": BATCH.table[0]}, ValueError, r"block_table\.shape.*requests"),
    ({"block_table": PAST_THE_CACHE}, ValueError, r"block_table\[0, 1\].*a page id in 0\.\.6.*7"),
    ({"block_table": BATCH.table.to("meta")}, ValueError, r"block_table\.device.*cpu.*meta"),
    ({"seq_lens": int32([300])}, ValueError, r"seq_lens\.shape.*\[2\].*\[1\]"),
    ({"seq_lens": BATCH.seq_lens.long()}, TypeError, r"seq_lens\.dtype.*int32.*int64"),
    ({"seq_lens": int32([300, 600])}, ValueError, r"seq_lens.*0\.\.512.*600"),
    ({"seq_lens": int32([300, -1])}, ValueError, r"seq_lens.*0\.\.512.*-1"),
    ({"seq_lens": int32([300, 200])}, ValueError, r"block_table\[1, 1\].*page id.*got -1"),
    ({"rows_per_request": 0}, ValueError, "rows_per_request.*>= 1.*0"),
    ({"rows_per_request": 2.0}, TypeError, "rows_per_request.*an int.*2.0"),
    ({"out": torch.zeros(2, 4, 3)}, ValueError, r"out\.shape.*\[2, 4, 4\].*\[2, 4, 3\]"),
    ({"out": torch.zeros(2, 4, 4).bfloat16()}, TypeError, r"out\.dtype.*float32.*bfloat16"),
    ({"out": torch.zeros(2, 1, 4).expand(2, 4, 4)}, ValueError, r"out\.stride"),
    ({"backend": "hip"}, ValueError, "backend.*'hip'"),
    ({"backend": "triton"}, NotImplementedError, "index_score_decode backend.*'triton'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    index_score_decode(**GOOD)
    with pytest.raises(error, match=message):
        index_score_decode(**{**GOOD, **change})


def test_a_main_cache_is_not_an_index_cache_even_with_one_head():
    main = MainCache.allocate(4, 1, "nvfp4", head_dim=32)
    with pytest.raises(TypeError, match="index_cache"):
        index_score_decode(**{**GOOD, "index_cache": main})


@pytest.mark.parametrize("requests", [1, 3, 45, 64, 65, 1025])
@pytest.mark.parametrize("max_blocks", [1, 31, 896, 4096, 8192])
@pytest.mark.parametrize("pairs", [1, 16, 17, 64])
def test_plan_of_the_one_warp_kernel(requests, max_blocks, pairs):
    """One wave of programs at most, none without a block, and all requests held."""
    from rocm_msa.ops.index_score_decode.plan import select_hopper

    t = select_hopper(requests, pairs, max_blocks)
    turns = -(-pairs // 16)
    assert 1 <= t.programs <= requests * max_blocks
    assert t.programs * turns <= {16: 132 * 16, 32: 132 * 12}[t.tile]
    assert t.requests >= requests and t.requests & (t.requests - 1) == 0
