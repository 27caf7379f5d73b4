"""The exchange with one step of its protocol removed, compiled anew: something notices.

Each mutant is one text of the sources replaced, in a copy of them. What nothing notices is listed
with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocm_msa.aot import compile_builds
from tests.dcp.exchange_group import Case, Group
from tests.dcp.noticing import CASE, SHARED_LINES, noticed

ROOT = Path(__file__).resolve().parents[2]
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
