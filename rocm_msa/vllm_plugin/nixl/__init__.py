"""KV transfer between a prefill and a decode engine: outer-block rows over NIXL.

`--kv-transfer-config '{"kv_connector": "RocmMsaNixlConnector", "kv_role": ...}'`; without the
plugin's registration add `"kv_connector_module_path": "rocm_msa.vllm_plugin.nixl"`.

    options.py      what kv_connector_extra_config can set
    plan.py         which bytes of which rank a rank reads, as few descriptors as possible (pure)
    fingerprint.py  what both sides must agree on, and the comparison
    leases.py       blocks the prefill engine keeps until they are read or their lease ends
    control.py      the TCP side channel: handshake, commit, renew, progress
    agent.py        the NIXL agent: one registered region, reads, connections
    reader.py       loads of the decode engine: handshake, read, retry, commit
    checks.py       identities and checksums of blocks (debug mode)
    memory.py       the rows a rank registers, checked against the declared row
    stats.py        metrics, through vLLM's own metrics path
    scheduler.py, worker.py, connector.py, upstream.py    vLLM's side; upstream.py holds its imports

docs/disaggregation.md describes the protocol, the commands and what to watch.
"""

from __future__ import annotations

import importlib
from typing import Any

CONNECTOR = "RocmMsaNixlConnector"

__all__ = [CONNECTOR]


def __getattr__(name: str) -> Any:
    if name == CONNECTOR:
        module = importlib.import_module("rocm_msa.vllm_plugin.nixl.connector")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
