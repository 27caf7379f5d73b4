"""Triton's interpreter is chosen when Triton is imported: tests under it need their own process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 1200  # seconds; a tenth is usual on two idle cores


def run_in_interpreter(tests: Path) -> None:
    """Run a file of tests with the kernels interpreted on the CPU; all must pass, none may skip."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(tests), "-q", "-x", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
