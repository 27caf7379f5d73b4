"""Backend choice of an op: which implementation runs, and why.

No silent fallback: the path taken is logged once a reason and counted in `taken`. Triton runs on
GPU tensors (CUDA and ROCm alike); on CPU tensors only when asked for, in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rocm_msa.errors import expect

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BACKENDS = ("flydsl", "triton", "reference")
"""In order of preference."""

taken: Counter[tuple[str, str]] = Counter()
"""Calls by (op, backend) in this process."""

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
    if backend is None:
        faults = []
        for name in BACKENDS:
            fault = "not implemented"
            if name in implementations:
                on_cpu = name == "triton" and _on_cpu(device)
                fault = "for GPUs" if on_cpu else _fault(name, device)
            if fault is None:
                break
            faults.append(f"{name}: {fault}")
        reason = "; ".join(faults) or "preferred"
    else:
        if backend not in BACKENDS:
            raise ValueError(expect("backend", f"None or one of {BACKENDS}", repr(backend)))
        if backend not in implementations:
            raise NotImplementedError(
                expect(f"{op} backend", f"one of {tuple(implementations)}", repr(backend))
            )
        fault = _fault(backend, device)
        if fault is not None:
            raise NotImplementedError(
                expect(f"{op} backend {backend!r}", "one that can run here", fault)
            )
        name, reason = backend, "asked for"
    taken[op, name] += 1
    if (op, name, reason) not in _logged:
        _logged.add((op, name, reason))
        logger.info("%s runs on backend %s (%s)", op, name, reason)
    return implementations[name]


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` may be checked: on a GPU that would wait for it."""
    return tensor.device.type == "cpu"


def triton_run(op: str) -> Callable[..., Any]:
    """`run` of the op's triton_impl.py, imported on its first call."""

    def run(*args: Any, **options: Any) -> Any:
        return importlib.import_module(f"rocm_msa.ops.{op}.triton_impl").run(*args, **options)

    return run


def _on_cpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def _fault(backend: str, device: torch.device | None) -> str | None:
    """Why a backend cannot run on tensors of `device`; None when it can."""
    if backend != "triton" or device is None:
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if _on_cpu(device) and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU tensors (Triton runs on a GPU; on the CPU only under TRITON_INTERPRET=1)"
    return None
