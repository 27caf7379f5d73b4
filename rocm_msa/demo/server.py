"""A server process and everything it starts: started, watched, and ended without a trace.

The server leads its own session, so one signal to its process group reaches all of it and a
terminal's Ctrl-C reaches only us. A marker in its environment finds descendants that left the
group. `stop` asks first (SIGTERM), then kills, then looks that nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

MARKER = "ROCM_MSA_DEMO_RUN"
TAIL_LINES = 25
POLL_SECONDS = 0.2
GRACE_SECONDS, STARTING_GRACE_SECONDS, KILL_SECONDS = 10.0, 2.0, 60.0

# A proxy of the environment must not stand between us and our own server.
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class DemoError(Exception):
    """A step of the demo failed; the message says what happened and what to look at."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Server:
    """A server that answers 200 on `/health` of `127.0.0.1:port`."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]
    ):
        self.command, self.port, self.log = list(command), port, log
        self.run_id = uuid.uuid4().hex
        self.environment = {**environment, MARKER: self.run_id}
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.hurry = self.was_healthy = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not port_is_free(self.port):
            raise DemoError(f"port {self.port} is in use; choose another with --port, or none")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self.started = time.monotonic()

    def wait_healthy(self, timeout: float, progress: Callable[[float, str], None]) -> float:
        """Wait for `/health`; `progress(seconds, last log line)` is called meanwhile.

        Returns:
            Seconds from the start.

        Raises:
            DemoError: the server ended or was not healthy in time, with the end of its log.
        """
        while True:
            elapsed = time.monotonic() - self.started
            self.check_alive()
            if self._healthy():
                self.was_healthy = True
                return elapsed
            if elapsed > timeout:
                raise DemoError(f"the server was not healthy after {timeout:.0f} s\n{self.tail()}")
            progress(elapsed, self.last_line())
            time.sleep(POLL_SECONDS)

    def check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"the server ended by itself with exit code {code}\n{self.tail()}")

    def _healthy(self) -> bool:
        try:
            with open_url(f"{self.url}/health", timeout=2) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _log_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def last_line(self) -> str:
        return next((line for line in reversed(self._log_lines()) if line.strip()), "")

    def tail(self) -> str:
        """The log's path and last lines, for an error message."""
        lines = self._log_lines()[-TAIL_LINES:] or ["(empty)"]
        return "\n".join([f"server log: {self.log}", *(f"    {line}" for line in lines)])

    def processes(self) -> list[psutil.Process]:
        """What is left of the server: its group, and whatever carries our marker."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if self._is_ours(process):
                    found.append(process)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        # While it is not reaped, the leader's pid is the number of its group and of no other.
        leader = self.process
        if leader and leader.returncode is None and os.getpgid(process.pid) == leader.pid:
            return True
        return process.environ().get(MARKER) == self.run_id

    def stop(self, grace: float | None = None) -> None:
        """End the server and all it started: SIGTERM, after `grace` seconds SIGKILL.

        By default a server that never became healthy, and so holds nothing, gets less time.
        Setting `hurry` (a second Ctrl-C does) skips the waiting.

        Raises:
            DemoError: something survived SIGKILL.
        """
        if grace is None:
            grace = GRACE_SECONDS if self.was_healthy else STARTING_GRACE_SECONDS
        deadline = time.monotonic() + grace
        _signal(self.processes(), signal.SIGTERM)
        while (left := self.processes()) and time.monotonic() < deadline and not self.hurry:
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while left and time.monotonic() < deadline:
            _signal(left, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
            left = self.processes()
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise DemoError(f"could not end the server's processes {pids}")
        if self.process is not None:
            self.process.wait()


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """psutil checks the start time first: a pid that was given to another is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
