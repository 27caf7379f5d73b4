"""Parity 2: vLLM's path over quantised caches against the whole-model PyTorch reference.

The reference (rocm_msa/testing/reference_model.py) recomputes prompt and answer in one causal pass
with the same quantisation points. Engine and reference run in fp32, so they differ by the order of
additions (about 1e-6 relative) until such a difference moves a value over a rounding boundary of
the cache format (one code, about 1e-2 in a log-probability) or over a routing or selection
boundary (another expert or block, up to about 1). Hence two tolerances on log-probabilities:

    TYPICAL  0.05  for at least 99 % of the generated positions
    FLIPPED  2.0   for all of them

test_the_tolerances_are_tighter_than_the_models_own_sensitivity compares them with what an input
noise of 1e-6 does to the reference alone. A greedy token has to agree wherever the reference's
top-2 margin exceeds twice the deviation allowed at that position.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch

from rocm_msa.testing.reference_model import ReferenceModel
from tests.vllm_plugin.engine import NGRAM, Answer, engine, generate, metric

TYPICAL, FLIPPED, TYPICAL_SHARE = 0.05, 2.0, 0.99
BF16_TYPICAL = 1.0

COUNT = 64
LENGTHS = (1, 2, 16, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 384, 500, 2100)
FEW_BLOCKS = 26
"""Cache blocks with which sixteen requests do not fit, but the longest context does."""


@lru_cache(maxsize=1)
def prompts() -> list[list[int]]:
    """Mixed lengths; the longer ones repeat themselves, which n-gram speculation can use."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(3, 900, (n,), generator=generator).tolist() for n in LENGTHS]
    for prompt in made[9:]:
        half = len(prompt) // 2
        prompt[half : 2 * half] = prompt[:half]
    return made


class Yardstick:
    """Reference log-probabilities of continuations, kept between tests."""

    def __init__(self, checkpoint: str):
        self.checkpoint = checkpoint
        self.models: dict[tuple, ReferenceModel] = {}
        self.known: dict[tuple, torch.Tensor] = {}

    def model(self, main: str, index: str, dtype: torch.dtype) -> ReferenceModel:
        key = (main, index, dtype)
        if key not in self.models:
            self.models[key] = ReferenceModel.from_checkpoint(
                self.checkpoint, dtype=dtype, main_dtype=main, index_dtype=index
            )
        return self.models[key]

    def logprobs(
        self, prompt: list[int], tokens: list[int], main: str, index: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """fp32 `[len(tokens), vocab]` before each token of the continuation."""
        key = (tuple(prompt), tuple(tokens), main, index, dtype)
        if key not in self.known:
            logits = self.model(main, index, dtype).forward([*prompt, *tokens[:-1]])
            self.known[key] = torch.log_softmax(logits[len(prompt) - 1 :].float(), dim=-1)
        return self.known[key]


@pytest.fixture(scope="module")
def yardstick(checkpoint) -> Yardstick:
    return Yardstick(checkpoint)


def check(
    yardstick: Yardstick,
    asked: list[list[int]],
    answers: list[Answer],
    main: str = "nvfp4",
    index: str = "nvfp4",
    dtype: torch.dtype = torch.float32,
    typical: float = TYPICAL,
) -> None:
    """Compare answers with the reference by the rules at the top of this module."""
    deviations = []
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens) == COUNT
        wanted = yardstick.logprobs(prompt, answer.tokens, main, index, dtype)
        assert not answer.logprobs.isnan().any()
        deviation = (answer.logprobs - wanted).abs().amax(dim=-1)
        best = wanted.topk(2, dim=-1).values
        margin = best[:, 0] - best[:, 1]
        allowed = torch.where(deviation <= typical, typical, FLIPPED)
        wrong = (wanted.argmax(dim=-1) != torch.tensor(answer.tokens)) & (margin > 2 * allowed)
        assert not wrong.any(), f"prompt of {len(prompt)}: tokens {wrong.nonzero().flatten()}"
        deviations.append(deviation)
    everything = torch.cat(deviations)
    assert everything.max() <= FLIPPED, f"largest deviation {everything.max():.3f}"
    share = (everything <= typical).float().mean()
    assert share >= TYPICAL_SHARE, f"{share:.4f} of the positions within {typical}"


