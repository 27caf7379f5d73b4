"""A GPU behind the launcher that is the emulator: a launch has ended when the call returns.

The launcher does all that it does on an AMD GPU (manifest, digests, argument packing); instead of
HIP's calls it makes those of `EmulatedGpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gfx950_emu import Checks, CodeObject, DeviceModel, Machine, Report, Schedule
from rocm_msa.hip import HipError
from rocm_msa.launcher import Launcher, Runtime

NOT_FOUND = 500  # hipErrorNotFound


class EmulationError(RuntimeError):
    """A launch that did not end, or in which the emulator found a fault of the kernel."""


class EmulatedGpu:
    """A launcher.Runtime.

    Args:
        schedule, checks, device: of every launch; see gfx950_emu.
        observe: gets the Report of each launch, findings and all; what it raises ends the launch.

    Attributes:
        buffers: tensors that the next launch may access, beside what is mapped.
        functions: (code object, kernel name) of each function handed out, from 1.
    """

    def __init__(
        self,
        observe: Callable[[Report], None],
        *,
        schedule: Schedule | None = None,
        checks: Checks = Checks.ALL,
        device: DeviceModel | None = None,
    ) -> None:
        self.observe = observe
        self.schedule, self.checks = schedule or Schedule(), checks
        self.device = device or DeviceModel()
        self.buffers: list[torch.Tensor] = []
        self.functions: list[tuple[CodeObject, str]] = []
        self._modules: list[CodeObject] = []
        self._mapped: dict[int, Any] = {}

    def load_module(self, data: bytes, subject: str) -> int:
        self._modules.append(_code_object(data))
        return len(self._modules)

    def get_function(self, module: int, symbol: str, subject: str) -> int:
        code = self._modules[module - 1]
        if symbol not in code.kernels:
            raise HipError("hipModuleGetFunction", subject, NOT_FOUND, "hipErrorNotFound")
        self.functions.append((code, symbol))
        return len(self.functions)

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        lds: int,
        stream: int,
        kernarg: bytes,
        subject: str,
    ) -> None:
        machine = Machine(self.device, self.schedule, self.checks)
        self.queue(machine, function, grid, block, lds, kernarg)
        self.observe(machine.run())

    def queue(
        self,
        machine: Machine,
        function: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        lds: int,
        kernarg: bytes,
        **place: Any,
    ) -> None:
        """Put a launch into a machine's queue. place: rank, delay; see gfx950_emu.Machine."""
        code, name = self.functions[function - 1]
        args = [
            kernarg[a.offset : a.offset + a.size]
            for a in code.kernels[name].args
            if not a.kind.startswith("hidden_")
        ]
        reached = [*self.buffers, *self._mapped.values()]
        machine.launch(code, name, grid, block, args, lds_bytes=lds, buffers=reached, **place)

    def map(self, memory: np.ndarray | torch.Tensor) -> int:
        """Let all launches reach `memory` through its address, which is returned."""
        tensor = isinstance(memory, torch.Tensor)
        address = memory.data_ptr() if tensor else memory.ctypes.data
        self._mapped[address] = memory
        return address

    def unmap(self, address: int) -> None:
        """Forget what `map` was given."""
        del self._mapped[address]


class EmulatedLauncher(Launcher):
    """A launcher for CPU tensors that tells the emulator which memory a kernel may touch.

    Args:
        hip: what makes the calls, when it is not `gpu` itself.
    """

    def __init__(self, directory: Path, gpu: EmulatedGpu, hip: Runtime | None = None) -> None:
        super().__init__(directory, torch.device("cpu"), hip=hip or gpu)
        self.gpu = gpu

    def launch(self, build: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        self.gpu.buffers = [a for a in args if isinstance(a, torch.Tensor) and a.numel()]
        super().launch(build, grid, args)


@functools.lru_cache(maxsize=256)
def _code_object(data: bytes) -> CodeObject:
    return CodeObject.from_bytes(data)
