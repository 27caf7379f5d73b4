"""The emulated GPU: backend "emulated" of an op, what is counted, what is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections import Counter

import pytest
import torch

from rocm_msa import emulated, launcher
from rocm_msa.hip import HipError
from rocm_msa.launcher import MissingKernel
from rocm_msa.ops import dispatch
from tests.launcher import toy
from tests.ops.test_dispatch import Toy

CPU = torch.device("cpu")
ONE, TWO = toy.Build(16), toy.Build(16, twice=True)


@pytest.fixture(autouse=True)
def nothing_offered(monkeypatch):
    monkeypatch.setattr(launcher, "_offered", {})
    monkeypatch.setattr(dispatch, "_logged", set())
    for name in ("launches", "instructions", "nbytes"):
        monkeypatch.setattr(emulated.tally, name, Counter())


def toy_op(x, *args, backend="emulated", kernels=True, **options):
    implementations = {"reference": lambda *a, **o: "reference"}
    if kernels:
        implementations["flydsl"] = Toy()
    return dispatch.choose("toy", backend, implementations, x.device)(x, *args, **options)


def test_an_op_runs_its_code_object_and_nothing_else_changes():
    emulated.start([ONE])
    x, before = torch.arange(300.0), dispatch.taken["toy", "emulated"]
    assert torch.equal(toy_op(x, 2.0), 2 * x + 16)
    assert dispatch.taken["toy", "emulated"] == before + 1
    assert launcher.active(CPU) is None and toy_op(x, 2.0, backend=None) == "reference"
    tally = emulated.tally
    assert tally.launches == {(ONE.symbol,): 1}
    assert tally.instructions[(ONE.symbol,)] > 0
    assert tally.nbytes[ONE.symbol, "written"] == 4 * len(x)


def test_an_op_without_kernels_takes_the_reference_and_says_so(caplog):
    emulated.start([ONE])
    with caplog.at_level(logging.INFO, dispatch.__name__):
        assert toy_op(torch.zeros(3), 1.0, kernels=False) == "reference"
    words = "toy runs on backend reference (emulated: the op has no FlyDSL kernels)"
    assert words in caplog.text


def test_no_other_backend_steps_in():
    with pytest.raises(NotImplementedError, match=r"no emulator was started in this process"):
        toy_op(torch.zeros(3), 1.0)
    emulated.start([ONE])
    with pytest.raises(MissingKernel, match="toy_add16_twice"):
        toy_op(torch.zeros(3), 1.0, twice=True)
    with pytest.raises(NotImplementedError, match="x: expected one dimension"):
        toy_op(torch.zeros(1, 3), 1.0)
    with pytest.raises(NotImplementedError, match=r"got tensors on meta"):
        toy_op(torch.zeros(3, device="meta"), 1.0)


def test_a_fused_kernel_is_offered_with_the_emulator():
    x = torch.arange(5.0)
    assert dispatch.fused("toy", None, Toy(), CPU, (x, 1.0)) is None
    with pytest.raises(NotImplementedError, match="no emulator was started"):
        dispatch.fused("toy", "emulated", Toy(), CPU, (x, 1.0))
    emulated.start([ONE])
    assert dispatch.fused("toy", "emulated", Toy(), CPU, (x[None], 1.0)) is None
    run = dispatch.fused("toy", "emulated", Toy(), CPU, (x, 1.0))
    assert torch.equal(run(x, 1.0), x + 16) and emulated.tally.launches.total() == 1
    assert dispatch.fused("toy", "reference", Toy(), CPU, (x, 1.0)) is None


def test_a_fault_of_a_kernel_ends_the_call():
    loaded = emulated.start([ONE])
    with launcher.using(loaded), pytest.raises(emulated.EmulationError, match="outside of any"):
        launcher.launch(ONE, (1,), [torch.zeros(256), torch.zeros(100), 1.0, 256, 0], CPU)
    assert not emulated.tally.launches


def test_kernels_of_a_folder(tmp_path):
    from rocm_msa.aot import compile_builds

    compile_builds([ONE], tmp_path, processes=1)
    assert torch.equal(_with(emulated.start([ONE], tmp_path)), torch.full((4,), 17.0))
    with pytest.raises(RuntimeError, match=f"{tmp_path} lacks toy_add16_twice"):
        emulated.start([ONE, TWO], tmp_path)


def _with(loaded) -> torch.Tensor:
    with launcher.using(loaded):
        return toy.run(torch.ones(4), 1.0)


def test_a_function_that_a_code_object_lacks():
    gpu = emulated.start([ONE]).gpu
    with pytest.raises(HipError, match="hipErrorNotFound"):
        gpu.get_function(1, "nothing", "kernel nothing")


def test_what_is_missing_is_named(monkeypatch):
    assert emulated.faults() == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (no_compiler,) = emulated.faults("folder")
    assert "neither g++ nor clang++" in no_compiler

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = "\n".join(emulated.faults())
    assert "FlyDSL 0.5.0 is not installed" in text and "LLVM's disassembler" in text
    assert len(emulated.faults("folder")) == 2
