"""Unpack the Python sources of a vLLM release, without its dependencies, for static checks.

`python tools/fetch_vllm_sources.py 0.33.0` downloads the wheel with pip and keeps only its .py
files under .cache/vllm-0.33.0 (reused when complete). Prints the directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
PINNED = "0.33.0"


def fetch(version: str = PINNED) -> Path:
    """Directory that holds `vllm/` of this version; RuntimeError with pip's words on failure."""
    target = CACHE / f"vllm-{version}"
    if target.is_dir():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"),
            *("--only-binary", ":all:", "--dest", work, f"vllm=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(work).glob("vllm-*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(f"could not download vllm=={version}:\n{done.stderr[-2000:]}")
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [n for n in wheel.namelist() if n.endswith(".py")]
            wheel.extractall(unpacked, members)
        shutil.move(unpacked, target)
    return target


if __name__ == "__main__":
    print(fetch(*sys.argv[1:2]))
