"""The four HIP calls that load and launch a code object, through ctypes.

`hipModuleLaunchKernel` takes the argument block as one buffer (`extra`) and copies it before it
returns, so a launch may be captured into a graph. More than 64 KiB of dynamic LDS needs no
attribute: on AMD the limit is the device's, and HIP documents `hipFuncSetAttribute` as ignored.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_MAPS = Path("/proc/self/maps")

# HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3


class HipError(RuntimeError):
    """A HIP call that failed. `call`, `subject` (what it was about), `code`, `name`."""

    def __init__(self, call: str, subject: str, code: int, name: str):
        self.call, self.subject, self.code, self.name = call, subject, code, name
        super().__init__(f"{call} for {subject} failed: {name} ({code})")


def find_library(names: tuple[str, ...] | None = None) -> str | None:
    """A runtime library: the one in this process (torch brings its own), or the loader's.

    Two copies in one process do not know each other's streams, hence the order.

    Args:
        names: of the library, with and without a version; None stands for HIP's.
    """
    names = names or NAMES
    stem = names[0].partition(".so")[0] + ".so"
    try:
        mapped = _MAPS.read_text()
    except OSError:
        mapped = ""
    for line in mapped.splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(stem):
            return f"/{path}"
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


class Hip:
    """The runtime library.

    Args:
        path: of the library; None searches.

    Raises:
        RuntimeError: no HIP runtime, or one without the calls needed.
    """

    def __init__(self, path: str | None = None) -> None:
        found = path or find_library()
        if found is None:
            raise RuntimeError(
                f"the HIP runtime was not found ({', '.join(NAMES)}): compiled kernels need ROCm"
            )
        try:
            self._lib = ctypes.CDLL(found)
            self._load = self._lib.hipModuleLoadData
            self._function = self._lib.hipModuleGetFunction
            self._launch = self._lib.hipModuleLaunchKernel
            self._error_name = self._lib.hipGetErrorName
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the HIP runtime {found} cannot be used: {error}") from None
        pointer, uint = ctypes.c_void_p, ctypes.c_uint
        self._load.argtypes = [ctypes.POINTER(pointer), pointer]
        self._function.argtypes = [ctypes.POINTER(pointer), pointer, ctypes.c_char_p]
        # function, grid, block, dynamic LDS, stream, kernelParams, extra
        self._launch.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]
        self._error_name.argtypes, self._error_name.restype = [ctypes.c_int], ctypes.c_char_p
        for call in (self._load, self._function, self._launch):
            call.restype = ctypes.c_int

    def load_module(self, data: bytes, subject: str) -> int:
        """Load a code object onto the current device; returns the module."""
        module = ctypes.c_void_p()
        image = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        self._check("hipModuleLoadData", subject, self._load(ctypes.byref(module), image))
        return module.value

    def get_function(self, module: int, symbol: str, subject: str) -> int:
        """A kernel of a loaded module."""
        function = ctypes.c_void_p()
        code = self._function(ctypes.byref(function), module, symbol.encode())
        self._check("hipModuleGetFunction", subject, code)
        return function.value

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        lds: int,
        stream: int,
        kernarg: bytes,
        subject: str,
    ) -> None:
        """Queue a launch. grid: workgroups; block: lanes; lds: dynamic bytes a workgroup."""
        size = ctypes.c_size_t(len(kernarg))
        buffer = ctypes.c_char_p(kernarg)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER,
            ctypes.cast(buffer, ctypes.c_void_p),
            _BUFFER_SIZE,
            ctypes.addressof(size),
            _END,
        )
        code = self._launch(function, *grid, *block, lds, stream, None, extra)
        if code:
            self._check("hipModuleLaunchKernel", subject, code)

    def _check(self, call: str, subject: str, code: int) -> None:
        if code:
            name = self._error_name(code)
            raise HipError(call, subject, code, name.decode() if name else "unknown error")
