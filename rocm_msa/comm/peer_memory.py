"""One allocation a rank, mapped by all ranks of the host: the mailboxes of device-side protocols.

    memory = PeerMemory(group, nbytes, device, terms={"layout": digest})   # collective
    kernel(memory.table, ...)         # int64 [ranks]: where each rank's memory lies, seen from here
    memory.close()                    # collective; once more does nothing

Addresses never change, so that captured graphs stay valid. The memory is zero when the constructor
returns, on every rank, before any peer can write to it. All ranks get a PeerMemory, or all raise
PeerMemoryError with the same reasons: what failed on which rank, and every term that differs.

Who frees: a mapping of freed memory is undefined behaviour, so memory is freed only after all
ranks said that they unmapped it. A rank that cannot hear from the others leaves its memory to the
end of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rocm_msa import __version__
from rocm_msa.comm.group import Disagreement, Group, as_group, differences
from rocm_msa.comm.runtime import PeerRuntime
from rocm_msa.errors import check_int, expect
from rocm_msa.layout import round_up

logger = logging.getLogger(__name__)

PAGE = 2 * 2**20
"""Bytes that sizes are rounded up to. Runtimes cut smaller allocations out of a shared block, and
a handle would then show the whole block to the peers."""


class PeerMemoryError(Disagreement):
    """The ranks do not have peer memory; nothing of it is left but what `reasons` says."""


class PeerMemory:
    """This rank's allocation and the peers', mapped.

    Args:
        group: a torch.distributed group, or see group.Group; its ranks are on one host.
        nbytes: of each rank's memory, the same on all.
        device: the GPU that it lies on; peers may share one. "cpu" needs a `runtime`.
        terms: what else must be the same on all ranks, by name: layout digest, versions.
        runtime: None finds the one of torch's build.

    Attributes:
        rank, ranks: of the group.
        nbytes: of each rank's memory, rounded up to PAGE.
        addresses: of each rank's memory in this process.
        table: int64 `[ranks]` on the device, the same addresses.

    Raises:
        PeerMemoryError: on all ranks alike.
        TypeError, ValueError: see `as_group`; of other arguments the ranks tell each other.
    """

    def __init__(
        self,
        group: Any,
        nbytes: int,
        device: torch.device | str,
        *,
        terms: Mapping[str, Any] | None = None,
        runtime: PeerRuntime | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._group: Group = as_group(group)
        self.rank, self.ranks = self._group.rank, self._group.ranks
        self._subject = f"peer memory of {self.ranks} ranks"
        self._own, self._mapped = 0, {}
        self._runtime, self._closed = runtime, True
        offer = self._offer(nbytes, dict(terms or {}))
        offers = self._gather(offer)
        reasons = [f"rank {r}: {o['fault']}" for r, o in enumerate(offers) if o["fault"]]
        reasons = reasons or differences([o["terms"] for o in offers])
        if reasons:
            self._free()  # no rank has mapped anything yet
            raise PeerMemoryError(self._subject, reasons)
        fault = self._map(offers)
        faults = self._gather(fault)
        reasons = [f"rank {r}: {fault}" for r, fault in enumerate(faults) if fault]
        if reasons:
            self._release()
            raise PeerMemoryError(self._subject, reasons)
        self._closed = False

    def _offer(self, nbytes: int, terms: dict[str, Any]) -> dict[str, Any]:
        """Allocate, clear, export. What went wrong is told, not raised: the others wait."""
        offer = {"fault": None, "process": _process(), "device": str(self.device), "terms": {}}
        try:
            check_int("nbytes", nbytes, 1)
            self.nbytes = round_up(nbytes, PAGE)
            self._runtime = self._runtime or PeerRuntime(_platform(self.device))
            with _current(self.device):
                self._own = self._runtime.allocate(self.nbytes)
                self._runtime.clear(self._own, self.nbytes)
                offer["address"] = self._own
                offer["handle"] = self._runtime.export(self._own)
        except Exception as error:
            offer["fault"] = f"{type(error).__name__}: {error}"
            return offer
        offer["terms"] = {
            "nbytes": self.nbytes,
            "runtime": self._runtime.platform,
            "host": _host(),
            "rocm_msa": __version__,
            **terms,
        }
        return offer

    def _map(self, offers: list[dict[str, Any]]) -> str | None:
        """Open the peers' memory; returns what went wrong.

        Ranks of one process, threads for instance, need no mapping, and the runtimes allow none.
        """
        addresses = []
        try:
            for rank, offer in enumerate(offers):
                if offer["process"] == _process():
                    device = offer["device"]
                    if device != str(self.device):
                        got = f"rank {rank} of this process on {device}"
                        raise ValueError(expect("device", f"{self.device} in one process", got))
                    addresses.append(offer["address"])
                    continue
                with _current(self.device):
                    mapped = self._runtime.open(offer["handle"], f"the memory of rank {rank}")
                self._mapped[rank] = mapped
                addresses.append(mapped)
            self.addresses = tuple(addresses)
            self.table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over this rank's own memory, `offset` bytes from its start.

        Valid until `close`. What kernels of other ranks write there is seen by kernels that
        start later, and by copies.
        """
        if self._closed:
            raise RuntimeError(f"{self._subject} is closed")
        size = torch.Size(shape).numel() * dtype.itemsize
        check_int("offset", offset, 0)
        if offset % dtype.itemsize or offset + size > self.nbytes:
            raise ValueError(
                expect("offset", f"aligned, with {size} bytes of {self.nbytes} after it", offset)
            )
        return _tensor(self._own + offset, shape, dtype, self.device)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, *, wait: bool = True) -> None:
        """Unmap the peers' memory, and free the own once all ranks have done so. Idempotent.

        No kernel that uses the memory may be launched from here on; those that run are awaited.

        Args:
            wait: False when a peer may be gone: nothing is asked of the others, and the own
                memory stays until the process ends.
        """
        if self._closed:
            return
        self._closed = True
        with _current(self.device):
            self._runtime.synchronize(self._subject)
        self._release(wait)

    def _release(self, wait: bool = True) -> None:
        unmapped = self._unmap()
        if wait:
            try:
                all_unmapped = all(self._group.all_gather_object(unmapped))
            except Exception as error:
                logger.warning("%s: rank %d heard nothing of the others: %s",
                               self._subject, self.rank, error)  # fmt: skip
                all_unmapped = False
            if all_unmapped:
                self._free()
                return
        logger.warning("%s: rank %d leaves %d bytes mapped by its peers to the end of the process",
                       self._subject, self.rank, self.nbytes)  # fmt: skip

    def _unmap(self) -> bool:
        """Whether every mapping is gone."""
        good = True
        with _current(self.device):
            while self._mapped:
                rank, address = self._mapped.popitem()
                try:
                    self._runtime.close(address)
                except RuntimeError as error:
                    logger.warning("%s: rank %d: %s", self._subject, rank, error)
                    good = False
        return good

    def _free(self) -> None:
        own, self._own = self._own, 0
        if own:
            with _current(self.device):
                self._runtime.free(own)

    def _gather(self, value: Any) -> list[Any]:
        """Everybody's value. When a peer is gone, whoever is left says so, each on its own."""
        try:
            return self._group.all_gather_object(value)
        except Exception as error:
            self._unmap()
            reason = f"rank {self.rank} heard nothing of the others: {error}"
            raise PeerMemoryError(self._subject, [reason]) from error


def _platform(device: torch.device) -> str:
    if device.type != "cuda":
        raise RuntimeError(expect("device", "a GPU", device))
    return "cuda" if torch.version.hip is None else "hip"


def _current(device: torch.device):
    """A GPU as the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _process() -> tuple[int, int]:
    """A process of this host, whatever pid namespace it lives in."""
    return os.getpid(), os.stat("/proc/self/ns/pid").st_ino


def _host() -> str:
    """IPC handles are valid within one boot of one host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class _Range:
    """Device memory as `__cuda_array_interface__`, which HIP's torch reads too."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


def _tensor(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor over memory that it does not own."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cuda":
        raw = torch.as_tensor(_Range(address, nbytes), device=device)
    else:
        raw = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return raw.view(dtype).view(shape)
