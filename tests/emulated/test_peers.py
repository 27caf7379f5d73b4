"""Memory of an emulated rank, mapped by another process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rocm_msa.emulated import EmulatedGpu, EmulatedPeers

NBYTES = 2 * 2**20
OWNER = f"""
from rocm_msa.emulated import EmulatedGpu, EmulatedPeers
import ctypes
peers = EmulatedPeers(EmulatedGpu(print))
address = peers.allocate({NBYTES})
print(peers.export(address).decode(), flush=True)
input()
print((ctypes.c_uint8 * {NBYTES}).from_address(address)[{NBYTES} - 1], flush=True)
input()
"""


@pytest.fixture
def owner():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def bytes_at(gpu: EmulatedGpu, address: int) -> np.ndarray:
    return gpu._mapped[address]


def test_two_processes_see_the_same_bytes(owner):
    gpu = EmulatedGpu(print)
    peers = EmulatedPeers(gpu)
    handle = owner.stdout.readline().encode()
    address = peers.open(handle, "the memory of rank 1")
    memory = bytes_at(gpu, address)
    assert memory.shape == (NBYTES,) and not memory.any()
    memory[-1] = 7
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "7\n"
    with pytest.raises(RuntimeError, match="the memory of rank 1: expected file 1 of process"):
        peers.open(b"%s %s 1 %s" % (*handle.split()[:2], handle.split()[3]), "the memory of rank 1")
    owner.communicate("\n", timeout=60)
    assert memory[-1] == 7
    del memory
    peers.close(address)
    assert not gpu._mapped
    with pytest.raises(OSError, match="No such file"):
        peers.open(handle, "the memory of rank 1")


def test_memory_is_given_back():
    gpu = EmulatedGpu(print)
    peers = EmulatedPeers(gpu)
    address = peers.allocate(NBYTES)
    bytes_at(gpu, address)[:] = 3
    peers.clear(address, 10)
    assert bytes_at(gpu, address)[:12].tolist() == [0] * 10 + [3] * 2
    peers.free(address)
    assert not gpu._mapped and not peers._blocks
