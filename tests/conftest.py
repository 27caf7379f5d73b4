"""What all tests share. Nothing heavy is imported here: torch and vLLM cost seconds."""

import os
from pathlib import Path

import pytest

# Before torch is first imported: results and run times then do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Code under test never asks a model hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout's root folder."""
    return Path(__file__).resolve().parent.parent
