"""Read plans and descriptors: every byte of a rank's row from the right place, few descriptors."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.cache.pages import main_page
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.vllm_plugin.nixl.plan import descriptors, owned_heads, read_plan, source_rank

NVFP4, FP8 = CacheDType.NVFP4, CacheDType.FP8
H = MINIMAX_M3.kv_heads
SIZES = (1, 2, 4, 8, 16)


def row(tp, main=NVFP4, index=NVFP4, draft=0):
    rank = MINIMAX_M3.shard(tp)
    pages = [main_page(rank.kv_heads, 128, main)] * draft
    return OuterBlockRow.of(MINIMAX_M3, rank, main, index, draft=pages)


def plan(local_tp, rank, remote_tp, **options):
    local, remote = row(local_tp, **options), row(remote_tp, **options)
    return read_plan(H, local, local_tp, rank, remote, remote_tp)


def labels(tp: int, rank: int, **options) -> np.ndarray:
    """A row in units of 16 bytes, each named by page, head and place: what must arrive."""
    parts = []
    for number, page in enumerate(row(tp, **options).pages):
        units = page.page.head_bytes // 16
        heads = owned_heads(H, tp, rank) if page.sharded else range(1)
        for head in heads:
            parts.append(number * 10**8 + head * 10**6 + np.arange(units))
    return np.concatenate(parts)


@pytest.mark.parametrize("local_tp", SIZES)
@pytest.mark.parametrize("remote_tp", SIZES)
def test_every_byte_comes_from_the_right_place(local_tp, remote_tp):
    options = {"index": FP8, "draft": 1}
    for rank in range(local_tp):
        got = np.full(row(local_tp, **options).nbytes // 16, -1)
        for source, pieces in plan(local_tp, rank, remote_tp, **options).pieces.items():
            theirs = labels(remote_tp, source, **options)
            for piece in pieces:
                assert piece.remote_rank == source
                here, there, n = piece.local_offset, piece.remote_offset, piece.nbytes
                assert here % 16 == there % 16 == n % 16 == 0
                span = slice(here // 16, (here + n) // 16)
                assert (got[span] == -1).all(), "bytes are read twice"
                got[span] = theirs[there // 16 : (there + n) // 16]
        assert (got == labels(local_tp, rank, **options)).all()


@pytest.mark.parametrize(
    ("local_tp", "remote_tp", "a_block"),
    [(1, 1, 1), (4, 4, 1), (8, 8, 1), (8, 4, 1), (4, 8, 1), (16, 8, 1)],
)
def test_same_heads_are_one_piece(local_tp, remote_tp, a_block):
    for rank in range(local_tp):
        found = plan(local_tp, rank, remote_tp)
        assert found.reason is None
        assert [len(p) for p in found.pieces.values()] == [a_block]


@pytest.mark.parametrize(("local_tp", "remote_tp", "sources"), [(1, 2, 2), (2, 4, 2), (1, 8, 4)])
def test_fewer_ranks_gather_heads_and_read_the_index_page_once(local_tp, remote_tp, sources):
    found = plan(local_tp, 0, remote_tp)
    assert len(found.pieces) == sources
    assert f"prefill {remote_tp}, decode {local_tp}" in found.reason
    assert found.nbytes == row(local_tp).nbytes
    # One run of heads a main page and source; all index pages are one run of one source.
    assert sum(map(len, found.pieces.values())) == 60 * sources + 1


def test_descriptors_a_block_as_documented():
    """The table of docs/disaggregation.md: the most that a rank of the full model reads."""
    table = {1: (1, 121, 241, 241), 2: (61, 1, 121, 121), 4: (61, 61, 1, 1), 8: (61, 61, 1, 1)}
    for local_tp, row_ in table.items():
        for remote_tp, most in zip((1, 2, 4, 8), row_, strict=True):
            plans = [plan(local_tp, rank, remote_tp) for rank in range(local_tp)]
            assert max(sum(map(len, p.pieces.values())) for p in plans) == most


def test_readers_of_a_shared_head_are_spread_over_its_holders():
    assert {source_rank(H, 8, 0, reader) for reader in range(4)} == {0, 1}
    assert [source_rank(H, 4, head, 3) for head in range(4)] == [0, 1, 2, 3]
    assert [owned_heads(H, 8, r)[0] for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"rank: expected 0\.\.3, got 4"):
        owned_heads(H, 4, 4)


def describe(pieces, local_blocks, remote_blocks, nbytes, pad=0):
    stride = nbytes + pad
    return descriptors(pieces, 0x1000, stride, local_blocks, 0x9000, stride, remote_blocks)


def test_public_case_c35_adjacent_blocks_are_one_descriptor():
    ids = [5, 6, 7, 20, 21, 40]
    (pieces,) = plan(4, 0, 4).pieces.values()
    n = row(4).nbytes
    local, remote = describe(pieces, ids, ids, n)
    assert (local[:, 1] // n).tolist() == [3, 2, 1]
    assert (local[:, 1] == remote[:, 1]).all()
    assert (local[:, 0] - 0x1000 == np.array([5, 20, 40]) * n).all()
    # A run ends where either side's does.
    local, _ = describe(pieces, [1, 2, 3, 4], [7, 8, 12, 13], n)
    assert (local[:, 1] // n).tolist() == [2, 2]
    # Descending ids, and rows with a gap between them, are not one run.
    assert len(describe(pieces, [3, 2], [3, 2], n)[0]) == 2
    assert len(describe(pieces, [2, 3], [2, 3], n, pad=64)[0]) == 2


def test_descriptors_carry_exactly_the_plan():
    """Random blocks and plans against a copy of every piece of every block."""
    random_ = random.Random(0)
    for _ in range(30):
        local_tp, remote_tp = random_.choice(SIZES), random_.choice(SIZES)
        rank = random_.randrange(local_tp)
        n = random_.randrange(1, 12)
        here, there = (random_.sample(range(40), n) for _ in range(2))
        if random_.random() < 0.5:
            here, there = sorted(here), sorted(there)
        mine, theirs = row(local_tp).nbytes, row(remote_tp).nbytes
        for pieces in plan(local_tp, rank, remote_tp).pieces.values():
            local, remote = descriptors(pieces, 0, mine, here, 0, theirs, there)
            want = {
                (b * mine + p.local_offset + k, r * theirs + p.remote_offset + k)
                for b, r in zip(here, there, strict=True)
                for p in pieces
                for k in range(0, p.nbytes, 1024)
            }
            got = {
                (int(a[0]) + k, int(b[0]) + k)
                for a, b in zip(local, remote, strict=True)
                for k in range(0, int(a[1]), 1024)
            }
            assert got == want
            assert local[:, 1].sum() == n * sum(p.nbytes for p in pieces)


def test_offsets_beyond_32_bits():
    (pieces,) = plan(4, 0, 4).pieces.values()
    local, _ = describe(pieces, [200_000], [3], row(4).nbytes)
    assert int(local[0, 0]) == 0x1000 + 200_000 * 1_631_232


def test_refusals():
    (pieces,) = plan(4, 0, 4).pieces.values()
    with pytest.raises(ValueError, match="remote_blocks: expected 2 block ids, got 1"):
        describe(pieces, [1, 2], [1], 16)
    assert len(describe(pieces, [], [], 16)[0]) == 0
