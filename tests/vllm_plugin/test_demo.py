"""`make demo`, as a new user runs it: a real server process, real HTTP, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil


def test_demo(tmp_path):
    before = {p.pid for p in psutil.process_iter()}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from rocm_msa.cli import main; main()"),
            *("demo", "--cache-dir", str(tmp_path / "cache")),
        ],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in (
        "1. A streaming chat request",
        "3,000 prompt tokens",
        "8 requests at once",
        "nvfp4",
        "none of its processes is left",
    ):
        assert words in done.stdout
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "tiny-bf16" in " ".join(p.info["cmdline"] or [])]
