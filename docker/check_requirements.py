"""check_requirements.py DISTRIBUTION: exit code 1 when one of its requirements is not met."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement


def unmet(distribution: str) -> list[str]:
    """A line for each requirement, extras left out, that the environment does not meet."""
    lines = []
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{text}: not installed")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lines.append(f"{text}: found {found}")
    return lines


if __name__ == "__main__":
    faults = unmet(sys.argv[1])
    if faults:
        sys.exit("\n".join([f"{sys.argv[1]}: the image lacks what it needs:", *faults]))
