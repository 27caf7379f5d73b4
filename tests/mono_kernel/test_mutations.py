"""The layer with one step of its hand-offs taken out: it is noticed.

Noticed: a finding of the emulator, an error word, or another result. The emulator's caches hold
every line since they were emptied (Checks.HELD), so that each acquire counts. Fences, barriers,
drains and scopes are taken out of the code object; waits and tags out of the sources.
"""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gfx950_emu import Checks, CodeObject, Schedule
from gfx950_emu.elf import Elf
from mono_kernel import plan
from mono_kernel.layer_gfx950 import Build
from rocm_msa import kernel_manifest
from rocm_msa.aot import compile_builds
from tests.emulator.mutate import Mutant, mutants
from tests.mono_kernel.emulated import Group, compiled
from tests.mono_kernel.steps import Step

ROOT = Path(__file__).resolve().parents[2]
MOST = 20_000_000  # wave-instructions: a mutant may run for ever
SCHEDULES = [
    Schedule("random", 0, (1, 3000), max_instructions=MOST),
    Schedule("random", 1, (1, 30), max_instructions=MOST),
    Schedule("starve", 3, (1, 300), starve=(None, 1, 0), max_instructions=MOST),
    Schedule("priority", 4, (1, 2000), max_instructions=MOST),
    # A wave whose stores nobody waited for, when the others go on.
    *(
        Schedule("starve", seed, (1, 300), starve=(None, None, seed), max_instructions=MOST)
        for seed in (1, 2, 3)
    ),
    *(Schedule("random", seed, (1, 300), max_instructions=MOST) for seed in range(5, 11)),
]
CHECKS = Checks.ALL | Checks.HELD
OUTPUTS = ("residual_out", "hidden_out", "selected", "chosen")
# Every meeting takes place; workgroups join, then norm for themselves; more rows than workgroups.
CASES = (([642, 129], 2), ([130], 1), ([130, 5], 1), (list(range(3, 19)), 1))
ALL = tuple(range(len(CASES)))


@functools.cache
def build() -> Build:
    return Build.from_shape(step(0).shape)


def step(case: int) -> Step:
    lens, per = CASES[case]
    return Step("mxfp4", 2, lens, per, seed=2, room=2 * per)


@functools.cache
def original() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        compile_builds([build()], Path(folder), processes=1)
        entry = kernel_manifest.read(Path(folder)).kernels[build().symbol]
        return kernel_manifest.read_code_object(Path(folder), entry)


def results(
    code: CodeObject, case: int, schedule: Schedule, launches: int = 1, patience: int | None = None
) -> list[torch.Tensor] | None:
    """Outputs of all ranks after each launch; None when something was found."""
    group, found = Group(step(case)), []
    for number in range(launches):
        if number:
            group.next()
        if patience:
            for r in group.ranks:
                r.memory = replace(r.memory, patience=patience)
        machine = group.machine(schedule, CHECKS)
        for queued in machine.queue:
            queued.code_object, queued.kernel = code, code.kernels[build().symbol]
        report = machine.run()
        if not report.ok or any(group.errors()):
            return None
        found += [group.region(name, rank).clone() for name in OUTPUTS for rank in range(2)]
    return found


@functools.cache
def wanted(case: int, launches: int) -> list[torch.Tensor]:
    found = results(compiled(build())[1], case, SCHEDULES[0], launches)
    assert found is not None
    return found


def noticed(data: bytes, cases=ALL, **how) -> bool:
    code = CodeObject.from_bytes(data)
    for schedule in SCHEDULES:
        for case in cases:
            got = results(code, case, schedule, **how)
            if got is None:
                return True
            pairs = zip(got, wanted(case, how.get("launches", 1)), strict=True)
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                return True
    return False


# The code object


def kernel():
    return compiled(build())[1].kernels[build().symbol]


def survivors(pick: Callable[[Mutant], bool], least: int, cases=ALL) -> list[Mutant]:
    """Of at least `least` mutants, those that nothing notices."""
    found = [m for m in mutants(original(), kernel()) if pick(m)]
    assert len(found) >= least, len(found)
    return [m for m in found if not noticed(m.code_object, cases)]


# Phases in which wave 0 alone stores, the one that writes back; norm and route at this width.
ONE_WAVE = {"norm", "project", "output", "route", "up"}


def write_backs() -> list[int]:
    """Of the meetings in their order, as numbers of instructions."""
    return [i for i, one in enumerate(kernel().instructions) if one.mnemonic == "buffer_wbl2"]


def barriers_before() -> dict[str, int]:
    """Number of the instruction that is the barrier before a phase's write-back."""
    instructions, found = kernel().instructions, {}
    for i, phase in zip(write_backs(), plan.PHASE_NAMES, strict=False):
        found[phase] = [k for k in range(i) if instructions[k].mnemonic == "s_barrier"][-1]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fence", ["buffer_wbl2", "buffer_inv"])
