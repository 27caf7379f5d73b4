"""block_topk: the selection rule, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_msa.ops import block_topk
from tests.ops import oracle
from tests.ops.cases import guarded, guards_intact, int32

INF, NAN = math.inf, math.nan


def one_row(scores: list[float], nb: int | None = None, **options) -> list[int]:
    nb = len(scores) if nb is None else nb
    return block_topk(torch.tensor([[scores]]), int32([nb]), **options)[0, 0].tolist()


def test_newest_first_then_by_score():
    assert one_row([1.0, 9.0, 5.0, -3.0], topk=3) == [3, 1, 2]


def test_ties_go_to_the_lower_id():
    assert one_row([2.0, 7.0, 7.0, 7.0, 2.0, 0.0], topk=5) == [5, 1, 2, 3, 0]


def test_all_equal_scores_take_the_lowest_ids():
    assert one_row([3.0] * 40) == [39, *range(15)]


def test_minus_zero_equals_plus_zero():
    assert one_row([-0.0, 0.0, -0.0, 0.0, 1.0], topk=4) == [4, 0, 1, 2]
    assert one_row([0.0, -0.0, 0.0, 1.0], topk=3) == [3, 0, 1]


def test_nan_ranks_below_minus_infinity():
    assert one_row([NAN, -INF, -1.0, 0.0], topk=4) == [3, 2, 1, 0]


def test_nan_with_its_sign_set_ranks_last_too():
    negative = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    scores = torch.cat([negative, torch.tensor([-INF, NAN, 5.0, 0.0])])[None, None]
    assert block_topk(scores, int32([5]), topk=5)[0, 0].tolist() == [4, 3, 1, 0, 2]


def test_infinities_and_the_largest_numbers_rank_as_numbers():
    big = torch.finfo(torch.float32).max
    assert one_row([-big, big, INF, -INF, 0.0], topk=5) == [4, 2, 1, 0, 3]


@pytest.mark.parametrize("newest", [-INF, NAN, 0.0, INF])
@pytest.mark.parametrize("other", [INF, NAN, 3e38])
def test_newest_is_kept_whatever_the_scores(newest, other):
    assert one_row([other] * 30 + [newest])[0] == 30


def test_newest_is_the_rows_own_not_the_tables_last():
    assert one_row([1.0, 2.0, 3.0, INF, INF], nb=3, topk=2) == [2, 1]


@pytest.mark.parametrize("beyond", [INF, NAN, 1e30])
def test_entries_at_and_beyond_nb_are_ignored(beyond):
    assert one_row([1.0, 2.0, beyond, beyond], nb=2, topk=4) == [1, 0, -1, -1]


@pytest.mark.parametrize("nb", [0, 1, 2, 15, 16, 17])
def test_short_rows_are_padded_with_minus_one(nb):
    ids = one_row([float(i) for i in range(20)], nb=nb)
    count = min(16, nb)
    assert ids[count:] == [-1] * (16 - count)
    assert sorted(ids[:count]) == list(range(nb - count, nb))


def test_no_blocks_at_all():
    assert block_topk(torch.zeros(2, 3, 0), int32([0, 0, 0])).tolist() == [[[-1] * 16] * 3] * 2


def test_topk_larger_than_the_table():
    assert one_row([1.0, 2.0], topk=16) == [1, 0] + [-1] * 14


def test_init_blocks_are_kept_by_construction():
    assert one_row([-INF, NAN, 5.0, 6.0, 7.0, 0.0], topk=4, init_blocks=2) == [0, 1, 5, 4]


def test_init_and_local_blocks_overlap_in_a_short_row():
    assert one_row([1.0, 2.0, 3.0], topk=6, init_blocks=2, local_blocks=2) == [0, 1, 2, -1, -1, -1]


def test_local_blocks_above_one():
    assert one_row([9.0, 1.0, 8.0, 0.0, 0.0], topk=4, local_blocks=2) == [3, 4, 0, 2]


def test_8192_blocks_at_one_million_tokens():
    scores = torch.arange(8192.0).flip(0)[None, None]
    assert block_topk(scores, int32([8192]))[0, 0].tolist() == [8191, *range(15)]


def test_c10_each_head_selects_for_itself():
    scores = torch.zeros(4, 1, 32)
    for head in range(4):
        scores[head, 0, 8 * head : 8 * head + 8] = 10 + torch.arange(8.0)
    ids = block_topk(scores, int32([32]))
    for head in range(4):
        rest = [b for b in range(32) if b // 8 != head and b != 31]
        if head == 3:
            assert ids[3, 0].tolist() == [31, *range(30, 23, -1), *rest[:8]]
        else:
            own = [*range(8 * head + 7, 8 * head - 1, -1)]
            assert ids[head, 0].tolist() == [31, *own, *rest[:7]]
    assert len({tuple(r) for r in ids[:, 0].tolist()}) == 4


def test_c11_slice_of_a_persistent_buffer():
    heads, rows, topk = 4, 5, 16
    scores = torch.randn(heads, rows, 40, generator=torch.Generator().manual_seed(1))
    nb = int32([40, 3, 0, 17, 25])
    want = block_topk(scores, nb)
    by_token = torch.full((8192, heads, topk), -7, dtype=torch.int32)
    view = by_token[:rows].transpose(0, 1)
    assert block_topk(scores, nb, out=view) is view
    assert torch.equal(by_token[:rows], want.transpose(0, 1))
    assert (by_token[rows:] == -7).all()


def test_c11_strided_scores_of_a_larger_buffer():
    big = torch.full((64, 4, 100), NAN)
    scores = torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(2))
    big[:5, :, :40] = scores.transpose(0, 1)
    nb = int32([40, 3, 0, 17, 25])
    assert torch.equal(block_topk(big[:5, :, :40].transpose(0, 1), nb), block_topk(scores, nb))


def test_out_writes_nothing_beside_it():
    buffer, out = guarded([2, 3, 16], torch.int32)
    scores = torch.randn(2, 3, 20)
    block_topk(scores, int32([20, 0, 5]), out=out)
    assert guards_intact(buffer)
    assert torch.equal(out, block_topk(scores, int32([20, 0, 5])))


def test_a_row_depends_on_itself_alone():
    scores = torch.randn(4, 9, 50, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    nb = int32([50, 0, 7, 16, 17, 1, 33, 49, 50])
    whole = block_topk(scores, nb)
    wide = torch.cat([scores, torch.full((4, 9, 30), INF)], dim=-1)
    assert torch.equal(block_topk(wide, nb), whole)
    for row in range(9):
        assert torch.equal(
            block_topk(scores[:, row : row + 1], nb[row : row + 1])[:, 0], whole[:, row]
        )
        for head in range(4):
            assert torch.equal(block_topk(scores[head : head + 1], nb)[0, row], whole[head, row])


def test_arguments_are_not_changed():
    scores, nb = torch.tensor([[[NAN, -0.0, 1.0]]]), int32([3])
    before = scores.view(torch.int32).clone()
    block_topk(scores, nb)
    assert torch.equal(scores.view(torch.int32), before)


@pytest.mark.parametrize("shape", [(4, 0, 8), (0, 3, 8), (0, 0, 0)])
def test_c14_no_rows_or_no_heads(shape):
    assert block_topk(torch.zeros(shape), int32([0] * shape[1])).shape == (*shape[:2], 16)


SCORE = st.sampled_from([NAN, -INF, INF, 0.0, -0.0, 1.0, -1.0, 2.0**-149]) | st.floats(width=32)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(SCORE, min_size=24, max_size=24), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_scores_against_the_oracle(rows, data):
    nb = [data.draw(st.integers(0, 24)) for _ in rows]
    init, local = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    topk = data.draw(st.integers(init + local, 20))
    got = block_topk(torch.tensor([rows], dtype=torch.float32), int32(nb), topk, init, local)
    want = [oracle.select(row, n, topk, init, local) for row, n in zip(rows, nb, strict=True)]
    assert got[0].tolist() == want


NOWHERE = torch.empty(3, dtype=torch.int32, device="meta")
ONE_PLACE = torch.zeros(1, 3, 16, dtype=torch.int32).expand(2, 3, 16)
GOOD = {"scores": torch.zeros(2, 3, 20), "num_blocks": int32([20, 0, 5])}
BAD = [
    ({"scores": torch.zeros(2, 3, 20).double()}, TypeError, r"scores\.dtype.*float32.*float64"),
    ({"scores": [[1.0]]}, TypeError, "scores: expected a torch.Tensor, got list"),
    ({"scores": torch.zeros(3, 20)}, ValueError, r"scores\.shape.*heads.*\[3, 20\]"),
    ({"num_blocks": torch.tensor([20, 0, 5])}, TypeError, r"num_blocks\.dtype.*int32.*int64"),
    ({"num_blocks": int32([20, 0])}, ValueError, r"num_blocks\.shape.*\[3\].*\[2\]"),
    ({"num_blocks": int32([21, 0, 5])}, ValueError, r"num_blocks.*0\.\.20.*0\.\.21"),
    ({"num_blocks": int32([20, -1, 5])}, ValueError, r"num_blocks.*0\.\.20.*-1\.\.20"),
    (
        {"num_blocks": NOWHERE},
        ValueError,
        r"num_blocks\.device",
    ),
    ({"topk": 0}, ValueError, "topk.*>= 1.*got 0"),
    ({"topk": 2, "init_blocks": 2}, ValueError, "topk.*>= 3.*got 2"),
    ({"topk": 16.0}, TypeError, "topk.*an int.*16.0"),
    ({"topk": True}, TypeError, "topk.*an int.*True"),
    ({"local_blocks": 0}, ValueError, "local_blocks.*>= 1.*got 0"),
    ({"init_blocks": -1}, ValueError, "init_blocks.*>= 0.*got -1"),
    ({"out": torch.zeros(2, 3, 16)}, TypeError, r"out\.dtype.*int32"),
    ({"out": torch.zeros(2, 3, 8, dtype=torch.int32)}, ValueError, r"out\.shape.*16.*8"),
    (
        {"out": ONE_PLACE},
        ValueError,
        r"out\.stride",
    ),
    ({"backend": "cuda"}, ValueError, "backend.*'cuda'"),
    ({"backend": "flydsl"}, NotImplementedError, "block_topk backend.*'flydsl'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        block_topk(**{**GOOD, **change})
