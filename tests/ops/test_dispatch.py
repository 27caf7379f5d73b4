"""Backend choice, and the checks that all ops share."""

import logging

import pytest
import torch

from rocm_msa.errors import ConfigError, Refusals, check_output, check_tensor
from rocm_msa.ops import block_topk, dispatch
from tests.ops.cases import int32

SCORES, NB = torch.zeros(1, 1, 4), int32([4])


def test_the_path_taken_is_counted():
    before = dispatch.taken["block_topk", "reference"]
    block_topk(SCORES, NB)
    block_topk(SCORES, NB, backend="reference")
    assert dispatch.taken["block_topk", "reference"] == before + 2


def test_the_reason_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(3):
            block_topk(SCORES, NB)
            block_topk(SCORES, NB, backend="reference")
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [
        "block_topk runs on backend reference (flydsl: not implemented; triton: for GPUs)",
        "block_topk runs on backend reference (asked for)",
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
    order = {name: (lambda name=name: name) for name in dispatch.BACKENDS}
    assert dispatch.choose("x", None, order)() == "flydsl"
    assert dispatch.choose("x", "triton", order)() == "triton"
    assert dispatch.choose("x", None, {"reference": order["reference"]})() == "reference"


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
