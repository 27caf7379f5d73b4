"""vLLM's engine on the CPU with `mono`: both paths, step by step and layer by layer.

On the CPU a mono layer is mono_kernel/reference.py. Its quantisation points are the kernel's, not
those of the ordinary layers (docs/mono.md), so the two paths differ by roundings:

    LAYER    0.03  the distance of a layer's outputs in their norm, with both paths begun at the
                   same step: attention over E4M3 values gives 0.01, roundings of bf16 the rest.
                   In one of ten layers a near tie of two experts may go the other way: ROUTED, 0.3
    BYTES    0.15  of the bytes that a step writes into the caches: the distances above move 5 % of
                   the 4-bit codes and scales over a boundary
    BF16_TYPICAL, FLIPPED  of log-probabilities, see tests/vllm_plugin/test_parity_reference.py
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch

from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.vllm_plugin import mono
from rocm_msa.vllm_plugin.model import Model
from tests.vllm_plugin.engine import NGRAM, attention_layers, engine, generate, metric
from tests.vllm_plugin.test_parity_reference import BF16_TYPICAL, FLIPPED, Yardstick

LAYER, ROUTED, BYTES = 0.03, 0.3, 0.15
MONO = {
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 64,
    "additional_config": {"rocm_msa": {"mono": True}},
}


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 900, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> str:
    """A tiny checkpoint with MXFP4 experts and bf16 attention."""
    path = tmp_path_factory.mktemp("mono") / "mxfp4"
    make_checkpoint(path, "tiny", "mxfp4", intermediate_size=256)
    return str(path)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(mono, "steps", mono.Counter())


@dataclass
class Seen:
    """Of a run: the path of each step with its rows; of mono steps the distance from the ordinary
    layers: of each layer's output, and of the caches' bytes."""

    paths: list[tuple[str, int]] = field(default_factory=list)
    layers: list[list[float]] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)


@contextlib.contextmanager
def seeing(llm, monkeypatch, compare: bool = False):
    """Follow the steps. compare: run the ordinary layers on each mono step's input too."""
    seen, forward, begin = Seen(), Model.forward, mono.Mono.begin
    caches = [
        layer.cache.pages
        for layer in attention_layers(llm).values()
        if getattr(layer, "cache", None) is not None
    ]

    def begun(self, positions, hidden):
        step = begin(self, positions, hidden)
        seen.paths.append(("layers" if step is None else "mono", hidden.shape[0]))
        return step

    def both(self, *args, **kwargs):
        """The mono step, with every layer's output; then the ordinary layers in its place."""
        before = [pages.clone() for pages in caches]
        count = len(seen.paths)
        self.aux_hidden_state_layers = tuple(range(len(self.layers) + 1))
        out, aux = forward(self, *args, **kwargs)
        if seen.paths[count][0] == "mono":
            after = [pages.clone() for pages in caches]
            for pages, old in zip(caches, before, strict=True):
                pages.copy_(old)
            kept, self.mono = self.mono, None
            _, plain = forward(self, *args, **kwargs)
            self.mono = kept
            seen.layers.append([distance(a, b) for a, b in zip(aux, plain, strict=True)])
            written = changed = 0
            for pages, old, new in zip(caches, before, after, strict=True):
                touched = (pages != old) | (new != old)
                written += int(touched.sum())
                changed += int((pages != new).sum())
                pages.copy_(new)
            seen.bytes.append(changed / written)
        self.aux_hidden_state_layers = ()
        return out

    with monkeypatch.context() as patch:
        patch.setattr(mono.Mono, "begin", begun)
        if compare:
            patch.setattr(Model, "forward", both)
        yield seen


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def close(seen: Seen) -> None:
    """The rules at the top of this module."""
    layers = torch.tensor(seen.layers)
    assert (layers[:, :2] == 0).all()  # the embedding and the dense layer before
    assert (layers[:, 2:] > 0).all()  # two paths, not one of them twice
    assert layers.max() < ROUTED, layers
    assert layers.flatten().quantile(0.9) < LAYER, layers
    assert max(seen.bytes) < BYTES, seen.bytes


def judged(checkpoint: str, asked, answers) -> None:
    """Log-probabilities against the whole-model reference."""
    yardstick = Yardstick(checkpoint)
    for given, answer in zip(asked, answers, strict=True):
        wanted = yardstick.logprobs(given, answer.tokens, "nvfp4", "nvfp4", torch.bfloat16)
        deviation = (answer.logprobs - wanted).abs().amax(dim=-1)
        assert deviation.max() <= FLIPPED
        assert deviation.median() <= BF16_TYPICAL


