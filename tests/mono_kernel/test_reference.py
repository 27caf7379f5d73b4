"""The layer's reference against the whole-model reference, on 1, 2 and 4 simulated ranks.

Both round at the same places but for: expert outputs, which the mono kernel does not round one by
one; two E4M3 terms of activations far below their row's largest; NVFP4 expert weights, which it
takes through the table; p and V of the attention (reference_fp8.py), and index keys through the
table, which may exchange the last block of a list. Tolerances are of the relative RMS difference:
STREAM for the residual stream (found: 0.006 to 0.014), EXPERTS for the experts' output (0.013 to
0.019).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from mono_kernel import reference
from rocm_msa.checkpoint.read import dequantised_weights
from rocm_msa.testing.reference_model import Details, ReferenceModel
from rocm_msa.testing.reference_parts import blocks_to_mask
from tests.mono_kernel.layers import PREFIX, checkpoint, layer_weights, write
from tests.mono_kernel.steps import RAGGED, Step

STREAM, EXPERTS = 2.0**-6, 2.0**-5


class OneLayer(ReferenceModel):
    """The whole-model reference, fed with hidden states instead of tokens."""

    def __init__(self, layout: str, layer: int = 0):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "model", layout, layer)
            config = json.loads((Path(folder) / "model" / "config.json").read_text())
        tensors = checkpoint(layout, layer)[1].items()
        weights = dict(dequantised_weights(tensors, config, torch.bfloat16))
        super().__init__(
            config, weights, dtype=torch.bfloat16, main_dtype="nvfp4", index_dtype="nvfp4"
        )

    @torch.inference_mode()
    def layer(self, hidden: torch.Tensor, start: int, state: dict, details: Details):
        """(residual after the attention, output of the experts) of bf16 rows at `start`."""
        cos_sin = self._cos_sin(torch.arange(start, start + len(hidden)))
        x = self._norm(hidden, f"{PREFIX}.input_layernorm")
        middle = hidden + self._attention(0, x, cos_sin, start, state, details)
        x = self._norm(middle, f"{PREFIX}.post_attention_layernorm")
        return middle, self._moe(f"{PREFIX}.block_sparse_moe", x)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error <= tolerance, float(error)


@pytest.mark.parametrize(
    ("layout", "tp"),
    [
        ("nvfp4", 2),
        pytest.param("mxfp4", 1, marks=pytest.mark.slow),
        pytest.param("mxfp8", 4, marks=pytest.mark.slow),
    ],
)
def test_the_whole_model_reference_agrees(layout, tp):
    """A prompt of 3000 tokens in the caches, then a step of three rows."""
    step = Step(layout, tp, lens=[3003], rows=3, seed=tp)
    model = OneLayer(layout)
    state, details = {}, Details()
    model.layer(step.prompt(0), 0, state, Details())
    stream = (step.hidden.float() + step.residual.float()).to(torch.bfloat16)
    middle, out = model.layer(stream, 3000, state, details)
    step.fill(state[0], 3000)
    found = step.reference()
    for r in found:
        close(r["residual_out"], middle, STREAM)
        close(r["hidden_out"], out, EXPERTS)
    selected = torch.cat([r["selected"] for r in found])
    width = 24
    ours, theirs = (blocks_to_mask(x.long(), width) for x in (selected, details.selected[0]))
    # Keys through the table: a block at the edge of the list may be another.
    assert ((ours & theirs).sum(-1) >= 14).all() and (ours.sum(-1) == 16).all()
    assert torch.equal(selected[..., 0], torch.full_like(selected[..., 0], width - 1))


def test_ranks_agree_bitwise_and_with_one_rank():
    alone = Step("mxfp8", 1, lens=[700, 130], rows=2, seed=5).reference()[0]
    ranks = Step("mxfp8", 4, lens=[700, 130], rows=2, seed=5).reference()
    for name in ("residual_out", "hidden_out", "chosen"):
        assert all(torch.equal(r[name], ranks[0][name]) for r in ranks)
        close(ranks[0][name], alone[name], STREAM)


def test_padded_rows_change_nothing():
    short = Step("mxfp8", 1, lens=[700], rows=2, seed=6)
    padded = Step("mxfp8", 1, lens=[700, 0], rows=2, seed=6)
    one, both = short.reference()[0], padded.reference()[0]
    for name in ("residual_out", "hidden_out"):
        assert torch.equal(both[name][:2], one[name])
    assert (both["selected"][:, 2:] == -1).all() and (both["attention"][2:] == 0).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_different_requests_have_the_bits_of_one_row_after_another(tp):
    """Over a block's edge, from a request's first token on, and with padding that holds NaN."""
    step = Step("mxfp4", tp, *RAGGED, seed=6, padding=2)
    step.hidden[-2:] = float("nan")
    caches = step.copies()
    found = step.reference(caches)
    singly = step.copies()
    for request in range(len(step.lens)):
        for row in range(*step.batch.starts[request : request + 2].tolist()):
            want = step.alone(request, row).reference(singly)
            for got, wanted in zip(found, want, strict=True):
                for name in ("residual_out", "hidden_out", "chosen", "q"):
                    assert torch.equal(got[name][row], wanted[name][0]), (row, name)
                assert torch.equal(got["selected"][:, row], wanted["selected"][:, 0])
    for got, wanted in zip(caches, singly, strict=True):
        assert all(torch.equal(a.pages, b.pages) for a, b in zip(got, wanted, strict=True))
    for r in found:
        assert (r["selected"][:, -2:] == -1).all() and (r["attention"][-2:] == 0).all()


def test_two_terms_hold_bf16_exactly():
    x = (torch.randn(8, 256) * torch.tensor([1e-3, 1.0, 30.0, 1e4] * 2)[:, None]).bfloat16()
    x[3] = 0
    terms, factor = reference.split(x)
    assert terms.float().abs().max() <= 256
    limit = x.float().abs().amax(-1, keepdim=True) * 2.0**-21
    assert ((reference.value(terms, factor) - x.float()).abs() <= limit).all()


def test_a_tie_goes_to_the_lower_expert():
    s = layer_weights("mxfp8").shape
    logits = torch.zeros(1, s.experts)
    chosen, weights = reference.choose(s, logits, torch.zeros(s.experts))
    assert chosen.tolist() == [[0, 1, 2, 3]] and torch.equal(weights, torch.full((1, 4), 0.5))
    bias = torch.tensor([0, 0, 0, 0, 0.1, 0, 0, 0])
    assert reference.choose(s, logits, bias)[0].tolist() == [[4, 0, 1, 2]]
