"""What a test kernel of the emulator is, and the cache of compiled ones.

A case is compiled once and kept by the digest of what it was made from, so that a run after the
first compiles nothing. `make_args(seed)` gives one tuple of arguments for each rank, in the order
of the kernel's own argument block without Triton's hidden pointers; `expected(args)` gives, for
each rank, what some of the positions must hold afterwards.

    [tensor]        a buffer: CPU, contiguous; one tensor at several places is one buffer
    [int, float]    a scalar of the size that the kernel's metadata says
    PointerTable    a buffer of 64-bit addresses, one for each of its tensors
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rocm_msa.flydsl_compile as compiler
from rocm_msa.flydsl_compile import Compiled


@dataclass(frozen=True)
class PointerTable:
    """Addresses of buffers, for kernels that reach the memory of other ranks."""

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= absolute + relative * |expected|; both zero: every bit."""

    relative: float = 0.0
    absolute: float = 0.0


Args = tuple[tuple[Any, ...], ...]
Expected = tuple[dict[int, torch.Tensor], ...]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Compiled]
    make_args: Callable[[int], Args]
    grid: tuple[int, int, int]  # workgroups of each rank
    block: tuple[int, int, int]  # lanes
    expected: Callable[[Args], Expected]  # of arguments that no kernel has touched
    tolerance: Tolerance = Tolerance()
    ranks: int = 1
    source: str = ""  # the file that the kernel is written in; "": where `build` is

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.build.__code__.co_filename)

    def compile(self) -> Compiled:
        """The compiled kernel, from the cache when its sources have not changed."""
        folder = cache_folder()
        stem = f"{self.name}-{source_digest(self.source)[:16]}"
        code, facts = folder / f"{stem}.hsaco", folder / f"{stem}.json"
        try:
            fields = json.loads(facts.read_text())
            if hashlib.sha256(data := code.read_bytes()).hexdigest() == fields.pop("digest"):
                for key in ("block", "arguments", "argument_types"):
                    fields[key] = tuple(fields[key])
                return Compiled(code_object=data, **fields)
        except (OSError, ValueError, KeyError):
            pass
        compiled = self.build()
        fields = dataclasses.asdict(compiled) | {"digest": compiled.digest}
        del fields["code_object"]
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in (
            (code, compiled.code_object),
            (facts, json.dumps(fields, indent=1).encode()),
        ):
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_bytes(data)
            part.replace(path)
        return compiled


@functools.cache
def cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(cache if cache.exists() else cache.parent, os.W_OK):
        cache = Path(tempfile.gettempdir())
    return cache / "rocm-msa" / "test-kernels"


@functools.cache
def source_digest(path: str) -> str:
    """Changes with a file of kernels, the shim that compiles them and the compilers' versions."""
    state = hashlib.sha256()
    for name in (path, compiler.__file__):
        state.update(Path(name).read_bytes())
    for package in ("flydsl", "triton"):
        state.update(importlib.metadata.version(package).encode())
    return state.hexdigest()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def one_rank(*args: Any) -> Args:
    return (args,)