def test_mono_steps_among_others_agree_with_the_ordinary_layers(quantised, monkeypatch):
    """Prompts of several lengths; more requests than rows; the same again from the prefix cache."""
    asked = [prompt(n, n) for n in (5, 127, 300)]
    with engine(quantised, **MONO) as llm:
        with seeing(llm, monkeypatch, compare=True) as seen:
            answers = generate(llm, asked, 4)
        assert seen.paths == [("layers", 432), *[("mono", 3)] * 3]
        close(seen)
        judged(quantised, asked, answers)
        with seeing(llm, monkeypatch) as seen:
            generate(llm, [prompt(3, n) for n in range(17)], 2)
            again = generate(llm, asked, 4)
        assert seen.paths[:2] == [("layers", 51), ("layers", 17)]
        assert seen.paths[2][0] == "layers" and seen.paths[2][1] < 432
        assert seen.paths[3:] == [("mono", 3)] * 3
        assert metric(llm, "vllm:prefix_cache_hits") >= 256
        judged(quantised, asked, again)
    assert mono.steps == {
        ("layers", "prefill"): 3, ("layers", "rows"): 1, ("mono", "decode"): 6,
    }  # fmt: skip


def test_a_prompt_read_in_chunks_beside_a_decoding_request(quantised, monkeypatch):
    """A request goes from one path to the other and back, and ends as if alone."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    asked = [prompt(40, 1), prompt(300, 2), prompt(130, 3)]
    with engine(quantised, **MONO, max_num_batched_tokens=128, max_num_seqs=8) as llm:
        run = llm.llm_engine
        with seeing(llm, monkeypatch, compare=True) as seen:
            tokens = {}

            def step():
                for output in run.step():
                    tokens[output.request_id] = output.outputs[0].token_ids

            run.add_request("first", {"prompt_token_ids": asked[0]}, params)
            for _ in range(4):
                step()
            run.add_request("second", {"prompt_token_ids": asked[1]}, params)
            for _ in range(4):
                step()
            run.add_request("third", {"prompt_token_ids": asked[2]}, params)
            while run.has_unfinished_requests():
                step()
    kinds = [path for path, _ in seen.paths]
    assert kinds[:4] == ["layers", "mono", "mono", "mono"]
    assert kinds[4:7] == ["layers"] * 3  # 127, 127 and 46 tokens of the second beside one
    # 126 tokens of the third beside two, then the 4 that are left.
    assert kinds[7:10] == ["mono", "layers", "mono"] and seen.paths[9] == ("mono", 6)
    assert set(kinds[9:]) == {"mono"} and len(kinds) > 12
    assert mono.steps["mono", "ragged"] == 1
    assert {len(found) for found in tokens.values()} == {12}
    close(seen)


def test_rows_of_drafts_take_the_mono_path(quantised, monkeypatch):
    """Every token is in the prompt, so that each one has drafts after it."""
    every = (torch.randperm(1021, generator=torch.Generator().manual_seed(3)) + 3).tolist()
    with engine(quantised, **MONO, speculative_config=NGRAM) as llm:
        with seeing(llm, monkeypatch, compare=True) as seen:
            answers = generate(llm, [every], 6)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") >= 3
    assert seen.paths[:2] == [("layers", 1021), ("mono", 4)]
    close(seen)
    assert len(answers[0].tokens) == 6
    judged(quantised, [every], answers)


def test_requests_with_and_without_drafts_share_a_step(quantised, monkeypatch):
    """One has drafts after every token, the other after none; the last step has one request."""
    every = (torch.randperm(1021, generator=torch.Generator().manual_seed(3)) + 3).tolist()
    asked = [every, [7]]
    options = MONO | {"speculative_config": NGRAM}
    with engine(quantised, **options) as llm, seeing(llm, monkeypatch, compare=True) as seen:
        answers = generate(llm, asked, 4)
    assert seen.paths[:2] == [("layers", 1022), ("mono", 5)]
    assert {path for path, _ in seen.paths[1:]} == {"mono"}
    assert mono.steps["mono", "ragged"] >= 1
    close(seen)
    judged(quantised, asked, answers)


def test_prompts_of_a_few_tokens_take_the_mono_path(quantised, monkeypatch):
    """Over a handful of keys the roundings to E4M3 do not average out: not held to LAYER."""
    asked = [prompt(9, 1), prompt(4, 2), prompt(1, 3)]
    with engine(quantised, **MONO) as llm, seeing(llm, monkeypatch, compare=True) as seen:
        answers = generate(llm, asked, 3)
    assert seen.paths == [("mono", 14), ("mono", 3), ("mono", 3)]
    assert mono.steps == {("mono", "ragged"): 1, ("mono", "decode"): 2}
    assert torch.tensor(seen.layers).max() < ROUTED
    judged(quantised, asked, answers)


@pytest.mark.slow
def test_requests_are_preempted_between_mono_steps(quantised):
    """Ten requests cross into their second block at once, and twelve blocks do not hold them."""
    asked = [prompt(120, n) for n in range(10)]
    options = MONO | {"num_gpu_blocks_override": 12, "max_model_len": 1024}
    with engine(quantised, **options, enable_prefix_caching=False) as llm:
        answers = generate(llm, asked, 16)
        assert metric(llm, "vllm:num_preemptions") > 0
    assert mono.steps["mono", "decode"] > 16 > mono.steps["layers", "prefill"] > 1
    judged(quantised, asked, answers)
