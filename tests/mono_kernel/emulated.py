"""The mono kernel in the emulator on one or several ranks, and its regions after a launch."""

from __future__ import annotations

import functools
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gfx950_emu import Checks, CodeObject, DeviceModel, Machine, Report, Schedule
from mono_kernel import plan
from mono_kernel.faults import MonoError, decode
from mono_kernel.layer_gfx950 import Build, Memory, arguments
from mono_kernel.regions import view
from mono_kernel.shapes import MAX_ROWS
from rocm_msa import kernel_manifest
from rocm_msa.aot import compile_builds
from tests.mono_kernel.steps import Step

WORKGROUPS = 8
MAX_BLOCKS = 64  # of a request, for the exchange's mailboxes
PATIENCE = 20  # ms of the virtual clock
POISON = 0x7F
_CODES = {"i32": "i", "i64": "q", "f32": "f"}
RANDOM = Schedule("random", 3, (1, 2000))


@functools.cache
def compiled(build: Build) -> tuple[kernel_manifest.Entry, CodeObject]:
    """A kernel's manifest entry and code object, from the cache of rocm_msa.aot."""
    with tempfile.TemporaryDirectory() as folder:
        compile_builds([build], Path(folder), processes=1)
        entry = kernel_manifest.read(Path(folder)).kernels[build.symbol]
        return entry, CodeObject.from_bytes(kernel_manifest.read_code_object(Path(folder), entry))


def packed_arguments(args: list, entry: kernel_manifest.Entry) -> list:
    """Scalars as bytes of the kernel's types, tensors as they are."""
    return [
        value if a.type == "ptr" else struct.pack("<" + _CODES[a.type], value)
        for value, a in zip(args, entry.arguments, strict=True)
    ]


@dataclass
class Rank:
    """A rank's buffers. Scratch is poison: what a phase did not write must not be read."""

    memory: Memory
    mailbox: torch.Tensor
    hidden_out: torch.Tensor
    residual_out: torch.Tensor
    packed: torch.Tensor
    caches: tuple


@dataclass
class Group:
    """All ranks of a step, in one address space. status: what each rank's host would read."""

    step: Step
    phases: int = len(plan.PHASES)
    workgroups: int = WORKGROUPS
    ranks: list[Rank] = field(default_factory=list)
    inputs: list[tuple] | None = None  # each rank's hidden and residual, where not the step's own

    def __post_init__(self) -> None:
        step = self.step
        shape, rows = step.shape, step.batch.rows
        self.build = Build.from_shape(shape, self.phases)
        self.status = torch.zeros(step.tp, dtype=torch.int64)
        boxes = [
            torch.zeros(plan.mailbox_layout(shape, MAX_BLOCKS).nbytes, dtype=torch.uint8)
            for _ in range(step.tp)
        ]
        for rank, caches in enumerate(step.copies()):
            addresses = [box.data_ptr() for box in boxes]
            addresses.append(self.status[rank:].data_ptr())
            scratch = plan.scratch_layout(shape, step.table.shape[1]).nbytes
            state = torch.zeros(plan.state_layout().nbytes, dtype=torch.uint8)
            state[:8].view(torch.int64)[0] = 1
            memory = Memory(
                torch.full((scratch,), POISON, dtype=torch.uint8), state,
                torch.tensor(addresses), rank, PATIENCE, self.workgroups, MAX_BLOCKS,
            )  # fmt: skip
            outs = [torch.full((rows, shape.hidden), float("nan")).bfloat16() for _ in range(2)]
            packed = step.packed(rank)
            self.ranks.append(Rank(memory, boxes[rank], *outs, packed, caches))
        self.boxes = boxes

    def next(self, **inputs) -> None:
        """Go on to the step after this one, on the same buffers."""
        kept = self.step.copies([r.caches for r in self.ranks])
        self.step = self.step.next(kept, **inputs)

    def errors(self) -> list[MonoError | None]:
        """What the host of each rank reads."""
        return [decode(word) for word in self.status.tolist()]

    def arguments(self, rank: int) -> list:
        r, step = self.ranks[rank], self.step
        given = self.inputs[rank] if self.inputs else (step.hidden, step.residual)
        return arguments(
            self.build, r.memory, r.packed, r.caches, step.batch, *given,
            r.hidden_out, r.residual_out,
        )  # fmt: skip

    def machine(self, schedule: Schedule, checks=Checks.ALL, device=None) -> Machine:
        """With one launch of every rank queued."""
        entry, code = compiled(self.build)
        machine = Machine(device or DeviceModel(), schedule, checks)
        for rank in range(len(self.ranks)):
            self.queue(machine, rank, entry, code)
        return machine

    def queue(self, machine: Machine, rank: int, entry, code) -> None:
        args = packed_arguments(self.arguments(rank), entry)
        machine.launch(
            code, entry.symbol, (self.workgroups, 1, 1), entry.block, args,
            lds_bytes=entry.dynamic_lds, rank=rank, buffers=[*self.boxes, self.status],
        )  # fmt: skip

    def run(self, schedule: Schedule = RANDOM, **options) -> Report:
        """One launch on every rank, without a finding and without an error word."""
        report = self.machine(schedule, **options).run()
        report.raise_for_findings()
        assert self.errors() == [None] * self.step.tp
        return report

    def region(self, name: str, rank: int = 0) -> torch.Tensor:
        """A region in the shape and dtype of plan.scratch_layout, of the batch's rows."""
        s, rows = self.step.shape, self.step.batch.rows
        r = self.ranks[rank]
        if name in plan.OUTPUTS:
            return getattr(r, name)
        if name == "scores" and s.exchange:
            return self._exchanged(rank)[:, :rows]
        found = view(s, r.memory.scratch, name, self.step.table.shape[1])
        return found[:, :rows] if name in ("scores", "selected") else found[:rows]

    def _exchanged(self, rank: int) -> torch.Tensor:
        """Scores that the last launch of `rank` was sent."""
        r, where = self.ranks[rank], plan.mailbox_layout(self.build, MAX_BLOCKS)["results"]
        launch = int(r.memory.state[:8].view(torch.int64)) - 1
        words = r.mailbox[where.offset : where.end].view(torch.int32)
        words = words.view(2, self.build.index_heads, MAX_ROWS, MAX_BLOCKS, 2)[launch % 2, ..., 0]
        return words.contiguous().view(torch.float32)[..., : self.step.table.shape[1]]
