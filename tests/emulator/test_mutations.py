"""Drop any wait, barrier or fence, or clear any scope bit: the emulator notices.

Kernels with different hand-offs: through LDS, through registers, and from rank to rank. A survivor
has to be listed here with the reason.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from gfx950_emu import Checks, CodeObject
from tests.emulator.corpus import BY_NAME
from tests.emulator.mutate import mutants
from tests.emulator.test_machine_corpus import SCHEDULES, run

_L1_TOO = "harmless: buffer_inv empties the L1 with either bit, the L2 with sc1"
_NOTHING_BEFORE = "harmless: the wave has stored nothing before it takes the lock"
_NOTHING_AFTER = "harmless: nothing is loaded after this atomic"
_TWICE = "harmless alone, one of two: buffer_inv sc1 at 0x160, and sc0 sc1 on the load at 0x170"
_NO_DATA = "harmless: the kernel's atomics guard no plain loads or stores"
_NO_LDS = "harmless: no LDS access of another wave is near"
_OTHER_BARRIER = (
    "harmless alone: the next barrier also lies between these reads and the next writes"
)
_ALL_LANES = "harmless: all lanes are on, the branch that does the same waits is always taken"
_DUPLICATES = (
    "harmless: nothing was stored, and 64 lanes in 16 bins always go through the waits from 0x348"
)
SURVIVORS: dict[str, dict[str, str]] = {
    "flydsl_allreduce_flags_4": {
        "dropped s_waitcnt vmcnt(0) at 0x94": "harmless: vmcnt(0) at 0xac precedes the store",
        "sc0 cleared in buffer_inv sc0 sc1 at 0x128": _L1_TOO,
    },
    "triton_locked_sum": {
        "dropped buffer_wbl2 sc1 at 0x148": _NOTHING_BEFORE,
        "sc1 cleared in buffer_wbl2 sc1 at 0x148": _NOTHING_BEFORE,
        "dropped s_waitcnt vmcnt(0) at 0x150": _NOTHING_BEFORE,
        "dropped buffer_inv sc1 at 0x160": _TWICE,
        "sc1 cleared in buffer_inv sc1 at 0x160": _TWICE,
        "sc0 cleared in global_load_dword v1, v0, s[6:7] sc0 sc1 at 0x170": _TWICE,
        "sc1 cleared in global_load_dword v1, v0, s[6:7] sc0 sc1 at 0x170": _TWICE,
        "dropped s_waitcnt vmcnt(0) at 0x20c": _NOTHING_AFTER,
        "dropped buffer_inv sc1 at 0x210": _NOTHING_AFTER,
        "sc1 cleared in buffer_inv sc1 at 0x210": _NOTHING_AFTER,
    },
    "triton_atomics": {
        "dropped s_barrier at 0x174": _NO_LDS,
        "dropped s_barrier at 0x478": _NO_LDS,
        "dropped s_barrier at 0x4fc": _OTHER_BARRIER,
        "dropped s_barrier at 0x598": _OTHER_BARRIER,
        "dropped s_barrier at 0x614": _OTHER_BARRIER,
        "dropped s_barrier at 0x6e4": _OTHER_BARRIER,
        "dropped s_barrier at 0x7a4": _NO_LDS,
        "dropped s_barrier at 0x868": _NO_LDS,
        "dropped s_waitcnt vmcnt(0) lgkmcnt(0) at 0x43c": _DUPLICATES,
        "dropped s_waitcnt lgkmcnt(1) at 0x458": _ALL_LANES,
        "dropped s_waitcnt lgkmcnt(0) at 0x474": _ALL_LANES,
        **{
            f"{change} at {pc:#x}": _NO_DATA
            for at in ((0x434, 0x448, 0x44C), (0x56C, 0x580, 0x584), (0x688, 0x69C, 0x6A0),
                       (0x844, 0x858, 0x85C))
            for pc, changes in (
                (at[0], ("dropped buffer_wbl2 sc1", "sc1 cleared in buffer_wbl2 sc1")),
                (at[0] + 8, ("dropped s_waitcnt vmcnt(0)",) if at[0] != 0x434 else ()),
                (at[1], ("dropped s_waitcnt vmcnt(0)",)),
                (at[2], ("dropped buffer_inv sc1", "sc1 cleared in buffer_inv sc1")),
            )
            for change in changes
        },
    },
}  # fmt: skip
"""kernel -> {mutant: why it survives}."""

TOGETHER = [
    ("triton_locked_sum", "dropped buffer_inv sc1 at 0x160", "sc1 cleared in global_load_dword"),
    ("triton_locked_sum", "sc1 cleared in buffer_inv sc1 at 0x160", "sc1 cleared in global_load"),
    ("triton_atomics", "dropped s_barrier at 0x4fc", "dropped s_barrier at 0x598"),
    ("triton_atomics", "dropped s_barrier at 0x614", "dropped s_barrier at 0x6e4"),
]
"""Survivors that are harmless alone: two at once are a fault."""

KERNELS = {
    "triton_softmax_1000": 10,
    "triton_paged_decode": 20,
    "flydsl_transpose": 25,
    "flydsl_allreduce_words_4": 20,
    "flydsl_allreduce_flags_4": 15,
    "triton_locked_sum": 15,
    "triton_atomics": 50,
}
"""Kernel -> fewest mutants that it must have, so that the test cannot pass on nothing."""


def caught(case, made, code_object: bytes) -> bool:
    """Whether some schedule gives a finding, a run that does not end, or a wrong result."""
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    changed = dataclasses.replace(made, code_object=code_object)
    mutant = SimpleNamespace(**fields, compile=lambda: changed)
    # Whether a cache still holds a line would depend on where the buffers lie, but for HELD.
    for checks in (Checks.ALL, Checks.ALL | Checks.HELD):
        for schedule in SCHEDULES:
            report, wrong = run(mutant, schedule, checks=checks)
            if wrong or not report.ok:
                return True
    return False


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_caught(name):
    case = BY_NAME[name]
    made = case.compile()
    assert not caught(case, made, made.code_object), "the kernel itself is at fault"
    kernel = CodeObject.from_bytes(made.code_object).kernels[made.kernel]
    all_mutants = list(mutants(made.code_object, kernel))
    assert len(all_mutants) >= KERNELS[name]
    survivors = {str(m) for m in all_mutants if not caught(case, made, m.code_object)}
    assert survivors == set(SURVIVORS.get(name, {}))


@pytest.mark.parametrize("name,first,second", TOGETHER)
def test_two_at_once_are_caught(name, first, second):
    case = BY_NAME[name]
    made = case.compile()

    def mutant(code_object: bytes, text: str) -> bytes:
        kernel = CodeObject.from_bytes(code_object).kernels[made.kernel]
        (found,) = (m for m in mutants(code_object, kernel) if str(m).startswith(text))
        return found.code_object

    assert caught(case, made, mutant(mutant(made.code_object, first), second))
