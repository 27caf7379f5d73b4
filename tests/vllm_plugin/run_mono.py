"""Run as a script: a tensor-parallel engine with `mono`, its answers and its steps saved.

python run_mono.py CHECKPOINT OUTPUT.pt CASE.json

CASE: `options` of the engine; `prompts`; `count` of tokens; `rounds`, in each of which the prompts
are asked: null, or "silent" for a rank 1 that from then on sends nothing to the second sum of a
layer.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

from tests.vllm_plugin.engine import engine, generate, hang, metric


def take_counts(worker) -> dict[str, int]:
    """In a worker: steps by "path reason" since the last time."""
    from rocm_msa.vllm_plugin import mono

    counts = {" ".join(way): n for way, n in mono.steps.items()}
    mono.steps.clear()
    return counts


def fall_silent(worker) -> None:
    """In a worker: rank 1 stops before its part of the second sum, for which nobody waits long."""
    runner = worker.get_model().model.mono.runner
    total = runner._sum

    def sum_of(phase, generation, part):
        if phase == "down":
            if runner.rank == 1:
                hang()
            runner.timeout = timedelta(seconds=2)
        return total(phase, generation, part)

    runner._sum = sum_of


def main(checkpoint: str, output: str, case: str) -> None:
    asked = json.loads(Path(case).read_text())
    rounds = []
    with engine(checkpoint, **asked["options"]) as llm:
        for what in asked["rounds"]:
            if what == "silent":
                llm.collective_rpc(fall_silent)
            answers = generate(llm, asked["prompts"], asked["count"])
            rounds.append(
                {
                    "answers": [(a.tokens, a.logprobs) for a in answers],
                    "counts": llm.collective_rpc(take_counts),
                    "hits": metric(llm, "vllm:prefix_cache_hits"),
                    "drafts": metric(llm, "vllm:spec_decode_num_draft_tokens"),
                }
            )
    torch.save(rounds, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
