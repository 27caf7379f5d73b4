"""KV transfer between a prefill and a decode engine: outer-block rows over NIXL.

`--kv-transfer-config '{"kv_connector": "RocmMsaNixlConnector", "kv_role": ...}'`; without the
plugin's registration add `"kv_connector_module_path": "rocm_msa.vllm_plugin.nixl"`.

    options.py      what kv_connector_extra_config can set
    plan.py         which bytes of which rank a rank reads, as few descriptors as possible (pure)
    fingerprint.py  what both sides must agree on, and the comparison
    leases.py       blocks the prefill engine keeps until they are read or their lease ends
    control.py      the TCP side channel: hello, commit, renew, cancel
    memory.py       the rows a rank registers, checked against the declared row
    agent.py        the NIXL agent: registered regions, connections, reads
    peers.py        prefill engines that a decode rank is connected to
    reader.py       loads of a decode rank: connect, read, check, commit; retries and failures
    arrival.py      between a row's arrival and its use: checks, conversion of a foreign packing
    checks.py       identities and checksums of blocks (debug mode)
    stats.py        counts; metrics.py: the same in vLLM's metrics
    scheduler.py, worker.py, connector.py    the halves that vLLM calls
    upstream.py     everything of vLLM that is used here

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
