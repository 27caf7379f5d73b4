"""dense_attention against the oracle, and what must not change its results."""

import math

import pytest
import torch

from rocm_msa.ops import dense_attention
from tests.ops import oracle
from tests.ops.cases import DTYPES, guarded, guards_intact, int32, make_batch, queries

LENS = [150, 2300, 700, 0]
COUNTS = [150, 2, 33, 0]
CU = int32([0, 150, 152, 185, 185])


def run(batch, q, cu=CU, **options):
    return dense_attention(q, batch.main, batch.table, cu, batch.seq_lens, 0.2, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 2, 32), (1, 16, 128)])
def test_against_the_oracle(dtype, kv_heads, group, head_dim):
    batch = make_batch(LENS, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, gap=32)
    q = queries(1, 185, kv_heads * group, head_dim)
    out, lse = run(batch, q.float(), return_lse=True)
    assert not out.isnan().any()
    rows = oracle.row_lengths(LENS, COUNTS)
    some = [*range(0, 150, 29), 127, 128, 149, 150, 151, 152, 184]
    want = oracle.attention(q[some], batch.keys, batch.values, [rows[t] for t in some], None, 0.2)
    torch.testing.assert_close(out[some].double(), want[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lse[some].double(), want[1], rtol=1e-5, atol=2e-5)


def test_equals_torchs_own_attention_on_a_bf16_cache():
    batch = make_batch([400], dtype="bf16", kv_heads=2, head_dim=64)
    q = queries(2, 400, 8, 64).float()
    k, v = (x[0].float().transpose(0, 1) for x in (batch.keys, batch.values))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=0.2, enable_gqa=True
    )
    got = run(batch, q, int32([0, 400]))
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-4, atol=2e-5)


def test_padding_tokens_are_exact_zeros():
    batch = make_batch(LENS)
    q = queries(3, 190, 4, 32)
    buffer, out = guarded([190, 4, 32], torch.bfloat16)
    got, lse = run(batch, q, out=out, return_lse=True)
    assert got is out and guards_intact(buffer)
    assert (got[185:].view(torch.int16) == 0).all() and (lse[185:] == -math.inf).all()
    assert torch.equal(got[:185], run(batch, q[:185]))


@pytest.mark.parametrize("chunk", [1, 64, 100, 128, 1000])
def test_bitwise_for_any_chunking_of_the_prompt(chunk):
    length = 150 if chunk == 1 else 1500
    batch = make_batch([length])
    q = queries(4, length, 4, 32)
    whole = run(batch, q, int32([0, length]))
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        cu, lens = int32([0, stop - start]), int32([stop])
        got = dense_attention(q[start:stop], batch.main, batch.table, cu, lens, 0.2)
        assert torch.equal(got, whole[start:stop])


def test_bitwise_alone_beside_a_long_neighbour():
    """A long neighbour makes every row's list longer; the short rows must not notice."""
    batch = make_batch([40, 9000, 130], content=[1, 2, 3])
    q = queries(5, 6, 4, 32)
    whole = run(batch, q, int32([0, 2, 4, 6]))
    for r, length in enumerate([40, 9000, 130]):
        alone = make_batch([length], content=[r + 1], extra_blocks=r, gap=16 * r, shuffle=r)
        two = slice(2 * r, 2 * r + 2)
        assert torch.equal(run(alone, q[two], int32([0, 2])), whole[two])


def test_bitwise_for_any_number_of_threads():
    batch = make_batch([1500], head_dim=64)
    q = queries(6, 1500, 8, 64)
    one = run(batch, q, int32([0, 1500]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, q, int32([0, 1500])), one)
    finally:
        torch.set_num_threads(1)


def test_c14_no_tokens_and_no_requests():
    batch = make_batch([300])
    assert run(batch, queries(1, 0, 4, 32), int32([0, 0])).shape == (0, 4, 32)
    none = (batch.main, batch.table[:0], int32([0]), int32([]), 0.2)
    assert dense_attention(queries(1, 0, 4, 32), *none).shape == (0, 4, 32)
    assert (dense_attention(queries(1, 3, 4, 32), *none) == 0).all()


BATCH = make_batch([300, 40])
GOOD = {
    "q": queries(1, 4, 4, 32),
    "main_cache": BATCH.main,
    "block_table": BATCH.table,
    "cu_seqlens_q": int32([0, 3, 4]),
    "seq_lens": BATCH.seq_lens,
    "sm_scale": 0.2,
}
BAD = [
    ({"q": queries(1, 4, 5, 32)}, ValueError, r"q\.shape\[1\].*multiple of 2 KV heads.*5"),
    ({"q": [[1.0]]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"main_cache": BATCH.index}, TypeError, "main_cache.*MainCache.*IndexCache"),
    ({"block_table": BATCH.table.to("meta")}, ValueError, r"block_table\.device.*cpu.*meta"),
    ({"cu_seqlens_q": int32([0, 4, 2])}, ValueError, "cu_seqlens_q.*rising from 0"),
    ({"seq_lens": int32([300, 513])}, ValueError, r"seq_lens.*0\.\.512.*513"),
    ({"seq_lens": int32([300, 200])}, ValueError, r"block_table\[1, 1\].*page id.*-1"),
    ({"sm_scale": math.nan}, ValueError, "sm_scale.*finite.*nan"),
    ({"out": queries(1, 4, 4, 32).half()}, TypeError, r"out\.dtype.*bfloat16.*float16"),
    ({"backend": "vllm"}, ValueError, "backend.*'vllm'"),
    ({"backend": "triton"}, NotImplementedError, "dense_attention backend.*'triton'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    dense_attention(**GOOD)
    with pytest.raises(error, match=message):
        dense_attention(**{**GOOD, **change})
