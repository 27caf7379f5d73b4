"""The NIXL agent of one rank: registered regions, connections, reads.

With progress "poll" our own thread moves the transport every `poll_seconds`; NIXL's own progress
thread does it without pause and takes a whole core, which a CPU engine cannot spare. One lock
serialises all calls, so that any thread may make them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocm_msa.vllm_plugin.nixl.options import TransferOptions

logger = logging.getLogger("vllm.rocm_msa.nixl")

DONE, BUSY, FAILED = "done", "busy", "failed"


def nixl_api() -> Any:
    """NIXL's Python API: `nixl`, or `nixl_rocm` beside a ROCm PyTorch.

    Raises:
        RuntimeError: it is not installed.
    """
    package = "nixl_rocm" if torch.version.hip else "nixl"
    # Without a bound UCX's registration cache keeps memory that was freed.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        return importlib.import_module(f"{package}._api")
    except ImportError as error:
        source = "NIXL built for ROCm" if torch.version.hip else "rocm-msa's extra `nixl`"
        raise RuntimeError(
            f"RocmMsaNixlConnector needs the package {package} ({source}): {error}"
        ) from None


@dataclass
class Read:
    """A posted read. `descriptors` and `nbytes` are what was asked for."""

    handle: Any
    descriptors: int
    nbytes: int
    released: bool = False


class RowAgent:
    """One agent over the UCX (or another) backend."""

    def __init__(self, options: TransferOptions, device_type: str):
        api = nixl_api()
        progress = options.nixl_progress or ("poll" if device_type == "cpu" else "thread")
        config = api.nixl_agent_config(
            enable_prog_thread=progress == "thread",
            capture_telemetry=True,
            num_threads=options.nixl_threads,
            backends=list(options.backends),
        )
        self.memory_type = "DRAM" if device_type == "cpu" else "VRAM"
        self._backends = list(options.backends)
        self._agent = api.nixl_agent(str(uuid.uuid4()), config)
        self._lock = threading.RLock()
        self._registered: list[Any] = []
        self._closed = threading.Event()
        self._poller = None
        if progress == "poll":
            self._poller = threading.Thread(
                target=self._poll, args=(options.poll_seconds,), name="rocm-msa-nixl", daemon=True
            )
            self._poller.start()

    def register(self, base: int, nbytes: int, device: int) -> Any:
        """Register one run of memory; returns what `deregister` takes."""
        with self._lock:
            region = [(base, nbytes, device, "")]
            handle = self._agent.register_memory(region, self.memory_type, self._backends)
            self._registered.append(handle)
            return handle

    def deregister(self, handle: Any) -> None:
        with self._lock:
            self._registered = [h for h in self._registered if h is not handle]
            self._agent.deregister_memory(handle)

    @property
    def registrations(self) -> int:
        return len(self._registered)

    def metadata(self) -> bytes:
        """What a peer needs to connect; after `register`."""
        with self._lock:
            return self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> Any:
        """Load a peer's metadata; returns its name."""
        with self._lock:
            return self._agent.add_remote_agent(metadata)

    def disconnect(self, name: Any) -> None:
        with self._lock, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(name)

    def read(
        self, name: Any, local: np.ndarray, remote: np.ndarray, device: int, remote_device: int
    ) -> Read:
        """Post reads of `[n, 2]` (address, bytes) from a peer.

        Raises:
            Exception: whatever NIXL raises, e.g. when the peer is gone.
        """
        with self._lock:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(_with_device(local, device), self.memory_type),
                self._agent.get_xfer_descs(_with_device(remote, remote_device), self.memory_type),
                name,
            )
            read = Read(handle, len(local), int(local[:, 1].sum()))
            try:
                if self._agent.transfer(handle) == "ERR":
                    raise RuntimeError("NIXL could not post the read")
            except Exception:
                self.release(read)
                raise
            return read

    def state(self, read: Read) -> str:
        with self._lock:
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                logger.warning("KV read failed: %s", error)
                return FAILED
        return {"DONE": DONE, "PROC": BUSY}.get(state, FAILED)

    def telemetry_descriptors(self, read: Read) -> int:
        """Descriptors of a finished read as NIXL counted them."""
        with self._lock:
            return int(self._agent.get_xfer_telemetry(read.handle).descCount)

    def release(self, read: Read) -> bool:
        """Free a read, cancelling it when it is active; False when that was not possible."""
        with self._lock:
            if not read.released:
                try:
                    self._agent.release_xfer_handle(read.handle)
                    read.released = True
                except Exception as error:
                    logger.warning("KV read could not be cancelled yet: %s", error)
            return read.released

    def close(self) -> None:
        """End the thread and give the registrations back. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._poller is not None:
            self._poller.join(timeout=5)
        with self._lock:
            for region in self._registered:
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(region)
            self._registered.clear()
            self._agent = None

    def _poll(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            with self._lock:
                try:
                    self._agent.get_new_notifs()
                except Exception as error:
                    logger.warning("NIXL progress: %s", error)


def _with_device(descs: np.ndarray, device: int) -> np.ndarray:
    """`[n, 2]` -> `[n, 3]` uint64: NIXL's (address, bytes, device)."""
    return np.concatenate([descs, np.full((len(descs), 1), device, dtype=np.uint64)], axis=1)
