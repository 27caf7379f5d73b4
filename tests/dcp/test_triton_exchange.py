"""The Triton exchange as its gfx950 code object, several ranks in the emulator.

What every rank selects is what the single-rank kernels select, bit for bit, under adversarial
schedules and with all of the emulator's checks; no finding is allowed.
"""

import pytest
import torch

pytest.importorskip("triton")

from dcp.mailbox_layout import BUFFERS, TAG_PERIOD, tag
from dcp.plan import Results
from gfx950_emu import Schedule
from tests.dcp.emulated_ranks import Ranks
from tests.dcp.triton_cases import Case, check, exchange, queue
from tests.launcher.emulated import SCHEDULES

slow = pytest.mark.slow
CANDIDATES, SCORES = Results.CANDIDATES, Results.SCORES
SMALL = Case((700, 0, 129), rows=2)
LONG = Schedule("random", 3, (1, 100_000))

# More lanes than work, empty batches, one block, requests of one length, more pairs than columns.
SHAPES = [
    Case((700, 0, 129), rows=2),
    Case((0, 0, 0)),
    Case((128 * 17, 128, 127, 1, 2049)),
    Case((128 * 40 + 5,)),
    Case((900, 300), rows=9),
    Case((128 * 15, 128 * 16, 128 * 16 + 1), kept=(16, 0, 1)),
    Case((3000, 140, 500), rows=3, kept=(6, 2, 3)),
    Case((2000, 100), kept=(1, 0, 1)),
    Case((2600, 2600), rows=2, content="ties"),
    Case((2600, 1300), rows=2, content="extreme"),
    Case((2600, 1300), rows=2, content="gone"),
]


def name(case: Case) -> str:
    return f"{list(case.lens)}x{case.rows}-{case.kind}-{case.content}-{case.kept}"


@pytest.mark.parametrize("form", [CANDIDATES, pytest.param(SCORES, marks=slow)])
@pytest.mark.parametrize("content", ["random", "ties", "extreme", "gone"])
def test_two_ranks(content, form):
    exchange(Case((1300, 0, 129, 640), rows=2, content=content), 2, LONG, form=form)


def test_two_ranks_under_all_schedules():
    assert len(SCHEDULES) >= 20
    for schedule in SCHEDULES:
        exchange(SMALL, 2, schedule, form=CANDIDATES)


def test_four_ranks():
    case = Case((700, 0, 129, 2000), rows=2)
    for schedule in (Schedule(), LONG, Schedule("starve", 1, (1, 500), starve=(3, None, None))):
        exchange(case, 4, schedule, form=SCORES)


@slow
@pytest.mark.parametrize("form", [CANDIDATES, SCORES])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_schedules(ranks, form):
    for schedule in SCHEDULES:
        exchange(SMALL, ranks, schedule, form=form, grid=2)


@slow
@pytest.mark.parametrize("form", [CANDIDATES, SCORES])
@pytest.mark.parametrize("case", SHAPES, ids=name)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shapes(ranks, case, form):
    exchange(case, ranks, LONG, form=form, grid=4)


@slow
@pytest.mark.parametrize("content", ["random", "ties", "gone"])
def test_eight_ranks(content):
    """Each head has two owners."""
    exchange(Case((2600, 0, 129, 900), rows=2, content=content), 8, LONG, form=CANDIDATES)


@slow
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_caches_and_queries(heads, kind, dtype):
    """Replicated heads, several a rank; every cache with every query type that is taken."""
    if (kind, dtype) == ("bf16", torch.float16):
        pytest.skip("fp16 queries on a bf16 cache are refused")
    case = Case((1300, 0, 129), rows=2, kind=kind, heads=heads, dtype=dtype)
    exchange(case, 4, LONG, form=CANDIDATES)


@pytest.mark.parametrize(
    "first", [TAG_PERIOD - 2, pytest.param(2**32 - 2, marks=slow),
              pytest.param(2**31 * 7 - 3, marks=slow)]
)  # fmt: skip
def test_launches_over_a_wrap_with_stale_mailboxes(first):
    """Six launches around the tag's wrap; the mailboxes hold words of launches long ago."""
    geometry = SMALL.geometry(2)
    words = geometry.mailbox.nbytes // 8
    old = torch.arange(words) % 7 + first - 40 * BUFFERS
    signed = torch.tensor([tag(int(g)) - 2**32 if tag(int(g)) >> 31 else tag(int(g)) for g in old])
    group = Ranks(geometry, first, stale=(signed << 32) | 0x3F80)
    for step in range(6):
        group.machine.queue.clear()
        case = (SMALL, Case((129,), rows=1), Case((0, 400), rows=2))[step % 3]
        outs = queue(group, case, form=CANDIDATES, layer=step)
        check(group, case, outs, group.run(Schedule("random", step, (1, 5000))))
    assert group.generations() == [first + 6] * 2


def test_replays_of_a_recorded_step():
    """A recorded step of three layers, replayed: the generation advances on the device."""
    group = Ranks(SMALL.geometry(2))
    outs = [queue(group, SMALL, form=CANDIDATES, layer=layer) for layer in range(3)]
    flat = [[outs[layer][rank] for layer in range(3)] for rank in range(2)]
    for replay in range(4):
        for out in (o for rank in flat for o in rank):
            out.fill_(9)
        report = group.run(Schedule("random", replay, (1, 3000)))
        for layer in range(3):
            check(group, SMALL, outs[layer], report)
    assert group.generations() == [13, 13]
