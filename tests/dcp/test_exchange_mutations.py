"""The exchange with one step of its protocol removed, compiled anew: something notices.

Each mutant is one text of the sources replaced, in a copy of them. What nothing notices is listed
with the reason.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gfx950_emu import CodeObject, Fault, Schedule
from rocm_msa.aot import compile_builds
from tests.dcp.exchange_group import PATIENCE_MS, Case, Group

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(lens=(128 * 11 + 3, 0, 128 * 4))
HEALTHY = [
    Schedule("random", 1, (1, 40)),
    Schedule("random", 2, (1, 3000)),
    Schedule("starve", 0, (1, 500), starve=(1, None, None)),
    Schedule("priority", 3, (1, 2000)),
    Schedule("round_robin", 0, (1, 1)),
    Schedule("random", 4, (1, 200)),
    Schedule("starve", 5, (1, 300), starve=(None, 1, 0)),
    Schedule("starve", 6, (1, 300), starve=(None, 1, None)),
    Schedule("random", 6, (1, 8)),
    *(Schedule("starve", seed, (1, 200), starve=(None, None, seed)) for seed in range(1, 4)),
]
FAULT = Schedule("random", 5, (1, 300), spin_rounds=1000)
# Two rows whose keys share lines, read by one workgroup, written by two.
SHARED_LINES = Case(ranks=2, heads=2, lens=(128 * 9, 128 * 9))
CYCLES_A_MS = 2_400_000
LOST = 3  # the rank that dies
MOST = 20_000_000  # wave-instructions: a mutant may run for ever

MAILBOX, BEGIN, SCORE = (
    "rocm_msa/device/mailbox.py", "dcp/exchange_begin_kernel.py", "dcp/exchange_score_kernel.py"
)  # fmt: skip
KERNEL, PLACES, SELECT = (
    "dcp/exchange_kernel.py", "dcp/exchange_places_kernel.py", "dcp/exchange_select_kernel.py"
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`old`, which `file` holds once, becomes `new`. survives: why nothing notices, if so."""

    name: str
    file: str
    old: str
    new: str
    survives: str = ""
    case: Case = CASE


MUTANTS = [
    Mutant("any tag will do", MAILBOX,
           "absent = want & (fx.Int32(word >> 32) != end.tag)",
           "absent = want & (fx.Int32(word >> 32) == 0)"),
    Mutant("words are sent at agent scope", MAILBOX,
           "_store(place, high | fx.Int64(fx.Uint32(payload)), _SYSTEM)",
           "_store(place, high | fx.Int64(fx.Uint32(payload)), _AGENT)"),
    Mutant("words are read at agent scope", MAILBOX,
           "found = [_load(place, _SYSTEM) for place in places]",
           "found = [_load(place, _AGENT) for place in places]"),
    Mutant("no drain before the flag", MAILBOX,
           "    rocdl.s_waitcnt(vmcnt=0)\n    fx.barrier()\n    _publish",
           "    fx.barrier()\n    _publish"),
    Mutant("no barrier before the flag", MAILBOX,
           "    fx.barrier()\n    _publish", "    _publish"),
    Mutant("no release before the flag", MAILBOX,
           "        fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope=_AGENT)\n", ""),
    Mutant("release of the workgroup alone", MAILBOX,
           "ordering=fx.AtomicOrdering.Release, syncscope=_AGENT",
           "ordering=fx.AtomicOrdering.Release, syncscope='workgroup'"),
    Mutant("no acquire after the flags", MAILBOX,
           "    fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=_AGENT)\n", "",
           case=SHARED_LINES),
    Mutant("any flag will do", MAILBOX,
           "wanted & (_load(place, _AGENT) != launch)", "wanted & (_load(place, _AGENT) == 0)"),
    Mutant("flags are read in the workgroup's scope", MAILBOX,
           "wanted & (_load(place, _AGENT) != launch)",
           "wanted & (_load(place, 'workgroup') != launch)"),
    Mutant("errors are not told to peers", MAILBOX,
           "if (won != 0) & (lane < end.ranks):", "if (won != 0) & (lane < 0):"),
    Mutant("waits do not listen for errors", MAILBOX,
           "over = there | late | _heard(end)", "over = there | late"),
    Mutant("waits have no bound", MAILBOX,
           "over = there | late | _heard(end)", "over = there | _heard(end)"),
    Mutant("the generation stands still", MAILBOX, "_launch(end) + 1", "_launch(end) + 0"),
    Mutant("arrivals are not taken back", MAILBOX,
           "            _store(arrivals, fx.Int32(0), _AGENT)\n", ""),
    Mutant("one buffer for all launches", PLACES, "(number & (BUFFERS - 1))", "(number & 0)"),
    Mutant("words of this launch are cleared", BEGIN,
           "buffer_at(a, launch + 2)", "buffer_at(a, launch)"),
    Mutant("digests are not compared", BEGIN,
           "(same != a.ranks).ir_value()", "(same == 0).ir_value()"),
    Mutant("lengths are not in the digest", KERNEL,
           "a.digest = a.digest ^ mark", "a.digest = a.digest ^ 0"),
    Mutant("table and prefix are read before they are there", KERNEL,
           "Readers: all waves.\n    fx.barrier()\n", "Readers: all waves.\n"),
    Mutant("ranks select in spite of an error", SELECT,
           "ok.select(ranked, fx.Int32(-1))", "ranked"),
    Mutant("ties go to any block", "rocm_msa/device/topk_rows.py",
           "(pair < other)", "(fx.Uint32(pair >> 32) < fx.Uint32(other >> 32))",
           case=Case(lens=(128 * 70, 128 * 19), content="ties")),
]  # fmt: skip


