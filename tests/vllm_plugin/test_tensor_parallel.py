"""TP 2 (two worker processes, gloo) against the whole-model reference, as TP 1 is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.vllm_plugin.engine import Answer
from tests.vllm_plugin.test_parity_reference import COUNT, Yardstick, check, prompts

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks(checkpoint, tmp_path):
    asked = prompts()
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("run_tp.py")), checkpoint),
            *(str(tmp_path / "out.pt"), "2", str(tmp_path / "prompts.json"), str(COUNT)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(tmp_path / "out.pt")
    check(Yardstick(checkpoint), asked, [Answer(*a) for a in saved])
