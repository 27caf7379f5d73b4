"""Device memory without a GPU, for rocm_msa/comm: shared memory behind HIP's and CUDA's names."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from rocm_msa.comm.runtime import PeerRuntime
from tests.launcher.emulated import library

SOURCE = Path(__file__).with_name("fake_peers.c")


def runtime(platform: str = "hip") -> PeerRuntime:
    """The product's bindings on the fake library."""
    return PeerRuntime(platform, str(library(SOURCE)))


def live() -> tuple[int, int]:
    """(allocations, mappings) of this process that were not given back."""
    fake = ctypes.CDLL(str(library(SOURCE)))
    return fake.fake_peers_live(0), fake.fake_peers_live(1)


@contextlib.contextmanager
def failing(call: str, code: int = 2) -> Iterator[None]:
    """Let a call of this process return `code`; its name without hip or cuda."""
    fake = ctypes.CDLL(str(library(SOURCE)))
    fake.fake_peers_fail(call.encode(), code)
    try:
        yield
    finally:
        fake.fake_peers_fail(b"", 0)
