"""Drop any wait, barrier or fence, or clear any scope bit: the emulator notices.

Kernels with different hand-offs: through LDS, through registers, and from rank to rank. A survivor
has to be listed here with the reason.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from gfx950_emu import CodeObject
from tests.emulator.corpus import BY_NAME
from tests.emulator.mutate import mutants
from tests.emulator.test_machine_corpus import SCHEDULES, run

_NOTHING_CACHED = (
    "harmless in one launch: caches are empty when a kernel starts, and no line of a peer's data "
    "was read before the flag"
)
_READ_AGAIN = "harmless: where the first look finds no flag, the loop's own scoped load decides"
SURVIVORS: dict[str, dict[str, str]] = {
    "flydsl_allreduce_flags_4": {
        "dropped s_waitcnt vmcnt(0) at 0x94": "harmless: vmcnt(0) at 0xac precedes the store",
        "sc0 cleared in global_load_dword v4, v[0:1], off sc0 sc1 at 0xec": _READ_AGAIN,
        "sc1 cleared in global_load_dword v4, v[0:1], off sc0 sc1 at 0xec": _READ_AGAIN,
        "dropped buffer_inv sc0 sc1 at 0x128": _NOTHING_CACHED,
        "sc0 cleared in buffer_inv sc0 sc1 at 0x128": _NOTHING_CACHED,
        "sc1 cleared in buffer_inv sc0 sc1 at 0x128": _NOTHING_CACHED,
    }
}
"""kernel -> {mutant: why it survives}."""

KERNELS = {
    "triton_softmax_1000": 10,
    "triton_paged_decode": 20,
    "flydsl_transpose": 25,
    "flydsl_allreduce_words_4": 20,
    "flydsl_allreduce_flags_4": 15,
}
"""Kernel -> fewest mutants that it must have, so that the test cannot pass on nothing."""


def caught(case, made, code_object: bytes) -> bool:
    """Whether some schedule gives a finding, a run that does not end, or a wrong result."""
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    changed = dataclasses.replace(made, code_object=code_object)
    mutant = SimpleNamespace(**fields, compile=lambda: changed)
    for schedule in SCHEDULES:
        report, wrong = run(mutant, schedule)
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
