"""Every benchmark of the documents runs through, on little work, and prints or writes its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, documented

LITTLE = {
    "bench_cache_accuracy.py": ["--blocks", "24", "--rows", "2", "--seeds", "1"],
    "bench_dcp_gfx950.py": ["--ranks", "2", "--requests", "2", "--rows", "1"],
    "bench_dcp_multi.py": ["--device", "cpu", "--ranks", "2"],
    "bench_emulator.py": [],
    "bench_flydsl_decode.py": ["--cases", "1x1"],
    "bench_mono_gfx950.py": ["--rows", "1"],
    "bench_msa_triton.py": [],
    "bench_ops_gfx950.py": ["--ops", "block_topk"],
    "bench_transfer.py": ["--tokens", "1024", "--repeats", "1"],
}
FOLDER = ("bench_cache_accuracy.py", "bench_dcp_multi.py", "bench_msa_triton.py")
"""Those that write into a folder; the others write one JSON file."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LITTLE)
def test_a_benchmark_runs(name, tmp_path):
    where = ["--out", tmp_path] if name in FOLDER else ["--json", tmp_path / "figures.json"]
    command = [sys.executable, ROOT / "benchmarks" / name, *LITTLE[name], *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip()
    if "no GPU here, nothing measured" in done.stdout:
        return
    written = list(tmp_path.rglob("*.json"))
    assert written, "no figures were written"
    assert all(json.loads(path.read_text()) for path in written)


def test_every_benchmark_of_the_documents_is_run():
    named = {Path(words[1]).name for words in documented() if "benchmarks/" in " ".join(words)}
    assert named and named <= LITTLE.keys()
