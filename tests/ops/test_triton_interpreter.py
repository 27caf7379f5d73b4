"""Runs test_triton_ops.py in Triton's interpreter, in a process of its own."""

import importlib.util
from pathlib import Path

import pytest

from tests.ops.interpreter import run_in_interpreter

FILE = Path(__file__).with_name("test_triton_ops.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_in_the_interpreter():
    run_in_interpreter(FILE)
