"""Launching kernels on the emulated device.

    report = launch(code, "softmax", grid=(8,), block=(256,), args=[out, x, 1024])

Buffers (NumPy arrays, torch CPU tensors) are used in place: an emulated address is the address in
this process. Only what was passed as an argument, or as `buffers`, can be accessed; anything else
is a finding, and a read gives 0. The grid counts workgroups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gfx950_emu.report import Report
from gfx950_emu.run import Run
from gfx950_emu.settings import Checks, DeviceModel, Fault, Schedule


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3 or min(values) < 1:
        raise ValueError(f"a grid or block of 1 to 3 positive numbers, not {value}")
    return (*values, 1, 1)[:3]


@dataclass
class Queued:
    code_object: object
    kernel: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: list
    lds_bytes: int
    rank: int
    stream: int
    delay: int
    buffers: list = field(default_factory=list)


class Machine:
    """A device, or several ranks of it in one address space, with a queue of launches.

    Launches of one rank and stream run one after another, all others at once. run() runs the
    queue and keeps it, so that a second run() replays it, as a graph does.
    """

    def __init__(self, device: DeviceModel | None = None, schedule: Schedule | None = None,
                 checks: Checks = Checks.ALL) -> None:  # fmt: skip
        self.device = device or DeviceModel()
        self.schedule = schedule or Schedule()
        self.checks = checks
        self.queue: list[Queued] = []
        self.faults: list[Fault] = []

    def launch(self, code_object, kernel, grid, block, args, *, lds_bytes=0, rank=0, stream=0,
               delay=0, buffers=()) -> int:  # fmt: skip
        """Queue a launch. `delay`: scheduling quanta to hold it back. `buffers`: memory that is
        reached only through pointers in memory. Returns its number."""
        k = code_object.kernels[kernel] if isinstance(kernel, str) else kernel
        grid, block = _three(grid), _three(block)
        threads = block[0] * block[1] * block[2]
        if threads > k.max_workgroup_size:
            raise ValueError(
                f"kernel {k.name}: a block of {threads} threads, compiled for at most "
                f"{k.max_workgroup_size}"
            )
        lds = k.descriptor.lds_bytes + lds_bytes
        if lds > self.device.lds_bytes:
            raise ValueError(
                f"kernel {k.name}: {lds} bytes of LDS, a CU has {self.device.lds_bytes}"
            )
        self.queue.append(
            Queued(code_object, k, grid, block, list(args), lds, rank, stream, delay, list(buffers))
        )
        return len(self.queue) - 1

    def inject(self, fault: Fault) -> None:
        """Every run from now on has this fault; the report says when it happened."""
        self.faults.append(fault)

    def kill_rank(self, rank: int) -> None:
        """The rank's launches never start."""
        self.inject(Fault("kill", rank, after_instructions=0))

    def run(self) -> Report:
        return Run(self).run()


def launch(code_object, kernel, grid, block, args, *, lds_bytes=0, ranks=1, device=None,
           schedule=None, checks=Checks.ALL, buffers=(), faults=()) -> Report:  # fmt: skip
    """Run one kernel to its end, on `ranks` ranks at once.

    `args`: a list for all ranks, or a list of `ranks` lists. lds_bytes comes on top of what the
    code object declares (Triton's shared memory).
    """
    machine = Machine(device, schedule, checks)
    for fault in faults:
        machine.inject(fault)
    each = ranks > 1 and len(args) == ranks and all(isinstance(a, (list, tuple)) for a in args)
    for rank in range(ranks):
        machine.launch(code_object, kernel, grid, block, args[rank] if each else args,
                       lds_bytes=lds_bytes, rank=rank, buffers=buffers)  # fmt: skip
    return machine.run()
