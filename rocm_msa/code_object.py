"""What a compiled gfx950 code object says about its kernel: argument block, LDS, registers.

Reads the AMDGPU metadata note (MessagePack) of an ELF file. Needed while compiling only.
"""

from __future__ import annotations

import struct
from typing import Any

_SHT_NOTE, _NT_AMDGPU_METADATA = 7, 32
_EM_AMDGPU = 224
_SECTION = struct.Struct("<IIQQQQIIQQ")


def kernel_metadata(data: bytes, symbol: str) -> dict[str, Any]:
    """The metadata of kernel `symbol`, keys as the compiler writes them (".args", ...).

    Raises:
        ValueError: not an AMDGPU code object with that kernel.
        RuntimeError: the package msgpack is missing.
    """
    try:
        import msgpack
    except ImportError:
        raise RuntimeError("reading code objects needs msgpack: pip install msgpack") from None
    for note in _notes(data):
        metadata = msgpack.unpackb(note, strict_map_key=False)
        for kernel in metadata.get("amdhsa.kernels", ()):
            if kernel[".name"] == symbol:
                return kernel
    raise ValueError(f"the code object holds no kernel {symbol}")


def _notes(data: bytes) -> list[bytes]:
    """Contents of the AMDGPU metadata notes."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine != _EM_AMDGPU:
        raise ValueError(f"an ELF file for machine {machine}, not for an AMD GPU ({_EM_AMDGPU})")
    table, entry_bytes, count = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HH", data, 58),
    )
    found = []
    for i in range(count):
        _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(data, table + i * entry_bytes)
        end = offset + size
        while kind == _SHT_NOTE and offset + 12 <= end:
            name_bytes, content_bytes, note = struct.unpack_from("<III", data, offset)
            content = offset + 12 + (name_bytes + 3) // 4 * 4
            if note == _NT_AMDGPU_METADATA and data[offset + 12 :].startswith(b"AMDGPU"):
                found.append(data[content : content + content_bytes])
            offset = content + (content_bytes + 3) // 4 * 4
    return found
