"""What `kv_connector_extra_config` can set, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from rocm_msa.errors import Refusals, expect

PACKINGS = ("rocm_msa", "vllm-hnd", "vllm-nhd")
"""Byte orders of an NVFP4 main page: ours, and vLLM's own writer's with its two head orders."""


@dataclass(frozen=True)
class TransferOptions:
    """Options of one engine.

    lease_seconds: how long finished blocks are kept for a decode engine that says nothing; a
        decode engine renews for its queued requests.
    control_timeout_seconds: one message of the side channel.
    read_timeout_seconds: from a request's first read to its last byte.
    retries: how often a failed handshake or read is tried again.
    allow_unequal_tp: False refuses another tensor-parallel size instead of reading by pages.
    packing: byte order of this engine's NVFP4 main pages.
    convert_packing: accept a prefill engine of another packing and permute its pages on arrival.
    debug_checks: every block carries an identity and checksums, compared after each read.
    nixl_progress: "thread" (NIXL's own, takes a core) or "poll" (every poll_seconds); None
        chooses "poll" on the CPU.
    nixl_threads: UCX worker threads of the agent, 0 for NIXL's default.
    backends: NIXL backends.
    """

    lease_seconds: float = 30.0
    control_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    retries: int = 1
    allow_unequal_tp: bool = True
    packing: str = "rocm_msa"
    convert_packing: bool = False
    debug_checks: bool = False
    nixl_progress: str | None = None
    nixl_threads: int = 0
    poll_seconds: float = 0.001
    backends: tuple[str, ...] = ("UCX",)

    @classmethod
    def read(cls, given: dict[str, Any]) -> TransferOptions:
        """From `kv_connector_extra_config`.

        Raises:
            ConfigError: unknown keys or bad values, all of them.
        """
        refusals = Refusals("kv_connector_extra_config cannot be used")
        known = {f.name: f for f in fields(cls)}
        for key in sorted(set(given) - set(known)):
            refusals.check(False, f"{key}: unknown key, known: {sorted(known)}")
        values = {k: v for k, v in given.items() if k in known}
        for key, value in values.items():
            problem = _problem(key, value, known[key].default)
            if problem:
                refusals.check(False, expect(key, problem, repr(value)))
        refusals.raise_if_any()
        if "backends" in values:
            values["backends"] = tuple(values["backends"])
        return cls(**values)


def _problem(key: str, value: Any, default: Any) -> str | None:
    """What was expected of an option, when it is not that."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "a bool"
    if key == "packing":
        return None if value in PACKINGS else f"one of {PACKINGS}"
    if key == "nixl_progress":
        return None if value in (None, "thread", "poll") else '"thread" or "poll"'
    if key == "backends":
        names = isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)
        return None if names else "a list of backend names"
    if isinstance(value, bool) or not isinstance(value, Real):
        return "a number"
    if isinstance(default, int):
        return None if isinstance(value, int) and value >= 0 else "an integer >= 0"
    return None if 0 < value < float("inf") else "a number of seconds > 0"
