"""Ownership: every (head, row, block) is scored once and delivered once to each owner."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.shard import Shard
from rocm_msa.config import BLOCK_TOKENS

steady = settings(derandomize=True, deadline=None, max_examples=150)

GROUPS = [(p, h) for p in (1, 2, 3, 4, 5, 8, 16) for h in (1, 2, 4, 8) if p % h == 0 or h % p == 0]


def shards(ranks: int, heads: int) -> list[Shard]:
    return [Shard(rank, ranks, heads) for rank in range(ranks)]


def row_lengths(seq_len: int, rows: int) -> list[int]:
    """Causal lengths of a request's rows, by the contract."""
    return [max(0, seq_len - rows + i + 1) if seq_len else 0 for i in range(rows)]


@st.composite
def batches(draw):
    """(ranks, heads, causal length of every row)."""
    ranks, heads = draw(st.sampled_from(GROUPS))
    rows = draw(st.integers(1, 9))
    edges = st.sampled_from([0, 1, 127, 128, 129, 16 * 128, 17 * 128 + 1])
    seq_lens = draw(st.lists(edges | st.integers(0, 40 * BLOCK_TOKENS), min_size=0, max_size=6))
    return ranks, heads, [n for seq_len in seq_lens for n in row_lengths(seq_len, rows)]


@steady
@given(batches())
def test_scored_once_and_delivered_once_to_each_owner(batch):
    ranks, heads, lengths = batch
    group = shards(ranks, heads)
    scored, delivered = Counter(), Counter()
    for shard in group:
        for row, length in enumerate(lengths):
            for block in shard.blocks(-(-length // BLOCK_TOKENS)):
                for head in range(heads):
                    scored[head, row, block] += 1
                    delivered.update((head, row, block, owner) for owner in shard.owners(head))
    wanted = [
        (head, row, block)
        for head in range(heads)
        for row, length in enumerate(lengths)
        for block in range(-(-length // BLOCK_TOKENS))
    ]
    assert scored == Counter(wanted)
    owners = {h: [s.rank for s in group if h in s.own_heads] for h in range(heads)}
    assert delivered == Counter((*w, owner) for w in wanted for owner in owners[w[0]])


@pytest.mark.parametrize(("ranks", "heads"), GROUPS)
def test_every_head_is_pushed_once_and_owned_as_vllm_shards_kv_heads(ranks, heads):
    group = shards(ranks, heads)
    pushed = [head for shard in group for head in shard.pushed_heads]
    assert pushed == list(range(heads))
    for shard in group:
        per_rank = max(1, heads // ranks)
        first = shard.rank * heads // ranks if ranks <= heads else shard.rank // (ranks // heads)
        assert list(shard.own_heads) == list(range(first, first + per_rank))
        assert len(shard.own_heads) == shard.heads_per_rank == per_rank
        for head in shard.own_heads:
            assert shard.rank in shard.owners(head) and len(shard.owners(head)) == shard.replicas
            assert group[shard.pusher(head)].pushed_heads.count(head) == 1
        assert sorted((*shard.peers, shard.rank)) == list(range(ranks))
        assert [shard.of(r) for r in range(ranks)] == group


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_is_first_of_one_peer(ranks):
    group = shards(ranks, 4)
    for turn in range(ranks - 1):
        assert {shard.peers[turn] for shard in group} == set(range(ranks))


@steady
@given(st.sampled_from(GROUPS), st.integers(0, 9000))
def test_counts_agree_with_the_lists(group, num_blocks):
    for shard in shards(*group):
        blocks = list(shard.blocks(num_blocks))
        assert len(blocks) == shard.owned_blocks(num_blocks) <= shard.slots(num_blocks)
        assert all(b < num_blocks and shard.block_rank(b) == shard.rank for b in blocks)
        assert blocks == [i * shard.ranks + shard.rank for i in range(len(blocks))]
    assert sum(s.owned_blocks(num_blocks) for s in shards(*group)) == num_blocks
    assert shards(*group)[0].slots(num_blocks) == shards(*group)[0].owned_blocks(num_blocks)


@steady
@given(st.sampled_from(GROUPS), st.integers(0, 40 * BLOCK_TOKENS))
def test_owned_keys_are_the_first_of_the_owned_blocks(group, length):
    for shard in shards(*group):
        keys = [k for k in range(length) if shard.block_rank(k // BLOCK_TOKENS) == shard.rank]
        assert shard.owned_keys(length) == len(keys)
        blocks = list(shard.blocks(-(-length // BLOCK_TOKENS)))
        packed = [
            blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in range(len(keys))
        ]
        assert packed == keys


def test_refused():
    with pytest.raises(ValueError, match=r"rank: expected 0\.\.3, got 4"):
        Shard(4, 4, 4)
    with pytest.raises(
        ValueError, match="ranks: expected a divisor or multiple of 4 index heads, got 3"
    ):
        Shard(0, 3, 4)
    with pytest.raises(ValueError, match="heads: expected >= 1, got 0"):
        Shard(0, 1, 0)
    with pytest.raises(TypeError, match="ranks: expected an int"):
        Shard(0, 2.0, 4)
    with pytest.raises(ValueError, match=r"head: expected 0\.\.3, got 4"):
        Shard(0, 4, 4).owners(4)
