"""Launches that are counted alone: no check for faults, long turns. For times by the model."""

from __future__ import annotations

from collections.abc import Callable

from gfx950_emu import Checks, Report, Schedule
from rocm_msa.emulated.gpu import EmulatedGpu


def counting_gpu(observe: Callable[[Report], None]) -> EmulatedGpu:
    """A GPU that gives `observe` the report of each launch."""
    fast = Schedule("round_robin", 0, (100_000, 100_000))
    return EmulatedGpu(observe, schedule=fast, checks=Checks.NONE)
