"""The demo's process handling, with a fake server: nothing that was started is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rocm_msa.demo import server as server_module
from rocm_msa.demo.client import Client
from rocm_msa.demo.server import MARKER, DemoError, Server, free_port

FAKE = Path(__file__).with_name("fake_server.py")
LONG = 300  # seconds for what takes a moment on a machine that is not loaded

# A driver in its own process, since it is signalled: supervise() around a fake server.
DRIVER = """
import sys, time
from pathlib import Path
from rich.console import Console
from rocm_msa.demo import server as server_module
from rocm_msa.demo.run import supervise
from rocm_msa.demo.server import DemoError, Server
import os
port, mode, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if mode == "ignores":
    server_module.GRACE_SECONDS = 3600.0
server = Server([sys.executable, {fake!r}, str(port), mode], port, log, os.environ)
console = Console(width=80)
console.print("run", server.run_id)
def course():
    if mode != "hangs":
        server.wait_healthy(300, lambda *_: None)
    console.print("ready")
    sys.stdout.flush()
    while True:
        time.sleep(0.1)
        server.check_alive()
try:
    sys.exit(supervise(server, course, console))
except DemoError as error:
    print("failed:", error)
    sys.exit(1)
"""

SERVE_DRIVER = """
import sys, tempfile
from pathlib import Path
from rich.console import Console
from rocm_msa.demo import DemoOptions, prepare, run_demo, steps
tempfile.tempdir = {tmp!r}
prepare.check_environment = lambda environment: None
prepare.checkpoint = lambda cache_dir: (Path({tmp!r}), True)
prepare.server_command = lambda directory, port: [sys.executable, {fake!r}, str(port), "children"]
for step in ("streaming_chat", "long_prompt", "concurrent", "capacity"):
    setattr(steps, step, lambda *args: None)
import rocm_msa.demo.client as client
client.Client.cache_info = lambda self: {{}}
sys.exit(run_demo(DemoOptions(serve=True, port={port}), Console(width=80)))
"""


def start(mode, tmp_path, port=None):
    port = port or free_port()
    command = [sys.executable, str(FAKE), str(port), mode]
    server = Server(command, port, tmp_path / "server.log", os.environ)
    server.start()
    return server


def marked(run_id):
    """Living processes of a run, found without the code under test's own listing."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARKER) == run_id:
                found.append(process.pid)
    return found


def no_progress(elapsed, line):
    pass


def test_healthy_server_is_waited_for_and_stopped(tmp_path):
    server = start("serves", tmp_path)
    assert server.wait_healthy(LONG, no_progress) > 0
    assert marked(server.run_id)
    server.stop()
    assert marked(server.run_id) == []
    server.stop()


@pytest.mark.parametrize("mode", ["children", "ignores"])
def test_children_end_too(tmp_path, mode):
    server = start(mode, tmp_path)
    server.wait_healthy(LONG, no_progress)
    assert len(marked(server.run_id)) >= 2
    server.stop(grace=1.0)
    assert marked(server.run_id) == []


def test_orphans_of_a_dead_server_are_found(tmp_path):
    server = start("orphans", tmp_path)
    server.process.wait(LONG)
    with pytest.raises(DemoError, match="exit code 4"):
        server.check_alive()
    assert len(marked(server.run_id)) == 2
    server.stop(grace=1.0)
    assert marked(server.run_id) == []


def test_early_death_is_reported_with_the_log(tmp_path):
    server = start("dies", tmp_path)
    with pytest.raises(DemoError) as caught:
        server.wait_healthy(LONG, no_progress)
    message = str(caught.value)
    assert "exit code 3" in message
    assert str(server.log) in message
    assert "RuntimeError: no such model" in message
    server.stop()


def test_hanging_server_times_out_with_progress(tmp_path):
    server = start("hangs", tmp_path)
    seen = []
    with pytest.raises(DemoError, match="not healthy after 2 s"):
        server.wait_healthy(2, lambda elapsed, line: seen.append((elapsed, line)))
    assert "fake server in mode hangs" in seen[-1][1]
    assert seen == sorted(seen)
    server.stop()
    assert marked(server.run_id) == []


