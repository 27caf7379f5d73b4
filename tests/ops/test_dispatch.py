"""Backend choice, and the checks that all ops share."""

import logging
from types import SimpleNamespace

import pytest
import torch

from rocm_msa import launcher
from rocm_msa.aot import compile_builds
from rocm_msa.errors import ConfigError, Refusals, check_output, check_tensor
from rocm_msa.launcher import MissingKernel
from rocm_msa.ops import block_topk, dispatch
from tests.launcher import toy
from tests.launcher.emulated import FakeHip, emulated
from tests.ops.cases import int32

SCORES, NB = torch.zeros(1, 1, 4), int32([4])


def test_the_path_taken_is_counted():
    before = dispatch.taken["block_topk", "reference"]
    block_topk(SCORES, NB)
    block_topk(SCORES, NB, backend="reference")
    assert dispatch.taken["block_topk", "reference"] == before + 2


@pytest.fixture
def logged(caplog, monkeypatch):
    """The lines that dispatch logged so far."""
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.INFO, logger=dispatch.__name__)
    return lambda: [r.getMessage() for r in caplog.records if r.name == dispatch.__name__]


IMPLEMENTATIONS = {name: (lambda name=name: name) for name in dispatch.BACKENDS}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_reason_is_logged_once(logged):
    for _ in range(3):
        block_topk(SCORES, NB, backend="reference")
        dispatch.choose("x", None, {"reference": len, "triton": len}, CPU)
        dispatch.choose("y", None, IMPLEMENTATIONS, CPU)
    assert logged() == [
        "block_topk runs on backend reference (asked for)",
        "x runs on backend reference (flydsl: not implemented; triton: for GPUs)",
        "y runs on backend reference (flydsl: for GPUs; triton: for GPUs)",
    ]


def test_a_refused_backend_is_not_counted():
    before = sum(dispatch.taken.values())
    for backend in ("flydsl", "cuda"):
        with pytest.raises((NotImplementedError, ValueError)):
            block_topk(SCORES, NB, backend=backend)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        block_topk(SCORES, NB, backend="triton")
    assert sum(dispatch.taken.values()) == before


def test_the_preferred_backend_runs():
    assert dispatch.choose("x", None, IMPLEMENTATIONS)() == "flydsl"
    assert dispatch.choose("x", "triton", IMPLEMENTATIONS)() == "triton"
    only = {"reference": IMPLEMENTATIONS["reference"]}
    assert dispatch.choose("x", None, only)() == "reference"


# FlyDSL: by device, then by call.


class Toy(dispatch.FlydslRun):
    """An op's FlyDSL backend that lies elsewhere."""

    def __init__(self):
        self.module = "tests.launcher.toy"


def toy_op(x, *args, backend=None, **options):
    others = {n: (lambda *a, n=n, **o: n) for n in ("triton", "reference")}
    choice = dispatch.choose("toy", backend, {"flydsl": Toy(), **others}, x.device)
    return choice(x, *args, **options)


def test_compiled_kernels_are_chosen_where_they_serve_the_call(logged):
    x, before = torch.arange(300.0), dispatch.taken["toy", "flydsl"]
    with emulated([toy.Build(16)]) as reports:
        assert torch.equal(toy_op(x, 2.0), 2 * x + 16)
        assert torch.equal(toy_op(x, 2.0, backend="flydsl"), 2 * x + 16)
        assert toy_op(x, 2.0, twice=True) == "reference"
        assert toy_op(x[None], 2.0) == "reference"
        with pytest.raises(MissingKernel, match="toy_add16_twice"):
            toy_op(x, 2.0, twice=True, backend="flydsl")
        with pytest.raises(NotImplementedError, match="x: expected one dimension"):
            toy_op(x[None], 2.0, backend="flydsl")
    assert len(reports) == 2 and dispatch.taken["toy", "flydsl"] == before + 4
    assert logged() == [
        "toy runs on backend flydsl (preferred)",
        "toy runs on backend flydsl (asked for)",
        "toy runs on backend reference (flydsl: not compiled: toy_add16_twice; triton: for GPUs)",
        "toy runs on backend reference (flydsl: x: expected one dimension; triton: for GPUs)",
    ]


@pytest.mark.parametrize("backend", [None, "flydsl"])
def test_a_call_is_looked_at_once(monkeypatch, backend):
    seen, needs = [], toy.needs
    monkeypatch.setattr(toy, "needs", lambda *a, **o: seen.append(1) or needs(*a, **o))
    with emulated([toy.Build(16)]):
        toy_op(torch.arange(5.0), 2.0, backend=backend)
    assert len(seen) == 1


