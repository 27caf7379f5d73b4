"""What a run is told: the device, the schedule, the checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Checks(enum.IntFlag):
    WAIT = 1
    DEFER = 2
    LDS_RACE = 4
    BOUNDS = 8
    UNINIT = 16
    ALIGN = 32
    BARRIER = 64
    SCOPE = 128
    ALL = 255
    NONE = 0


@dataclass(frozen=True)
class DeviceModel:
    xcds: int = 8
    cus_per_xcd: int = 32
    lds_bytes: int = 160 * 1024
    waves_per_simd: int = 8
    vgprs_per_simd: int = 512
    simds: int = 4
    max_workgroups: int = 32  # on a CU
    sgprs: int = 800


@dataclass(frozen=True)
class Schedule:
    """Which wave runs next and for how long; the same seed gives the same run.

    round_robin: in turn. random: any. priority: waves with random priorities that change when a
    wave polls, s_setprio first. starve: random, but the waves named by rank, workgroup and wave
    (None: any) run only when all others poll, or by a chance of 1 in 4096.
    """

    kind: str = "round_robin"
    seed: int = 0
    quantum: tuple[int, int] = (64, 64)  # wave-instructions, least and most, log-uniform
    starve: tuple[int | None, int | None, int | None] = (None, None, None)
    max_instructions: int = 2_000_000_000
    spin_rounds: int = 20_000  # polling instructions a wave before nobody makes progress

    KINDS = ("round_robin", "random", "priority", "starve")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"schedule {self.kind!r}: expected one of {self.KINDS}")
