"""The exchange against one rank: block_topk(index_score_decode(...)), bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp import reference
from dcp.plan import Results
from dcp.shard import Shard
from rocm_msa.ops import block_topk, index_score_decode
from rocm_msa.ops.rows import decode_rows
from tests.ops.cases import int32, make_batch, queries, random_values

HEADS = 4
RANKS = [1, 2, 4, 8]
FORMS = list(Results)
MANY_BLOCKS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 129, 255, 1000, 8191, 8192)
INF, NAN, BIG = math.inf, math.nan, torch.finfo(torch.float32).max


def through_messages(ranks, form, scores, num_blocks, topk=16, init=0, local=1):
    """Selection of whole rows' scores `[heads, rows, blocks]`, sent in shards to the owners."""
    heads, _, max_blocks = scores.shape
    shards = [Shard(rank, ranks, heads) for rank in range(ranks)]
    sent = []
    for shard in shards:
        own = scores[..., shard.rank :: ranks]
        own = torch.nn.functional.pad(own, (0, shard.slots(max_blocks) - own.shape[-1]))
        sent.append(reference.message(shard, own, num_blocks, topk, form))
    selected = []
    for shard in shards:
        received = torch.stack([m[list(shard.own_heads)] for m in sent])
        selected.append(
            reference.select(shard, received, num_blocks, max_blocks, topk, init, local, form)
        )
    return shards, selected


def same_as_one_rank(ranks, form, scores, num_blocks, *kept):
    whole = block_topk(scores, num_blocks, *kept)
    for shard, got in zip(*through_messages(ranks, form, scores, num_blocks, *kept), strict=True):
        assert torch.equal(got, whole[list(shard.own_heads)])


def picks(values, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]


