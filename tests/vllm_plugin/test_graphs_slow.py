"""Recorded graphs of decode steps on two ranks, and over many steps; see test_graphs.py."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch

from rocm_msa.checkpoint.make import make_checkpoint
from tests.vllm_plugin.engine import NGRAM
from tests.vllm_plugin.graph_engine import BATCHES
from tests.vllm_plugin.test_decode_cp import run_engine
from tests.vllm_plugin.test_graphs import OPTIONS, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SPARSE = 3
SHARE = {"indexer_decode_cp": True, "indexer_decode_cp_min_blocks": 20}
"""Of 24 blocks: graphs, as wide as --max-model-len, share the scan; other steps where long."""


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("graphs") / "mxfp4"
    make_checkpoint(path, "tiny", "mxfp4", intermediate_size=256)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "rows", "kernel", "counted"),
    [
        (SHARE, 1, "exchange", "shared long"),
        ({"mono": True}, 1, "mono", "mono decode"),
        ({"mono": True, **SHARE}, 4, "sharing", "mono shared"),
    ],
    ids=["exchange", "mono", "mono-sharing"],
)
def test_two_ranks_replay_the_same_steps(flags, rows, kernel, counted, quantised, tmp_path):
    """All ranks capture the same sizes in the same order: neither mailboxes nor generations of a
    rank are ahead, and each replay is the step without a graph, on both ranks alike."""
    drafts = {"speculative_config": NGRAM} if rows > 1 else {}
    flags = {"rocm_msa": {"backend": "emulated", **flags}}
    case = {
        "options": {**OPTIONS, **drafts, "additional_config": flags},
        "rows": rows,
        "sizes": [n * rows for n in (4, 2, 1)],
        "batches": BATCHES[1:],
    }
    done = run_engine(tmp_path, quantised, case, script="run_graphs.py")
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = torch.load(tmp_path / "out.pt")
    assert one["untouched"] and other["untouched"]
    assert one["graphs"] == other["graphs"] == [(n, n * rows) for n in (4, 2, 1)]
    for a, b in zip(one["hidden"], other["hidden"], strict=True):
        assert torch.equal(a, b)
    assert one["generations"] == other["generations"]
    numbers = [found[kernel] for found in one["generations"]]
    assert numbers[0] == 1 + 3 * SPARSE  # the warm-ups
    # Each batch is replayed twice; a step without a graph, its table narrower, may scan alone.
    assert all(b - a >= 2 * SPARSE for a, b in itertools.pairwise(numbers))
    assert one["replay"] == other["replay"]
    assert set(one["replay"]) == set(one["captured"]) == {counted}


@pytest.mark.parametrize("rows", [1, 4])
def test_forty_steps_leave_the_bytes_of_forty_steps_without_graphs(rows, quantised):
    """Caches after each step, and what each step gives, beside those of another history."""
    with serving(quantised, rows, (4 * rows, 2 * rows), mono=True) as served:
        served.steps.capture()
        histories = []
        for run in (served.steps.eager, served.steps.replayed):
            served.begin()
            histories.append([])
            for step in range(40):
                out = run(served.batch("abcd"[: 4 - step % 3]))
                sums = [
                    hashlib.sha256(x.contiguous().numpy()).digest() for x in served.steps.caches()
                ]
                histories[-1].append((out, sums))
        for (out, sums), (again, others) in zip(*histories, strict=True):
            assert torch.equal(out, again) and sums == others
