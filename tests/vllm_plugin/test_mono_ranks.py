"""Engines of two ranks with `mono`: the same steps on both, and a rank that is lost.

Answers are judged as in test_mono_engine.py, against the whole-model reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_msa.checkpoint.make import make_checkpoint
from tests.vllm_plugin.engine import NGRAM, Answer
from tests.vllm_plugin.test_decode_cp import run_engine
from tests.vllm_plugin.test_mono_engine import MONO, judged, prompt

pytestmark = pytest.mark.timeout(2500)
TWO = MONO | {"tensor_parallel_size": 2}


def run(folder: Path, checkpoint: str, **case):
    """Rounds of an engine."""
    folder.mkdir(exist_ok=True)
    done = run_engine(folder, checkpoint, case, script="run_mono.py")
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = torch.load(folder / "out.pt")
    for one in rounds:
        one["answers"] = [Answer(*answer) for answer in one["answers"]]
    return rounds


def layout(folder: Path, name: str) -> str:
    make_checkpoint(folder / name, "tiny", name, intermediate_size=256)
    return str(folder / name)


def test_both_ranks_take_the_same_steps(tmp_path):
    """Prompts of two lengths, and again from the prefix cache."""
    checkpoint, asked = layout(tmp_path, "mxfp4"), [prompt(300, 1), prompt(60, 2)]
    rounds = run(tmp_path, checkpoint, options=TWO, prompts=asked, count=4, rounds=[None, None])
    for one in rounds:
        assert one["counts"] == [{"layers prefill": 1, "mono decode": 3}] * 2
        judged(checkpoint, asked, one["answers"])
    assert rounds[1]["hits"] >= 256


CASES = {
    "nvfp4-one-rank": ("nvfp4", MONO),
    "nvfp4": ("nvfp4", TWO),
    "mxfp8-chunks": ("mxfp8", TWO | {"max_num_batched_tokens": 512}),
    "mxfp4-ngram": ("mxfp4", TWO | {"speculative_config": NGRAM}),
    "mxfp4-ragged": ("mxfp4", TWO | {"speculative_config": NGRAM}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_formats_chunks_and_drafts(case, tmp_path):
    name, options = CASES[case]
    checkpoint = layout(tmp_path, name)
    asked = [prompt(2100, 1), prompt(2, 2), prompt(127, 3)]
    if "speculative_config" in options:
        generator = torch.Generator().manual_seed(3)
        asked = [(torch.randperm(1021, generator=generator) + 3).tolist()]  # drafts for any token
    if case == "mxfp4-ragged":
        asked.append([7])  # drafts for few tokens
    (one,) = run(tmp_path / "run", checkpoint, options=options, prompts=asked, count=24, rounds=[0])
    assert len({tuple(sorted(counts.items())) for counts in one["counts"]}) == 1
    counts = one["counts"][0]
    assert set(counts) - {"mono ragged"} == {"layers prefill", "mono decode"}
    assert ("mono ragged" in counts) or case != "mxfp4-ragged"
    judged(checkpoint, asked, one["answers"])
    if "speculative_config" in options:
        assert one["drafts"] > 0
    else:
        assert counts["mono decode"] >= 18


@pytest.mark.slow
def test_seventeen_requests_take_the_layers_until_one_has_ended(tmp_path):
    checkpoint = layout(tmp_path, "mxfp4")
    asked = [prompt(3 + n, n) for n in range(17)]
    (one,) = run(tmp_path / "run", checkpoint, options=TWO, prompts=asked, count=5, rounds=[0])
    assert one["counts"] == [{"layers prefill": 1, "layers rows": 4}] * 2
    judged(checkpoint, asked, one["answers"])


@pytest.mark.slow
def test_two_emulated_ranks_share_the_scan_inside_the_layer(tmp_path):
    """Each rank's layers are code objects in an emulator of its own, over mailboxes in memory that
    both processes map; the context has three blocks."""
    asked, checkpoint = [prompt(300, 1)], layout(tmp_path, "mxfp4")
    flags = {"mono": True, "backend": "emulated"}
    flags |= {"indexer_decode_cp": True, "indexer_decode_cp_min_blocks": 3}
    options = TWO | {"additional_config": {"rocm_msa": flags}}
    case = {"options": options, "prompts": asked, "count": 3, "rounds": [None]}
    (one,) = run(tmp_path / "run", checkpoint, **case)
    assert one["counts"] == [{"layers prefill": 1, "mono shared": 2}] * 2
    judged(checkpoint, asked, one["answers"])


@pytest.mark.slow
def test_a_rank_that_is_lost_in_a_layer_ends_the_engine(tmp_path):
    """The engine's process as in serving: the error names rank, peer, phase and launch."""
    case = {"options": TWO, "prompts": [prompt(300, 1)], "count": 4, "rounds": [None, "silent"]}
    checkpoint = layout(tmp_path, "mxfp4")
    done = run_engine(
        tmp_path, checkpoint, case, script="run_mono.py", VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )
    assert done.returncode != 0 and not (tmp_path / "out.pt").exists()
    text = done.stdout + done.stderr
    assert (
        "mono kernel: rank 0 waited in vain for rank 1 at the sum over ranks in phase down "
        "(generation 10)" in text
    )
    assert "EngineDeadError" in text