def test_port_in_use_is_refused_before_anything_starts(tmp_path):
    server = start("serves", tmp_path)
    try:
        server.wait_healthy(LONG, no_progress)
        with pytest.raises(DemoError, match=f"port {server.port} is in use"):
            start("serves", tmp_path, server.port)
    finally:
        server.stop()


def test_hurry_skips_the_grace(tmp_path):
    server = start("ignores", tmp_path)
    server.wait_healthy(LONG, no_progress)
    server.hurry = True
    server.stop(grace=3600.0)
    assert marked(server.run_id) == []


def drive(mode, tmp_path):
    """Start the driver; returns it and the run's id once the server is up."""
    code, log = DRIVER.format(fake=str(FAKE)), str(tmp_path / "server.log")
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(free_port()), mode, log],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    run_id = driver.stdout.readline().split()[1]
    return driver, run_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("mode", ["children", "hangs"])
def test_signals_end_everything(tmp_path, mode, number):
    driver, run_id = drive(mode, tmp_path)
    assert driver.stdout.readline().strip() == "ready"
    end = time.monotonic() + LONG
    while not marked(run_id):  # a process that has just begun may not show its environment yet
        assert time.monotonic() < end
    driver.send_signal(number)
    output, _ = driver.communicate(timeout=LONG)
    assert driver.returncode == 128 + number
    assert f"Interrupted ({number.name})" in output
    assert "none of its processes is left" in output
    assert marked(run_id) == []


def test_second_interrupt_kills_at_once(tmp_path):
    driver, run_id = drive("ignores", tmp_path)
    assert driver.stdout.readline().strip() == "ready"
    driver.send_signal(signal.SIGINT)
    while "Stopping" not in driver.stdout.readline():
        pass
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=LONG)  # the driver's grace is an hour
    assert driver.returncode == 130
    assert "none of its processes is left" in output
    assert marked(run_id) == []


def test_death_while_serving_is_a_failure(tmp_path):
    driver, run_id = drive("dies-later", tmp_path)
    output, _ = driver.communicate(timeout=LONG)
    assert driver.returncode == 1
    assert "ended by itself with exit code 5" in output
    assert "server.log" in output
    assert marked(run_id) == []


@pytest.fixture
def fake_url(tmp_path):
    server = start("serves", tmp_path)
    server.wait_healthy(LONG, no_progress)
    yield server.url
    server.stop()


def test_client_streams_and_refuses_broken_answers(fake_url):
    pieces = []
    answer = Client(fake_url, "good").chat("hello", 3, pieces.append)
    assert pieces == ["t0 ", "t1 ", "t2 "]
    assert (answer.text, answer.prompt_tokens, answer.tokens) == ("t0 t1 t2 ", 7, 3)
    assert 0 < answer.first_token_s <= answer.total_s
    for model, message in (
        ("short", "asked for 3 tokens, got 2"),
        ("error", "engine died"),
        ("cut", r"ended without \[DONE\]"),
    ):
        with pytest.raises(DemoError, match=message):
            Client(fake_url, model).chat("hello", 3, pieces.append)
    with pytest.raises(DemoError, match="/metrics: the server answered 404"):
        Client(fake_url, "good").cache_info()
    with pytest.raises(DemoError, match="answered 400: bad request body"):
        Client(fake_url, "good")._request("/broken", {"model": "x"})
    with pytest.raises(DemoError, match="no answer from the server"):
        Client(f"http://127.0.0.1:{free_port()}", "good").chat("hello", 3, pieces.append)


def test_a_starting_server_gets_less_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "GRACE_SECONDS", 3600.0)
    server = start("ignores", tmp_path)
    deadline = time.monotonic() + LONG
    while len(marked(server.run_id)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    server.stop()
    assert marked(server.run_id) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_is_how_serving_ends(tmp_path, number, code):
    """`demo --serve` with the fake server: Ctrl-C is its normal end, SIGTERM is not."""
    script = SERVE_DRIVER.format(fake=str(FAKE), port=free_port(), tmp=str(tmp_path))
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    seen = ""
    while "-d '" not in seen:
        line = driver.stdout.readline()
        assert line, seen
        seen += line
    assert "curl -N http://127.0.0.1:" in seen
    driver.send_signal(number)
    output, _ = driver.communicate(timeout=LONG)
    assert driver.returncode == code, output
    assert "none of its processes is left" in output
    assert list(tmp_path.glob("rocm-msa-demo-*")) == []
