"""Memory that nobody wrote holds NaN bytes: no bit of any answer changes."""

from __future__ import annotations

import pytest
import torch

from tests.vllm_plugin.engine import NGRAM, attention_layers, engine, generate
from tests.vllm_plugin.test_parity_reference import prompts

COUNT = 12


def poison(llm) -> int:
    """Fill every cache page of every layer with 0xFF: NaN as bf16, E4M3 data and E4M3 scale."""
    layers = list(attention_layers(llm).values())
    for layer in layers:
        layer.cache.pages.fill_(0xFF)
    return len(layers)


@pytest.mark.parametrize(("main", "index"), [("nvfp4", "nvfp4"), ("fp8", "fp8"), ("bf16", "bf16")])
def test_fresh_and_freed_blocks(main, index, checkpoint):
    asked = [prompts()[i] for i in (0, 5, 7, 12, 15)]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with engine(checkpoint, main=main, index=index, **options) as llm:
        clean = generate(llm, asked, COUNT)
        assert poison(llm) == 7
        poisoned = generate(llm, asked, COUNT)
    for before, after in zip(clean, poisoned, strict=True):
        assert before.tokens == after.tokens
        assert torch.equal(before.logprobs, after.logprobs)


def test_with_speculation(checkpoint):
    """Rejected drafts leave stale tokens behind the newest one; they must not count either."""
    asked = [prompts()[i] for i in (10, 13)]
    options = {"enable_prefix_caching": False, "speculative_config": NGRAM}
    with engine(checkpoint, **options) as llm:
        clean = generate(llm, asked, COUNT)
        poison(llm)
        poisoned = generate(llm, asked, COUNT)
    for before, after in zip(clean, poisoned, strict=True):
        assert torch.equal(before.logprobs, after.logprobs)


def test_memory_is_released_when_vllm_takes_the_caches_back(checkpoint):
    """vLLM does so after profiling and at shutdown; a view kept by a layer would keep it all."""
    from vllm.v1.worker.utils import clear_layer_kv_caches

    with engine(checkpoint) as llm:
        layers = list(attention_layers(llm).values())
        assert all(layer.cache is not None for layer in layers)
        clear_layer_kv_caches(layers)
        assert all(layer.cache is None for layer in layers)
