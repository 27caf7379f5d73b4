"""Drop a release fence of the mono kernel, or clear its scope bit: it is noticed.

Noticed: a finding of the emulator, an error word, or another result. The acquire fences are left
out: the emulator's caches are empty when a launch begins and fetch nothing on a store, and no
region is loaded before the meeting that follows its stores, so that nothing stale is there to read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from gfx950_emu import CodeObject, Schedule
from mono_kernel import plan
from rocm_msa import kernel_manifest
from rocm_msa.aot import compile_builds
from tests.emulator.mutate import mutants
from tests.mono_kernel.emulated import Group, compiled
from tests.mono_kernel.steps import Step

SCHEDULES = [Schedule("random", seed, (1, 3000)) for seed in range(3)]
OUTPUTS = ("residual_out", "hidden_out", "selected", "chosen")


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
def test_release_fences():
    data, entry, kernel = original()
    want = results(CodeObject.from_bytes(data), entry, SCHEDULES[0])
    assert want is not None
    found = [m for m in mutants(data, kernel) if m.instruction.mnemonic == "buffer_wbl2"]
    assert len(found) == 2 * plan.HAND_OFFS  # dropped, and sc1 cleared, at each meeting
    alive = [
        str(m) for m in found if not noticed(CodeObject.from_bytes(m.code_object), entry, want)
    ]
    assert not alive, alive