def compiled(mutant: Mutant | None, folder: Path, case: Case = CASE) -> bytes:
    """The code object of a case's build, from mutated sources."""
    group = Group(case)
    group.queue(ranks=(0,))
    (build,) = group.builds
    if mutant is None:
        compile_builds([build], folder, processes=1)
        return (folder / f"{build.symbol}.hsaco").read_bytes()
    for package in ("dcp", "rocm_msa"):
        ignored = shutil.ignore_patterns("*.pyc", "code_objects", "vllm_plugin")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    path = folder / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, mutant.name
    path.write_text(text.replace(mutant.old, mutant.new))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from dcp.exchange_gfx950 import Build, compile_build\n"
        f"open(sys.argv[2], 'wb').write(compile_build({build!r}).code_object)\n"
    )
    target = folder / "mutant.hsaco"
    subprocess.run([sys.executable, "-c", program, folder, target], check=True, timeout=900,
                   cwd=folder)  # fmt: skip
    return target.read_bytes()


def with_code(group: Group, data: bytes) -> Group:
    """Every launch that is queued runs this code instead."""
    made = CodeObject.from_bytes(data)
    for queued in group.machine.queue:
        queued.code_object, queued.kernel = made, made.kernels[queued.kernel.name]
    group.forget()
    return group


def given_up_or_right(group: Group) -> bool:
    """No survivor's row is anything but right or -1 throughout; LOST is the one that died."""
    return all(
        bool(((group.selected(r) == group.wanted(r)).all(-1) | (group.selected(r) == -1).all(-1))
             .all())
        for r in range(CASE.ranks) if r != LOST
    )  # fmt: skip


def replays(data: bytes, case: Case) -> Iterator[str]:
    """What is wrong under schedules that all ranks survive."""
    # Three batches for four buffers: what lies in a buffer is another batch's.
    batches = [replace(case, seed=seed) for seed in range(3)]
    group = Group(case)
    for layer, batch in enumerate(batches):
        group.queue(batch, layer=layer)
    with_code(group, data)
    for number, schedule in enumerate(HEALTHY, 1):
        group.forget()
        report = group.run(replace(schedule, max_instructions=MOST))
        good = report.ok and set(group.errors()) == {None}
        good = good and not any(group.wrong(batch) for batch in batches)
        if not good or group.generations() != [3 * number + 1] * case.ranks:
            yield f"replay {number}: {report.status} {group.errors()} {report.findings[:1]}"
            return


