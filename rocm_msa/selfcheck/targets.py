"""Where a self-check runs: a GPU, or gfx950's kernels in the emulator; what is missing is named.

with open_target("gpu", code_objects=None) as target: ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mono_kernel.layer_gfx950 import Build
from mono_kernel.runner import MonoRunner
from mono_kernel.shapes import Shape
from rocm_msa import launcher
from rocm_msa.aot import compile_builds
from rocm_msa.arch import GFX950
from rocm_msa.errors import expect
from rocm_msa.hip import Hip
from rocm_msa.launcher import Runtime
from rocm_msa.selfcheck.kernels import KINDS, builds
from rocm_msa.selfcheck.mono import MAX_BLOCKS, PATIENCE_MS, Alone

EMULATED_WORKGROUPS = 8
TARGETS = ("gpu", GFX950.name, "emulator")


class TargetError(RuntimeError):
    """This machine cannot be the target; the message says what is missing."""


@dataclass(frozen=True)
class Target:
    """name: of TARGETS. device: of tensors. arch: what it is. gpus: usable.

    backends: of the ops, those whose kernels can run. runtime: launches single gfx950 kernels, None
    where there are none. reach: tells it which tensors the next launch may touch. counting: gives
    a context with the emulator's reports, None on a GPU. mono: a runner of the mono kernel, None
    where it cannot run. notes: what is left out, and why.
    """

    name: str
    device: torch.device
    arch: str
    gpus: int
    backends: tuple[str, ...]
    runtime: Runtime | None = None
    reach: Callable[[list[torch.Tensor]], None] = lambda tensors: None
    counting: Callable[[], contextlib.AbstractContextManager[list[Any]]] | None = None
    mono: Callable[[Shape, Build], MonoRunner] | None = None
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_target(
    name: str, code_objects: Path | None = None, small: bool = False
) -> Iterator[Target]:
    """The target, its kernels loaded.

    Args:
        code_objects: a folder of `rocm-msa compile`; without it the kernels are compiled where
            FlyDSL is installed, else those that came with the package are taken.
        small: load the NVFP4 kernels alone.

    Raises:
        ValueError: not of TARGETS.
        TargetError: the GPU, a package or a kernel is missing.
    """
    if name not in TARGETS:
        raise ValueError(expect("target", f"one of {', '.join(TARGETS)}", repr(name)))
    wanted = builds(KINDS[:1] if small else KINDS)
    with contextlib.ExitStack() as stack:
        try:
            if name == "emulator":
                target = _emulator(stack, wanted, code_objects)
            else:
                target = _gpu(stack, name, wanted, code_objects)
        except TargetError:
            raise
        except (OSError, RuntimeError) as error:  # HIP, the manifest, the compiler
            raise TargetError(f"target {name}: {error}") from error
        yield target


def _kernels(stack: contextlib.ExitStack, wanted: list, code_objects: Path | None) -> Path:
    """A folder that holds the wanted kernels."""
    if code_objects is not None:
        return code_objects
    return _compiled(stack, wanted) if _has_flydsl() else launcher.PACKAGE_DIRECTORY


def _has_flydsl() -> bool:
    return importlib.util.find_spec("flydsl") is not None


def _compiled(stack: contextlib.ExitStack, wanted: list) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    compile_builds(wanted, folder)
    return folder


def _complete(loaded: launcher.Launcher, wanted: list) -> None:
    missing = loaded.missing(wanted)
    if missing:
        raise TargetError(
            f"{loaded.directory} lacks {len(missing)} of {len(wanted)} kernels, {missing[0]} for "
            "one: compile them for --tp 4 with every --kv-cache-dtype and --indexer-kv-dtype "
            "(nvfp4, fp8, bf16), or install FlyDSL"
        )


def _emulator(stack, wanted: list, code_objects: Path | None) -> Target:
    try:
        from rocm_msa import emulated
        from rocm_msa.emulated.counting import counting_gpu
        from rocm_msa.emulated.serving import NAME
    except ImportError as error:
        raise TargetError(f"target emulator needs the emulator's packages: {error}") from None
    faults = emulated.faults(code_objects and str(code_objects))
    if faults:
        raise TargetError(f"target emulator: {'; '.join(faults)}")

    folder = _kernels(stack, wanted, code_objects)
    gpu = emulated.EmulatedGpu(emulated.tally.add)
    loaded = emulated.EmulatedLauncher(folder, gpu)
    _complete(loaded, wanted)
    launcher.offer(NAME, loaded)

    @contextlib.contextmanager
    def counting() -> Iterator[list]:
        reports: list = []
        with launcher.using(emulated.EmulatedLauncher(folder, counting_gpu(reports.append))):
            yield reports

    def reach(tensors: list[torch.Tensor]) -> None:
        gpu.buffers = tensors

    def mono(shape: Shape, build: Build) -> MonoRunner:
        kernels = emulated.EmulatedLauncher(_compiled(stack, [build]), gpu)
        made = MonoRunner(
            Alone(), shape, max_blocks=MAX_BLOCKS, device="cpu", patience_ms=PATIENCE_MS,
            workgroups=EMULATED_WORKGROUPS, runtime=emulated.EmulatedPeers(gpu), kernels=kernels,
        )  # fmt: skip
        gpu.map(made.status)
        return made

    return Target(
        "emulator", torch.device("cpu"), f"{GFX950.name}, emulated", 0, ("emulated",), gpu, reach,
        counting, mono if _has_flydsl() else None, ("Triton's kernels need a GPU",),
    )  # fmt: skip


def _gpu(stack, name: str, wanted: list, code_objects: Path | None) -> Target:
    if not torch.cuda.is_available():
        raise TargetError(
            f"target {name}: no GPU: torch {torch.__version__} sees none (is this its ROCm or CUDA "
            "build, and is the device visible?). Without one: --target emulator"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    arch = (
        properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    )
    described, count = f"{properties.name} ({arch})", torch.cuda.device_count()
    triton = ("triton",) if importlib.util.find_spec("triton") else ()
    notes = () if triton else ("Triton is not installed: its kernels are not checked",)
    if arch != GFX950.name:
        if name == GFX950.name:
            raise TargetError(f"target {name}: expected a {name} GPU, got {described}")
        if not triton:
            raise TargetError(f"target {name}: {described} needs Triton, which is not installed")
        notes += (f"opcodes and FlyDSL kernels need {GFX950.name}, this is {described}",)
        return Target(name, device, described, count, triton, notes=notes)
    runtime = Hip()
    _complete(launcher.start(_kernels(stack, wanted, code_objects), device), wanted)

    def mono(shape: Shape, build: Build) -> MonoRunner:
        kernels = launcher.Launcher(_compiled(stack, [build]), device)
        return MonoRunner(
            Alone(), shape, max_blocks=MAX_BLOCKS, device=device, patience_ms=PATIENCE_MS,
            kernels=kernels,
        )  # fmt: skip

    return Target(
        name, device, described, count, ("flydsl", *triton), runtime,
        mono=mono if _has_flydsl() else None, notes=notes,
    )  # fmt: skip
