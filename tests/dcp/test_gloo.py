"""The gloo exchange between real processes: results, and what each fault raises where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp.gloo import GlooExchange
from tests.dcp.run_gloo import GONE, HEADS, SCENARIOS, batch_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1800)  # reached by a hang alone


def run(tmp_path: Path, *wanted: str) -> dict:
    output = tmp_path / "answers.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_gloo.py")), str(output), *wanted],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """Every scenario with two processes."""
    return run(tmp_path_factory.mktemp("gloo"), *SCENARIOS)


def all_right(ranks: list[dict], world: int) -> bool:
    return len(ranks) == world and all(
        r["status"] == 0 and len(r["answer"]) == 18 and all(r["answer"]) for r in ranks
    )


def test_two_processes_select_as_one_rank(answers):
    assert all_right(answers["selections"], 2)


@pytest.mark.slow
def test_one_four_and_eight_processes_select_as_one_rank(tmp_path):
    for item, ranks in run(tmp_path, *(f"selections:{n}" for n in (1, 4, 8))).items():
        assert all_right(ranks, int(item.partition(":")[2])), item


@pytest.mark.parametrize(
    ("scenario", "site"),
    [
        ("dies-before", "START"),
        ("dies-before-its-queries", "QUERIES"),
        ("dies-before-its-results", "RESULTS"),
        ("never-comes", "START"),
    ],
)
def test_a_peer_that_is_gone_is_named(answers, scenario, site):
    alive, gone = answers[scenario]
    assert gone["status"] == (0 if scenario == "never-comes" else GONE)
    assert alive["status"] == 0
    told = alive["answer"]
    assert (told["rank"], told["peer"], told["site"], told["generation"]) == (0, 1, site, 2)
    assert "rank 0: the" in told["text"] or "rank 0: rank 1 did not begin" in told["text"]
    assert told["again"] == [True, True]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("leaves-a-launch-out", ["layer: expected 5, got 6", "layer: expected 6, got 5"]),
        ("another-shape", ["requests: expected 2, got 5", "requests: expected 5, got 2"]),
        ("other-lengths", ["sum of seq_lens: expected 2183, got 2182", "expected 2182, got 2183"]),
    ],
)
def test_ranks_that_disagree_all_say_so(answers, scenario, words):
    for rank, (process, word) in enumerate(zip(answers[scenario], words, strict=True)):
        told = process["answer"]
        assert (told["rank"], told["peer"], told["generation"]) == (rank, 1 - rank, 2)
        assert told["site"] == "SHAPE" and word in told["text"]
        assert told["again"] == [True, True]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_checks_and_closing(alone):
    arguments, index_q = batch_of(0, [300, 4000], 1)
    exchange = GlooExchange(None, HEADS)
    assert exchange.select(index_q, *arguments).shape == (HEADS, 2, 16)
    with pytest.raises(ValueError, match=r"index_q.shape\[1\]: expected 4 heads"):
        exchange.select(index_q[:, :2], *arguments)
    with pytest.raises(ValueError, match=r"out.shape: expected \[4, 2, 16\]"):
        exchange.select(index_q, *arguments, out=torch.zeros(4, 2, 8, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=r"index_q.device: expected cpu, got meta"):
        exchange.select(index_q.to("meta"), *arguments)
    with pytest.raises(ValueError, match="timeout_s: expected > 0, got 0"):
        GlooExchange(None, HEADS, timeout_s=0)
    exchange.check()
    exchange.close()
    with pytest.raises(RuntimeError, match="closed"):
        exchange.select(index_q, *arguments)
