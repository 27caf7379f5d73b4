"""The whole-model reference against transformers' own minimax_m3_vl, and against itself.

transformers (5.19) is independent code in eager fp32: the logits agree to fp32 rounding and the
chosen blocks are the same, one list per index head (public case C10; older releases took the
maximum over the index heads, which this test would show as a different selection).

Tolerances: two fp32 programs that add in different orders: 1e-4 of the logits' spread (measured:
1.5e-5). A token at a time against all at once: the same. Cache rounding: see each test.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F

from rocm_msa.checkpoint.corpus import TEXT
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.tokenizer import build_tokenizer
from rocm_msa.formats import nvfp4
from rocm_msa.testing.reference_model import Details, ReferenceModel
from rocm_msa.testing.reference_parts import (
    blocks_to_mask,
    rope_frequencies,
    select_blocks,
    through_cache,
)
from tests.transformers_model import build

FP32_TOLERANCE = 1e-4
BLOCK = 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("reference")
    make_checkpoint(root / "tiny")
    return root / "tiny"


@pytest.fixture(scope="module")
def model(directory):
    return ReferenceModel.from_checkpoint(directory)


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, (count,), generator=generator).tolist()


def text_prompt(count: int) -> list[int]:
    ids = build_tokenizer(1024).encode(TEXT).ids
    return (ids * math.ceil(count / len(ids)))[:count]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = FP32_TOLERANCE) -> bool:
    return float((a - b).abs().max()) <= tolerance * float(b.std())


# --- against transformers ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_model(model):
    pytest.importorskip("transformers.models.minimax_m3_vl")
    return build(model)


@pytest.mark.parametrize(
    "count",
    [1, 127, 128, 129, 2047, 2048, 2049, pytest.param(5000, marks=pytest.mark.slow)],
)
def test_transformers_agrees(model, transformers_model, count):
    chosen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.indexer.register_forward_hook(
            lambda _module, _args, out, index=index: chosen.update({index: out[0]})
        )
        for index, layer in enumerate(transformers_model.model.layers)
        if layer.self_attn.indexer is not None
    ]
    ids = prompt(count)
    details = Details()
    try:
        ours = model.forward(ids, details)
        with torch.inference_mode():
            theirs = transformers_model(torch.tensor([ids])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    assert close(ours, theirs)
    width = -(-count // BLOCK)
    assert set(chosen) == set(details.selected) == {1, 2, 3}
    for layer, ids_ in details.selected.items():
        assert torch.equal(blocks_to_mask(ids_, width), blocks_to_mask(chosen[layer], width))
    if count > 16 * BLOCK + BLOCK:
        for ids_ in details.selected.values():
            heads = blocks_to_mask(ids_, width)
            assert (heads[0] != heads[1]).any(dim=-1)[17 * BLOCK :].float().mean() > 0.9


def test_transformers_loads_the_public_names_by_itself(tmp_path):
    """The VL checkpoint through from_pretrained: transformers' own conversion of public names.

    Its classes are named, not looked up: vLLM, once imported, registers its own config class.
    """
    pytest.importorskip("transformers.models.minimax_m3_vl")
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    make_checkpoint(tmp_path / "vl", arch="vl", seed=3)
    theirs, report = modeling.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path / "vl",
        config=configuration.MiniMaxM3VLConfig.from_pretrained(tmp_path / "vl"),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[fault], fault
    ids = prompt(300)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids])).logits[0]
    assert close(ReferenceModel.from_checkpoint(tmp_path / "vl").forward(ids), expected)


# --- the checkpoint is worth comparing with -----------------------------------------------------


def test_index_heads_choose_different_blocks(model):
    """C10: one list per index head, and sparse attention really drops blocks."""
    details = Details()
    ids = prompt(3072)
    sparse = model.forward(ids, details)
    for chosen in details.selected.values():
        late = blocks_to_mask(chosen, 24)[:, -BLOCK:]
        assert (late.sum(dim=-1) == 16).all()
        assert late[..., 23].all()
        overlap = (late[0] & late[1]).sum(dim=-1).float()
        assert overlap.mean() < 13.5
    wide = ReferenceModel(
        {
            **model.config,
            "sparse_attention_config": {
                **model.config["sparse_attention_config"],
                "sparse_topk_blocks": 64,
            },
        },
        model.weights,
    )
    dense = wide.forward(ids)
    assert close(sparse[: 16 * BLOCK], dense[: 16 * BLOCK])
    moved = (sparse - dense)[17 * BLOCK :].abs().amax(dim=-1)
    assert moved.median() > 0.1 * sparse.std()


def test_every_part_moves_the_logits_and_no_expert_is_idle(model, monkeypatch):
    ids = text_prompt(600)
    used: dict[str, torch.Tensor] = {}
    original = ReferenceModel._moe

    def spy(self, base, x):
        scores = F.linear(x.float(), self.weights[f"{base}.gate.weight"]).sigmoid()
        top = (scores + self.weights[f"{base}.e_score_correction_bias"]).topk(4, dim=-1).indices
        used[base] = torch.bincount(top.flatten(), minlength=scores.shape[1]) / len(x)
        return original(self, base, x)

    monkeypatch.setattr(ReferenceModel, "_moe", spy)
    logits = model.forward(ids)
    for share in used.values():
        assert share.min() > 0.05 and share.max() < 0.95
    assert 1.5 < logits.std() < 5
    margins = logits.topk(2, dim=-1).values
    assert (margins[:, 0] - margins[:, 1]).median() > 0.3
    for part in (".o_proj.", ".w2.", "shared_experts.down_proj.", ".mlp.down_proj."):
        weights = {n: t * (part not in n) for n, t in model.weights.items()}
        moved = (ReferenceModel(model.config, weights).forward(ids) - logits).abs().amax(dim=-1)
        assert moved.median() > 0.25, part


def test_greedy_margins_stand_above_last_bit_noise(directory, monkeypatch):
    """bf16 with NVFP4 caches, sums in another order: most margins exceed twice the effect."""
    options = {"dtype": torch.bfloat16, "main_dtype": "nvfp4", "index_dtype": "nvfp4"}
    ids = prompt(1500)

    def linear(self, name, x, noise=0.0):
        out = F.linear(x.float(), self.weights[f"{name}.weight"].float())
        return (out * (1 + noise * torch.randn(out.shape, generator=generator))).to(x.dtype)

    generator = torch.Generator().manual_seed(0)
    model = ReferenceModel.from_checkpoint(directory, **options)
    monkeypatch.setattr(ReferenceModel, "_linear", linear)
    exact = model.forward(ids)
    monkeypatch.setattr(
        ReferenceModel, "_linear", lambda self, name, x: linear(self, name, x, 1e-6)
    )
    noisy = model.forward(ids)
    best = exact.topk(2, dim=-1).values
    margin, error = best[:, 0] - best[:, 1], (noisy - exact).abs().amax(dim=-1)
    assert (margin > 2 * error).float().mean() > 0.6
    assert (noisy.argmax(-1) == exact.argmax(-1)).float().mean() > 0.94


# --- the reference against itself --------------------------------------------------------------


@pytest.mark.parametrize("cache", ["none", "bf16", "fp8", "nvfp4"])
def test_a_token_at_a_time_is_the_full_forward(directory, cache):
    model = ReferenceModel.from_checkpoint(directory, main_dtype=cache, index_dtype=cache)
    start, more = prompt(250), 12
    generated = model.generate_greedy(start, more)
    full = model.continuation_margins(start, generated.tokens)
    assert close(generated.logits, full.logits, 1e-3)
    assert generated.tokens == full.tokens
    assert generated.margins == pytest.approx(full.margins, abs=1e-2)


def test_64_tokens_after_2000(directory):
    """Long enough to pass the sixteenth block while generating, and quick."""
    model = ReferenceModel.from_checkpoint(
        directory, dtype=torch.bfloat16, main_dtype="nvfp4", index_dtype="nvfp4"
    )
    generated = model.generate_greedy(text_prompt(2020), 64)
    assert len(generated.tokens) == len(generated.margins) == 64
    assert min(generated.margins) >= 0


def test_vl_and_text_checkpoints_give_the_same_model(directory, tmp_path, model):
    make_checkpoint(tmp_path / "vl", arch="vl")
    ids = prompt(40)
    assert torch.equal(
        ReferenceModel.from_checkpoint(tmp_path / "vl").forward(ids), model.forward(ids)
    )


@pytest.mark.parametrize(("layout", "limit"), [("mxfp8", 0.15), ("nvfp4", 0.2), ("mxfp4", 0.4)])
def test_quantised_weights_stay_near_the_bf16_model(tmp_path, model, layout, limit):
    make_checkpoint(tmp_path / "q", layout=layout)
    ids = prompt(200)
    exact = model.forward(ids)
    error = ReferenceModel.from_checkpoint(tmp_path / "q").forward(ids) - exact
    assert 0 < error.std() < limit * exact.std()


@pytest.mark.parametrize("cache", ["bf16", "fp8", "nvfp4"])
def test_the_caches_hold_what_the_format_gives_back(directory, cache):
    model = ReferenceModel.from_checkpoint(directory, main_dtype=cache, index_dtype=cache)
    plain = ReferenceModel.from_checkpoint(directory)
    ids = prompt(64)
    rounded, exact = Details(), Details()
    model.forward(ids, rounded)
    plain.forward(ids, exact)
    first = exact.layers[0]
    assert torch.equal(rounded.layers[0].keys, through_cache(first.keys, cache))
    assert torch.equal(rounded.layers[0].values, through_cache(first.values, cache))
    for state in rounded.layers.values():
        for tensor in (state.keys, state.values, state.index_keys):
            if tensor is not None:
                assert torch.equal(through_cache(tensor, cache), tensor)


def test_cache_dtypes_are_independent(directory):
    ids = prompt(300)
    model = ReferenceModel.from_checkpoint(directory, main_dtype="nvfp4")
    details = Details()
    logits = model.forward(ids, details)
    index = details.layers[1].index_keys
    assert not torch.equal(through_cache(index, "nvfp4"), index)
    # Three blocks: all are chosen, so the index cache's dtype changes nothing.
    other = ReferenceModel.from_checkpoint(directory, main_dtype="nvfp4", index_dtype="fp8")
    assert torch.equal(other.forward(ids), logits)


def test_through_cache_rules():
    x = torch.tensor([[math.nan, math.inf, -math.inf, 500.0, -0.0, 1.03] + [0.0] * 10])
    fp8 = through_cache(x, "fp8")
    assert fp8[0, :6].tolist() == [0.0, 448.0, -448.0, 448.0, 0.0, 1.0]
    data, scales = nvfp4.quantize(x, 1.0)
    assert torch.equal(through_cache(x, "nvfp4"), nvfp4.dequantize(data, scales, 1.0))
    assert through_cache(x, "nvfp4").isfinite().all()
    with pytest.raises(ValueError, match="cache dtype"):
        through_cache(x, "int8")


def test_selection_rules():
    def pick(row, nb, topk=3, init=0, local=1):
        scores = torch.tensor([[row]], dtype=torch.float32)
        return select_blocks(scores, torch.tensor([nb]), topk, init, local)[0, 0].tolist()

    inf, nan = math.inf, math.nan
    assert pick([1, 5, 2, 9, 0], 5) == [4, 3, 1]
    assert pick([1, 5, 2, 9, 0], 3) == [2, 1, 0]
    assert pick([3, 3, 3, 3, 0], 5) == [4, 0, 1]
    assert pick([nan, -inf, -inf, 1, -inf], 5, topk=5) == [4, 3, 1, 2, 0]
    assert pick([-0.0, 0.0, -0.0, 0.0, 1], 5) == [4, 0, 1]
    assert pick([inf, 1, inf, 2, nan], 5) == [4, 0, 2]
    assert pick([0, 1, 2, 3, 4], 5, init=1) == [0, 4, 3]
    assert pick([0, 1, 2, 3, 4], 1) == [0, -1, -1]
    assert pick([0, 1, 2, 3, 4], 0) == [-1, -1, -1]
    assert pick([7, 1], 2, topk=4) == [1, 0, -1, -1]
    assert blocks_to_mask(torch.tensor([2, 0, -1]), 4).tolist() == [True, False, True, False]


def test_each_head_has_its_own_list():
    """C10's small input: head h prefers the blocks {8h..8h+7} of 32."""
    scores = torch.zeros(4, 1, 32)
    for head in range(4):
        scores[head, 0, 8 * head : 8 * head + 8] = 1.0
    chosen = blocks_to_mask(select_blocks(scores, torch.tensor([32]), 16, 0, 1), 32)[:, 0]
    assert (chosen.sum(dim=-1) == 16).all()
    for head in range(4):
        assert chosen[head, 8 * head : 8 * head + 8].all()
        assert all(not torch.equal(chosen[head], chosen[other]) for other in range(head))


