"""Compiled Triton and FlyDSL kernels give PyTorch's results under many schedules, no finding."""

from __future__ import annotations

import pytest
import torch

from gfx950_emu import Checks, CodeObject, Machine, Report, Schedule
from tests.emulator.cases import Args, Case, Expected, PointerTable
from tests.emulator.corpus import CASES

SCHEDULES = [
    Schedule("round_robin", 0, (1, 1)),
    Schedule("round_robin", 0, (100_000, 100_000)),
    *(Schedule("random", seed, (1, 100_000)) for seed in range(6)),
    *(Schedule("random", seed, (1, 8)) for seed in range(4)),
    *(Schedule("priority", seed, (1, 2000)) for seed in range(4)),
    *(Schedule("starve", 0, (1, 500), starve=who) for who in
      ((0, None, None), (None, 0, None), (None, None, 0), (None, None, 1))),
]  # fmt: skip
QUICK = (Schedule(), SCHEDULES[2], SCHEDULES[8], SCHEDULES[12])


def queue(machine: Machine, case: Case, args: Args) -> None:
    """A launch of the case on each of its ranks."""
    compiled = case.compile()
    code = CodeObject.from_bytes(compiled.code_object)
    tables, buffers = {}, []

    def passed(value):
        if not isinstance(value, PointerTable):
            return value
        if id(value) not in tables:
            addresses = [t.data_ptr() for t in value.tensors]
            tables[id(value)] = torch.tensor(addresses, dtype=torch.int64)
            buffers.extend(value.tensors)
        return tables[id(value)]

    for rank in range(case.ranks):
        machine.launch(
            code, compiled.kernel, case.grid, case.block, [passed(v) for v in args[rank]],
            lds_bytes=compiled.dynamic_lds_bytes, rank=rank, buffers=buffers,
        )  # fmt: skip


def differences(case: Case, args: Args, expected: Expected) -> list[tuple[int, int, int]]:
    """What differs from PyTorch: (rank, argument, elements)."""
    wrong = []
    for rank, results in enumerate(expected):
        for position, want in results.items():
            got = args[rank][position].double()
            want = want.double()
            limit = case.tolerance.absolute + case.tolerance.relative * want.abs()
            good = ((got - want).abs() <= limit) | (got == want) | (got.isnan() & want.isnan())
            if not good.all():
                wrong.append((rank, position, int((~good).sum())))
    return wrong


def run(
    case: Case, schedule: Schedule, seed: int = 0, checks: Checks = Checks.ALL
) -> tuple[Report, list]:
    """The report, and what differs from PyTorch."""
    args = case.make_args(seed)
    expected = case.expected(args)
    machine = Machine(schedule=schedule, checks=checks)
    queue(machine, case, args)
    report = machine.run()
    return report, differences(case, args, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case):
    for schedule in QUICK:
        report, wrong = run(case, schedule)
        report.raise_for_findings()
        assert not wrong, schedule


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_under_all_schedules(case):
    assert len(SCHEDULES) >= 20
    for schedule in SCHEDULES:
        report, wrong = run(case, schedule, seed=1)
        report.raise_for_findings()
        assert not wrong, schedule
