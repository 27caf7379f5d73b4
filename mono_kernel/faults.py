"""The error word of a launch, and the error that it becomes. Integers only.

A word: bits 56..63 site, 48..55 the peer that was waited for, 40..47 the rank that found the fault,
bit 32 set, 0..31 the low half of the generation (rocm_msa/device/mailbox.py writes it).
"""

from __future__ import annotations

from mono_kernel.plan import EXCHANGED, HAND_OFFS, PHASE_NAMES, SITES

TOLD = 0  # site of a rank that was told by a peer before it read the peer's word


def meeting_site(number: int) -> int:
    """Of the meeting of the grid behind phase `number`."""
    return 1 + number


def sum_site(phase: str) -> int:
    """Of the sum over ranks in a phase."""
    return 1 + HAND_OFFS + SITES.index(phase)


def exchange_site(part: str) -> int:
    """Of a part of the index exchange."""
    return 1 + HAND_OFFS + len(SITES) + EXCHANGED.index(part)


def site_name(site: int) -> str:
    if site == TOLD:
        return "a fault that a peer reported"
    if site <= HAND_OFFS:
        phase, after = PHASE_NAMES[site - 1 : site + 1]
        return f"the meeting of its workgroups between phases {phase} and {after}"
    number = site - 1 - HAND_OFFS
    if number < len(SITES):
        return f"the sum over ranks in phase {SITES[number]}"
    return f"the index exchange's {EXCHANGED[number - len(SITES)]}"


class MonoError(RuntimeError):
    """A launch failed: its results are worthless, and later launches do nothing until a reset.

    Attributes:
        rank: that found the fault, also where another rank raises it. peer: that was waited for;
        the rank itself in a meeting of its workgroups. site: see `site_name`. generation: of the
        launch, its low 32 bits.
    """

    def __init__(self, rank: int, peer: int, site: int, generation: int):
        self.rank, self.peer, self.site, self.generation = rank, peer, site, generation
        where = site_name(site)
        whom = f" for rank {peer}" if site > HAND_OFFS else ""
        super().__init__(
            f"mono kernel: rank {rank} waited in vain{whom} at {where} (generation {generation})"
        )

    def __reduce__(self):
        return type(self), (self.rank, self.peer, self.site, self.generation)


def decode(word: int) -> MonoError | None:
    """The error of a word as an unsigned or signed 64-bit integer; None for 0."""
    if word == 0:
        return None
    fields = [word >> shift & 0xFF for shift in (40, 48, 56)]
    return MonoError(*fields, word & 0xFFFFFFFF)
