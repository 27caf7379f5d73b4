"""The exchange's compiled code with one step of its protocol taken out: something notices, or it is
listed why nothing can.

Every wait for memory, barrier, cache operation, scope bit and comparison with a tag or flag is
taken out of the code object of the form with the most hand-offs (code_mutants.py). A mutant that
nothing notices must be in SURVIVORS, and one that is there must not be noticed.
"""

from __future__ import annotations

import functools
from collections import Counter
from unittest import mock

import pytest

from dcp import exchange_gfx950
from rocm_msa import flydsl_compile
from tests.dcp.code_mutants import Mutant, mutants
from tests.dcp.exchange_group import Group
from tests.dcp.exchange_survivors import SURVIVORS
from tests.dcp.noticing import CASE, noticed

ROWS = (1, 4, 2)  # of the replayed batches: every loop over rows is run
PARTS = 16
RELEASE = "fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope=_AGENT)"
ACQUIRE = "fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=_AGENT)"
DRAIN, THERE = "rocdl.s_waitcnt(vmcnt=0)", "says there"
STRONGEST = (  # what is done, and to which line
    ("s_waitcnt vmcnt", DRAIN),
    ("s_barrier dropped", "fx.barrier()"),
    ("buffer_wbl2 sc1 dropped", RELEASE),
    ("buffer_wbl2 without sc1", RELEASE),
    ("buffer_inv sc1 dropped", ACQUIRE),
    (THERE, "!= end.tag"),
    (THERE, "!= launch"),
)


@functools.cache
def code() -> tuple[bytes, bytes]:
    """The code object, and the same with source lines."""
    group = Group(CASE)
    group.queue(ranks=(0,))
    (build,) = group.builds
    compile_flydsl = flydsl_compile.compile_flydsl

    def with_lines(*args, **options):
        return compile_flydsl(*args, **options | {"line_info": True})

    plain = exchange_gfx950.compile_build(build).code_object
    with mock.patch.object(flydsl_compile, "compile_flydsl", with_lines):
        return plain, exchange_gfx950.compile_build(build).code_object


@functools.cache
def named() -> dict[str, Mutant]:
    """All mutants; the second of a name is `name #2`, in the order of the code."""
    seen, found = Counter(), {}
    for mutant in mutants(*code()):
        seen[mutant.name] += 1
        found[f"{mutant.name} #{seen[mutant.name]}"] = mutant
    return found


def survivors() -> dict[str, str]:
    """Why nothing notices, by name."""
    return {
        f"{name} #{number}": why
        for why, names in SURVIVORS.items()
        for name, numbers in names.items()
        for number in numbers
    }


@pytest.mark.parametrize(("what", "line"), STRONGEST)
def test_the_strongest_are_noticed(what, line):
    found = [m for m in named().values() if what in m.what and m.source.startswith("mailbox.py")]
    mutant = next(m for m in found if line in m.source)
    assert mutant.apply(code()[0]) != code()[0]
    assert noticed(mutant.apply(code()[0]), CASE, ROWS, every=False) is not None


@pytest.mark.slow
def test_every_survivor_is_of_the_code():
    assert set(survivors()) <= set(named())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_are_noticed_or_listed(part):
    plain, listed, wrong = code()[0], survivors(), []
    for name, mutant in list(named().items())[part::PARTS]:
        words = "says there" in name
        what = noticed(mutant.apply(plain), CASE, ROWS, every=False, words=words)
        if (what is None) != (name in listed):
            wrong.append(f"{name}: {what or 'nothing notices, and it is not listed'}")
    assert not wrong, "\n".join(wrong)
