"""The demo's course: checkpoint, server, three kinds of requests, capacity, and the clearing up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rocm_msa.demo import prepare, steps
from rocm_msa.demo.client import Client
from rocm_msa.demo.server import DemoError, Server, free_port

PROGRESS_SECONDS = 5.0
"""How often a plain log gets a line while the server starts."""


@dataclass(frozen=True)
class DemoOptions:
    """serve: stay until Ctrl-C. port 0: a free one. cache_dir None: the user's cache."""

    serve: bool = False
    port: int = 0
    keep_files: bool = False
    cache_dir: Path | None = None
    start_timeout: float = 300.0


class Interrupted(BaseException):
    """A signal asked us to end."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP raises `Interrupted`; later ones hurry the clean-up."""

    def __init__(self, on_hurry: Callable[[], None]):
        self.ending, self.on_hurry = False, on_hurry

    def __call__(self, number: int, frame: object) -> None:
        if self.ending:
            self.on_hurry()
            return
        self.ending = True
        raise Interrupted(number)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo; returns the exit code, 128 + signal when one ended it.

    Raises:
        DemoError: a step failed. Everything that was started has been stopped.
    """
    began = time.monotonic()
    prepare.check_environment(os.environ)
    cache_dir = options.cache_dir or prepare.default_cache_dir(os.environ)
    directory, reused = prepare.checkpoint(cache_dir)
    verb = "Reusing" if reused else "Made"
    _print(console, f"{verb} the tiny checkpoint (random weights): {directory}")
    files = Path(tempfile.mkdtemp(prefix="rocm-msa-demo-"))
    port = options.port or free_port()
    server = Server(
        prepare.server_command(directory, port),
        port,
        files / "server.log",
        prepare.server_environment(os.environ),
    )
    keep = True
    try:
        code = supervise(server, lambda: _course(server, directory, options, console), console)
        keep = options.keep_files
    finally:
        if not keep:
            shutil.rmtree(files, ignore_errors=True)
    if options.keep_files:
        _print(console, f"Server log kept: {server.log}")
    if code == 0:
        console.print(f"Done in {time.monotonic() - began:.0f} s.")
    return code


def supervise(server: Server, course: Callable[[], None], console: Console) -> int:
    """Run `course` with the server's end guaranteed; returns 0, or 128 + the signal's number.

    Raises:
        DemoError: from the course (with the server's fate added), or when clearing up failed.
    """

    def hurry() -> None:
        server.hurry = True

    signals, code = _Signals(hurry), 0
    with signals.installed():
        try:
            try:
                server.start()
                course()
            except DemoError as error:
                raise _with_fate(error, server) from None
            finally:
                signals.ending = True
        except Interrupted as interrupt:
            console.print(f"\nInterrupted ({interrupt}).")
            code = 128 + interrupt.number
        finally:
            if server.processes():
                console.print("Stopping the server ...")
            server.stop()
            console.print("Server stopped; none of its processes is left.")
    return code


def _with_fate(error: DemoError, server: Server) -> DemoError:
    """Add the server's log to an error that does not show it yet."""
    if str(server.log) in str(error) or server.process is None:
        return error
    return DemoError(f"{error}\n{server.tail()}")


def _course(server: Server, directory: Path, options: DemoOptions, console: Console) -> None:
    _print(console, f"Starting vLLM on {server.url}; its log: {server.log}")
    with progress_line(console) as progress:
        seconds = server.wait_healthy(options.start_timeout, progress)
    console.print(f"The server is healthy after {seconds:.1f} s.")
    client = Client(server.url, prepare.SERVED_NAME)
    steps.streaming_chat(client, console)
    steps.long_prompt(client, directory, console)
    steps.concurrent(client, prepare.MAX_SEQUENCES, console)
    steps.capacity(client.cache_info(), directory, console)
    if options.serve:
        _stay(server, console)


@contextlib.contextmanager
def progress_line(console: Console) -> Iterator[Callable[[float, str], None]]:
    """One line that is rewritten on a terminal, a line now and then in a plain log."""
    width = console.width - 2

    def line(elapsed: float, last: str) -> str:
        text = f"{elapsed:4.0f} s  {''.join(c for c in last if c.isprintable())}"
        return text if len(text) <= width else text[: width - 3] + "..."

    if console.is_terminal:
        with console.status("") as status:
            yield lambda elapsed, last: status.update(escape(line(elapsed, last)))
        return
    printed = 0.0

    def print_line(elapsed: float, last: str) -> None:
        nonlocal printed
        if elapsed - printed >= PROGRESS_SECONDS:
            printed = elapsed
            console.print(line(elapsed, last), markup=False)
            sys.stdout.flush()

    yield print_line


def _print(console: Console, text: str) -> None:
    """Text with a path in it: never wrapped, so that it can be copied."""
    console.print(text, markup=False, soft_wrap=True)
    sys.stdout.flush()


def _stay(server: Server, console: Console) -> None:
    """Serve until Ctrl-C, which is the normal end."""
    try:
        _show_example(server, console)
        while True:
            time.sleep(1)
            server.check_alive()
    except Interrupted as interrupt:
        if interrupt.number != signal.SIGINT:
            raise
        console.print("\nCtrl-C.")


def _show_example(server: Server, console: Console) -> None:
    body = f'{{"model": "{prepare.SERVED_NAME}", "max_tokens": 32, "stream": true, "messages": '
    body += '[{"role": "user", "content": "Hello"}]}'
    console.print("\nThe server stays until Ctrl-C. For example:")
    _print(
        console,
        f"curl -N {server.url}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d '{body}'",
    )