def test_rope_range_and_yarn(model):
    limit = model.config["max_position_embeddings"]
    with pytest.raises(ValueError, match=f"at most {limit} positions"):
        model.forward([0] * (limit + 1))
    with pytest.raises(ValueError, match="token_ids"):
        model.forward([])
    plain, scale = rope_frequencies(model.config)
    assert plain.shape == (32,) and scale == 1.0 and plain[0] == 1.0
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}
    yarn, scale = rope_frequencies({**model.config, "rope_scaling": scaling})
    assert scale == pytest.approx(1 + 0.1 * math.log(2.0))
    assert torch.equal(yarn[:4], plain[:4])
    assert torch.allclose(yarn[-4:], plain[-4:] / 2)
    with pytest.raises(NotImplementedError, match="yarn"):
        rope_frequencies({**model.config, "rope_scaling": {"rope_type": "linear", "factor": 2}})


def test_yarn_is_vllms(model):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.rotary_embedding import yarn_scaling_rope as theirs

    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524288}
    config = {**model.config, "max_position_embeddings": 524288, "rope_scaling": scaling}
    yarn, scale = rope_frequencies(config)
    low, high = theirs.yarn_find_correction_range(32, 1, 64, 5e6, 524288)
    keep = 1 - theirs.yarn_linear_ramp_mask(low, high, 32, dtype=torch.float32)
    plain, _ = rope_frequencies(model.config)
    expected = plain / 2 * (1 - keep) + plain * keep
    assert torch.allclose(yarn, expected, rtol=1e-6)
    assert scale == pytest.approx(float(theirs.yarn_get_mscale(2.0)))


def test_bad_options(directory):
    with pytest.raises(ValueError, match="main_dtype"):
        ReferenceModel.from_checkpoint(directory, main_dtype="int8")
    with pytest.raises(ValueError, match="index_dtype"):
        ReferenceModel.from_checkpoint(directory, index_dtype="fp4")


def test_the_reference_is_deterministic(model):
    ids = prompt(300)
    digests = {hashlib.sha256(model.forward(ids).numpy().tobytes()).hexdigest() for _ in range(2)}
    assert len(digests) == 1
