"""Run as a script: two emulated ranks that capture and replay decode steps, what they saw saved.

python run_graphs.py CHECKPOINT OUTPUT.pt CASE.json

CASE: `options` of the engine; `rows` of a request; `sizes` to capture; `batches`, see graph_engine.
Each rank compares each replay with the steps without a graph, as test_graphs.py does.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.vllm_plugin.engine import engine


def replays(worker, sizes: list[int], rows: int, batches: list[str]) -> dict:
    """In a worker: hidden states of each step, and what was counted."""
    from rocm_msa.vllm_plugin import decode_cp, mono
    from tests.vllm_plugin.graph_engine import Served, Steps, check_step

    served = Served(Steps(worker.model_runner, sizes, rows), rows, {})
    served.begin()
    model = served.steps.model.model
    before = [pages.clone() for pages in served.steps.caches()]
    with all_reduces_in_graphs():
        served.steps.capture()
        caches = zip(served.steps.caches(), before, strict=True)
        found = {
            "graphs": served.steps.graphs,
            "untouched": all(torch.equal(a, b) for a, b in caches),
            "captured": counts(mono.steps, decode_cp.taken),
            "generations": [generations(model)],
            "hidden": [],
        }
        for names in batches:
            requests = served.batch(names)
            check_step(served.steps, requests)
            with served.steps.undone():
                mono.steps.clear()
                decode_cp.taken.clear()
                found["hidden"].append(served.steps.replayed(requests))
            found["generations"].append(generations(model))
    return found | {"replay": counts(mono.steps, decode_cp.taken)}


def counts(*counters) -> dict[str, int]:
    return {" ".join(way): n for counter in counters for way, n in counter.items()}


def generations(model) -> dict[str, int]:
    """Next launch of each kernel that meets the peers."""
    cp = model.layers[0].self_attn.decode_cp
    ends = {"exchange": cp and cp.exchange}
    if model.mono is not None:
        ends |= {"mono": model.mono.runner, "sharing": model.mono.sharing}
    return {name: end.generation for name, end in ends.items() if end is not None}


def all_reduces_in_graphs() -> contextlib.ExitStack:
    """vLLM's all-reduce is a launch on a GPU, and messages between processes here."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    from rocm_msa.vllm_plugin import moe
    from tests.vllm_plugin.recorded_graph import kernel

    name, stack = "tensor_model_parallel_all_reduce", contextlib.ExitStack()
    for module in (linear, vocab_parallel_embedding, moe):
        stack.enter_context(mock.patch.object(module, name, kernel(getattr(module, name))))
    return stack


def main(checkpoint: str, output: str, case: str) -> None:
    asked = json.loads(Path(case).read_text())
    with engine(checkpoint, tensor_parallel_size=2, **asked["options"]) as llm:
        arguments = (asked["sizes"], asked["rows"], asked["batches"])
        torch.save(llm.collective_rpc(replays, args=arguments), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
