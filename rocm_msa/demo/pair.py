"""A prefill and a decode server on this machine, with a proxy in front, for demo and tests.

Each engine has one core of its own: `VLLM_CPU_OMP_THREADS_BIND`. Ports are free ones each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_msa.cli.serve import command_line, merge
from rocm_msa.demo import prepare
from rocm_msa.demo.server import DemoError, Server, free_port, open_url

STOCK, ROWS = "NixlConnector", "RocmMsaNixlConnector"
KV_CACHE_BYTES = 64 * 2**20
START_SECONDS = 600.0


@dataclass(frozen=True)
class Engine:
    """One engine of the pair. threads: its cores, ranks separated by "|". flags: vLLM's."""

    role: str
    threads: str
    tp: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def prefill_engine(**options: Any) -> Engine:
    return Engine("kv_producer", **({"threads": "0"} | options))


def decode_engine(**options: Any) -> Engine:
    last = (os.cpu_count() or 1) - 1
    return Engine("kv_consumer", **({"threads": str(last)} | options))


def engine_server(
    checkpoint: Path, engine: Engine, connector: str, log: Path, policy: str = "recompute"
) -> Server:
    """The server of one engine, not started. policy: vLLM's kv_load_failure_policy."""
    port = free_port()
    transfer = {
        "kv_connector": connector,
        "kv_role": engine.role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": engine.extra,
    }
    flags, _ = merge(
        [
            "--host=127.0.0.1",
            f"--port={port}",
            f"--served-model-name={prepare.SERVED_NAME}",
            f"--max-model-len={prepare.MAX_MODEL_LEN}",
            f"--max-num-seqs={prepare.MAX_SEQUENCES}",
            f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
            f"--tensor-parallel-size={engine.tp}",
            "--enforce-eager",
            "--disable-uvicorn-access-log",
            "--kv-transfer-config",
            json.dumps(transfer),
            *engine.flags,
        ]
    )
    environment = prepare.server_environment(os.environ) | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": engine.threads,
    }
    if engine.tp > 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = command_line(str(checkpoint), flags)
    return Server(command, port, log, environment | engine.environment)


def proxy_server(script: Path, prefill: Server, decode: Server, log: Path) -> Server:
    """The proxy of examples/pd, not started."""
    port = free_port()
    command = [sys.executable, str(script), f"--port={port}"]
    command += [f"--prefill={prefill.url}", f"--decode={decode.url}"]
    return Server(command, port, log, dict(os.environ) | {"PYTHONUNBUFFERED": "1"})


@contextlib.contextmanager
def running(servers: Sequence[Server], timeout: float = START_SECONDS) -> Iterator[None]:
    """Start servers together, wait until all are healthy, and end every one of them.

    Raises:
        DemoError: a server did not start, with the end of its log.
    """
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_healthy(timeout, lambda seconds, line: None)
        yield
    finally:
        stop_all(servers)


def stop_all(servers: Sequence[Server]) -> None:
    """End all servers; the first that could not be ended is reported after the others."""
    failures = []
    for server in reversed(servers):
        try:
            server.stop()
        except DemoError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def metrics(server: Server) -> dict[str, float]:
    """Prometheus samples by name, summed over their labels."""
    text = open_url(f"{server.url}/metrics", timeout=60).read().decode()
    out: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        out[name] = out.get(name, 0.0) + float(value)
    return out


@dataclass(frozen=True)
class Transfers:
    """What a decode server has read so far."""

    reads: int
    descriptors: int
    nbytes: int

    def since(self, before: Transfers) -> Transfers:
        return Transfers(
            self.reads - before.reads,
            self.descriptors - before.descriptors,
            self.nbytes - before.nbytes,
        )


def transfers(decode: Server, connector: str) -> Transfers:
    """From the metrics of either connector; both count NIXL's own telemetry."""
    found = metrics(decode)
    names = {
        ROWS: ("vllm:rocm_msa_kv_read_descriptors", "vllm:rocm_msa_kv_read_bytes"),
        STOCK: ("vllm:nixl_num_descriptors", "vllm:nixl_bytes_transferred"),
    }[connector]
    return Transfers(
        int(found.get(f"{names[0]}_count", 0)),
        int(found.get(f"{names[0]}_sum", 0)),
        int(found.get(f"{names[1]}_sum", 0)),
    )


def settled(decode: Server, connector: str, reads: int, seconds: float = 120.0) -> Transfers:
    """`transfers` once at least `reads` are counted: metrics follow a step later.

    Raises:
        DemoError: fewer reads within the time.
    """
    end = time.monotonic() + seconds
    while (now := transfers(decode, connector)).reads < reads:
        if time.monotonic() > end:
            raise DemoError(f"expected {reads} KV reads on {decode.url}, got {now.reads}")
        time.sleep(0.1)
    return now