def test_fences(fence):
    """Of each meeting: dropped, and its scope narrowed to the XCD."""
    alive = survivors(lambda m: m.instruction.mnemonic == fence, 2 * plan.HAND_OFFS, cases=(0,))
    assert not alive, [str(m) for m in alive]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_barriers():
    """Left aside: those of meetings whose phase's stores are all wave 0's, and the one before
    arrivals are counted: behind the last meeting only wave 0, which counts, waits or sends."""
    instructions = kernel().instructions
    spared = {instructions[i].pc for p, i in barriers_before().items() if p in ONE_WAVE}
    spared.add([one.pc for one in instructions if one.mnemonic == "s_barrier"][-1])
    alive = survivors(
        lambda m: m.instruction.mnemonic == "s_barrier" and m.instruction.pc not in spared,
        2 * plan.HAND_OFFS,
    )
    assert not alive, [str(m) for m in alive]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_drains():
    """Before each meeting's barrier, of the stores of all waves. Left aside: ONE_WAVE, where wave
    0's load of the error word, between the barrier and the write-back, waits for its stores."""
    instructions, found = kernel().instructions, set()
    for (phase, at), i in zip(barriers_before().items(), write_backs(), strict=True):
        between = [one.text for one in instructions[at:i]]
        assert any(text.startswith("s_waitcnt vmcnt(0)") for text in between), between
        if phase not in ONE_WAVE:
            found.add(instructions[at - 1].pc)
    alive = survivors(
        lambda m: m.change == "dropped" and m.instruction.pc in found, len(found), cases=(0,)
    )
    assert not alive, [str(m) for m in alive]


@pytest.mark.slow
def test_each_write_back_is_waited_for_twice():
    """Between it and the flag's store stand its own wait and that of the generation's load: taking
    out one of them changes nothing."""
    instructions = kernel().instructions
    for i in write_backs():
        flag = next(
            k for k in range(i, len(instructions))
            if instructions[k].mnemonic == "global_store_dwordx2"
        )  # fmt: skip
        between = [one.text for one in instructions[i:flag]]
        assert sum(text.startswith("s_waitcnt vmcnt(0)") for text in between) == 2, between
        assert not any("branch" in text for text in between)


SC0, SC1 = 1 << 16, 1 << 25
SCOPES = {
    "words are sent at agent scope": ("global_store_dwordx2", {"sc0", "sc1"}, SC0),
    "words are read at agent scope": ("global_load_dwordx2", {"sc0", "sc1"}, SC0),
    "flags are stored as data": ("global_store_dwordx2", {"sc1"}, SC1),
    "flags are read as data": ("global_load_dwordx2", {"sc1"}, SC1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCOPES)
def test_scopes(name):
    """Of all such accesses at once: those of error paths run in no healthy launch."""
    mnemonic, scopes, bit = SCOPES[name]
    data, text, count = bytearray(original()), Elf(original()).section(".text").offset, 0
    for one in kernel().instructions:
        if one.mnemonic == mnemonic and {"sc0", "sc1"} & set(one.text.split()) == scopes:
            (word,) = struct.unpack_from("<I", data, text + one.pc)
            struct.pack_into("<I", data, text + one.pc, word & ~bit)
            count += 1
    assert count >= 2
    assert noticed(bytes(data))


# The sources: one kernel whose patience says what is left out

LAYER, MAILBOX = "mono_kernel/layer.py", "rocm_msa/device/mailbox.py"
CHANGES = (
    (LAYER, "ctx.workgroups - 1, meeting_site(number)",
     "(end.patience == 100 + number).select(fx.Int32(-1), ctx.workgroups - 1), "
     "meeting_site(number)"),
    (MAILBOX, "absent = want & (fx.Int32(word >> 32) != end.tag)",
     "found_tag = fx.Int32(word >> 32)\n"
     "        absent = want & (found_tag != end.tag) & ((found_tag == 0) | (end.patience != 90))"),
    (MAILBOX, "(_load(place, _AGENT) != launch)",
     "(_load(place, _AGENT) != launch) & ((_load(place, _AGENT) == 0) | (end.patience != 91))"),
    (MAILBOX, "_launch(end) + 1, _AGENT",
     "_launch(end) + (end.patience == 92).select(fx.Int64(0), fx.Int64(1)), _AGENT"),
    (MAILBOX, "_store(arrivals, fx.Int32(0), _AGENT)",
     "_store(arrivals, (end.patience == 93).select(before, fx.Int32(0)), _AGENT)"),
)  # fmt: skip
LEFT_OUT = {
    "any tag will do": 90,
    "any flag will do": 91,
    "the generation stands still": 92,
    "arrivals are not taken back": 93,
    **{f"nobody waits behind {plan.PHASE_NAMES[n]}": 100 + n for n in range(plan.HAND_OFFS)},
}


@functools.cache
def changed() -> bytes:
    """The code object of the changed sources."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ignored = shutil.ignore_patterns("*.pyc", "code_objects", "vllm_plugin")
        for package in ("mono_kernel", "rocm_msa"):
            shutil.copytree(ROOT / package, folder / package, ignore=ignored)
        for file, old, new in CHANGES:
            path, text = folder / file, (folder / file).read_text()
            assert text.count(old) == 1, old
            path.write_text(text.replace(old, new))
        program = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from mono_kernel.layer_gfx950 import Build, compile_build\n"
            f"open(sys.argv[2], 'wb').write(compile_build({build()!r}).code_object)\n"
        )
        target = folder / "changed.hsaco"
        subprocess.run([sys.executable, "-c", program, folder, target], check=True, timeout=1500,
                       cwd=folder)  # fmt: skip
        return target.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_left_out_gives_the_same():
    code = CodeObject.from_bytes(changed())
    for case in ALL:
        got = results(code, case, SCHEDULES[0], 2)
        pairs = zip(got, wanted(case, 2), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_waits_and_tags(name):
    assert noticed(changed(), cases=(0,), launches=3, patience=LEFT_OUT[name])
