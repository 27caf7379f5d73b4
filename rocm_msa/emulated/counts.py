"""What the emulated GPU of this process did, by kernel; findings end the step."""

from __future__ import annotations

import logging
import time
from collections import Counter

from gfx950_emu import Report
from rocm_msa.emulated.gpu import EmulationError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0


class Tally:
    """Sums over launches; counters are keyed like the metrics that show them.

    launches: (kernel,) -> launches.
    instructions: (kernel,) -> wave-instructions outside of polling loops.
    nbytes: (kernel, "read" | "written") -> bytes of global memory that the lanes asked for.
    """

    def __init__(self) -> None:
        self.launches: Counter[tuple[str]] = Counter()
        self.instructions: Counter[tuple[str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self._said = time.monotonic()

    def add(self, report: Report) -> None:
        """Count one launch.

        Raises:
            EmulationError: it did not end, or there are findings; with all of them.
        """
        try:
            report.raise_for_findings()
        except AssertionError as error:
            raise EmulationError(f"emulated gfx950: {error}") from None
        for launch in report.launches:
            self.launches[(launch.kernel,)] += 1
            self.instructions[(launch.kernel,)] += launch.useful
            for way, count in launch.traffic["lanes"].items():
                self.nbytes[launch.kernel, way] += count
        self._say(report.launches[-1].kernel)

    def _say(self, kernel: str) -> None:
        """A line now and then: a step takes seconds."""
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            logger.info(
                "emulated gfx950: %d launches, %.1f million wave-instructions so far; now %s",
                *(self.launches.total(), self.instructions.total() / 1e6, kernel),
            )


tally = Tally()
"""Of the launcher that `start` made."""
