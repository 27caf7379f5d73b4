"""bench_dcp_multi.py without GPUs: its checks run over gloo, and a wrong selection is a fault."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import dcp_multi
from benchmarks.dcp_cases import HEADS, make_work, ragged, random_cache, select_alone, uniform
from dcp.shard import Shard
from tests.comm.ranks import PATIENCE


def bench(repo_root, *args):
    command = [sys.executable, "benchmarks/bench_dcp_multi.py", *args]
    return subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_without_gpus_nothing_is_run(repo_root, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    done = bench(repo_root, "--out", str(tmp_path), "--commit", "abc")
    assert done.returncode == 0, done.stderr
    for ranks in (2, 4):
        assert f"{ranks} ranks need {ranks} GPUs, here are 0: not run" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_checks_on_the_cpu(repo_root, tmp_path, ranks):
    done = bench(repo_root, "--device", "cpu", "--ranks", str(ranks), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU: nothing was timed" in done.stdout and "FAULT" not in done.stdout
    report = json.loads((tmp_path / "dcp_multi.json").read_text())
    (group,) = report["groups"]
    assert (group["ranks"], group["faults"], group["times"]) == (ranks, [], [])
    assert done.stdout.count("good ") >= 4


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run(repo_root, tmp_path):
    done = bench(
        repo_root, "--device", "cpu", "--ranks", "2", "--kinds", "int7", "--out", str(tmp_path)
    )
    assert done.returncode == 1 and "2 ranks: the processes ended with" in done.stdout
    report = json.loads((tmp_path / "dcp_multi.json").read_text())
    assert len(report["groups"][0]["faults"]) == 1


class Alone:
    """A team of one rank, in this process."""

    rank, ranks, device, on_gpu = 0, 1, torch.device("cpu"), False
    kinds = ("nvfp4", "fp8")

    def __init__(self):
        self.told = {}

    def barrier(self):
        pass

    def agree(self, what, fault):
        self.told[what] = fault


class Exchange:
    """Selects for all heads, wrongly where `wrong` says."""

    shard = Shard(0, 1, HEADS)

    def __init__(self, wrong):
        self.wrong = wrong

    def select(self, q, cache, table, lens, rows, num_blocks, topk):
        work = dcp_multi.Work(q, cache, table, lens, rows, num_blocks)
        ids = select_alone(work, self.shard.own_heads)
        if self.wrong:
            ids[2, -1, 0] = 1
        return ids

    def check(self):
        pass


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_selection_is_a_fault(monkeypatch, wrong):
    monkeypatch.setattr(dcp_multi, "CollectiveExchange", lambda *args: None)
    team = Alone()
    dcp_multi.check_shapes(team, Exchange(wrong), [uniform(2, 1, 900)])
    assert list(team.told) == ["nvfp4 2x1 0K", "fp8 2x1 0K"]
    for fault in team.told.values():
        assert (fault is None) == (not wrong)
        assert not wrong or fault.startswith("1 of 8 rows differ, the first is head 2, row 1: [1,")


def test_work_is_the_same_everywhere():
    shape = ragged(3, 2, 200, 900)
    first, second = (make_work(shape, random_cache(8, "nvfp4", Alone.device)) for _ in range(2))
    assert torch.equal(first.cache.pages, second.cache.pages)
    assert torch.equal(first.index_q, second.index_q) and torch.equal(first.table, second.table)
    assert all(200 <= n <= 900 for n in shape.lens) and shape.blocks == 8
