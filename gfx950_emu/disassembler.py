"""LLVM's disassembler for gfx950, through the C interface of librocmllvm.so."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from pathlib import Path

TRIPLE, PROCESSOR = b"amdgcn-amd-amdhsa", b"gfx950"
PACKAGE = "rocm-llvm-python==7.2.2.562.46"
TEXT_BYTES = 512
LONGEST = 20  # bytes of the longest encoding that LLVM looks at


class ToolchainError(RuntimeError):
    """A library is missing; the message says what to install."""


def find_library() -> Path:
    """librocmllvm.so of the installed rocm-llvm-python, which is not imported for this."""
    try:
        spec = importlib.util.find_spec("rocm.llvm")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "librocmllvm.so"
        if path.exists():
            return path
    raise ToolchainError(
        f"gfx950_emu needs LLVM's disassembler: librocmllvm.so of the package {PACKAGE}, which "
        f"is not installed. Install it: pip install {PACKAGE}"
    )


class Disassembler:
    """One LLVM disassembler context, which serves one thread at a time."""

    def __init__(self) -> None:
        path = find_library()
        try:
            library = ctypes.CDLL(str(path))
            library.LLVMCreateDisasmCPU.restype = ctypes.c_void_p
        except (OSError, AttributeError) as error:
            raise ToolchainError(
                f"{path} cannot be used ({error}). Install it anew: pip install {PACKAGE}"
            ) from error
        for part in ("TargetInfo", "TargetMC", "Disassembler"):
            getattr(library, f"LLVMInitializeAMDGPU{part}")()
        library.LLVMCreateDisasmCPU.argtypes = [
            *[ctypes.c_char_p] * 2,
            ctypes.c_void_p,
            ctypes.c_int,
            *[ctypes.c_void_p] * 2,
        ]
        self._decode = library.LLVMDisasmInstruction
        self._decode.restype = ctypes.c_size_t
        self._decode.argtypes = [
            *[ctypes.c_void_p] * 2,
            *[ctypes.c_uint64] * 2,
            ctypes.c_char_p,
            ctypes.c_size_t,
        ]
        self._context = library.LLVMCreateDisasmCPU(TRIPLE, PROCESSOR, None, 0, None, None)
        if not self._context:
            raise ToolchainError(f"{path} does not know gfx950. Install {PACKAGE}")
        self._text = ctypes.create_string_buffer(TEXT_BYTES)
        self._one_at_a_time = threading.Lock()

    def decode(self, code: ctypes.Array, offset: int, end: int) -> tuple[int, str] | None:
        """(size in bytes, text) of the instruction at `offset`; None when LLVM knows none.

        The text is LLVM's: mnemonic, one space, operands. `offset` stands for the address, which
        only matters to texts that name it (none of AMDGPU's does).
        """
        room = min(LONGEST, end - offset)
        with self._one_at_a_time:
            size = self._decode(
                self._context,
                ctypes.addressof(code) + offset,
                room,
                offset,
                self._text,
                TEXT_BYTES,
            )
            text = self._text.value.decode()
        if not size or size > room:
            return None
        text = text.partition("//")[0]
        return size, " ".join(text.split())


@functools.lru_cache(maxsize=1)
def disassembler() -> Disassembler:
    """The process's own, made at first use: loading the library takes about 0.1 s."""
    return Disassembler()
