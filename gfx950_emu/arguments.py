"""Buffers, argument blocks and images: what a launch puts into memory."""

from __future__ import annotations

import struct

import numpy as np

READ, WRITE = 1, 2


def buffer_span(value) -> tuple[int, int, int] | None:
    """(address, bytes, permissions) of an array or tensor; None for anything else."""
    if isinstance(value, np.ndarray):
        low, high = (
            np.lib.array_utils.byte_bounds(value) if value.size else (value.ctypes.data,) * 2
        )
        return low, high - low, READ | (WRITE if value.flags.writeable else 0)
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise ValueError(f"a tensor on {value.device}: the emulator needs CPU tensors")
        size = value.element_size()
        if value.numel() == 0:
            return value.data_ptr(), 0, READ | WRITE
        last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), (last + 1) * size, READ | WRITE
    return None


def pack_argument(value, size: int, name: str) -> bytes:
    span = buffer_span(value)
    if span:
        start = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
        if size != 8:
            raise TypeError(f"argument {name}: a buffer for a parameter of {size} bytes")
        return struct.pack("<Q", start)
    if value is None:
        return bytes(size)
    if isinstance(value, (bytes, bytearray)):
        if len(value) > size:
            raise TypeError(f"argument {name}: {len(value)} bytes for a parameter of {size}")
        return bytes(value).ljust(size, b"\0")
    if isinstance(value, np.generic):
        return value.tobytes().ljust(size, b"\0")
    if isinstance(value, float):
        code = {2: "<e", 4: "<f", 8: "<d"}.get(size)
        if code is None:
            raise TypeError(f"argument {name}: a float for a parameter of {size} bytes")
        return struct.pack(code, value)
    if isinstance(value, (bool, int)):
        if not -(1 << (8 * size - 1)) <= value < 1 << 8 * size:
            raise ValueError(f"argument {name}: {value} does not fit {size} bytes")
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    raise TypeError(f"argument {name}: cannot pass {type(value).__name__}")


def pack_kernarg(kernel, args, grid, block, packet_address: int = 0) -> np.ndarray:
    """The kernel's argument block; trailing pointers that are not given are null."""
    length = max(
        kernel.descriptor.kernarg_bytes, max((a.offset + a.size for a in kernel.args), default=0)
    )
    raw = np.zeros(max(length, 16) + 512, np.uint8)
    block_bytes = raw[-raw.ctypes.data % 256 :][: len(raw) - 256]  # aligned as a packet's are
    hidden = {}
    for axis, letter in enumerate("xyz"):
        hidden[f"hidden_block_count_{letter}"] = grid[axis]
        hidden[f"hidden_group_size_{letter}"] = block[axis]
    hidden["hidden_grid_dims"] = 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1
    explicit = [a for a in kernel.args if not a.kind.startswith("hidden_")]
    if len(args) > len(explicit):
        raise TypeError(f"kernel {kernel.name} takes {len(explicit)} arguments, {len(args)} given")
    for a in explicit[len(args) :]:
        if a.kind != "global_buffer":
            raise TypeError(f"kernel {kernel.name}: argument {a.name or a.offset} is missing")
    for a, value in zip(explicit, args, strict=False):
        data = pack_argument(value, a.size, a.name or f"at {a.offset}")
        block_bytes[a.offset : a.offset + a.size] = np.frombuffer(data, np.uint8)
    for a in kernel.args:
        if a.kind in hidden:
            data = int(hidden[a.kind]).to_bytes(a.size, "little")
            block_bytes[a.offset : a.offset + a.size] = np.frombuffer(data, np.uint8)
    return block_bytes


def loaded_image(code_object) -> tuple[np.ndarray, int]:
    """The code object's memory, and the address of its byte 0 there."""
    end = max((s.address + len(s.data) for s in code_object.segments), default=0)
    raw = np.zeros(end + 4096, np.uint8)
    shift = -raw.ctypes.data % 4096
    image = raw[shift : shift + end]
    for s in code_object.segments:
        image[s.address : s.address + len(s.data)] = np.frombuffer(s.data, np.uint8)
    return image, image.ctypes.data