SHAPE = (HEADS, len(MANY_BLOCKS), max(MANY_BLOCKS))
CONTENTS = {
    "random": lambda: random_values(0, *SHAPE),
    "ties-of-three-values": lambda: picks([-1.0, 0.5, 2.0], *SHAPE),
    "all-equal": lambda: torch.full(SHAPE, 3.0),
    "all-nan": lambda: torch.full(SHAPE, NAN),
    "nan-among-numbers": lambda: picks([NAN, NAN, -INF, 1.0, -2.0], *SHAPE),
    "few-numbers-among-nan": lambda: torch.where(random_values(1, *SHAPE) > 3.5, 1.0, NAN),
    "extremes": lambda: picks([INF, -INF, BIG, -BIG, 0.0, -0.0, 1e-45, -1e-45, NAN], *SHAPE),
    "rising": lambda: torch.arange(SHAPE[2]).float().expand(SHAPE).contiguous(),
    "falling": lambda: -torch.arange(SHAPE[2]).float().expand(SHAPE).contiguous(),
    "best-on-one-rank": lambda: random_values(2, *SHAPE) + (torch.arange(SHAPE[2]) % 8 == 5) * 9,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_any_scores_in_any_number_of_blocks(ranks, content, form):
    same_as_one_rank(ranks, form, CONTENTS[content](), int32(MANY_BLOCKS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [(16, 1, 1), (16, 3, 2), (4, 2, 2), (1, 0, 1), (24, 0, 5)])
def test_any_kept_blocks(kept, form):
    scores = picks([NAN, -1.0, 0.0, 1.0], 4, 60, 60, seed=3)
    for ranks in RANKS:
        same_as_one_rank(ranks, form, scores, int32(range(60)), *kept)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from(RANKS),
    st.sampled_from(FORMS),
    st.lists(st.sampled_from([NAN, -INF, INF, 0.0, -0.0, 1.0, 2.0]), min_size=1, max_size=48),
    st.integers(1, 8),
    st.data(),
)
def test_any_small_row(ranks, form, row, topk, data):
    nb = data.draw(st.integers(0, len(row)))
    local = data.draw(st.integers(1, topk))
    init = data.draw(st.integers(0, topk - local))
    scores = torch.tensor([[row]]).expand(HEADS, 1, len(row)).contiguous()
    same_as_one_rank(ranks, form, scores, int32([nb]), topk, init, local)


# --- from the caches ---


def own_queries(index_q, ranks):
    """Each rank's `index_q`, as tensor parallelism cuts `[rows, heads, dim]`."""
    shards = [Shard(rank, ranks, index_q.shape[1]) for rank in range(ranks)]
    return [index_q[:, list(s.own_heads)].contiguous() for s in shards]


def alone(batch, index_q, rows_per_request, num_blocks):
    scores = index_score_decode(index_q, batch.index, batch.table, batch.seq_lens, rows_per_request)
    return block_topk(scores, num_blocks)


def compare(batch, index_q, rows_per_request=1, ranks=RANKS, forms=FORMS):
    num_blocks = decode_rows(batch.seq_lens, rows_per_request).num_blocks.int()
    whole = alone(batch, index_q, rows_per_request, num_blocks)
    for count in ranks:
        for form in forms:
            group = reference.Group(count, index_q.shape[1], results=form)
            got = group.select(
                own_queries(index_q, count), batch.index, batch.table, batch.seq_lens,
                rows_per_request, num_blocks,
            )  # fmt: skip
            for shard, ids in zip(group.shards, got, strict=True):
                assert torch.equal(ids, whole[list(shard.own_heads)]), (count, form)
    return whole


@pytest.mark.parametrize("rows", range(1, 10))
def test_rows_of_ragged_and_padded_requests(rows):
    """Lengths at block edges and below the rows a request; the third and last are padding."""
    lens = [128 * 18 + 1, 1, 0, 128, 130, 128 * 33, rows, 128 * 17 + rows // 2, 0]
    batch = make_batch(lens, extra_blocks=2)
    compare(batch, queries(1, rows * len(lens), HEADS, 32), rows)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_other_caches_and_widths(dtype):
    batch = make_batch([3000, 129, 2049], dtype=dtype, head_dim=128, gap=48, extra_blocks=3)
    compare(batch, queries(2, 6, HEADS, 128, dtype=torch.float16), 2)


@pytest.mark.parametrize(("heads", "ranks"), [(1, [1, 2, 8]), (8, [2, 4, 16]), (2, [4])])
def test_other_numbers_of_heads(heads, ranks):
    batch = make_batch([2500, 700])
    compare(batch, queries(3, 2, heads, 32), ranks=ranks)


def test_padding_alone_and_no_request():
    ids = compare(make_batch([0, 0]), queries(4, 4, HEADS, 32), 2)
    assert (ids == -1).all()
    assert compare(make_batch([]), queries(4, 0, HEADS, 32)).shape == (HEADS, 0, 16)


def test_ties_across_shards_take_the_lower_block():
    """Every block holds the same page's keys; also 8192 blocks of them."""
    batch = make_batch([1024])
    for blocks in (17, 40, 8192):
        batch.table, batch.lens = batch.table[:, :1].expand(1, blocks).contiguous(), [128 * blocks]
        ids = compare(batch, queries(5, 3, HEADS, 32), 3)
        assert ids[0, 2].tolist() == [blocks - 1, *range(15)]


def test_8192_blocks_of_a_few_pages():
    batch = make_batch([128 * 40])
    pages = batch.table[0, :40]
    batch.table = pages[torch.randint(40, (1, 8192), generator=torch.Generator().manual_seed(1))]
    batch.lens = [128 * 8192 - 5]
    compare(batch, queries(6, 4, HEADS, 32), 4)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_queries_that_overflow(value):
    """Rows of NaN, of infinities and of both, beside one that is left alone."""
    batch = make_batch([128 * 37 + 3, 500])
    index_q = queries(7, 4, HEADS, 32, dtype=torch.float32)
    index_q[0, :, 3], index_q[1, 2] = value, value
    compare(batch, index_q, 2)


def test_all_owners_of_a_head_take_its_pushers_queries():
    batch = make_batch([5000])
    index_q = queries(8, 1, HEADS, 32)
    num_blocks = decode_rows(batch.seq_lens, 1).num_blocks.int()
    whole = alone(batch, index_q, 1, num_blocks)
    cut = own_queries(index_q, 8)
    for rank in range(1, 8, 2):
        cut[rank] = torch.zeros_like(cut[rank])
    group = reference.Group(8, HEADS)
    got = group.select(cut, batch.index, batch.table, batch.seq_lens, 1, num_blocks)
    for shard, ids in zip(group.shards, got, strict=True):
        assert torch.equal(ids, whole[list(shard.own_heads)])


def test_shares_of_keys_agree_with_the_shard():
    lengths = torch.arange(0, 128 * 9 + 2)
    for shard in (Shard(rank, ranks, 4) for ranks in RANKS for rank in range(ranks)):
        keys = reference.owned_keys(shard, lengths)
        assert keys.tolist() == [shard.owned_keys(n) for n in lengths.tolist()]
        blocks = reference.owned_blocks(shard, lengths)
        assert blocks.tolist() == [shard.owned_blocks(n) for n in lengths.tolist()]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"index_q": [torch.zeros(2, 2, 32)] * 2}, ValueError, r"index_q.shape\[1\]: expected 1"),
        ({"index_q": [torch.zeros(2, 1, 32)]}, ValueError, r"len\(index_q\): expected 4 ranks"),
        ({"num_blocks": int32([8, 3])}, ValueError, r"num_blocks\[1\]: expected 2, got 3"),
        ({"num_blocks": int32([8])}, ValueError, r"num_blocks.shape: expected \[2\]"),
        ({"seq_lens": int32([1000, 9999])}, ValueError, "seq_lens: expected 0..1152"),
        ({"rows_per_request": 3}, ValueError, r"index_q.shape\[0\]"),
        ({"topk": 1, "init_blocks": 1}, ValueError, "topk: expected >= 2 kept blocks, got 1"),
        ({"local_blocks": 0}, ValueError, "local_blocks: expected >= 1, got 0"),
        ({"index_cache": None}, TypeError, "index_cache: expected an IndexCache"),
    ],
)
def test_refused(change, error, words):
    batch = make_batch([1000, 200])
    given = {
        "index_q": [torch.zeros(2, 1, 32)] * 4,
        "index_cache": batch.index,
        "block_table": batch.table,
        "seq_lens": batch.seq_lens,
        "rows_per_request": 1,
        "num_blocks": int32([8, 2]),
    }
    reference.Group(4, 4).select(**given)
    if "index_q" in change and len(change["index_q"]) == 2:
        change = {"index_q": change["index_q"] * 2}
    with pytest.raises(error, match=words):
        reference.Group(4, 4).select(**(given | change))
