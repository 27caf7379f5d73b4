"""Triton kernels as their real code objects on CPU tensors: compiled for gfx950, run in gfx950_emu.

    with emulated(schedule=Schedule("random", 7, (1, 1000))) as launches:
        ops.sparse_decode(..., backend="triton")           # ordinary CPU tensors
    print(launches[0].kernel, launches[0].report.counters)

Inside of it `kernel[grid](...)` of every `@triton.jit` function is specialised by Triton's own
rules for an AMD GPU (integers of 1 are constants; multiples of 16 and pointers to less than 2 GiB
are known to be that), compiled through rocm_msa.flydsl_compile and launched in the emulator, to its
end before the call returns. A finding or a run that does not finish is raised there, with the
kernel's name. `install` does the same for the rest of the process.

Only the portable kernels: a Gluon function is refused, as are functions made under
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from gfx950_emu import Checks, CodeObject, DeviceModel, Machine, Report, Schedule
from rocm_msa import ops
from rocm_msa.flydsl_compile import (
    ARCH,
    TRITON_HIDDEN_POINTERS,
    WAVE_SIZE,
    Compiled,
    compile_triton,
)
from rocm_msa.ops import dispatch

CACHES = ("pages", "main_pages", "index_pages")
"""Arguments of the ops' kernels that are larger than 2 GiB in service."""


PLACE = "emulated"
"""First word of the key of our specialisations in a function's table of them."""

OPS = sorted(path.parent.name for path in Path(ops.__file__).parent.glob("*/triton_impl.py"))


@dataclass(frozen=True)
class Launch:
    """One `kernel[grid](...)`."""

    kernel: str
    compiled: Compiled
    grid: tuple[int, int, int]  # workgroups
    report: Report | None  # None when nothing was run


@dataclass(frozen=True)
class Emulation:
    """How launches are made.

    arch      what to compile for
    run       whether to run them; without, any device's tensors will do ("meta" for instance)
    schedule, checks, device    see gfx950_emu.Machine
    strict    raise on findings
    large     arguments that are taken for larger than 2 GiB, whatever they are
    done      called with each Launch
    """

    done: Callable[[Launch], None]
    arch: str = ARCH
    run: bool = True
    schedule: Schedule = field(default_factory=Schedule)
    checks: Checks = Checks.ALL
    device: DeviceModel | None = None
    strict: bool = True
    large: frozenset[str] = frozenset()

    def launch(self, fn: jit.JITFunction, grid: Any, args: tuple, kwargs: dict) -> None:
        compiled, bound = specialise(fn, args, kwargs, self.arch, self.large)
        grid = tuple(grid(bound) if callable(grid) else grid)
        grid = (*grid, 1, 1)[:3]
        if 0 in grid:
            return
        report = None
        if self.run:
            names = [n for n in compiled.arguments if n not in TRITON_HIDDEN_POINTERS]
            machine = Machine(self.device, self.schedule, self.checks)
            machine.launch(
                loaded(compiled), compiled.kernel, grid, compiled.block, [bound[n] for n in names],
                lds_bytes=compiled.dynamic_lds_bytes,
            )  # fmt: skip
            report = machine.run()
            if self.strict:
                report.raise_for_findings()
        self.done(Launch(fn.__name__, compiled, grid, report))


def specialise(
    fn: jit.JITFunction, args: tuple, kwargs: dict, arch: str, large: frozenset[str] = frozenset()
) -> tuple[Compiled, dict[str, Any]]:
    """(what Triton would compile for these arguments, arguments by name).

    Kept in the function's own table of specialisations, which warm-up counts.
    """
    kwargs = {"enable_fp_fusion": True} | kwargs  # the default, said aloud: Triton warns about it
    if fn.is_gluon():
        raise NotImplementedError(f"{fn.__name__}: a Gluon kernel is not for {arch}")
    place = f"{PLACE} {arch}"
    if place not in fn.device_caches:
        backend = HIPBackend(GPUTarget("hip", arch, WAVE_SIZE))
        binder = jit.create_function_from_signature(fn.signature, fn.params, backend)
        fn.device_caches[place] = ({}, {}, backend.target, backend, binder)
    kernels, keys, _, backend, binder = fn.device_caches[place]
    bound, kinds, options = binder(*args, **kwargs)
    kinds = [
        (kind, facts.replace("S", "")) if name in large and kind != "constexpr" else (kind, facts)
        for name, (kind, facts) in zip(bound, kinds, strict=True)
    ]
    key = jit.compute_cache_key(keys, kinds, options)
    if key not in kernels:
        _, types, constants, attrs = fn._pack_args(backend, kwargs, bound, kinds, options)
        names = list(types)

        def having(fact: str) -> tuple[str, ...]:
            return tuple(names[at] for (at,), facts in attrs.items() if fact in dict(facts))

        kernels[key] = compile_triton(
            fn,
            {name: kind for name, kind in types.items() if kind != "constexpr"},
            {names[at]: value for (at,), value in constants.items()},
            aligned=having("tt.divisibility"),
            small=having("tt.pointer_range"),
            arch=arch,
            **options,
        )
    return kernels[key], bound


@functools.cache
def _parsed(code_object: bytes) -> CodeObject:
    return CodeObject.from_bytes(code_object)


def loaded(compiled: Compiled) -> CodeObject:
    return _parsed(compiled.code_object)


def install(emulation: Emulation, *, default: bool = False) -> Callable[[], None]:
    """Launch every Triton kernel of this process as `emulation` says; returns what undoes it.

    default: whether ops that are given no backend take Triton for CPU tensors too.
    """

    def run(fn, *args, grid, warmup, **kwargs):
        emulation.launch(fn, grid, args, kwargs)

    find_fault = dispatch._fault

    def fault(backend, device):
        return None if backend == "triton" else find_fault(backend, device)

    patches = [(jit.JITFunction, "run", run), (dispatch, "_fault", fault)]
    if default:
        patches.append((dispatch, "_on_cpu", lambda device: False))
    # The ops see an AMD GPU: what they then choose is what is to be run.
    patches.append((torch.version, "hip", "emulated"))
    for name in OPS:
        importlib.import_module(f"rocm_msa.ops.{name}.triton_impl")
    for name, module in list(sys.modules.items()):
        if name.startswith("rocm_msa.ops.") and hasattr(module, "target_of"):
            patches.append((module, "target_of", lambda x: emulation.arch))
    before = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, value in patches:
        setattr(place, name, value)

    def uninstall() -> None:
        for place, name, value in before:
            setattr(place, name, value)

    return uninstall


@contextlib.contextmanager
def emulated(*, default: bool = False, **how: Any) -> Iterator[list[Launch]]:
    """The same for a block of code; gives the list that its launches are added to.

    how: fields of Emulation.
    """
    launches: list[Launch] = []
    uninstall = install(Emulation(done=launches.append, **how), default=default)
    try:
        yield launches
    finally:
        uninstall()
