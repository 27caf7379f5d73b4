"""Seeded requests whose prompt is read in chunks: the engine lives, and the answer is the same."""

from __future__ import annotations

import random

from tests.vllm_plugin.engine import engine


def sampled(checkpoint: str, prompts: list[list[int]], batched_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=1.0, seed=7 + i, max_tokens=6, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    options = {"max_num_batched_tokens": batched_tokens, "enable_prefix_caching": False}
    with engine(checkpoint, max_model_len=1024, max_num_seqs=4, **options) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_seeded_answer_does_not_depend_on_the_prompts_chunks(checkpoint):
    rng = random.Random(5)
    prompts = [[rng.randrange(1024) for _ in range(length)] for length in (700, 3, 333)]
    whole = sampled(checkpoint, prompts, 4096)
    assert sampled(checkpoint, prompts, 256) == whole
    assert len({tuple(tokens) for tokens in whole}) == len(prompts)
