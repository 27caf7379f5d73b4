"""block_topk as its gfx950 code objects, in the emulator: the reference's ids, bit for bit."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from rocm_msa.ops import block_topk
from rocm_msa.ops.block_topk.flydsl_gfx950 import Build
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated, resources
from tests.ops.cases import guarded, guards_intact, int32

INF, NAN = math.inf, math.nan
SMALL, LARGE = Build(4, 4, 16), Build(8, 16, 16)
EDGES = torch.tensor(
    [NAN, -NAN, -INF, INF, 0.0, -0.0, 2.0**-149, -(2.0**-149), 1.0, 3.4e38, -3.4e38]
)


def select(scores, nb, *options, builds=(SMALL, LARGE), schedule=None, **named):
    """(ids of the compiled kernel, reports); no finding."""
    with emulated(builds, schedule=schedule) as reports:
        ids = block_topk(scores, nb, *options, backend="flydsl", **named)
    assert_clean(reports, launches=1)
    return ids, reports


def check(scores, nb, *options, **named):
    got, _ = select(scores, nb, *options, **named)
    assert torch.equal(got, block_topk(scores, nb, *options, backend="reference"))


def edge_scores(heads: int, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Edge values, repeated ones and random ones mixed."""
    g = torch.Generator().manual_seed(seed)
    shape = (heads, rows, blocks)
    edges = EDGES[torch.randint(len(EDGES), shape, generator=g)]
    ties = torch.randint(-2, 3, shape, generator=g).float()
    kind = torch.randint(3, shape, generator=g)
    return torch.where(
        kind == 0, edges, torch.where(kind == 1, ties, torch.randn(shape, generator=g))
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_schedule(schedule):
    check(edge_scores(2, 3, 300, 1), int32([300, 17, 0]), schedule=schedule)


@pytest.mark.parametrize(
    "blocks", [1, 2, 15, 16, 17, 64, 65, 255, 257, 1023, 1024, 1025, 8191, 8192]
)
def test_every_width(blocks):
    check(edge_scores(1, 3, blocks, blocks), int32([blocks, max(0, blocks - 1), min(blocks, 9)]))


def test_lengths_of_one_to_nine_rows_and_four_heads():
    scores = edge_scores(4, 9, 100, 2)
    check(scores, int32([100, 0, 1, 2, 15, 16, 17, 64, 99]))


@pytest.mark.parametrize("seed", range(4))
def test_edge_values_with_kept_blocks(seed):
    scores = edge_scores(1, 8, 24, seed)
    nb = int32([24, 0, 1, 3, 5, 8, 20, 23])
    for init, local in ((0, 1), (2, 3), (3, 1)):
        check(scores, nb, 8, init, local, builds=[Build(4, 4, 8)])


def test_all_equal_scores_take_the_lowest_ids():
    ids, _ = select(torch.full((1, 1, 2000), 3.0), int32([2000]))
    assert ids[0, 0].tolist() == [1999, *range(15)]


def test_only_nan_and_the_newest_of_minus_infinity():
    ids, _ = select(torch.tensor([[[NAN, NAN, -INF, NAN, -INF]]]), int32([5]))
    assert ids[0, 0].tolist() == [4, 2, 0, 1, 3, *[-1] * 11]


def test_strided_scores_and_out_leave_the_rest_alone():
    big = torch.full((9, 2, 3, 50), NAN)
    scores = big[2:7, :, 1, :40].transpose(0, 1)
    scores.copy_(edge_scores(2, 5, 40, 4))
    nb = torch.stack([int32([40, 3, 0, 17, 25]), int32([7] * 5)], dim=1)[:, 0]
    buffer, out = guarded([5, 2, 16], torch.int32)
    got, _ = select(scores, nb, out=out.transpose(0, 1))
    assert got.data_ptr() == out.data_ptr() and guards_intact(buffer)
    assert torch.equal(got, block_topk(scores, nb))


@pytest.mark.parametrize("shape", [(4, 0, 8), (0, 3, 8), (0, 0, 0), (2, 3, 0)])
def test_nothing_to_launch(shape):
    with emulated([SMALL]) as reports:
        ids = block_topk(torch.zeros(shape), int32([0] * shape[1]), backend="flydsl")
    assert not reports and ids.shape == (*shape[:2], 16) and (ids == -1).all()


def test_what_has_no_build_is_refused():
    with emulated([SMALL]), pytest.raises(NotImplementedError, match=r"max_blocks.*<= 8192.*8193"):
        block_topk(torch.zeros(1, 1, 8193), int32([1]), backend="flydsl")
    with emulated([SMALL]), pytest.raises(NotImplementedError, match=r"topk.*<= 64.*65"):
        block_topk(torch.zeros(1, 1, 8), int32([1]), 65, backend="flydsl")
    for bad in ({"kept": 65}, {"kept": 0}, {"waves": 0}, {"registers": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Build(**{**asdict(SMALL), **bad})


def test_resources_and_bytes():
    for build in (SMALL, LARGE):
        used = resources(build)
        assert used["scratch_bytes"] == used["vgpr_spills"] == used["sgpr_spills"] == 0
    scores, nb = edge_scores(4, 4, 1024, 5), int32([1024] * 4)
    _, (report,) = select(scores, nb)
    least = scores.nbytes + nb.nbytes + 4 * 4 * 16 * 4
    assert report.launches[0].hbm_bytes <= 1.05 * least + 3 * 128  # parts of lines
