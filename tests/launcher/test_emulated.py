"""Compile, manifest, launcher, fake HIP, emulator: one small kernel through all of them."""

import pytest
import torch

from gfx950_emu import Checks, Schedule
from rocm_msa import launcher
from rocm_msa.launcher import MissingKernel
from tests.launcher import toy
from tests.launcher.emulated import CPU, SCHEDULES, assert_clean, emulated, useful

ONE, TWO = toy.Build(16), toy.Build(16, twice=True)


def test_a_kernel_runs_end_to_end():
    x = torch.arange(1000.0)
    for schedule in SCHEDULES:
        with emulated([ONE, TWO], schedule=schedule) as reports:
            plain, twice = toy.run(x, 3.0), toy.run(x, 3, twice=True)
        assert_clean(reports, 2)
        assert torch.equal(plain, x * 3 + 16) and torch.equal(twice, 2 * (x * 3 + 16))
        assert useful(reports[0], "global_store") == 16
    assert len(SCHEDULES) >= 20


def test_an_empty_grid_launches_nothing():
    with emulated([ONE]) as reports:
        assert toy.run(torch.zeros(0), 1.0).shape == (0,)
    assert reports == []


def test_the_launcher_is_put_back():
    assert launcher.active(CPU) is None
    with emulated([ONE]):
        outer = launcher.active(CPU)
        with emulated([TWO]):
            assert launcher.active(CPU) is not outer
            with pytest.raises(
                MissingKernel, match=r"toy_add16 is not among the 1 .*rocm-msa comp"
            ):
                toy.run(torch.zeros(4), 1.0)
        assert launcher.active(CPU) is outer
        assert torch.equal(toy.run(torch.ones(4), 1.0), torch.full((4,), 17.0))
    assert launcher.active(CPU) is None
    with pytest.raises(RuntimeError, match=r"toy_add16: CPU tensors \(compiled kernels run on gfx"):
        toy.run(torch.zeros(4), 1.0)


def test_findings_and_errors_of_the_emulator_reach_the_test():
    x, y = torch.zeros(256), torch.zeros(100)
    with emulated([ONE]) as reports:
        launcher.launch(ONE, (1,), [x, y, 1.0, 256, 0], CPU)
        with pytest.raises(AssertionError):
            assert_clean(reports)
        with pytest.raises(AssertionError):
            assert_clean([])
        with pytest.raises(AssertionError):
            assert_clean(reports, 2)
    with emulated([ONE], schedule=Schedule(max_instructions=10)) as reports:
        toy.run(x, 1.0)
    assert reports[0].status != "finished"
    with emulated([ONE], checks=Checks.NONE) as reports:
        toy.run(x, 1.0)
    assert_clean(reports, 1)
