"""What a run is told: the device, the schedule, the checks."""

from __future__ import annotations

import enum
import random
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
    HELD = 256  # with SCOPE: caches hold every line since they were last emptied
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
    outside_s: float = 0.0  # real seconds without progress that other processes are waited for

    KINDS = ("round_robin", "random", "priority", "starve")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"schedule {self.kind!r}: expected one of {self.KINDS}")
        if self.outside_s < 0:
            raise ValueError(f"schedule outside_s: expected >= 0, got {self.outside_s}")


@dataclass(frozen=True)
class Fault:
    """A rank that is killed, or stands still for `cycles` of the virtual clock, part-way.

    When, one of: `after_instructions` wave-instructions of the rank; `at_cycle` of the clock;
    `after_launches` of the rank's launches have finished; `at` a place, before the instruction
    there: (kernel, where), where is a pc, a source line "file.py:81", or how instructions start,
    "global_store"; the `arrival`-th time that a wave of the rank comes to it.

    A killed rank executes nothing more; of its stores that memory has not seen yet, chance (the
    schedule's seed) decides which ones it still sees.
    """

    action: str
    rank: int
    after_instructions: int | None = None
    at_cycle: int | None = None
    after_launches: int | None = None
    at: tuple[str, int | str] | None = None
    arrival: int = 1
    cycles: int = 0

    ACTIONS = ("kill", "delay")
    TRIGGERS = ("after_instructions", "at_cycle", "after_launches", "at")

    def __post_init__(self) -> None:
        if self.action not in self.ACTIONS:
            raise ValueError(f"fault action {self.action!r}: expected one of {self.ACTIONS}")
        given = [name for name in self.TRIGGERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"fault: expected exactly one of {self.TRIGGERS}, got {given}")
        if (self.action == "delay") != (self.cycles > 0):
            raise ValueError(f"fault cycles: a delay needs them, got {self.action}, {self.cycles}")
        if self.arrival < 1 or (self.at is None and self.arrival != 1):
            raise ValueError(f"fault arrival: a number from 1, with `at`; got {self.arrival}")

    @property
    def trigger(self) -> int:
        return next(n for n, name in enumerate(self.TRIGGERS) if getattr(self, name) is not None)

    @property
    def count(self) -> int:
        return self.arrival if self.at is not None else getattr(self, self.TRIGGERS[self.trigger])

    @classmethod
    def draw(cls, seed: int, ranks: int, instructions: int, action: str = "kill",
             cycles: int = 0) -> Fault:  # fmt: skip
        """Some rank, after at most `instructions` of its own; the same seed, the same fault."""
        chance = random.Random(seed)
        rank = chance.randrange(ranks)
        return cls(action, rank, after_instructions=chance.randrange(instructions), cycles=cycles)
