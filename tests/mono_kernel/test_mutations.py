"""Drop a fence or a barrier of the mono kernel, or clear a scope bit of a fence: it is noticed.

Noticed: a finding of the emulator, an error word, or another result. SURVIVORS says which changes
are harmless, by what they change.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from gfx950_emu import CodeObject, Schedule
from rocm_msa import kernel_manifest
from rocm_msa.aot import compile_builds
from tests.emulator.mutate import mutants
from tests.mono_kernel.emulated import Group, compiled
from tests.mono_kernel.steps import Step

SCHEDULES = [Schedule("random", seed, (1, 3000)) for seed in range(3)]
FENCES = ("buffer_wbl2", "buffer_inv", "s_barrier")
OUTPUTS = ("residual_out", "hidden_out", "selected", "chosen")
# Of a kind, at most so many of its places survive, and why.
SURVIVORS = {
    "buffer_inv": (
        "harmless in one launch: every region is written once, and no line of it was loaded before "
        "the meeting that it is written before; a launch starts with empty caches"
    ),
}


def original() -> tuple[bytes, object, object]:
    group = Group(step())
    entry, code = compiled(group.build)
    with tempfile.TemporaryDirectory() as folder:
        compile_builds([group.build], Path(folder), processes=1)
        found = kernel_manifest.read(Path(folder)).kernels[group.build.symbol]
        data = kernel_manifest.read_code_object(Path(folder), found)
    return data, entry, code.kernels[entry.symbol]


def step() -> Step:
    return Step("mxfp4", 2, [642, 129], 2, seed=2)


def results(code: CodeObject, entry, schedule: Schedule):
    """Outputs of all ranks; None when something was found."""
    group = Group(step())
    machine = group.machine(schedule)
    for queued in machine.queue:
        queued.code_object, queued.kernel = code, code.kernels[entry.symbol]
    report = machine.run()
    if report.findings or any(group.errors()):
        return None
    return [group.region(name, rank).clone() for name in OUTPUTS for rank in range(2)]


def noticed(code: CodeObject, entry, want: list) -> bool:
    for schedule in SCHEDULES:
        got = results(code, entry, schedule)
        if got is None:
            return True
        pairs = zip(got, want, strict=True)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", FENCES)
def test_fences_and_barriers(kind):
    data, entry, kernel = original()
    want = results(CodeObject.from_bytes(data), entry, SCHEDULES[0])
    assert want is not None
    found = [m for m in mutants(data, kernel) if m.instruction.mnemonic.startswith(kind)]
    assert len(found) >= 9, kind  # a meeting each
    alive = [
        str(m) for m in found if not noticed(CodeObject.from_bytes(m.code_object), entry, want)
    ]
    assert not alive or kind in SURVIVORS, (len(found), alive)
