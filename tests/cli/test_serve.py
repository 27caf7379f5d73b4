"""`rocm-msa serve`: our defaults against what the user gives; exec is replaced."""

import importlib.metadata
import importlib.util
import json
import os
import sys

import pytest
from typer.testing import CliRunner

from rocm_msa.cli import app
from rocm_msa.cli.serve import config_file_flags, cpu_environment, flag_values, merge
from rocm_msa.cli.vllm_main import version_for_vllm


def values(arguments, *names):
    return [value for _, _, value in flag_values(arguments, names)]


def attention(arguments):
    return json.loads(values(arguments, "--attention-config", "-ac")[-1])


def test_defaults():
    merged, notes = merge([])
    assert values(merged, "--block-size") == ["128"]
    assert values(merged, "--kv-cache-dtype") == ["nvfp4"]
    assert attention(merged) == {"indexer_kv_dtype": "nvfp4"}
    assert {note.note for note in notes} == {"default"}


@pytest.mark.parametrize(
    "given",
    [["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype=fp8"], ["--kv_cache_dtype", "fp8"]],
)
def test_user_flags_win_in_every_spelling(given):
    merged, notes = merge([*given, "--port", "1"])
    assert merged[: len(given)] == given
    assert values(merged, "--kv-cache-dtype") == ["fp8"]
    assert values(merged, "--block-size") == ["128"]
    assert [n.note for n in notes if n.name == "--kv-cache-dtype"] == ["yours"]


@pytest.mark.parametrize("flag", ["--attention-config", "-ac", "--attention_config"])
def test_attention_config_keys_merge(flag):
    merged, _ = merge([flag, '{"indexer_decode_cp": true}', "--port", "1"])
    assert attention(merged) == {"indexer_decode_cp": True, "indexer_kv_dtype": "nvfp4"}
    assert values(merged, "--port") == ["1"]
    merged, _ = merge([f'{flag}={{"indexer_kv_dtype": "fp8"}}'])
    assert merged[0] == f'{flag}={{"indexer_kv_dtype": "fp8"}}'
    assert len(values(merged, "--attention-config", "-ac")) == 1


def test_attention_config_dotted():
    merged, _ = merge(["--attention-config.indexer_kv_dtype", "bf16"])
    assert values(merged, "--attention-config") == []
    assert "--attention-config.indexer_kv_dtype" in merged
    assert merged.count("nvfp4") == 1
    merged, _ = merge(["-ac.indexer_decode_cp", "true"])
    assert merged[-2:] == ["--attention-config.indexer_kv_dtype", "nvfp4"]


def test_unreadable_attention_config_is_left_to_vllm():
    merged, _ = merge(["--attention-config", "{oops"])
    assert values(merged, "--attention-config") == ["{oops"]


def test_config_file_counts_as_given(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("kv_cache_dtype: fp8\nattention-config: '{}'\nport: 9\n")
    flags = config_file_flags(["--config", str(path)])
    merged, notes = merge(["--config", str(path)], flags)
    assert values(merged, "--kv-cache-dtype") == []
    assert values(merged, "--attention-config") == []
    assert values(merged, "--block-size") == ["128"]
    assert sum("config file" in note.note for note in notes) == 2


def test_unknown_options_and_order_pass_through():
    given = ["--no-such-flag", "--port=7", "-tp", "2", "--", "tail"]
    merged, _ = merge(given)
    assert merged[: len(given)] == given


def test_cpu_environment():
    one = cpu_environment([], {}, [0, 1], 24)
    assert one == {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    two = cpu_environment(["-tp", "2"], {}, list(range(9)), 8)
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3|4,5,6,7"
    assert two["OMP_NUM_THREADS"] == "4"
    assert two["VLLM_CPU_KVCACHE_SPACE"] == "2"
    tight = cpu_environment(["--tensor-parallel-size=2"], {}, [3, 5], 1)
    assert tight["VLLM_CPU_OMP_THREADS_BIND"] == "3|5"
    few = cpu_environment(["-tp=4"], {}, [0, 1], 1)
    assert few["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    # The user's environment wins, and the variable would override a cache-size flag.
    kept = cpu_environment(["--kv-cache-memory-bytes=1"], {"OMP_NUM_THREADS": "9"}, [0, 1], 24)
    assert kept == {"VLLM_CPU_OMP_THREADS_BIND": "0"}


@pytest.fixture
def executed(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: "yes" if name == "vllm" else real(name, *a)
    )
    return calls


def run(*arguments):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_command_executes_vllm_in_this_python(executed):
    result = run("/models/m3", "--port", "1", "--kv-cache-dtype=fp8", "--help")
    assert result.exit_code == 0, result.output
    ((program, command, environment),) = executed
    assert program == sys.executable
    assert command[:5] == [program, "-m", "rocm_msa.cli.vllm_main", "serve", "/models/m3"]
    assert command[5:9] == ["--port", "1", "--kv-cache-dtype=fp8", "--help"]
    assert environment["PATH"] == os.environ["PATH"]
    assert "yours" in result.output
    assert "vllm serve /models/m3 --port 1" in result.output


def test_command_dry_run_and_missing_model(executed):
    assert run("--dry-run", "m").exit_code == 0
    result = run("--port", "1", "m")
    assert result.exit_code == 2
    assert "before vLLM's options" in " ".join(result.stderr.split())
    assert run().exit_code == 2
    assert executed == []


def test_command_without_vllm(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("executed"))
    result = run("m")
    assert result.exit_code == 1
    assert "rocm-msa doctor" in result.stderr


def test_missing_config_file_is_an_error(executed, tmp_path):
    result = run("m", "--config", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "none.yaml" in " ".join(result.stderr.split())
    (tmp_path / "bad.yaml").write_text("a: [")
    result = run("m", "--config", str(tmp_path / "bad.yaml"))
    assert result.exit_code == 2
    assert "not YAML" in " ".join(result.stderr.split())
    assert executed == []


def test_vllm_cpu_stands_for_vllm():
    def version(name):
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    assert version_for_vllm("vllm", version) == "0.32.0+cpu"
    assert version_for_vllm("vllm-cpu", version) == "0.32.0"
    assert version_for_vllm("vllm", lambda name: "0.33.0") == "0.33.0"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version_for_vllm("other", version)
