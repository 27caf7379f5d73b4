"""Engines at TP 2 with the flag on and off, long prompts; and one that loses a rank's answer."""

from __future__ import annotations

import pytest
import torch

from tests.vllm_plugin.engine import NGRAM
from tests.vllm_plugin.test_decode_cp import OPTIONS, prompt, run_engine, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2500)]

ON = {"rocm_msa": {"indexer_decode_cp": True, "indexer_decode_cp_min_blocks": 1}}
SPARSE_LAYERS = 3
LONG = {"max_model_len": 8192}
CASES = {
    "chunks-of-1000-prefix-cache": {"max_num_batched_tokens": 1000},
    "chunks-of-700-ngram-fp8": {
        "max_num_batched_tokens": 700,
        "speculative_config": NGRAM,
        "attention_config": {"indexer_kv_dtype": "fp8"},
    },
    "one-chunk-ngram": {
        "max_num_batched_tokens": 8192,
        "speculative_config": NGRAM,
        "enable_prefix_caching": False,
    },
}


def prompts() -> list[list[int]]:
    """5,000 tokens, 40 blocks; the second repeats itself, as n-gram drafts need."""
    text = prompt(2500, 2)
    return [prompt(5000, 1), text + text, prompt(129, 3)]


@pytest.mark.parametrize("case", CASES)
def test_tokens_with_the_flag_on_are_those_with_it_off(case, checkpoint, tmp_path):
    """Two engines, each asked twice: the second time from the prefix cache, where there is one."""
    rounds = {}
    for name, additional in (("on", ON), ("off", {})):
        (tmp_path / name).mkdir()
        asked = {
            "options": LONG | CASES[case] | {"additional_config": additional},
            "prompts": prompts(),
            "count": 16,
            "rounds": [None, None],
        }
        done = run_engine(tmp_path / name, checkpoint, asked)
        assert done.returncode == 0, done.stderr[-3000:]
        rounds[name] = torch.load(tmp_path / name / "out.pt")
    for on, off in zip(rounds["on"], rounds["off"], strict=True):
        assert same(on["answers"], off["answers"])
        assert on["hits"] == off["hits"] and on["accepted"] == off["accepted"]
        one, other = on["counts"]
        assert one == other and one["shared long"] % SPARSE_LAYERS == 0 < one["shared long"]
        assert off["counts"] == [{}, {}]
    first, second = rounds["on"]
    if "speculative_config" in CASES[case]:
        assert first["accepted"] > 0
    if CASES[case].get("enable_prefix_caching", True):
        assert second["hits"] - first["hits"] >= 2 * 39 * 128


def test_a_rank_that_sends_no_results_ends_the_engine(checkpoint, tmp_path):
    """The engine's process as in serving: the error names rank, peer, site and launch, all end."""
    asked = {
        "options": OPTIONS | {"enable_prefix_caching": False},
        "prompts": [prompt(300, 1)],
        "count": 4,
        "rounds": [1, "silent"],
    }
    done = run_engine(tmp_path, checkpoint, asked, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert done.returncode != 0 and not (tmp_path / "out.pt").exists()
    text = done.stdout + done.stderr
    assert "rank 0: the results of rank 1 did not come (site RESULTS, generation 10)" in text
    assert "EngineDeadError" in text
