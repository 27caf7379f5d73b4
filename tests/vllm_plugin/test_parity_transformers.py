"""Parity 1: vLLM's path over bf16 caches against transformers' own minimax_m3_vl text model.

Both in fp32, with K, V and index keys rounded to bf16 as they enter a cache (transformers' cache
layers are patched to round). What is left are differences of the order of additions, and what they
turn into where a value sits on a bf16 boundary: one bf16 step in a key.
"""

from __future__ import annotations

import pytest
import torch

from rocm_msa.testing.reference_model import ReferenceModel
from tests.transformers_model import build
from tests.vllm_plugin.engine import engine

LENGTHS = (1, 127, 128, 129, 2047, 2048, 2049, 5000)
TYPICAL, FLIPPED, TYPICAL_SHARE = 5e-3, 0.5, 0.99
"""On log-probabilities, as in test_parity_reference; bf16 is the finer cache."""
SELECTION_SHARE = 0.995
"""Rows (head, token) with the same blocks; in the rest one near-tie fell the other way."""


def prompt(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, 900, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return build(ReferenceModel.from_checkpoint(checkpoint))


@pytest.fixture
def bf16_caches(monkeypatch):
    from transformers import cache_utils
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    def rounded(method):
        def call(self, *states, **kwargs):
            return method(self, *(s.bfloat16().float() for s in states), **kwargs)

        return call

    layer = modeling.MiniMaxM3VLSparseCacheLayer
    monkeypatch.setattr(layer, "update_index", rounded(layer.update_index))
    monkeypatch.setattr(
        cache_utils.DynamicLayer, "update", _round_two(cache_utils.DynamicLayer.update)
    )


def _round_two(method):
    def update(self, keys, values, *args, **kwargs):
        return method(self, keys.bfloat16().float(), values.bfloat16().float(), *args, **kwargs)

    return update


@pytest.fixture(scope="module")
def ours(checkpoint):
    """prompt length -> (log-probability of each prompt token, selections by layer)."""
    from vllm import SamplingParams

    from rocm_msa.vllm_plugin.attention import MsaAttention

    selected: dict[int, list[torch.Tensor]] = {}
    select = MsaAttention._select

    def recording(self, index_q, part):
        ids = select(self, index_q, part)
        selected.setdefault(self.layer_id, []).append(ids)
        return ids

    results = {}
    options = {"max_model_len": 5120, "max_num_batched_tokens": 1024}
    with (
        pytest.MonkeyPatch.context() as patch,
        engine(checkpoint, main="bf16", index="bf16", **options) as llm,
    ):
        patch.setattr(MsaAttention, "_select", recording)
        for count in LENGTHS:
            selected.clear()
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            asked = {"prompt_token_ids": prompt(count)}
            (output,) = llm.generate([asked], params, use_tqdm=False)
            steps = zip(output.prompt_logprobs[1:], prompt(count)[1:], strict=True)
            logprobs = torch.tensor([entry[token].logprob for entry, token in steps])
            last = next(iter(output.outputs[0].token_ids))
            ids = {layer: torch.cat(parts, dim=1) for layer, parts in selected.items()}
            results[count] = (logprobs, last, ids)
    return results


@pytest.mark.parametrize("count", LENGTHS)
def test_prompt(count, ours, theirs, bf16_caches, monkeypatch):
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    chosen: dict[int, torch.Tensor] = {}
    forward = modeling.MiniMaxM3VLIndexer.forward

    def recording(self, *args, **kwargs):
        ids = forward(self, *args, **kwargs)
        chosen[self.layer_idx] = ids[0]
        return ids

    monkeypatch.setattr(modeling.MiniMaxM3VLIndexer, "forward", recording)
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt(count)]), use_cache=True).logits[0]
    wanted = torch.log_softmax(logits.float(), dim=-1)
    logprobs, last, selected = ours[count]

    targets = torch.tensor(prompt(count)[1:], dtype=torch.int64)
    expected = wanted[:-1].gather(1, targets[:, None])[:, 0]
    assert last == int(wanted[-1].argmax())
    if count > 1:
        deviation = (logprobs - expected).abs()
        assert deviation.max() <= FLIPPED
        assert (deviation <= TYPICAL).float().mean() >= TYPICAL_SHARE
    assert set(selected) == set(chosen) == {1, 2, 3}
    for layer, ids in selected.items():
        common = _common(ids[:, :count], chosen[layer])
        size = (ids[:, :count] >= 0).sum(dim=-1)
        assert (common >= size - 1).all()
        assert (common == size).float().mean() >= SELECTION_SHARE
        if count > 17 * 128:
            assert (ids[0, -1].sort().values != ids[1, -1].sort().values).any(), "C10"


def _common(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Ids (>= 0) that are in both lists of a row: `[heads, rows]`."""
    return ((a[..., :, None] == b[..., None, :]) & (a[..., :, None] >= 0)).sum(dim=(-1, -2))
