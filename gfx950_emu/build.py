"""Builds the C++ core at first use and loads it.

The library lies in a cache folder under a name made of the digest of the sources, the flags and
the CPU; ROCM_MSA_EMU_CACHE moves the folder (for debugging). Needs g++ or clang++ with C++17.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-frounding-math",
    "-fPIC",
    "-march=native",
)


class BuildError(RuntimeError):
    """The core cannot be built; the message says why and what to install."""


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise BuildError(
        "gfx950_emu compiles its C++ core at first use and finds neither g++ nor clang++. "
        "Install one: apt-get install g++"
    )


def cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def cache_folder() -> Path:
    given = os.environ.get("ROCM_MSA_EMU_CACHE")
    base = Path(given) if given else Path.home() / ".cache" / "gfx950_emu"
    base.mkdir(parents=True, exist_ok=True)
    return base


def digest() -> str:
    h = hashlib.sha256(" ".join((*FLAGS, platform.machine(), cpu_flags())).encode())
    for path in sorted(SOURCES.iterdir()):
        h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()[:20]


def build(target: Path) -> None:
    cxx = compiler()
    units = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{unit.stem}.o" for unit in units]

        def run(arguments: list[str]) -> None:
            done = subprocess.run([cxx, *arguments], capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"{cxx} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda pair: run([*FLAGS, "-c", str(pair[0]), "-o", str(pair[1])]),
                    zip(units, objects, strict=True),
                )
            )
        made = Path(folder) / "core.so"
        run(["-shared", *map(str, objects), "-o", str(made)])
        os.replace(made, target)  # atomic: another process may build at the same time


@functools.lru_cache(maxsize=1)
def core() -> ctypes.CDLL:
    """The loaded core, built when the cache has none for these sources."""
    target = cache_folder() / f"core-{digest()}.so"
    if not target.exists():
        build(target)
    library = ctypes.CDLL(str(target))
    u32, u64, p = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    signatures = {
        "emu_sizes": (u32, [ctypes.c_int]),
        "emu_op_count": (u32, []),
        "emu_op_name": (ctypes.c_char_p, [u32]),
        "emu_op_form": (ctypes.c_char_p, [u32]),
        "emu_op_family": (u32, [u32]),
        "emu_op_extra": (u32, [u32]),
        "emu_create": (p, [p, p, u32]),
        "emu_destroy": (None, [p]),
        "emu_add_region": (None, [p, u64, u64, u32, u32]),
        "emu_add_code": (u32, [p, p, u32, u64]),
        "emu_add_launch": (u32, [p, p]),
        "emu_add_fault": (u32, [p, p]),
        "emu_mark": (None, [p, u32, u32, u32]),
        "emu_fault": (u32, [p, u32, p]),
        "emu_run": (ctypes.c_int, [p]),
        "emu_executed": (u64, [p]),
        "emu_clock": (u64, [p]),
        "emu_finding_count": (u32, [p]),
        "emu_findings": (None, [p, p]),
        "emu_counts": (None, [p, u32, p]),
        "emu_counters": (None, [p, u32, p]),
        "emu_encode": (u32, [ctypes.c_double, u32, u32, u32, u32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
