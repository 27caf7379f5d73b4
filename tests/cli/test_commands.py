"""make-checkpoint, and the demo's preparation, without a server."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rocm_msa.cli import app
from rocm_msa.demo import DemoError, DemoOptions, prepare
from rocm_msa.demo import run as run_module


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_make_checkpoint(tmp_path):
    result = invoke("make-checkpoint", tmp_path / "new", "--layout", "nvfp4", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "Random weights" in " ".join(result.output.split())
    assert json.loads((tmp_path / "new" / "config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    "arguments", [["--size", "huge"], ["--layout", "int4"], ["--arch", "audio"]]
)
def test_make_checkpoint_refuses(tmp_path, arguments):
    result = invoke("make-checkpoint", tmp_path / "new", *arguments)
    assert result.exit_code == 2
    assert "expected one of" in result.stderr
    assert not (tmp_path / "new").exists()


def test_make_checkpoint_will_not_overwrite(tmp_path):
    (tmp_path / "mine").write_text("x")
    result = invoke("make-checkpoint", tmp_path)
    assert result.exit_code == 2
    assert "is not empty" in " ".join(result.stderr.split())


def test_no_command_shows_help_and_unknown_ones_fail():
    assert "make-checkpoint" in invoke("--help").output
    assert invoke("nonsense").exit_code == 2
    assert invoke("capacity", "--no-such-option").exit_code == 2
    assert invoke("demo", "--port", "70000").exit_code == 2


def test_demo_checkpoint_is_made_once_and_repaired(tmp_path):
    first, reused = prepare.checkpoint(tmp_path)
    assert not reused
    assert prepare.checkpoint(tmp_path) == (first, True)
    (first / "model-00002-of-00002.safetensors").unlink()
    again, reused = prepare.checkpoint(tmp_path)
    assert (again, reused) == (first, False)
    assert (first / "model-00002-of-00002.safetensors").is_file()


def test_demo_cache_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DemoError, match="--cache-dir"):
        prepare.checkpoint(tmp_path / "file" / "below")


def test_demo_command_and_environment(tmp_path, monkeypatch):
    command = prepare.server_command(tmp_path, 4321)
    assert command[1:5] == ["-m", "rocm_msa.cli.vllm_main", "serve", str(tmp_path)]
    for part in ("--port=4321", "--host=127.0.0.1", "--kv-cache-dtype", "nvfp4", "--enforce-eager"):
        assert part in command
    monkeypatch.setattr(prepare, "on_cpu", lambda: True)
    environment = prepare.server_environment({"VLLM_CPU_KVCACHE_SPACE": "9", "PATH": "p"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == "p"


def test_demo_checks_first(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    result = invoke("demo", "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "vLLM is not installed" in result.stderr
    monkeypatch.undo()
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: "yes")
    monkeypatch.setattr(prepare.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(DemoError, match="would not see our plugin"):
        prepare.check_environment({})

    class Ours:
        name = "rocm_msa"

    monkeypatch.setattr(prepare.importlib.metadata, "entry_points", lambda group: [Ours])
    with pytest.raises(DemoError, match="VLLM_PLUGINS"):
        prepare.check_environment({"VLLM_PLUGINS": "x"})
    prepare.check_environment({"VLLM_PLUGINS": "x,rocm_msa"})


def test_failed_demo_keeps_the_log_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "check_environment", lambda environment: None)
    monkeypatch.setattr(prepare, "checkpoint", lambda cache_dir: (tmp_path, True))
    monkeypatch.setattr(run_module.tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", "print('ValueError: made up'); raise SystemExit(6)"]
    monkeypatch.setattr(prepare, "server_command", lambda directory, port: command)
    result = invoke("demo")
    assert result.exit_code == 1, result.output
    assert "exit code 6" in result.stderr
    assert "ValueError: made up" in result.stderr
    (log,) = tmp_path.glob("rocm-msa-demo-*/server.log")
    assert str(log) in result.stderr.replace("\n", "")
    assert "none of its processes is left" in result.output


def test_options_have_defaults():
    assert DemoOptions() == DemoOptions(False, 0, False, None, 300.0)


def test_importing_the_command_line_does_not_import_vllm():
    code = "import sys, rocm_msa.cli; print([m for m in ('vllm', 'triton') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
