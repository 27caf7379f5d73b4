"""Steps of the image that change the machine: in a view of the file system, in an environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
VERSIONS = dict(re.findall(r"^(\w+)=(.*)$", (DOCKER / "versions.env").read_text(), re.MULTILINE))

# A writable view of the whole file system that is gone with the mount namespace.
VIEW = """
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/view"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/view"
"""
STEP = """
cp -r "$2" "$1/view/docker"
chroot "$1/view" /docker/make_user.sh
chroot "$1/view" id -nG "$3"
chroot "$1/view" id -u "$3"
chroot "$1/view" stat -c %U "/home/$3/.cache"
test -d "$1/view/models"
"""


def in_a_view(script: str, folder: Path) -> subprocess.CompletedProcess:
    names = (folder, DOCKER, VERSIONS["RUN_USER"])
    command = ["unshare", "--mount", "bash", "-euc", VIEW + script, "bash", *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_user_that_serves(tmp_path):
    if shutil.which("unshare") is None or in_a_view("", tmp_path).returncode:
        pytest.skip("this user may not mount an overlay")
    done = in_a_view(STEP, tmp_path)
    assert done.returncode == 0, done.stderr
    groups, number, owner = done.stdout.splitlines()[-3:]
    assert {"video", "render"} <= set(groups.split())
    assert number == VERSIONS["RUN_UID"] and owner == VERSIONS["RUN_USER"]


@pytest.mark.slow
def test_the_tools_of_the_build_stage(tmp_path):
    """Installed from the package index, in the versions that are named in one place."""
    done = subprocess.run(
        [DOCKER / "install_build_tools.sh", tmp_path / "tools"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    program = (
        "from importlib.metadata import version\n"
        "for name in ('build', 'setuptools', 'flydsl', 'msgpack'): print(version(name))"
    )
    said = subprocess.run(
        [tmp_path / "tools" / "bin" / "python", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    wanted = [VERSIONS[f"{name}_VERSION"] for name in ("BUILD", "SETUPTOOLS", "FLYDSL", "MSGPACK")]
    assert said.stdout.split() == wanted
