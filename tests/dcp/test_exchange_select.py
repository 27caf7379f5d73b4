"""The exchange on gfx950 selects what one rank alone selects, bit for bit, without a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dcp import exchange_gfx950
from dcp.mailbox_layout import Geometry
from dcp.plan import Batch
from dcp.shard import Shard
from gfx950_emu import Schedule
from tests.dcp.exchange_group import CANDIDATES, DIM, SCORES, Case, Group, inputs
from tests.launcher.emulated import resources

RANDOM = Schedule("random", 3, (1, 2000))
EDGES = (0, 1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65)  # blocks
RAGGED = (128 * 18 + 1, 1, 0, 128, 130, 128 * 33, 128 * 17 + 2, 0)


def check(case: Case, schedule: Schedule = RANDOM) -> Group:
    group = Group(case)
    group.queue()
    report = group.run(schedule)
    report.raise_for_findings()
    assert group.errors() == [None] * case.ranks
    assert group.generations() == [2] * case.ranks
    assert group.wrong() == []
    return group


QUICK = [
    Case(lens=RAGGED, rows=4),
    Case(lens=RAGGED, rows=4, results=SCORES),
    Case(ranks=2, lens=RAGGED, rows=2),
    Case(ranks=8, lens=RAGGED, rows=3),
    Case(lens=RAGGED, rows=9, grid=3),
    Case(lens=RAGGED, kind="fp8", results=SCORES),
    Case(lens=RAGGED, kind="bf16", results=SCORES),
]


@pytest.mark.parametrize(
    "case", QUICK, ids=lambda c: f"{c.ranks}-{c.rows}-{c.kind}-{c.results.value}"
)
def test_ragged_and_padded_requests(case):
    check(case)


@pytest.mark.parametrize("results", [CANDIDATES, SCORES])
@pytest.mark.parametrize("content", ["ties", "zero", "nan", "extreme"])
def test_ties_nan_and_extremes(content, results):
    check(Case(lens=(128 * 70, 4000, 0, 128 * 21 + 5), content=content, results=results))


def test_replicated_heads_with_ties():
    check(Case(ranks=8, lens=(128 * 70, 4000), content="ties"))


@pytest.mark.parametrize("results", [CANDIDATES, SCORES])
def test_every_number_of_blocks_around_the_edges(results):
    lens = tuple(n for blocks in EDGES for n in {128 * blocks, max(0, 128 * blocks - 127)})
    check(Case(lens=lens, results=results, pages=9))


def test_more_blocks_than_a_wave_holds_at_once():
    """550 blocks a rank are taken in two turns, 1,100 blocks of scores in nine."""
    check(Case(ranks=2, lens=(128 * 1100 - 3, 128), pages=5))
    check(Case(lens=(128 * 1100 - 3, 128), pages=5, results=SCORES))


@pytest.mark.parametrize("grid", [1, 5])
def test_any_number_of_workgroups(grid):
    check(Case(lens=RAGGED, rows=4, grid=grid))


def test_no_work_and_no_row():
    check(Case(lens=(0, 0, 0), rows=2))
    group = Group(Case(lens=(0,)))
    group.queue()
    group.run(RANDOM).raise_for_findings()
    assert all(bool((group.selected(r) == -1).all()) for r in range(4))


def test_kept_blocks():
    check(Case(lens=RAGGED, rows=4, init=2, local=3))
    check(Case(lens=RAGGED, rows=4, init=1, local=2, results=SCORES))
    check(Case(lens=(3000, 100), init=9, local=7))  # nothing is left to choose


@pytest.mark.slow
@pytest.mark.parametrize("results", [CANDIDATES, SCORES])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_longest_context(ranks, results):
    for content in ("random", "ties"):
        check(Case(ranks=ranks, lens=(128 * 8192, 128 * 8191), pages=7, grid=4, content=content,
                   results=results))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("ranks,heads", [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 4)])
def test_rows_and_heads(ranks, heads, rows):
    for results in (CANDIDATES, SCORES):
        check(Case(ranks=ranks, heads=heads, rows=rows, lens=RAGGED, results=results))


@pytest.mark.slow
@pytest.mark.parametrize("results", [CANDIDATES, SCORES])
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
def test_caches_and_queries(kind, query, results):
    if kind == "bf16" and query is torch.float16:
        case = Case(kind=kind, query=query)
        with pytest.raises(NotImplementedError, match="bf16 cache"):
            Group(case).queue()
        return
    for content in ("random", "ties", "nan"):
        check(Case(kind=kind, query=query, lens=RAGGED, rows=2, content=content, results=results))


@pytest.mark.slow
def test_other_numbers_of_selected_blocks():
    for topk in (1, 4, 24, 40):
        check(Case(lens=(128 * 70, 4000), topk=topk))
        check(Case(lens=(128 * 70, 4000), topk=topk, results=SCORES))


# What is refused


def refusal(case: Case, geometry: Geometry | None = None, **options):
    group = Group(case, geometry)
    x = inputs(case)
    shard = Shard(0, case.ranks, case.heads)
    batch = Batch(len(case.lens), case.rows, x.table.shape[1])
    own = x.index_q[:, list(shard.own_heads)].contiguous()
    out = torch.empty(len(shard.own_heads), batch.rows, case.topk, dtype=torch.int32)
    exchange_gfx950.run(
        shard, group.geometry, group.memory(0), own, x.index, x.table, x.num_blocks, batch,
        *case.kept, out, results=case.results, **options,
    )  # fmt: skip


def test_refusals():
    case = Case(lens=(1000, 2000))
    g = case.geometry()
    with pytest.raises(ValueError, match=r"geometry.rows: expected >= 2, got 1"):
        refusal(case, replace(g, rows=1))
    with pytest.raises(ValueError, match=r"geometry.slots: expected >= 5, got 4"):
        refusal(case, replace(g, slots=4))
    with pytest.raises(ValueError, match=r"geometry.topk: expected 16, got 8"):
        refusal(case, replace(g, topk=8))
    with pytest.raises(ValueError, match=r"geometry.query_words: expected 64, got 32"):
        refusal(case, replace(g, query_words=32))
    with pytest.raises(ValueError, match=r"geometry.heads: expected 4, got 8"):
        refusal(case, replace(g, heads=8))
    long = Case(lens=(128 * 200,), pages=3, results=SCORES)
    with pytest.raises(ValueError, match=r"geometry.result_words: expected >= 51, got 32"):
        refusal(long, replace(long.geometry(), result_words=0))
    with pytest.raises(ValueError, match=r"grid: expected <= 512 resident workgroups, got 513"):
        refusal(case, grid=513)
    with pytest.raises(NotImplementedError, match=r"rows_per_request \* index heads on flydsl"):
        refusal(Case(lens=(1000,), rows=17))
    with pytest.raises(NotImplementedError, match="topk on flydsl"):
        refusal(Case(lens=(1000,), topk=65))
    with pytest.raises(
        NotImplementedError, match=r"requests on flydsl: expected <= 1024, got 1025"
    ):
        refusal(Case(lens=(0,) * 1025, pages=1))
    with pytest.raises(ValueError, match="ranks"):
        exchange_gfx950.Build("nvfp4", "bf16", 1, 3, 4, 16, "scores")


# What is resident


def resident(build) -> int:
    """Workgroups of four waves, one a SIMD, that a compute unit's registers allow."""
    return 512 // max(128 // 8, -(-resources(build)["vgpr"] // 8) * 8)


@pytest.mark.parametrize("case", QUICK[:5], ids=lambda c: f"{c.ranks}-{c.rows}-{c.results.value}")
def test_registers_allow_the_grid(case):
    x = inputs(case)
    batch = Batch(len(case.lens), case.rows, x.table.shape[1])
    (build,) = exchange_gfx950.needs(
        Shard(0, case.ranks, case.heads), x.index_q, x.index, batch, case.topk, case.results
    )
    found = resources(build)
    assert found["vgpr_spills"] == found["sgpr_spills"] == found["scratch_bytes"] == 0
    assert found["agpr"] == 0
    assert resident(build) >= exchange_gfx950.WORKGROUPS_A_CU
    assert DIM // 2 == exchange_gfx950.QUERY_WORDS
