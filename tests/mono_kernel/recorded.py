"""Several layers recorded once, as a graph records them, and replayed step after step.

Every pointer stays: between replays only the contents of the batch's tensors and of the first
layer's inputs change. All layers share a rank's state, mailbox and, as the runner has it, scratch.
"""

from __future__ import annotations

import dataclasses

import torch

from gfx950_emu import Checks, DeviceModel, Machine, Schedule
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import POISON, Group, compiled
from tests.mono_kernel.steps import Step
from tests.ops.cases import random_values

_CHANGING = ("positions", "main_slots", "index_slots", "seq_lens")


class Recorded:
    """own_scratch: each layer its own, so that all layers' regions are there after a replay."""

    def __init__(
        self, layout: str, tp: int, lens, per: int | list[int], *, layers: int, steps: int,
        schedule: Schedule, own_scratch: bool = True, checks: Checks = Checks.ALL,
    ):  # fmt: skip
        room = steps * (per if isinstance(per, int) else max(per))
        made = [
            Step(layout, tp, lens, per, seed=7, room=room, layer=layer) for layer in range(layers)
        ]
        self.groups = [Group(step) for step in made]
        self.lens, self.count = list(lens), 0
        first = self.groups[0]
        for before, group in zip(self.groups, self.groups[1:], strict=False):
            group.boxes, group.status = first.boxes, first.status
            group.step.batch = first.step.batch
            group.inputs = [(r.hidden_out, r.residual_out) for r in before.ranks]
            group.step.hidden, group.step.residual = group.inputs[0]
            for r, shared in zip(group.ranks, first.ranks, strict=True):
                scratch = r.memory.scratch if own_scratch else shared.memory.scratch
                r.memory = dataclasses.replace(shared.memory, scratch=scratch)
        self.machine = Machine(DeviceModel(), schedule, checks)
        entry, code = compiled(first.build)
        for group in self.groups:
            for rank in range(tp):
                group.queue(self.machine, rank, entry, code)

    def replay(self) -> None:
        """A step, without a finding or an error."""
        first = self.groups[0]
        for group in self.groups:
            group.step.caches = group.step.copies([r.caches for r in group.ranks])
            for r in group.ranks:
                r.memory.scratch.fill_(POISON)
                for out in (r.hidden_out, r.residual_out):
                    out.fill_(float("nan"))
        self.machine.run().raise_for_findings()
        assert first.errors() == [None] * first.step.tp
        self.count += 1
        for r in first.ranks:
            assert int(r.memory.state[:8].view(torch.int64)) == 1 + self.count * len(self.groups)

    def check(self) -> None:
        """Every region of every layer."""
        for group in self.groups:
            regions.check(group)

    def outputs(self) -> list[torch.Tensor]:
        return [r.hidden_out.clone() for group in self.groups for r in group.ranks]

    def advance(self) -> None:
        """Each request as many tokens on as it has rows: new contents, in place."""
        step = self.groups[0].step
        after = step.next(step.caches)
        for group in self.groups:
            group.step.lens = after.lens
        for name in _CHANGING:
            getattr(step.batch, name).copy_(getattr(after.batch, name))
        rows = step.hidden.shape
        for i, x in enumerate((step.hidden, step.residual)):
            x.copy_(random_values(10_000 + 2 * self.count + i, *rows))