CASES = {
    "one-chunk": {"enable_prefix_caching": False},
    "chunks-of-64": {"max_num_batched_tokens": 64},
    "chunks-of-128-preempted": {
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": FEW_BLOCKS,
        "enable_prefix_caching": False,
    },
    "chunks-of-1000-ngram": {"max_num_batched_tokens": 1000, "speculative_config": NGRAM},
    "ngram-preempted-prefix-cache": {
        "num_gpu_blocks_override": FEW_BLOCKS,
        "speculative_config": NGRAM,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_batch_of_sixteen(case, checkpoint, yardstick):
    options = CASES[case]
    with engine(checkpoint, **options) as llm:
        answers = generate(llm, prompts(), COUNT)
        if "num_gpu_blocks_override" in options:
            assert metric(llm, "vllm:num_preemptions") > 0
        if "speculative_config" in options:
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    check(yardstick, prompts(), answers)


def test_batch_of_one_and_prefix_cache_hits(checkpoint, yardstick):
    """One request at a time; then the same prompts again, answered from cached blocks."""
    long = prompts()[-1:]
    with engine(checkpoint, max_num_batched_tokens=1000) as llm:
        first = generate(llm, long, COUNT)
        again = generate(llm, long, COUNT)
        assert metric(llm, "vllm:prefix_cache_hits") >= 2048
    check(yardstick, long, first)
    check(yardstick, long, again)
    assert first[0].tokens == again[0].tokens


@pytest.mark.parametrize(
    ("main", "index"),
    [("fp8", "fp8"), ("bf16", "nvfp4"), ("nvfp4", "auto"), ("fp8_e4m3", "nvfp4")],
)
def test_other_cache_dtypes(main, index, checkpoint, yardstick):
    asked = [prompts()[i] for i in (5, 12, 15)]
    with engine(checkpoint, main=main, index=index) as llm:
        answers = generate(llm, asked, COUNT)
    names = {"fp8_e4m3": "fp8", "auto": "bf16"}
    check(yardstick, asked, answers, names.get(main, main), names.get(index, index))


def test_bf16_activations(checkpoint, yardstick):
    """bf16 rounds 2^-9 relative at every step, so boundaries are crossed all the time."""
    asked = [prompts()[i] for i in (5, 12, 15)]
    with engine(checkpoint, dtype="bfloat16") as llm:
        answers = generate(llm, asked, COUNT)
    check(yardstick, asked, answers, dtype=torch.bfloat16, typical=BF16_TYPICAL)


def test_the_tolerances_are_tighter_than_the_models_own_sensitivity(yardstick):
    """Noise of 1e-6 on the input moves the reference's own log-probabilities further."""
    model = yardstick.model("nvfp4", "nvfp4", torch.float32)
    name = "model.embed_tokens.weight"
    clean = model.weights[name]
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    deviations = []
    for prompt in prompts():
        wanted = torch.log_softmax(model.forward(prompt), dim=-1)
        model.weights[name] = clean * (1 + 1e-6 * noise)
        got = torch.log_softmax(model.forward(prompt), dim=-1)
        model.weights[name] = clean
        deviations.append((got - wanted).abs().amax(dim=-1))
    everything = torch.cat(deviations)
    assert everything.quantile(TYPICAL_SHARE) > TYPICAL
    assert TYPICAL < everything.max() <= FLIPPED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "batch", "preempted", "ngram"),
    [
        case
        for case in itertools.product(
            (64, 128, 1000, 4096), (True, False), (1, 16), (True, False), (True, False)
        )
        if not (case[2] == 1 and case[3])
    ],
)
def test_every_combination(chunk, prefix_cache, batch, preempted, ngram, checkpoint, yardstick):
    asked = prompts() if batch == 16 else prompts()[-1:]
    options = {"max_num_batched_tokens": chunk, "enable_prefix_caching": prefix_cache}
    if preempted:
        options["num_gpu_blocks_override"] = FEW_BLOCKS
    if ngram:
        options["speculative_config"] = NGRAM
    with engine(checkpoint, **options) as llm:
        check(yardstick, asked, generate(llm, asked, COUNT))
