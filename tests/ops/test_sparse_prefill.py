"""sparse_prefill against the oracle, and what must not change its results."""

import math

import pytest
import torch

from rocm_msa.ops import block_topk, dense_attention, sparse_decode, sparse_prefill
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

LENS = [150, 2300, 700]
COUNTS = [150, 2, 33]  # new tokens: a whole prompt, a decode-like step, a chunk
CU = int32([0, 150, 152, 185])


def select(lens, counts, heads, width, seed=0, topk=16):
    rows = oracle.row_lengths(lens, counts)
    nb = int32([oracle.blocks(n) for _, n in rows])
    return block_topk(random_values(seed + 40, heads, len(rows), width), nb, topk=topk), rows


def run(batch, q, ids, cu=CU, **options):
    return sparse_prefill(q, batch.main, ids, batch.table, cu, batch.seq_lens, 0.2, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 2, 32), (1, 16, 128)])
def test_against_the_oracle(dtype, kv_heads, group, head_dim):
    batch = make_batch(LENS, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, gap=32)
    ids, rows = select(LENS, COUNTS, kv_heads, batch.table.shape[1])
    q = queries(1, 185, kv_heads * group, head_dim)
    out, lse = run(batch, q.float(), ids, return_lse=True)
    assert not out.isnan().any()
    some = [*range(0, 150, 29), 127, 128, 149, 150, 151, 152, 160, 184]
    picked = [[ids[h, t].tolist() for t in some] for h in range(kv_heads)]
    want = oracle.attention(q[some], batch.keys, batch.values, [rows[t] for t in some], picked, 0.2)
    torch.testing.assert_close(out[some].double(), want[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse[some].double(), want[1], rtol=1e-5, atol=2e-5)


def test_causal_to_the_token():
    batch = make_batch([130], dtype="bf16")
    ids, _ = select([130], [130], 2, batch.table.shape[1])
    q = queries(2, 130, 4, 32)
    before = run(batch, q, ids, int32([0, 130]))
    batch.main.write(*(torch.full((1, 2, 32), 6.0),) * 2, batch.slots(0)[129:])
    after = run(batch, q, ids, int32([0, 130]))
    assert torch.equal(after[:129], before[:129])
    assert not torch.equal(after[129], before[129])


def test_padding_tokens_are_exact_zeros():
    batch = make_batch(LENS)
    ids, _ = select(LENS, COUNTS, 2, batch.table.shape[1])
    q = queries(3, 200, 4, 32)
    padded = torch.cat([ids, torch.zeros(2, 15, 16, dtype=torch.int32)], 1)
    buffer, out = guarded([200, 4, 32], torch.bfloat16)
    got, lse = run(batch, q, padded, out=out, return_lse=True)
    assert got is out and guards_intact(buffer)
    assert torch.equal(got[:185], run(batch, q[:185], ids))
    assert (got[185:].view(torch.int16) == 0).all() and (lse[185:] == -math.inf).all()


def test_requests_without_new_tokens():
    batch = make_batch([0, 300, 40, 0], content=[9, 1, 2, 9])
    alone = make_batch([300], content=[1])
    ids, _ = select([300], [7], 2, 3)
    q = queries(4, 7, 4, 32)
    got = run(batch, q, ids, int32([0, 0, 7, 7, 7]))
    assert torch.equal(got, run(alone, q, ids, int32([0, 7])))


def test_c14_no_tokens():
    batch = make_batch([300])
    none = torch.zeros(2, 0, 16, dtype=torch.int32)
    assert run(batch, queries(1, 0, 4, 32), none, int32([0, 0])).shape == (0, 4, 32)


@pytest.mark.parametrize("chunk", [1, 64, 100, 128, 1000])
@pytest.mark.parametrize("dtype", ["nvfp4", "bf16"])
def test_bitwise_for_any_chunking_of_the_prompt(chunk, dtype):
    length = 150 if chunk == 1 else 2300
    batch = make_batch([length], dtype=dtype)
    ids, _ = select([length], [length], 2, batch.table.shape[1])
    q = queries(5, length, 4, 32)
    whole, lse = run(batch, q, ids, int32([0, length]), return_lse=True)
    for start in range(0, length, chunk):
        part = slice(start, min(length, start + chunk))
        cu, lens = int32([0, part.stop - part.start]), int32([part.stop])
        args = (q[part], batch.main, ids[:, part], batch.table, cu, lens, 0.2)
        got = sparse_prefill(*args, return_lse=True)
        assert torch.equal(got[0], whole[part]) and torch.equal(got[1], lse[part])


def test_bitwise_equal_to_decode_rows():
    batch = make_batch(LENS)
    ids, _ = select(LENS, [4] * 3, 2, batch.table.shape[1])
    q = queries(6, 12, 4, 32)
    decode = sparse_decode(q, batch.main, ids, batch.table, batch.seq_lens, 4, 0.2)
    assert torch.equal(run(batch, q, ids, int32([0, 4, 8, 12])), decode)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_equal_to_dense_when_every_block_is_selected(dtype):
    batch = make_batch([150, 1900, 700], dtype=dtype)
    ids, _ = select([150, 1900, 700], COUNTS, 2, batch.table.shape[1])
    q = queries(7, 185, 4, 32)
    sparse = run(batch, q, ids, return_lse=True)
    dense = dense_attention(q, batch.main, batch.table, CU, batch.seq_lens, 0.2, return_lse=True)
    assert torch.equal(sparse[0], dense[0]) and torch.equal(sparse[1], dense[1])


def test_bitwise_alone_for_any_table_width_stride_and_page_order():
    batch = make_batch(LENS, content=[1, 2, 3])
    ids, _ = select(LENS, COUNTS, 2, batch.table.shape[1])
    q = queries(8, 185, 4, 32)
    whole = run(batch, q, ids)
    for r in range(3):
        alone = make_batch([LENS[r]], content=[r + 1], extra_blocks=5 * r, gap=16 * r, shuffle=r)
        rows = slice(int(CU[r]), int(CU[r + 1]))
        assert torch.equal(run(alone, q[rows], ids[:, rows], int32([0, COUNTS[r]])), whole[rows])


def test_bitwise_for_another_number_of_heads():
    """A KV head's result is the same on a rank that holds all heads and on one that holds it."""
    batch = make_batch([700], kv_heads=2)
    ids, _ = select([700], [40], 2, batch.table.shape[1])
    q = queries(9, 40, 8, 32)
    whole = run(batch, q, ids, int32([0, 40]))
    one = make_batch([700], kv_heads=1)
    keys, values = (x[0][:, 1:].float() for x in (batch.keys, batch.values))
    one.main.write(keys, values, one.slots(0))
    assert torch.equal(run(one, q[:, 4:], ids[1:], int32([0, 40])), whole[:, 4:])


def test_bitwise_for_any_number_of_threads():
    batch = make_batch([2000], head_dim=64)
    ids, _ = select([2000], [2000], 2, batch.table.shape[1])
    q = queries(10, 2000, 8, 64)
    one = run(batch, q, ids, int32([0, 2000]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, q, ids, int32([0, 2000])), one)
    finally:
        torch.set_num_threads(1)


BATCH = make_batch([300, 40])
IDS = torch.zeros(2, 4, 1, dtype=torch.int32)
GOOD = {
    "q": queries(1, 4, 4, 32),
    "main_cache": BATCH.main,
    "block_ids": IDS,
    "block_table": BATCH.table,
    "cu_seqlens_q": int32([0, 3, 4]),
    "seq_lens": BATCH.seq_lens,
    "sm_scale": 0.2,
}
BAD = [
    ({"q": queries(1, 4, 5, 32)}, ValueError, r"q\.shape\[1\].*multiple of 2 KV heads.*5"),
    ({"q": queries(1, 4, 4, 32).int()}, TypeError, r"q\.dtype.*int32"),
    ({"main_cache": None}, TypeError, "main_cache.*MainCache.*NoneType"),
    ({"block_ids": IDS[:, :3]}, ValueError, r"block_ids\.shape.*\[2, 4, topk\].*\[2, 3, 1\]"),
    ({"block_ids": IDS.transpose(0, 1)}, ValueError, r"block_ids\.shape"),
    ({"block_ids": IDS.repeat(1, 1, 2)}, ValueError, r"block_ids\[0, 0\].*distinct.*0 twice"),
    ({"block_ids": IDS.to("meta")}, ValueError, r"block_ids\.device.*cpu.*meta"),
    ({"block_table": BATCH.table.long()}, TypeError, r"block_table\.dtype"),
    ({"cu_seqlens_q": int32([0, 3])}, ValueError, r"cu_seqlens_q\.shape.*\[3\].*\[2\]"),
    ({"cu_seqlens_q": int32([0, 3, 9])}, ValueError, r"cu_seqlens_q\[-1\].*<= 4 tokens.*9"),
    ({"seq_lens": int32([2, 40])}, ValueError, r"cu_seqlens_q.*<= seq_lens"),
    ({"sm_scale": math.inf}, ValueError, "sm_scale.*finite.*inf"),
    ({"sm_scale": True}, TypeError, "sm_scale.*a number.*bool"),
    ({"out": queries(1, 4, 4, 32).float()}, TypeError, r"out\.dtype.*bfloat16.*float32"),
    ({"out": queries(1, 3, 4, 32)}, ValueError, r"out\.shape.*4.*3"),
    ({"backend": ""}, ValueError, "backend.*''"),
    ({"backend": "flydsl"}, NotImplementedError, "sparse_prefill backend.*'flydsl'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    sparse_prefill(**GOOD)
    with pytest.raises(error, match=message):
        sparse_prefill(**{**GOOD, **change})


def test_a_causal_block_without_a_page_is_named():
    with pytest.raises(ValueError, match=r"block_table\[1, 1\].*a page id in 0\.\.6, got -1"):
        sparse_prefill(**{**GOOD, "block_ids": IDS + 1, "seq_lens": int32([300, 200])})
