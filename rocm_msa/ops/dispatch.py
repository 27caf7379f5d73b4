"""Backend choice of an op: which implementation runs, and why.

No silent fallback: the path taken is logged once a reason and counted in `taken`.

flydsl      compiled ahead of time, on gfx950: where launcher.py has kernels for the device and, of
            these, the ones that this call needs
triton      GPU tensors (CUDA and ROCm alike); CPU tensors only when asked for, in its interpreter
reference   everything
emulated    never chosen, only asked for: flydsl's kernels on CPU tensors, in the emulator that the
            process has started (rocm_msa/emulated); the reference of an op without such kernels
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rocm_msa import launcher
from rocm_msa.errors import expect

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BACKENDS = ("flydsl", "triton", "reference")
"""In order of preference."""
EMULATED = "emulated"
CHOICES = (*BACKENDS, EMULATED)
"""What `backend` may name."""

taken: Counter[tuple[str, str]] = Counter()
"""Calls by (op, backend) in this process."""

chosen: Counter[tuple[str, str, str]] = Counter()
"""The same by (op, backend, reason); vllm_plugin/metrics.py exports it."""

_logged: set[tuple[str, str, str]] = set()


def choose(
    op: str,
    backend: str | None,
    implementations: Mapping[str, Callable[..., Any]],
    device: torch.device | None = None,
) -> Callable[..., Any]:
    """The implementation to run.

    Args:
        op: the op's name, for messages.
        backend: a backend's name, or None for the first that is implemented and runs on `device`.
        implementations: backend name -> function.
        device: of the tensors; None asks nothing of it.

    Raises:
        ValueError: not a backend's name.
        NotImplementedError (a RuntimeError): a backend that this op does not have, or that cannot
            run on these tensors: Triton on the CPU without its interpreter.
    """
    implementations = {n: f for n, f in implementations.items() if getattr(f, "exists", True)}
    if backend is None:
        return _first(op, implementations, device)
    if backend not in CHOICES:
        raise ValueError(expect("backend", f"None or one of {CHOICES}", repr(backend)))
    if backend == EMULATED:
        return _emulated(op, implementations, device)
    if backend not in implementations:
        raise NotImplementedError(
            expect(f"{op} backend", f"one of {tuple(implementations)}", repr(backend))
        )
    fault = _fault(backend, device)
    if fault is not None:
        raise NotImplementedError(
            expect(f"{op} backend {backend!r}", "one that can run here", fault)
        )
    _note(op, backend, "asked for")
    return implementations[backend]


def _first(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    device: torch.device | None,
    faults: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """The first backend that runs on `device`; `faults`: those that are out, and why.

    FlyDSL also depends on the call: then the function that comes back looks at it.
    """
    faults = dict(faults or {})
    for name in BACKENDS:
        if name in faults:
            continue
        fault = "not implemented"
        if name in implementations:
            fault = _fault(name, device)
            if _on_cpu(device) and (fault is not None or name == "triton"):
                fault = "for GPUs"  # Triton's interpreter runs only when asked for
        if fault is None:
            break
        faults[name] = fault
    if isinstance(implementations[name], FlydslRun):
        return functools.partial(_flydsl_or_next, op, implementations, device)
    _note(op, name, "; ".join(f"{n}: {f}" for n, f in faults.items()) or "preferred")
    return implementations[name]


def _flydsl_or_next(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    device: torch.device | None,
    /,
    *args: Any,
    **options: Any,
) -> Any:
    """Run the op's compiled kernels, or the next backend where they do not serve this call."""
    run = implementations["flydsl"]
    builds, fault = run.serves(device, args, options)
    if fault is None:
        _note(op, "flydsl", "preferred")
        return run(*args, **options, builds=builds)
    return _first(op, implementations, device, {"flydsl": fault})(*args, **options)


