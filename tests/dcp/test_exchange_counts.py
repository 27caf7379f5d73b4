"""What a launch of the gfx950 exchange reads, multiplies and sends, counted in the emulator."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from dcp.mailbox_layout import tag
from gfx950_emu import Schedule
from rocm_msa.cache.pages import index_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device.query import TERMS
from rocm_msa.ops import index_score_decode
from rocm_msa.ops.index_score_decode import flydsl_gfx950 as score_module
from tests.dcp.exchange_group import SCORES, Case, Group, inputs
from tests.launcher.emulated import emulated

CASE = Case(lens=(128 * 161, 128 * 80 + 5), rows=4, grid=4)
CANDIDATE_BLOCKS = (160, 80)  # all but the newest; the row that sees the most
SCHEDULE = Schedule("random", 1, (1, 100_000))
MFMAS_A_BLOCK = BLOCK_TOKENS // 16 * TERMS["bf16"]  # of one tile of columns


@functools.cache
def launched(case: Case) -> tuple[Group, tuple]:
    group = Group(case)
    group.queue()
    report = group.run(SCHEDULE)
    report.raise_for_findings()
    assert group.wrong() == []
    return group, report.launches


def products(launch) -> int:
    return sum(n for name, n in launch.instructions.items() if name.startswith("v_mfma"))


def test_one_launch_a_rank():
    group, launches = launched(CASE)
    assert [launch.rank for launch in launches] == [0, 1, 2, 3]
    assert len(group.machine.queue) == 4


def test_a_rank_scores_its_share_of_the_blocks():
    """Each block once over all ranks, for 16 columns: four heads of four rows fill a tile."""
    blocks = [products(launch) / MFMAS_A_BLOCK for launch in launched(CASE)[1]]
    assert sum(blocks) == sum(CANDIDATE_BLOCKS)
    assert blocks == [sum(-(-(n - rank) // 4) for n in CANDIDATE_BLOCKS) for rank in range(4)]
    one = launched(replace(CASE, rows=1))[1]
    assert [products(x) for x in one] == [products(x) for x in launched(CASE)[1]]
    assert CASE.rows * CASE.heads == 16


def test_a_rank_reads_its_share_of_the_index_cache():
    """Lines of memory by which four rows read more than what is no page, against the bytes of all
    pages that one rank alone reads."""
    x = inputs(CASE)
    page = index_page(128, x.index.dtype).page_bytes
    whole = sum(CANDIDATE_BLOCKS) * page
    arguments = (x.index_q[:, :1].contiguous(), x.index, x.table, x.seq_lens, CASE.rows)
    with emulated(score_module.needs(*arguments)) as reports:
        index_score_decode(*arguments, backend="flydsl")
    alone = reports[0].launches[0].traffic["hbm"]["read"]
    assert whole <= alone <= 1.02 * (whole + len(CASE.lens) * page + 8192)
    # The same launch with no candidate reads all that is no page but for queries and results.
    mailbox = 0
    for name in ("queries", "results"):
        mailbox += launched(CASE)[0].geometry.buffer[name].nbytes
    for launch in launched(CASE)[1]:
        read = launch.traffic["hbm"]["read"]
        pages = products(launch) // MFMAS_A_BLOCK * page
        assert pages <= 1.02 * whole / 4
        assert read <= 1.02 * pages + mailbox + 16384


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, results=SCORES)], ids=lambda c: c.results.value
)
def test_words_that_are_sent(case):
    """Queries: 64 words a head and row. Candidates: 32 words for each rank with a block; scores: a
    word for each block. All once for every reader."""
    group, launches = launched(case)
    first = group.geometry.mailbox["buffer1"].offset
    rows = len(case.lens) * case.rows
    for rank, mailbox in enumerate(group.mailboxes):
        found = {}
        for region in group.geometry.buffer:
            words = mailbox[(first + region.offset) // 8 : (first + region.end) // 8]
            found[region.name] = int(((words >> 32 & 0xFFFFFFFF) == tag(1)).sum())
        assert found["hello"] == case.ranks
        assert found["queries"] == rows * case.heads * 64
        last = (group.num_blocks[case] - 1).tolist()
        wanted = sum(last) if case.results is SCORES else rows * case.ranks * 32
        assert found["results"] == wanted, rank
    # Nothing but these is stored at system scope: the rest goes to the rank's own memory.
    assert all(launch.counters["global_write_bytes"] > 0 for launch in launches)


def test_fewer_bytes_as_candidates_from_two_times_topk_blocks_on():
    scores, candidates = launched(replace(CASE, results=SCORES)), launched(CASE)
    sent = [
        sum(x.counters["global_write_bytes"] for x in found[1]) for found in (scores, candidates)
    ]
    rows = len(CASE.lens) * CASE.rows
    kept = sum(products(x) for x in candidates[1]) // MFMAS_A_BLOCK * 4 * CASE.rows * CASE.heads
    words = rows * 4 * 4 * 32 - sum(
        int(n) - 1 for n in launched(CASE)[0].num_blocks[CASE].tolist()
    ) * 4  # fmt: skip
    # Candidates cost their keys in the rank's own memory, and these words instead of the scores.
    assert sent[1] - sent[0] == 8 * words + kept + 8 * 4 * CASE.grid
