"""The emulated GPU of a serving process: what it needs, and loading kernels onto it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gfx950_emu import Schedule
from gfx950_emu.build import compiler, core
from gfx950_emu.disassembler import find_library
from rocm_msa import aot, launcher
from rocm_msa.emulated.counts import tally
from rocm_msa.emulated.gpu import EmulatedGpu, EmulatedLauncher
from rocm_msa.flydsl_compile import check_flydsl, find_rocm_root

logger = logging.getLogger(__name__)

NAME = "emulated"
"""What launcher.offered and the ops' `backend` call it."""

OUTSIDE_SECONDS = 300.0
"""Real time that a kernel waits for the kernels of other ranks before its own bounds apply."""


def faults(code_objects: str | None = None) -> list[str]:
    """What this machine lacks, a reason each; code_objects: kernels that need not be compiled."""
    found = []
    compiling = () if code_objects is not None else (check_flydsl, find_rocm_root)
    for need in (compiler, find_library, *compiling):
        try:
            need()
        except RuntimeError as error:
            found.append(str(error))
    return found


def start(builds: Sequence[aot.Build], code_objects: str | Path | None = None) -> EmulatedLauncher:
    """Load kernels onto an emulated GPU and offer it to the ops of this process.

    Args:
        builds: what will be launched. Compiled when the user's cache does not have them.
        code_objects: a folder of compiled kernels to take instead.

    Raises:
        RuntimeError: `code_objects` lacks some; FlyDSL or its linker is missing; see Launcher.
    """
    with _alone():
        core()  # compiled by its first user, which takes a minute
    gpu = EmulatedGpu(tally.add, schedule=Schedule(outside_s=OUTSIDE_SECONDS))
    if code_objects is not None:
        loaded = EmulatedLauncher(Path(code_objects), gpu)
        missing = loaded.missing(builds)
        if missing:
            raise RuntimeError(f"{code_objects} lacks {', '.join(missing)}")
    else:
        logger.info("emulated gfx950: %d kernels; those not compiled before are now", len(builds))
        with tempfile.TemporaryDirectory() as folder:
            with _alone():
                summary = aot.compile_builds(builds, Path(folder), processes=1)
            loaded = EmulatedLauncher(Path(folder), gpu)
        logger.info(
            "emulated gfx950: %d kernels, %d of them compiled in %.0f s",
            *(summary.kernels, summary.compiled, summary.seconds),
        )
    launcher.offer(NAME, loaded)
    return loaded


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process of this user at a time: the ranks need the same kernels."""
    folder = aot.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
