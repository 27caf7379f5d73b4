"""Ops on FlyDSL kernels without a GPU: the launcher, a fake HIP runtime, the emulator.

    with emulated(module.builds(config)) as reports:
        got = ops.qkv_insert(..., backend="flydsl")         # CPU tensors
    assert_clean(reports)

Everything between the op and the compiled kernel is the product's own: manifest, checks, argument
packing, ctypes. `reports` holds one emulator Report a launch, in order. Kernels come from the cache
of rocm_msa.aot: only what changed is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gfx950_emu import Checks, DeviceModel, Report, Schedule
from rocm_msa import kernel_manifest, launcher
from rocm_msa.aot import Build, compile_builds
from rocm_msa.emulated import EmulatedGpu, EmulatedLauncher
from rocm_msa.hip import Hip, HipError

SOURCE = Path(__file__).with_name("fake_hip.c")
CPU = torch.device("cpu")
NO_BINARY, LAUNCH_FAILED = 209, 719

_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)
)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32,
    ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip

SCHEDULES = [
    Schedule("round_robin", 0, (1, 1)),
    Schedule("round_robin", 0, (100_000, 100_000)),
    *(Schedule("random", seed, (1, 100_000)) for seed in range(6)),
    *(Schedule("random", seed, (1, 8)) for seed in range(4)),
    *(Schedule("priority", seed, (1, 2000)) for seed in range(4)),
    *(Schedule("starve", 0, (1, 500), starve=who) for who in
      ((0, None, None), (None, 0, None), (None, None, 0), (None, None, 1))),
]  # fmt: skip
"""The schedules of the emulator's own corpus: 20."""


@dataclass
class Call:
    """One hipModuleLaunchKernel, as it arrived."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds: int
    stream: int
    kernarg: bytes


@dataclass
class FakeHip:
    """A HIP runtime library whose GPU is the emulator: the product's ctypes bindings on top of it.

    gpu: what runs kernels; `gpu.buffers` are the tensors that they may access.
    reports, calls: of the launches so far. error: what the emulator raised inside a callback.
    run_kernels: False records the calls alone.
    """

    schedule: Schedule = field(default_factory=Schedule)
    checks: Checks = Checks.ALL
    device: DeviceModel = field(default_factory=DeviceModel)
    run_kernels: bool = True
    reports: list[Report] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.gpu = EmulatedGpu(
            self.reports.append, schedule=self.schedule, checks=self.checks, device=self.device
        )
        self._library = ctypes.CDLL(str(library()))
        self._callbacks = (_LOAD(self._load), _FUNCTION(self._function), _LAUNCH(self._launch))
        self._plan: bytes = b""

    def connect(self) -> None:
        """Let the library's calls come here: to one FakeHip at a time."""
        self._library.fake_hip_connect(*self._callbacks)

    def runtime(self) -> Hip:
        """The product's own bindings, on this library."""
        self.connect()
        hip = Hip(str(library()))
        hip.fake = self  # the library holds no reference to the callbacks
        return hip

    @contextlib.contextmanager
    def failing(self, call: str, code: int) -> Iterator[None]:
        """Let a HIP call return `code`."""
        self._plan = call.encode()
        self._library.fake_hip_fail(ctypes.c_char_p(self._plan), code)
        try:
            yield
        finally:
            self._plan = b""
            self._library.fake_hip_fail(ctypes.c_char_p(self._plan), 0)

    def _load(self, image, module) -> int:
        try:
            header = ctypes.string_at(image, 64)
            sections = int.from_bytes(header[40:48], "little")
            size = int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
            module[0] = self.gpu.load_module(ctypes.string_at(image, sections + size), "")
        except Exception as error:
            self.error = error
            return NO_BINARY
        return 0

    def _function(self, module, name, function) -> int:
        try:
            function[0] = self.gpu.get_function(module, name.decode(), "")
        except HipError as error:
            return error.code
        return 0

    def _launch(self, function, geometry, lds, stream, kernarg, size) -> int:
        try:
            _, name = self.gpu.functions[function - 1]
            block_bytes = ctypes.string_at(kernarg, size)
            grid, block = tuple(geometry[0:3]), tuple(geometry[3:6])
            self.calls.append(Call(name, grid, block, lds, stream, block_bytes))
            if self.run_kernels:
                self.gpu.launch(function, grid, block, lds, stream, block_bytes, name)
        except Exception as error:  # ctypes would print and drop it
            self.error = error
            return LAUNCH_FAILED
        return 0


class Recording(EmulatedLauncher):
    """The emulated launcher on the product's bindings and a FakeHip, whose errors it raises."""

    def __init__(self, directory: Path, fake: FakeHip) -> None:
        super().__init__(directory, fake.gpu, fake.runtime())
        self.fake = fake

    def launch(self, build, grid, args) -> None:
        self.fake.error = None
        self.fake.connect()
        try:
            super().launch(build, grid, args)
        except Exception:
            if self.fake.error is not None:
                raise self.fake.error from None
            raise


@contextlib.contextmanager
def emulated(
    builds: Sequence[Build],
    *,
    schedule: Schedule | None = None,
    checks: Checks = Checks.ALL,
    device: DeviceModel | None = None,
) -> Iterator[list[Report]]:
    """Run the FlyDSL kernels of ops on CPU tensors in the emulator.

    Args:
        builds: what the ops inside need; compiled when the cache does not have them.
        schedule, checks, device: of every launch; see gfx950_emu.

    Yields:
        The list that each launch's Report is appended to. Findings are not raised.
    """
    fake = FakeHip(schedule or Schedule(), checks, device or DeviceModel())
    with tempfile.TemporaryDirectory() as folder:
        compile_builds(list(builds), Path(folder), processes=1)
        loaded = Recording(Path(folder), fake)
    with launcher.using(loaded):
        yield fake.reports


def assert_clean(reports: Sequence[Report], launches: int | None = None) -> None:
    """No finding in any report; `launches` of them when given."""
    assert reports and (launches is None or len(reports) == launches), len(reports)
    for report in reports:
        report.raise_for_findings()


@functools.cache
def library(source: Path = SOURCE) -> Path:
    """A fake runtime library, compiled once a source; this module's libamdhip64 for instance."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"rocm-msa-{source.stem}-{os.getuid()}-{digest}.so"
    if not path.exists():
        compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
        if compiler is None:
            raise RuntimeError("a C compiler (cc, gcc or clang) is needed to build the fake HIP")
        part = path.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", part, source]
        subprocess.run(command, check=True, capture_output=True)
        part.replace(path)
    return path


def resources(build: Build) -> dict[str, int]:
    """Registers, spills and scratch of a compiled kernel, from its manifest."""
    with tempfile.TemporaryDirectory() as folder:
        compile_builds([build], Path(folder), processes=1)
        return kernel_manifest.read(Path(folder)).kernels[build.symbol].registers


def useful(report: Report, prefix: str) -> int:
    """Wave-instructions whose mnemonic starts with `prefix`, over all launches."""
    counts: dict[str, Any] = {}
    for one in report.launches:
        for name, count in one.instructions.items():
            counts[name] = counts.get(name, 0) + count
    return sum(count for name, count in counts.items() if name.startswith(prefix))
