"""vLLM engines in this process, one after the other."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

VOCAB = 1024

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request and their log-probabilities fp32 `[tokens, vocab]`."""

    tokens: list[int]
    logprobs: torch.Tensor


@contextlib.contextmanager
def engine(model: str, *, main: str = "nvfp4", index: str = "nvfp4", **options) -> Iterator:
    """A running `vllm.LLM` of our path; keyword arguments are vLLM's."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    defaults = {
        "block_size": 128,
        "dtype": "float32",
        "max_model_len": 3072,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "seed": 0,
        "max_logprobs": VOCAB,
        "disable_log_stats": False,
        "kv_cache_dtype": {"bf16": "bfloat16"}.get(main, main),
        "attention_config": {"indexer_kv_dtype": index},
    }
    gc.freeze()  # vLLM's modules: see tests/conftest.py
    with nothing_else_frozen():
        llm = LLM(model=model, **(defaults | options))
        # A second engine in one process must not rebind vLLM's kernels again.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def nothing_else_frozen() -> Iterator[None]:
    """Keep the garbage collector away from what is alive now, and from nothing else.

    vLLM freezes its engine and thaws everything at the end; each of its collections, then, would
    walk all modules and caches of the test process.
    """
    gc.collect()  # the engine before this one
    gc.freeze()
    with mock.patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None):
        yield


def hang() -> None:
    """In a worker: never go on.

    Ends with the engine, which may be gone before it has ended its workers; the test waits for
    whoever holds the pipes that they share.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(1)


def generate(llm, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """Greedy continuation of every prompt by exactly `count` tokens, as one batch."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=count,
        temperature=0,
        ignore_eos=True,
        logprobs=VOCAB,
        flat_logprobs=True,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = []
    for output in outputs:
        (completion,) = output.outputs
        given = completion.logprobs
        each = torch.tensor(given.end_indices) - torch.tensor(given.start_indices)
        steps = torch.arange(len(each)).repeat_interleave(each)
        logprobs = torch.full((count, VOCAB), float("nan"))
        logprobs[steps, torch.tensor(given.token_ids)] = torch.tensor(given.logprobs)
        answers.append(Answer(list(completion.token_ids), logprobs))
    return answers


def metric(llm, name: str) -> float:
    """Sum of a Prometheus counter or gauge of the engine."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def attention_layers(llm) -> dict:
    """name -> attention layer of the engine's model."""
    config = llm.llm_engine.vllm_config.compilation_config
    return config.static_forward_context
