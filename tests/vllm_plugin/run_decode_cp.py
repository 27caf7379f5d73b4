"""Run as a script: a tensor-parallel engine with `indexer_decode_cp`, its answers saved.

python run_decode_cp.py CHECKPOINT OUTPUT.pt CASE.json

CASE: `options` of the engine; `prompts`; `count` of tokens; `rounds`, each a threshold in blocks
that every rank is set to before the prompts are asked again, null to leave it, or "silent" for a
rank 1 that sends no results from then on.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

from tests.vllm_plugin.engine import engine, generate, hang, metric

ALONE = 1 << 30
"""A threshold that no batch reaches."""


def set_threshold(worker, blocks: int) -> None:
    """In a worker: share decode batches from so many blocks on."""
    for layer in worker.get_model().model.layers:
        layer.self_attn.decode_cp.min_blocks = blocks


def take_counts(worker) -> dict[str, int]:
    """In a worker: calls by "path reason" since the last time."""
    from rocm_msa.vllm_plugin import decode_cp

    counts = {" ".join(way): n for way, n in decode_cp.taken.items()}
    decode_cp.taken.clear()
    return counts


def fall_silent(worker) -> None:
    """In a worker: rank 1 stops before its results, for which nobody waits long."""
    exchange = worker.get_model().model.layers[-1].self_attn.decode_cp.exchange
    send_and_receive = exchange._results

    def results(sent):
        if exchange.shard.rank == 1:
            hang()
        exchange.timeout = timedelta(seconds=2)
        return send_and_receive(sent)

    exchange._results = results


def main(checkpoint: str, output: str, case: str) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # before the flag goes into an AttentionConfig
    asked = json.loads(Path(case).read_text())
    rounds = []
    with engine(checkpoint, tensor_parallel_size=2, **asked["options"]) as llm:
        for blocks in asked["rounds"]:
            if blocks == "silent":
                llm.collective_rpc(fall_silent)
            elif blocks is not None:
                llm.collective_rpc(set_threshold, args=(blocks,))
            answers = generate(llm, asked["prompts"], asked["count"])
            rounds.append(
                {
                    "answers": [(a.tokens, a.logprobs) for a in answers],
                    "counts": llm.collective_rpc(take_counts),
                    "hits": metric(llm, "vllm:prefix_cache_hits"),
                    "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
                }
            )
    torch.save(rounds, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
