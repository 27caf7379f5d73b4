"""index_score_prefill against the oracle, and what must not change its results."""

import math

import pytest
import torch

from rocm_msa.ops import index_score_decode, index_score_prefill
from tests.ops import oracle
from tests.ops.cases import DTYPES, guarded, guards_intact, int32, make_batch, queries

LENS = [300, 129, 700]
COUNTS = [300, 2, 133]  # new tokens: a whole prompt, a decode-like step, a chunk
CU = int32([0, 300, 302, 435])


def run(batch, index_q, cu=CU, **options):
    return index_score_prefill(index_q, batch.index, batch.table, cu, batch.seq_lens, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_against_the_oracle(dtype, head_dim):
    batch = make_batch(LENS, dtype=dtype, head_dim=head_dim, gap=32)
    index_q = queries(1, 435, 2, head_dim)
    got = run(batch, index_q)
    assert not got.isnan().any()
    rows = oracle.row_lengths(LENS, COUNTS)
    want = oracle.scores(index_q, batch.index_keys, rows, batch.table.shape[1])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_causal_to_the_token():
    """The newest key decides the newest block's score of its own row, and of no row before."""
    batch = make_batch([130])
    index_q = torch.ones(130, 1, 32)
    before = run(batch, index_q, int32([0, 130]))
    slot = batch.slots(0)[129:]
    batch.index.write(torch.full((1, 32), 6.0), slot)
    after = run(batch, index_q, int32([0, 130]))
    assert after[0, 129, 1] == 192.0
    assert torch.equal(after[:, :129], before[:, :129])


def test_padding_tokens_are_all_minus_infinity():
    batch = make_batch(LENS)
    index_q = queries(2, 450, 2, 32)
    got = run(batch, index_q)
    assert (got[:, 435:] == -math.inf).all()
    assert torch.equal(got[:, :435], run(batch, index_q[:435]))


def test_requests_without_new_tokens_and_padded_requests():
    batch = make_batch([0, 300, 40, 0])
    index_q = queries(3, 10, 2, 32)
    got = run(batch, index_q, int32([0, 0, 7, 7, 7]))
    rows = oracle.row_lengths([300], [7])
    want = oracle.scores(index_q, batch.index_keys[1:], rows, batch.table.shape[1])
    torch.testing.assert_close(got[:, :7].double(), want, rtol=1e-5, atol=1e-4)
    assert (got[:, 7:] == -math.inf).all()


def test_c14_no_tokens():
    batch = make_batch([300])
    assert run(batch, queries(1, 0, 2, 32), int32([0, 0])).shape == (2, 0, batch.table.shape[1])
    none = index_score_prefill(
        queries(1, 0, 2, 32), batch.index, batch.table[:0], int32([0]), int32([])
    )
    assert none.shape == (2, 0, batch.table.shape[1])


@pytest.mark.parametrize("chunk", [1, 64, 100, 128, 1000])
def test_bitwise_for_any_chunking_of_the_prompt(chunk):
    length = 200 if chunk == 1 else 1100
    batch = make_batch([length])
    index_q = queries(4, length, 2, 32)
    whole = run(batch, index_q, int32([0, length]))
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        got = index_score_prefill(
            index_q[start:stop],
            batch.index,
            batch.table,
            int32([0, stop - start]),
            int32([stop]),
        )
        assert torch.equal(got, whole[:, start:stop])


def test_bitwise_equal_to_decode_rows():
    batch = make_batch([300, 129, 700])
    index_q = queries(5, 12, 2, 32)
    decode = index_score_decode(index_q, batch.index, batch.table, batch.seq_lens, 4)
    assert torch.equal(run(batch, index_q, int32([0, 4, 8, 12])), decode)


def test_bitwise_alone_for_any_table_width_and_page_order():
    batch = make_batch(LENS, content=[1, 2, 3])
    index_q = queries(6, 435, 2, 32)
    whole = run(batch, index_q)
    for r in range(3):
        alone = make_batch([LENS[r]], content=[r + 1], extra_blocks=5 * r, gap=16 * r, shuffle=r)
        rows = slice(int(CU[r]), int(CU[r + 1]))
        got = run(alone, index_q[rows], int32([0, COUNTS[r]]))
        nb = -(-LENS[r] // 128)
        assert torch.equal(got[..., :nb], whole[:, rows, :nb])
        assert (got[..., nb:] == -math.inf).all()


def test_bitwise_for_any_number_of_threads():
    batch = make_batch([2000])
    index_q = queries(7, 2000, 2, 32)
    one = run(batch, index_q, int32([0, 2000]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, index_q, int32([0, 2000])), one)
    finally:
        torch.set_num_threads(1)


def test_out_writes_nothing_beside_it():
    batch = make_batch(LENS)
    index_q = queries(8, 440, 2, 32)
    buffer, out = guarded([2, 440, batch.table.shape[1]], torch.float32)
    assert run(batch, index_q, out=out) is out
    assert guards_intact(buffer)
    assert torch.equal(out, run(batch, index_q))


BATCH = make_batch([300, 40])
GOOD = {
    "index_q": queries(15, 4, 2, 32),
    "index_cache": BATCH.index,
    "block_table": BATCH.table,
    "cu_seqlens_q": int32([0, 3, 4]),
    "seq_lens": BATCH.seq_lens,
}
BAD = [
    ({"index_q": queries(1, 4, 64)}, ValueError, r"index_q\.shape.*tokens|rows.*\[4, 64\]"),
    ({"index_q": queries(1, 4, 2, 32).double()}, TypeError, r"index_q\.dtype.*float64"),
    ({"index_cache": BATCH.main}, TypeError, "index_cache.*IndexCache.*MainCache"),
    ({"block_table": BATCH.table.float()}, TypeError, r"block_table\.dtype.*int32.*float32"),
    ({"seq_lens": int32([300, 600])}, ValueError, r"seq_lens.*0\.\.512.*600"),
    ({"seq_lens": int32([2, 40])}, ValueError, r"cu_seqlens_q.*<= seq_lens \[2, 40\].*\[3, 1\]"),
    ({"cu_seqlens_q": int32([0, 4])}, ValueError, r"cu_seqlens_q\.shape.*\[3\].*\[2\]"),
    ({"cu_seqlens_q": int32([0, 3, 5])}, ValueError, r"cu_seqlens_q\[-1\].*<= 4 tokens.*5"),
    ({"cu_seqlens_q": int32([1, 3, 4])}, ValueError, "cu_seqlens_q.*rising from 0"),
    ({"cu_seqlens_q": int32([0, 4, 3])}, ValueError, "cu_seqlens_q.*rising from 0"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 4])}, TypeError, r"cu_seqlens_q\.dtype.*int32.*int64"),
    ({"cu_seqlens_q": int32([0, 3, 4]).to("meta")}, ValueError, r"cu_seqlens_q\.device"),
    ({"out": torch.zeros(2, 4, 5)}, ValueError, r"out\.shape.*\[2, 4, 4\].*\[2, 4, 5\]"),
    ({"out": torch.zeros(2, 4, 4).half()}, TypeError, r"out\.dtype.*float32.*float16"),
    ({"backend": 3}, ValueError, "backend.*3"),
    ({"backend": "flydsl"}, NotImplementedError, "index_score_prefill backend.*'flydsl'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    index_score_prefill(**GOOD)
    with pytest.raises(error, match=message):
        index_score_prefill(**{**GOOD, **change})
