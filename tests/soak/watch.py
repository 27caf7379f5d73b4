"""What a server holds: memory, threads and open files of its processes, requests and blocks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rocm_msa.demo.server import Server, open_url

WAIT_SECONDS = 600.0
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Held:
    """One process: its memory in MiB (resident), threads and open files."""

    name: str
    memory: float
    threads: int
    files: int


def metrics(server: Server) -> dict[str, float]:
    """name -> sum over the labels, of the server's /metrics."""
    with open_url(f"{server.url}/metrics", timeout=WAIT_SECONDS) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z][\w:]*)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def until(what: str, reached: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """Ask until the answer is true; AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := reached()):
        assert time.monotonic() < deadline, f"not reached in {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return answer


def wait_idle(server: Server) -> dict[str, float]:
    """Wait until no request runs or waits and no block is held; the metrics then."""

    def idle() -> dict[str, float] | None:
        server.check_alive()
        now = metrics(server)
        return None if any(now[name] for name in IDLE) else now

    return until("no request and no block in use", idle)


def held(server: Server) -> dict[int, Held]:
    """pid -> what each of the server's processes holds."""
    found = {}
    for process in server.processes():
        with process.oneshot():
            memory = process.memory_info().rss / 2**20
            name = process.name()
            found[process.pid] = Held(name, memory, process.num_threads(), process.num_fds())
    return found


def growth(before: dict[int, Held], after: dict[int, Held], memory_bound: float) -> list[str]:
    """What grew between two idle moments: processes, threads, files, memory above the bound."""
    faults = []
    if before.keys() != after.keys():
        faults.append(f"processes: {before}, then {after}")
    for pid in before.keys() & after.keys():
        was, now = before[pid], after[pid]
        if now.threads > was.threads:
            faults.append(f"{now.name}: {was.threads} threads, then {now.threads}")
        if now.files > was.files:
            faults.append(f"{now.name}: {was.files} open files, then {now.files}")
        if now.memory > was.memory + memory_bound:
            faults.append(f"{now.name}: {was.memory:.0f} MiB, then {now.memory:.0f} MiB")
    return faults
