"""Backend choice of an op: which implementation runs, and why.

No silent fallback: the path taken is logged once a reason and counted in `taken`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rocm_msa.errors import expect

logger = logging.getLogger(__name__)

BACKENDS = ("flydsl", "triton", "reference")
"""In order of preference."""

taken: Counter[tuple[str, str]] = Counter()
"""Calls by (op, backend) in this process."""

_logged: set[tuple[str, str, str]] = set()


def choose(
    op: str, backend: str | None, implementations: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The implementation to run.

    Args:
        op: the op's name, for messages.
        backend: a backend's name, or None for the first one that is implemented.
        implementations: backend name -> function.

    Raises:
        ValueError: not a backend's name.
        NotImplementedError: a backend that this op does not have.
    """
    if backend is None:
        name = next(b for b in BACKENDS if b in implementations)
        missing = BACKENDS[: BACKENDS.index(name)]
        reason = f"not implemented: {', '.join(missing)}" if missing else "preferred"
    else:
        if backend not in BACKENDS:
            raise ValueError(expect("backend", f"None or one of {BACKENDS}", repr(backend)))
        if backend not in implementations:
            raise NotImplementedError(
                expect(f"{op} backend", f"one of {tuple(implementations)}", repr(backend))
            )
        name, reason = backend, "asked for"
    taken[op, name] += 1
    if (op, name, reason) not in _logged:
        _logged.add((op, name, reason))
        logger.info("%s runs on backend %s (%s)", op, name, reason)
    return implementations[name]
