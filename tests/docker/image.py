"""A clean environment for the image's scripts: a source tree and virtual environments of its own.

Third-party packages are linked from the environment that the tests run in, so that nothing is
downloaded; a distribution can be left out as if it had never been installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rocm_msa", "mono_kernel", "dcp", "gfx950_emu")
OURS = "rocm-msa"


def versions() -> dict[str, str]:
    """docker/versions.env."""
    lines = (DOCKER / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def source_tree(folder: Path) -> Path:
    """What the Dockerfile copies into the build stage, without anything built."""
    folder.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "code_objects", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def linked_packages(folder: Path, without: Iterable[str] = ()) -> Path:
    """Links to every installed distribution but ours and those of `without`."""
    folder.mkdir()
    site = Path(sysconfig.get_paths()["purelib"])
    left_out = {name.lower().replace("_", "-") for name in (OURS, *without)}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        if distribution.metadata["Name"].lower().replace("_", "-") in left_out:
            continue
        tops = {file.parts[0] for file in distribution.files or ()}
        for top in tops - {"..", "__pycache__", "_virtualenv.pth"}:
            if (site / top).exists() and not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


def environment(folder: Path, packages: Path) -> Path:
    """The Python of a new virtual environment that sees `packages`."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    major, minor = sys.version_info[:2]
    site = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    (site / "linked.pth").write_text(f"{packages}\n")
    return python


def script(name: str, *arguments: object, python: Path | str, timeout: int = 500, **extra: str):
    """Run a script of docker/ as the Dockerfile does; CompletedProcess."""
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "PIP_CONFIG_FILE")}
    return subprocess.run(
        [DOCKER / name, *map(str, arguments)],
        env={**keep, "PYTHON": str(python), "OMP_NUM_THREADS": "1", **extra},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def ran(done: subprocess.CompletedProcess) -> str:
    """Its standard output; AssertionError with its end when it failed."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
