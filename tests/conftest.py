"""What all tests share. Nothing heavy is imported here: torch and vLLM cost seconds.

The process of a whole run holds about a million objects for good: modules, collected tests, caches
of compiled kernels. Each full garbage collection would walk them all, half a second, and a test
with an engine of vLLM makes seven to twenty. So what is alive when a module of tests ends is taken
out of the collector's sight; only what becomes a garbage cycle later is then never freed.
"""

import gc
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


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a module, its fixtures ended: see the top."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules look for what was not freed
