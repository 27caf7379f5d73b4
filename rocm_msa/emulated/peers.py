"""Memory that processes of this host map into each other, as peer memory of emulated GPUs.

A rank is a process with an emulator of its own; what its kernels store into a peer's mailbox is
seen by the peer's kernels while both run, as over the fabric of real GPUs. The memory is anonymous
shared memory (memfd), opened by the peers through /proc, and gone with the last process.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from rocm_msa.emulated.gpu import EmulatedGpu
from rocm_msa.errors import expect


@dataclass
class _Block:
    pages: mmap.mmap
    file: int | None  # None for a peer's memory

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.pages, np.uint8)


class EmulatedPeers:
    """The calls of rocm_msa.comm.runtime.PeerRuntime, for the memory of an EmulatedGpu."""

    platform = "gfx950_emu"

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu = gpu
        self._blocks: dict[int, _Block] = {}

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory."""
        file = os.memfd_create("rocm_msa_peer_memory")
        try:
            os.ftruncate(file, nbytes)
            return self._add(_Block(mmap.mmap(file, nbytes), file))
        except OSError:
            os.close(file)
            raise

    def free(self, address: int) -> None:
        self._drop(address)

    def clear(self, address: int, nbytes: int) -> None:
        self._blocks[address].array[:nbytes] = 0

    def synchronize(self, subject: str) -> None:
        """Launches have ended when they return."""

    def export(self, address: int) -> bytes:
        """Whose file it is, and its inode: another file may get the number when it is closed."""
        block = self._blocks[address]
        place = (os.getpid(), block.file, os.fstat(block.file).st_ino, len(block.pages))
        return " ".join(map(str, place)).encode()

    def open(self, handle: bytes, subject: str) -> int:
        """Map a peer's memory.

        Raises:
            OSError: the peer's process has gone, or may not be looked at.
            RuntimeError: its memory has gone.
        """
        pid, number, inode, nbytes = map(int, handle.split())
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            got = os.fstat(file).st_ino
            if got != inode:
                raise RuntimeError(expect(subject, f"file {inode} of process {pid}", got))
            return self._add(_Block(mmap.mmap(file, nbytes), None))
        finally:
            os.close(file)

    def close(self, address: int) -> None:
        self._drop(address)

    def _add(self, block: _Block) -> int:
        address = self.gpu.map(block.array)
        self._blocks[address] = block
        return address

    def _drop(self, address: int) -> None:
        block = self._blocks.pop(address)
        self.gpu.unmap(address)
        block.pages.close()
        if block.file is not None:
            os.close(block.file)