def faults(data: bytes) -> Iterator[str]:
    """What is wrong when a rank of CASE dies or disagrees."""
    group = Group(CASE)
    group.queue()
    name = group.machine.queue[0].kernel.name
    for fault in (
        Fault("kill", LOST, after_instructions=0),
        Fault("kill", LOST, at=(name, "s_barrier"), arrival=9),
        Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=9),
        Fault("kill", LOST, at=(name, "buffer_wbl2"), arrival=1),
        *(
            Fault("kill", LOST, at=(name, "global_store_dwordx2"), arrival=n)
            for n in range(2, 26, 3)
        ),
    ):
        group = Group(CASE)
        group.queue()
        group.queue(layer=1)
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST), fault)
        named = [e and e.peer for r, e in enumerate(group.errors()) if r != LOST]
        if not report.ok or named != [LOST] * (CASE.ranks - 1) or not given_up_or_right(group):
            yield f"killed: {report.status} {group.errors()} {report.findings[:1]}"
    for layer, lengths in ((1, None), (0, torch.tensor([12, 0, 3]))):
        group = Group(CASE)
        group.queue(ranks=(0, 1, 3))
        if lengths is not None:
            group.num_blocks[CASE] = lengths.int()
        group.queue(ranks=(2,), layer=layer)
        report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
        if not report.ok or [e and e.peer for e in group.errors()] != [2] * 4:
            yield f"disagreement: {report.status} {group.errors()} {report.findings[:1]}"


def half_pushed(data: bytes) -> Iterator[str]:
    """LOST was seen by all ranks and gave its queries to rank 0 alone: that one can only wait for
    the others, which wait for LOST, and must hear from them whom they miss."""
    whole = Group(CASE)
    whole.queue()
    with_code(whole, data).run(FAULT)
    group = Group(CASE)
    group.queue(ranks=range(LOST))
    buffer = group.geometry.mailbox["buffer1"].offset
    hello, queries = (group.geometry.buffer[name].offset + buffer for name in ("hello", "queries"))
    count = group.geometry.rows * group.geometry.query_words
    first = queries // 8 + LOST * count
    for rank in range(LOST):
        mine, theirs = group.mailboxes[rank], whole.mailboxes[rank]
        mine[hello // 8 + LOST] = theirs[hello // 8 + LOST]
        if rank == 0:
            mine[first : first + count] = theirs[first : first + count]
    report = with_code(group, data).run(replace(FAULT, max_instructions=MOST))
    named = [e and e.peer for e in group.errors()[:LOST]]
    soon = report.clock < 4 * PATIENCE_MS * CYCLES_A_MS  # the others' bound is 2, rank 0's own 12
    if not report.ok or named != [LOST] * LOST or not soon or not given_up_or_right(group):
        yield f"half pushed: {report.status} {group.errors()} {report.findings[:1]}"


def noticed(data: bytes, case: Case = CASE) -> str | None:
    """What notices that something is wrong with the code, None for nothing."""
    try:
        runs = [replays(data, case)]
        runs += [half_pushed(data), faults(data)] if case == CASE else []
        return next(itertools.chain(*runs), None)
    except (AssertionError, ValueError) as error:
        # Host and device disagree, guard words are written; an instruction that is not there.
        return repr(error)


@pytest.mark.slow
def test_the_exchange_itself_passes():
    with tempfile.TemporaryDirectory() as folder:
        assert noticed(compiled(None, Path(folder))) is None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutants_are_noticed(mutant):
    with tempfile.TemporaryDirectory() as folder:
        what = noticed(compiled(mutant, Path(folder), mutant.case), mutant.case)
    assert (what is None) == bool(mutant.survives), what


def test_every_mutant_is_of_the_sources():
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
