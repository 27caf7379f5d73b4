"""`rocm-msa compile`."""

import json

import pytest
from typer.testing import CliRunner

from rocm_msa import aot, flydsl_compile
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.cli import app
from rocm_msa.kernel_manifest import read
from tests.launcher import toy


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """The set is two small kernels, so that the test compiles nothing large."""
    monkeypatch.setattr(aot.builds, "__kwdefaults__", {"modules": (toy.__name__,)})


def invoke(*arguments):
    return CliRunner().invoke(app, ["compile", *map(str, arguments)])


def test_compile(tmp_path):
    result = invoke("-o", tmp_path / "out", "--arch", "gfx950", "--tp", 4, "--tp", 8)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "toy_add16_twice (elements / 256)" in text
    assert "2 kernels for gfx950" in text
    assert set(read(tmp_path / "out").kernels) == {"toy_add16", "toy_add16_twice"}
    again = invoke("-o", tmp_path / "out")
    assert "0 compiled, 2 unchanged" in " ".join(again.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "gfx942"], "arch: expected gfx950, got gfx942"),
        (["--tp", 3], "num_attention_heads: expected a multiple of 3"),
        (["--kv-cache-dtype", "int4"], "cache dtype: expected one of"),
        (["--dtype", "int8"], "dtype: expected one of"),
        (["--model", "/nowhere"], "no file /nowhere"),
        (["--mono", "config"], "--mono: expected one of ['mxfp4', 'mxfp8', 'nvfp4'], or config"),
        (["--mono", "mxfp4", "--kv-cache-dtype", "fp8"], "--mono: the layer takes nvfp4 caches"),
    ],
)
def test_bad_input(tmp_path, arguments, words):
    result = invoke("-o", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(flydsl_compile, "FLYDSL_VERSION", "9.9")
    result = invoke("-o", tmp_path / "out", "--no-cache", "--processes", 1)
    assert result.exit_code == 1
    assert "pip install flydsl==9.9" in " ".join(result.stderr.split())


def test_without_flydsl_no_process_is_started(tmp_path, monkeypatch):
    def version(name):
        raise flydsl_compile.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flydsl_compile.importlib.metadata, "version", version)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda *a: pytest.fail("started"))
    result = invoke("-o", tmp_path / "out", "--no-cache")
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert message.startswith("error: FlyDSL") and "pip install flydsl==" in message


def test_the_manifest_is_plain_json(tmp_path):
    invoke("-o", tmp_path)
    data = json.loads((tmp_path / "manifest.json").read_text())
    assert data["kernels"][0]["build"] == {"offset": 16, "twice": False}


def test_the_mono_layer_is_compiled_for_each_way_to_store_weights(tmp_path, monkeypatch):
    """By a layout's name, or as the checkpoint's config says; compiling itself is left out."""
    wanted = []

    def compile_builds(builds, directory, **options):
        wanted.extend(builds)
        return aot.Summary(directory, len(builds), 0, 0, 0.0)

    monkeypatch.setattr(aot, "compile_builds", compile_builds)
    only_mono = {"modules": ("mono_kernel.layer_gfx950",)}
    monkeypatch.setattr(aot.builds, "__kwdefaults__", only_mono)
    make_checkpoint(tmp_path / "model", layout="nvfp4")
    given = ["--model", tmp_path / "model", "--tp", 1, "--mono", "config", "--mono", "mxfp8"]
    result = invoke("-o", tmp_path / "out", *given)
    assert result.exit_code == 0, result.output
    assert [b.routed_format for b in wanted] == ["nvfp4", "mxfp8"]
    assert {(b.hidden, b.experts, b.attention_format) for b in wanted} == {(256, 8, "mxfp8")}
    assert "2 kernels" in " ".join(result.output.split())
