"""Ranks of a Triton exchange in one emulated machine: mailboxes, states, launches that run at once.

    ranks = Ranks(geometry)
    with ranks.queueing(rank=0) as launches:       # `kernel[grid](...)` is queued, not run
        exchange_triton.run(ranks.shard(0), ranks.geometry, ranks.memory(0), ...)
    report = ranks.run(schedule)

The kernels are the gfx950 code objects that an AMD GPU would get (tests/ops/emulated_triton.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from triton.runtime import jit

from dcp.mailbox_layout import ErrorWord, Geometry
from dcp.shard import Shard
from gfx950_emu import Checks, Fault, Machine, Report, Schedule
from rocm_msa.flydsl_compile import ARCH, TRITON_HIDDEN_POINTERS, Compiled
from tests.ops.emulated_triton import CACHES, loaded, specialise

LARGE = frozenset((*CACHES, "state"))


@contextlib.contextmanager
def queueing(
    machine: Machine, rank: int, buffers: list[torch.Tensor], delay: int = 0,
    compiled_by_name: dict[str, Compiled] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Every Triton kernel launched inside is queued on `machine` for `rank`.

    buffers: memory that kernels find through pointers in memory. delay: in scheduling quanta.
    """

    def run(fn, *args, grid, warmup, **kwargs):
        compiled, bound = specialise(fn, args, kwargs, ARCH, LARGE)
        if compiled_by_name is not None:
            compiled_by_name[compiled.kernel] = compiled
        if warmup:
            return
        names = [n for n in compiled.arguments if n not in TRITON_HIDDEN_POINTERS]
        machine.launch(
            loaded(compiled), compiled.kernel, grid, compiled.block, [bound[n] for n in names],
            lds_bytes=compiled.dynamic_lds_bytes, rank=rank, delay=delay, buffers=buffers,
        )  # fmt: skip

    with (
        mock.patch.object(jit.JITFunction, "run", run),
        mock.patch.object(torch.version, "hip", "emulated"),
    ):
        yield


class Ranks:
    """The memory of a group. `generation`: the first launch's. `stale`: what mailboxes hold."""

    def __init__(self, geometry: Geometry, generation: int = 1, stale: torch.Tensor | None = None):
        self.geometry = geometry
        words = geometry.mailbox.nbytes // 8
        self.mailboxes = [torch.zeros(words, dtype=torch.int64) for _ in range(geometry.ranks)]
        first = geometry.mailbox["buffer0"].offset // 8
        self.states, self.status, self.addresses = [], [], []
        for mailbox in self.mailboxes:
            if stale is not None:
                mailbox[first:] = stale[: words - first]
            state = torch.zeros(geometry.state.nbytes, dtype=torch.uint8)
            self.words(state, "generation").fill_(generation)
            # The keys are as `torch.empty` gives them.
            self.region(state, "keys").fill_(0xA5)
            self.states.append(state)
            self.status.append(torch.zeros(1, dtype=torch.int64))
            places = [*self.mailboxes, self.status[-1]]
            self.addresses.append(torch.tensor([p.data_ptr() for p in places]))
        self.machine = Machine(checks=Checks.ALL)
        self.compiled: dict[str, Compiled] = {}

    def region(self, state: torch.Tensor, name: str) -> torch.Tensor:
        place = self.geometry.state[name]
        return state[place.offset : place.end]

    def words(self, state: torch.Tensor, name: str) -> torch.Tensor:
        return self.region(state, name).view(torch.int64)

    def shard(self, rank: int) -> Shard:
        return Shard(rank, self.geometry.ranks, self.geometry.heads)

    def memory(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.addresses[rank], self.states[rank]

    def generations(self) -> list[int]:
        return [int(self.words(s, "generation")) for s in self.states]

    def errors(self) -> list[ErrorWord | None]:
        """What each rank's host finds; the same as on its device."""
        found = [ErrorWord.parse(int(s)) for s in self.status]
        assert found == [ErrorWord.parse(int(self.words(s, "error"))) for s in self.states]
        return found

    def queueing(self, rank: int, delay: int = 0) -> contextlib.AbstractContextManager[None]:
        """Every Triton kernel launched inside is queued for `rank`."""
        buffers = [*self.mailboxes, self.status[rank]]
        return queueing(self.machine, rank, buffers, delay, self.compiled)

    def run(self, schedule: Schedule | None = None, fault: Fault | None = None) -> Report:
        """Run what is queued; again: a replay."""
        self.machine.schedule = schedule or Schedule()
        self.machine.faults = [fault] if fault else []
        return self.machine.run()