def fused(
    op: str, backend: str | None, run: FlydslRun, device: torch.device, args: tuple
) -> Callable[..., Any] | None:
    """A kernel that does the work of several ops, when it serves this call; else they run alone.

    args: of `run`, as far as its `needs` looks at them.
    """
    if backend == EMULATED:
        around = functools.partial(launcher.using, _emulator(op, device))
    elif backend in (None, "flydsl") and _fault("flydsl", device) is None:
        around = contextlib.nullcontext
    else:
        return None
    with around():
        builds, fault = run.serves(device, args, {})
    if fault is not None:
        return None
    _note(op, backend or "flydsl", "one launch")
    return functools.partial(_under, around, run, builds=builds)


def _emulated(
    op: str, implementations: Mapping[str, Callable[..., Any]], device: torch.device | None
) -> Callable[..., Any]:
    """The compiled kernels in the emulator, or the reference of an op that has none."""
    loaded = _emulator(op, device)
    if "flydsl" not in implementations:
        _note(op, "reference", "emulated: the op has no FlyDSL kernels")
        return implementations["reference"]
    _note(op, EMULATED, "asked for")
    around = functools.partial(launcher.using, loaded)
    return functools.partial(_under, around, implementations["flydsl"])


def _emulator(op: str, device: torch.device | None) -> launcher.Launcher:
    loaded = launcher.offered(EMULATED)
    if loaded is None:
        fault = "no emulator was started in this process (rocm_msa.emulated.start)"
    elif device is not None and device != loaded.device:
        fault = f"tensors on {device}"
    else:
        return loaded
    raise NotImplementedError(expect(f"{op} backend {EMULATED!r}", "one that can run here", fault))


def _under(
    around: Callable[[], contextlib.AbstractContextManager],
    run: Callable[..., Any],
    /,
    *args: Any,
    **options: Any,
) -> Any:
    with around():
        return run(*args, **options)


def _note(op: str, name: str, reason: str) -> None:
    taken[op, name] += 1
    chosen[op, name, reason] += 1
    if (op, name, reason) not in _logged:
        _logged.add((op, name, reason))
        logger.info("%s runs on backend %s (%s)", op, name, reason)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` may be checked: on a GPU that would wait for it."""
    return tensor.device.type == "cpu"


def triton_run(op: str) -> Callable[..., Any]:
    """`run` of the op's triton_impl.py, imported on its first call."""

    def run(*args: Any, **options: Any) -> Any:
        return importlib.import_module(f"rocm_msa.ops.{op}.triton_impl").run(*args, **options)

    return run


class FlydslRun:
    """`run` of the op's flydsl_gfx950.py, imported on its first call."""

    def __init__(self, op: str) -> None:
        self.module = f"rocm_msa.ops.{op}.flydsl_gfx950"

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module(self.module).run(*args, **options)

    @functools.cached_property
    def exists(self) -> bool:
        """Whether the op has FlyDSL kernels at all."""
        return importlib.util.find_spec(self.module) is not None

    def serves(
        self, device: torch.device | None, args: tuple, options: dict
    ) -> tuple[Sequence[Any], str | None]:
        """(builds that a call needs, why it cannot have them or None)."""
        try:
            builds = importlib.import_module(self.module).needs(*args, **options)
        except NotImplementedError as error:
            return (), str(error)
        loaded = launcher.active(device) if device is not None else None
        missing = loaded.missing(builds) if loaded is not None else []
        return builds, f"not compiled: {', '.join(missing)}" if missing else None


def flydsl_run(op: str) -> FlydslRun:
    """The op's FlyDSL backend."""
    return FlydslRun(op)


def _on_cpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def _fault(backend: str, device: torch.device | None) -> str | None:
    """Why a backend cannot run on tensors of `device`; None when it can."""
    if device is None or backend == "reference":
        return None
    if backend == "flydsl":
        return launcher.fault(device)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if _on_cpu(device) and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU tensors (Triton runs on a GPU; on the CPU only under TRITON_INTERPRET=1)"
    return None
