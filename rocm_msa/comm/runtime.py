"""The runtime calls that make device memory which other ranks may reach, through ctypes.

The table of calls differs between HIP and CUDA in names and in one point: on AMD the memory is
allocated uncached (`hipExtMallocWithFlags`, flag 3), since a GPU's L2 does not see stores that
arrive over the fabric; NVIDIA's is coherent for them, and plain `cudaMalloc` does.

Addresses are ints. Every call works on the current device.
"""

from __future__ import annotations

import ctypes

from rocm_msa.errors import expect
from rocm_msa.hip import NAMES, HipError, find_library

CUDA_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
LIBRARIES = {"hip": NAMES, "cuda": CUDA_NAMES}
HANDLE_BYTES = 64  # hipIpcMemHandle_t and cudaIpcMemHandle_t
_UNCACHED = 3  # hipDeviceMallocUncached
_ENABLE_PEER_ACCESS = 1  # {hip,cuda}IpcMemLazyEnablePeerAccess

Address = ctypes.c_void_p


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_CALLS = {
    "IpcGetMemHandle": (ctypes.POINTER(_Handle), Address),
    "IpcOpenMemHandle": (ctypes.POINTER(Address), _Handle, ctypes.c_uint),
    "IpcCloseMemHandle": (Address,),
    "Free": (Address,),
    "Memset": (Address, ctypes.c_int, ctypes.c_size_t),
    "DeviceSynchronize": (),
}


class CudaError(HipError):
    """A CUDA call that failed; the same fields."""


class PeerRuntime:
    """HIP's or CUDA's calls for memory that is exported and opened by handle.

    Args:
        platform: "hip" or "cuda".
        path: of the runtime library; None searches, first in this process.

    Raises:
        ValueError: another platform.
        RuntimeError: no runtime library, or one without the calls needed.
    """

    def __init__(self, platform: str, path: str | None = None) -> None:
        if platform not in LIBRARIES:
            raise ValueError(expect("platform", " or ".join(LIBRARIES), repr(platform)))
        names = LIBRARIES[platform]
        found = path or find_library(names)
        if found is None:
            raise RuntimeError(
                f"the {platform.upper()} runtime was not found ({', '.join(names)}): memory shared "
                "between GPUs needs it"
            )
        self.platform = platform
        try:
            self._lib = ctypes.CDLL(found)
            for name, types in _CALLS.items():
                self._declare(platform + name, types)
            if platform == "hip":
                types = (ctypes.POINTER(Address), ctypes.c_size_t, ctypes.c_uint)
                self._declare("hipExtMallocWithFlags", types)
            else:
                self._declare("cudaMalloc", (ctypes.POINTER(Address), ctypes.c_size_t))
            self._declare(f"{platform}GetErrorName", (ctypes.c_int,), ctypes.c_char_p)
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"the {platform.upper()} runtime {found} cannot be used: {error}"
            ) from None

    def _declare(self, name: str, types: tuple, result: type = ctypes.c_int) -> None:
        call = getattr(self._lib, name)
        call.argtypes, call.restype = types, result

    def _call(self, name: str, subject: str, *args) -> None:
        name = self.platform + name
        code = getattr(self._lib, name)(*args)
        if code:
            word = getattr(self._lib, f"{self.platform}GetErrorName")(code)
            kind = HipError if self.platform == "hip" else CudaError
            raise kind(name, subject, code, word.decode() if word else "unknown error")

    def allocate(self, nbytes: int) -> int:
        """Device memory, uncached on AMD; not cleared."""
        address, subject = Address(), f"{nbytes} bytes of peer memory"
        if self.platform == "hip":
            self._call("ExtMallocWithFlags", subject, ctypes.byref(address), nbytes, _UNCACHED)
        else:
            self._call("Malloc", subject, ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._call("Free", f"peer memory at {address:#x}", address)

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zero bytes and wait until they are in memory."""
        subject = f"peer memory at {address:#x}"
        self._call("Memset", subject, address, 0, nbytes)
        self.synchronize(subject)

    def synchronize(self, subject: str) -> None:
        """Wait for all work of the current device."""
        self._call("DeviceSynchronize", subject)

    def export(self, address: int) -> bytes:
        """The handle of an allocation, for another process of this host."""
        handle = _Handle()
        self._call("IpcGetMemHandle", f"peer memory at {address:#x}", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes, subject: str) -> int:
        """Map another process's allocation; not one of this process."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(expect("handle", f"{HANDLE_BYTES} bytes", f"{len(handle)}"))
        address = Address()
        self._call(
            "IpcOpenMemHandle", subject, ctypes.byref(address), _Handle.from_buffer_copy(handle),
            _ENABLE_PEER_ACCESS,
        )  # fmt: skip
        return address.value

    def close(self, address: int) -> None:
        """Unmap what `open` mapped."""
        self._call("IpcCloseMemHandle", f"mapped peer memory at {address:#x}", address)
