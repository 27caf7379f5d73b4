"""Backend "emulated" on two ranks, each a process with an emulator of its own; the demo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.vllm_plugin.run_decode_cp import ALONE
from tests.vllm_plugin.test_decode_cp import prompt, run_engine, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SPARSE_LAYERS, COUNT = 3, 6


def rounds(tmp_path, checkpoint, name: str, prompts, options: dict, asked: list) -> list[dict]:
    folder = tmp_path / name
    folder.mkdir()
    case = {
        "options": {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 4}
        | {"max_num_batched_tokens": 1024, "additional_config": {"rocm_msa": options}},
        "prompts": prompts,
        "count": COUNT,
        "rounds": asked,
    }
    done = run_engine(folder, checkpoint, case)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


def test_two_ranks_share_the_scan_through_each_others_memory(checkpoint, tmp_path):
    """Shared, alone, and never shared are the same bits."""
    prompts = [prompt(300, 0), prompt(150, 3)]
    emulated = {"backend": "emulated"}
    on, off = rounds(
        tmp_path, checkpoint, "on", prompts, emulated | {"indexer_decode_cp": True}, [1, ALONE]
    )
    (never,) = rounds(tmp_path, checkpoint, "never", prompts, emulated, [None])
    calls = SPARSE_LAYERS * (COUNT - 1)
    assert on["counts"] == [{"shared long": calls}] * 2
    assert off["counts"] == [{"alone short": calls}] * 2 and never["counts"] == [{}] * 2
    assert same(on["answers"], off["answers"]) and same(off["answers"], never["answers"])


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, []), (1, ["--mono"])])
def test_the_demo(ranks, flags, tmp_path):
    """`make demo-emulated`: real servers, HTTP, counters on /metrics, tokens compared."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from rocm_msa.cli import main; main()"),
            *("demo", "--emulated", f"--tp={ranks}", "--cache-dir", str(tmp_path / "cache")),
            *flags,
        ],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = " ".join(done.stdout.split())
    assert text.count("none of its processes is left") == ranks + 1
    assert text.count("tokens are the reference's") == ranks
    assert ("the same tokens and log-probabilities, bit for bit" in text) == (ranks == 2)
    assert ("dcp_exchange_nvfp4" in text) == (ranks == 2)
    assert ("mono_layer" in text) == bool(flags)
    assert ("sparse_decode_nvfp4" in text) != bool(flags) and "attend_by_page_pages" in text