def gpu(monkeypatch, hip, arch):
    """Let torch see one GPU."""
    monkeypatch.setattr(torch.version, "hip", hip)
    properties = SimpleNamespace(gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launcher, "_faults", {})
    monkeypatch.setattr(launcher, "_active", {})


@pytest.mark.parametrize(
    ("hip", "arch", "reason"),
    [
        (None, None, "not a gfx950 GPU"),
        ("7.0", "gfx942:sramecc+:xnack-", "compiled for gfx950, this GPU is gfx942"),
    ],
)
def test_another_gpu_takes_triton(monkeypatch, logged, hip, arch, reason):
    gpu(monkeypatch, hip, arch)
    assert dispatch.choose("z", None, IMPLEMENTATIONS, GPU)() == "triton"
    assert logged() == [f"z runs on backend triton (flydsl: {reason})"]
    with pytest.raises(NotImplementedError, match=reason):
        dispatch.choose("z", "flydsl", IMPLEMENTATIONS, GPU)


def test_gfx950_without_compiled_kernels_takes_triton_and_says_how_to_build(
    monkeypatch, logged, tmp_path
):
    gpu(monkeypatch, "7.0", "gfx950:sramecc+:xnack-")
    monkeypatch.setattr(launcher, "PACKAGE_DIRECTORY", tmp_path / "none")
    assert dispatch.choose("z", None, IMPLEMENTATIONS, GPU)() == "triton"
    (line,) = logged()
    assert "flydsl: no compiled kernels" in line and "to build: rocm-msa compile" in line


def test_gfx950_with_compiled_kernels_takes_flydsl(monkeypatch, tmp_path):
    gpu(monkeypatch, "7.0", "gfx950:sramecc+:xnack-")
    compile_builds([toy.Build(16)], tmp_path)
    monkeypatch.setattr(launcher, "PACKAGE_DIRECTORY", tmp_path)
    monkeypatch.setattr(launcher, "Hip", FakeHip().runtime)
    assert dispatch.choose("z", None, IMPLEMENTATIONS, GPU)() == "flydsl"
    assert launcher.active(GPU).missing([toy.Build(16), toy.Build(17)]) == ["toy_add17"]


X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("tensor", "options", "error", "message"),
    [
        (X, {"shape": [4, 5]}, ValueError, r"x\.shape: expected \[4, 5\], got \[4, 6\]"),
        (X, {"shape": ["rows", None, 1]}, ValueError, r"expected \[rows, \*, 1\], got \[4, 6\]"),
        (
            X,
            {"dtype": torch.int8},
            TypeError,
            r"x\.dtype: expected torch\.int8, got torch\.f",
        ),
        (X.T, {"inner_contiguous": True}, ValueError, r"x\.stride\(-1\): expected 1, got 6"),
        (X.view(-1)[1:], {"shape": [23], "align": 16}, ValueError, r"x\.data_ptr\(\).*16 bytes"),
        (X, {"device": torch.device("meta")}, ValueError, r"x\.device: expected meta.*got cpu"),
        (X.numpy(), {}, TypeError, r"x: expected a torch\.Tensor, got ndarray"),
    ],
)
def test_check_tensor_says_what_it_expected(tensor, options, error, message):
    shape = options.pop("shape", ["a", "b"])
    with pytest.raises(error, match=message):
        check_tensor("x", tensor, shape, **options)


def test_check_tensor_accepts():
    check_tensor("x", X, [4, "n"], (torch.float16, torch.float32), inner_contiguous=True, align=16)
    check_tensor("x", X[:0], [0, 6], inner_contiguous=True, align=64)


@pytest.mark.parametrize(
    ("tensor", "fine"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(4, 3).T, True),
        (torch.zeros(3, 9)[:, ::2][:, :4], True),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(100).as_strided((3, 4), (2, 1)), False),
        (torch.zeros(100).as_strided((3, 4), (4, 1)), True),
    ],
)
def test_check_output_refuses_elements_in_one_place(tensor, fine):
    arguments = ([3, 4], torch.float32, torch.device("cpu"))
    if fine:
        check_output(tensor, *arguments)
    else:
        with pytest.raises(ValueError, match=r"out\.stride\(\): expected elements that do not"):
            check_output(tensor, *arguments)


def test_refusals_come_all_at_once():
    refusals = Refusals("cannot serve")
    refusals.raise_if_any()
    assert refusals.check(True, "never seen") and not refusals.check(False, "first")
    refusals.check(False, "second")
    with pytest.raises(ConfigError, match="cannot serve:\n  - first\n  - second") as caught:
        refusals.raise_if_any()
    assert caught.value.reasons == ("first", "second")
