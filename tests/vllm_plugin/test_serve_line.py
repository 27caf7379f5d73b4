"""The public command line, with vLLM 0.32 (installed) and with vLLM 0.33's own sources."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_plugin import serve_lines, vllm_033

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def found(request, checkpoint) -> dict[str, dict]:
    """Outcome of every line."""
    if request.param == "0.32":
        return serve_lines.outcomes(checkpoint)
    command = [sys.executable, HERE / "vllm_033.py", HERE / "serve_lines.py", checkpoint]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=vllm_033.environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_flag_of_the_public_line_is_taken(found):
    taken = {name: value for name, value in found["public"].items() if name != "made"}
    assert taken == {
        "tp": 4,
        "block_size": 128,
        "kv_cache_dtype": "nvfp4",
        "indexer_kv_dtype": "nvfp4",
        "indexer_decode_cp": True,
        "moe": "mxfp8",
        "draft": "ngram",
        "one_manager": True,
        "reasoning_parser": "minimax_m3",
        "tool_parser": None,
    }


def test_it_becomes_a_configuration(found):
    line = found["public"]
    assert "error" not in line
    made = {"tp": 4, "block_size": 128, "draft": "ngram", "drafts": 3, "one_manager": True}
    assert line["made"] == made
    assert found["with tools"]["tool_parser"] == "minimax_m3"


def test_dotted_forms_mean_the_same(found):
    assert found["dotted"]["indexer_kv_dtype"] == "fp8"
    assert found["dotted"]["indexer_decode_cp"] is True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("unknown attention key", ["indexer_kv_dtyp"]),
        ("unknown MoE weights", ["mxfp9"]),
        ("unknown parser", ["minimax_m9"]),
        ("unknown draft", ["oracle"]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(line, words, found):
    assert "error" in found[line], found[line]
    for word in words:
        assert word in found[line]["error"]


@pytest.mark.slow
def test_the_parsers_work_with_033():
    """tests/vllm_plugin/test_parsers.py, on 0.33's engine."""
    test = HERE / "test_parsers.py"
    command = [sys.executable, HERE / "vllm_033.py", "-m", "pytest", "-q", "-x", test]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=550,
        env=vllm_033.environment(),
        cwd=vllm_033.ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
