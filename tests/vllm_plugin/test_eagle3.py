"""An EAGLE3 drafter on vLLM's CPU engine, beside the mono layers and the ordinary ones.

The drafter (drafter.py) is taught the hidden states that the mono layers give without it. How many
of its drafts are right shows that it is given them in steps with drafts, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.vllm_plugin import mono
from rocm_msa.vllm_plugin.model import Model
from tests.vllm_plugin.drafter import AUX, make_drafter, taught
from tests.vllm_plugin.engine import Answer, attention_layers, engine, generate, metric
from tests.vllm_plugin.test_mono_engine import MONO, judged, prompt
from tests.vllm_plugin.test_mono_ranks import run

pytestmark = pytest.mark.timeout(1200)
COUNT, DRAFTS = 12, 3
ASKED = [prompt(40, 1), prompt(130, 2)]
LAYERS = MONO | {"additional_config": {}}
MARGIN = 0.05  # of the best token's log-probability: a near tie may go either way
SHARE = 0.5  # of first drafts, right where the layers' roundings are not those that were taught


@dataclass(frozen=True)
class Lesson:
    """A target, what it answers to each of ASKED alone in mono steps, and a drafter for it."""

    target: str
    answers: list[Answer]
    options: dict


@contextmanager
def last_rows() -> Iterator[list[torch.Tensor]]:
    """Of each step the last row's hidden states of the layers AUX."""
    forward, rows = Model.forward, []

    def kept(self, *args, **kwargs):
        self.aux_hidden_state_layers = AUX
        out, aux = forward(self, *args, **kwargs)
        self.aux_hidden_state_layers = ()
        rows.append(torch.cat(aux, -1)[-1])
        return out

    with mock.patch.object(Model, "forward", kept):
        yield rows


@pytest.fixture(scope="module")
def lesson(tmp_path_factory) -> Lesson:
    folder: Path = tmp_path_factory.mktemp("eagle3")
    make_checkpoint(folder / "mxfp4", "tiny", "mxfp4", intermediate_size=256)
    target, answers, hidden = str(folder / "mxfp4"), [], []
    with engine(target, **MONO, enable_prefix_caching=False) as llm:
        for one in ASKED:
            with last_rows() as rows:
                answers += generate(llm, [one], COUNT)
            hidden += rows[:-1]  # nothing follows the last token
    for answer in answers:
        best = answer.logprobs.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MARGIN
    lm_head = taught(torch.stack(hidden), [t for a in answers for t in a.tokens[1:]])
    options = {
        "method": "eagle3",
        "model": make_drafter(folder / "drafter", lm_head),
        "num_speculative_tokens": DRAFTS,
        "kv_cache_dtype": "auto",  # bf16: the drafter's attention on the CPU knows no NVFP4
    }
    return Lesson(target, answers, options)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(mono, "steps", mono.Counter())


def drafted(llm) -> tuple[float, float, float]:
    """Drafts, tokens of them, accepted tokens."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return tuple(metric(llm, f"vllm:spec_decode_num_{name}") for name in names)


def test_it_drafts_and_is_verified_in_mono_steps(lesson):
    """The first draft of every step is right, and what is answered is what it was without."""
    with engine(lesson.target, **MONO, speculative_config=lesson.options) as llm:
        answers = generate(llm, ASKED, COUNT)
        drafts, tokens, accepted = drafted(llm)
        strides = {layer.kv_cache.stride(0) for layer in attention_layers(llm).values()}
    assert [a.tokens for a in answers] == [a.tokens for a in lesson.answers]
    assert tokens == DRAFTS * drafts and accepted == drafts == COUNT
    assert mono.steps == {("layers", "prefill"): 1, ("mono", "decode"): COUNT // 2}
    assert len(strides) == 3  # layout LBHNC: main, index and the drafter's pages
    judged(lesson.target, ASKED, answers)


def test_it_drafts_beside_the_ordinary_layers(lesson):
    with engine(lesson.target, **LAYERS, speculative_config=lesson.options) as llm:
        answers = generate(llm, ASKED, COUNT)
        drafts, tokens, accepted = drafted(llm)
    assert not mono.steps
    assert tokens == DRAFTS * drafts and accepted >= SHARE * drafts
    judged(lesson.target, ASKED, answers)


def test_the_layout_that_the_drafter_needs_changes_no_bit(lesson, monkeypatch):
    found = []
    for layout in ("BLHNC", "LBHNC"):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        with engine(lesson.target, **MONO) as llm:
            found.append(generate(llm, ASKED, COUNT))
            strides = {layer.kv_cache.stride(0) for layer in attention_layers(llm).values()}
        assert len(strides) == (1 if layout == "BLHNC" else 2)
    for a, b in zip(*found, strict=True):
        assert a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs)


@pytest.mark.slow
def test_two_ranks_with_a_drafter(lesson, tmp_path):
    options = MONO | {"tensor_parallel_size": 2, "speculative_config": lesson.options}
    case = {"options": options, "prompts": ASKED, "count": COUNT, "rounds": [None]}
    (one,) = run(tmp_path / "run", lesson.target, **case)
    assert one["counts"][0] == one["counts"][1]
    assert set(one["counts"][0]) == {"layers prefill", "mono decode"} and one["drafts"] > 0
    judged(lesson.target, ASKED, one["answers"])
