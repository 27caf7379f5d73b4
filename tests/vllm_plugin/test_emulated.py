"""Backend "emulated": vLLM's engine on gfx950 code objects, one process; what the flag refuses.

Every op with a kernel runs it, on every layer and step, without a finding of the emulator; the
greedy tokens are the reference path's. The kernels round K, V, q and p to E4M3 terms
(ops/sparse_decode/reference_fp8.py), so the log-probabilities are compared twice: loosely with the
reference path's, and closely with those of an engine whose sparse attention has the same roundings.
What is left there is the order of fp32 sums, seen through activations that are rounded to bf16.
"""

from __future__ import annotations

import sys
import types

import prometheus_client
import pytest
import torch

from rocm_msa import emulated, launcher, ops
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.errors import Refusals
from rocm_msa.ops import dispatch
from rocm_msa.ops.rows import prefill_rows
from rocm_msa.ops.sparse_decode import reference_fp8
from rocm_msa.vllm_plugin import emulated as plugin
from rocm_msa.vllm_plugin import metrics
from rocm_msa.vllm_plugin.verify import Options
from tests.vllm_plugin.engine import NGRAM, Answer, engine, generate, metric
from tests.vllm_plugin.test_decode_cp import prompt
from tests.vllm_plugin.test_verify import config, refusal

COUNT, LAYERS, SPARSE = 6, 4, 3
PROMPTS = [prompt(150, 3), prompt(40, 4)]
"""The two best tokens of each step are further apart than the roundings move them."""
PLAIN_TOLERANCE, ROUNDED_TOLERANCE = 0.8, 0.4
EMULATED = {"rocm_msa": {"backend": "emulated"}}
OPTIONS = {"dtype": "bfloat16", "max_num_seqs": 4}


def answers(checkpoint: str, **options) -> list[Answer]:
    with engine(checkpoint, **OPTIONS, **options) as llm:
        return generate(llm, PROMPTS, COUNT)


def rounded_ops() -> types.SimpleNamespace:
    """The ops, with sparse attention by the reference that rounds as the kernels do."""

    def decode(q, cache, ids, table, lens, rows, scale, *, out, backend):
        out.copy_(reference_fp8.run(q, cache, ids, table, lens, rows, scale)[0])

    def prefill(q, cache, ids, table, cu, lens, scale, *, out, backend):
        rows = prefill_rows(cu, lens, len(q))
        each = (table[rows.request], rows.length.int(), 1)
        out.copy_(reference_fp8.run(q, cache, ids, *each, scale)[0])

    return types.SimpleNamespace(
        **{**vars(ops), "sparse_decode": decode, "sparse_prefill": prefill}
    )


@pytest.fixture(scope="module")
def plain(checkpoint):
    return answers(checkpoint)


def worst(one: list[Answer], other: list[Answer]) -> float:
    """Largest difference of the log-probabilities of tokens that are at all likely."""
    return max(
        float((a.logprobs - b.logprobs).abs()[a.logprobs > -8].max())
        for a, b in zip(one, other, strict=True)
    )


def steps_alike(one: Answer, other: Answer) -> int:
    """Steps up to the first other token; all of them where there is none."""
    return next(
        (n for n, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b),
        len(one.tokens),
    )


def check_paths(one: list[Answer], other: list[Answer], tolerance: float) -> None:
    """The same tokens but where two are closer than the tolerance; before that, alike."""
    for a, b in zip(one, other, strict=True):
        n = steps_alike(a, b)
        if n < len(a.tokens):
            first, second = a.logprobs[n].topk(2).values
            assert first - second < tolerance, (n, a.tokens, b.tokens)
        moved = (a.logprobs - b.logprobs)[: n + 1].abs()[a.logprobs[: n + 1] > -8]
        assert moved.max() < tolerance


@pytest.mark.timeout(600)
def test_the_engine_on_emulated_kernels(checkpoint, plain, monkeypatch):
    tally = emulated.Tally()
    for module in ("rocm_msa.emulated", "rocm_msa.emulated.serving"):
        monkeypatch.setattr(f"{module}.tally", tally)
    monkeypatch.setattr(launcher, "_offered", {})
    before = dispatch.taken.copy()
    got = answers(checkpoint, additional_config=EMULATED)
    taken = dispatch.taken - before
    decodes = COUNT - 1
    assert taken == {
        ("qkv_insert", "emulated"): LAYERS * COUNT,
        ("index_score_prefill", "emulated"): SPARSE,
        ("block_topk", "emulated"): SPARSE,
        ("sparse_prefill", "emulated"): SPARSE,
        ("index_select_decode", "emulated"): SPARSE * decodes,
        ("sparse_decode", "emulated"): SPARSE * decodes,
        ("dense_attention", "reference"): COUNT,
    }
    launches = {kernel: n for (kernel,), n in tally.launches.items()}
    by_op = {op: sum(n for k, n in launches.items() if k.startswith(op)) for op, _ in taken}
    assert by_op.pop("dense_attention") == 0 and by_op.pop("sparse_prefill") == 0
    assert by_op == {op: taken[op, "emulated"] for op in by_op}
    pages = [n for kernel, n in launches.items() if kernel.startswith("attend_by_page")]
    assert pages == [SPARSE] * 5  # sparse_prefill
    assert all(tally.instructions[key] > 0 for key in tally.launches)
    metrics.publish()
    shown = {m.name: m.samples for m in prometheus_client.REGISTRY.collect()}
    for name, counter in (("launches", tally.launches), ("bytes", tally.nbytes)):
        samples = shown[f"rocm_msa_emulated_{name}"]
        total = sum(x.value for x in samples if x.name.endswith("_total"))
        assert total >= counter.total() > 0
    assert launcher.active(torch.device("cpu")) is None
    assert [a.tokens for a in got] == [a.tokens for a in plain]
    assert worst(plain, got) < PLAIN_TOLERANCE
    monkeypatch.setattr("rocm_msa.vllm_plugin.attention.ops", rounded_ops())
    rounded = answers(checkpoint)
    assert [a.tokens for a in rounded] == [a.tokens for a in got]
    assert worst(rounded, got) < ROUNDED_TOLERANCE
    assert worst(rounded, got) < worst(plain, got)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options",
    [
        {"main": "fp8", "index": "fp8"},
        {"main": "bf16", "index": "bf16"},
        {"max_num_batched_tokens": 128, "speculative_config": NGRAM},
    ],
    ids=["fp8", "bf16", "chunks-ngram"],
)
def test_other_caches_and_steps(options, checkpoint, monkeypatch):
    """Beside an engine that rounds alike: other pages; chunks, and several rows of a request."""
    before = dispatch.taken.copy()
    monkeypatch.setattr(launcher, "_offered", {})
    text = prompt(70, 2)
    prompts = [*PROMPTS, text + text]
    with engine(checkpoint, **OPTIONS, additional_config=EMULATED, **options) as llm:
        got = generate(llm, prompts, COUNT)
        drafted = metric(llm, "vllm:spec_decode_num_draft_tokens")
    assert {backend for _, backend in dispatch.taken - before} == {"emulated", "reference"}
    assert [op for op, b in dispatch.taken - before if b == "reference"] == ["dense_attention"]
    assert (drafted > 0) == ("speculative_config" in options)
    monkeypatch.setattr("rocm_msa.vllm_plugin.attention.ops", rounded_ops())
    with engine(checkpoint, **OPTIONS, **options) as llm:
        rounded = generate(llm, prompts, COUNT)
    check_paths(rounded, got, ROUNDED_TOLERANCE)
    assert sum(steps_alike(a, b) for a, b in zip(rounded, got, strict=True)) >= 2 * COUNT


def test_emulated_is_accepted(checkpoint):
    made = config(checkpoint, additional_config=EMULATED, dtype="bfloat16")
    assert made.additional_config == EMULATED


def test_what_has_no_kernel_or_no_emulator_is_refused(checkpoint, tmp_path, monkeypatch):
    message = refusal(checkpoint, additional_config=EMULATED, dtype="float32")
    for op in ("index_score_decode", "index_score_prefill", "sparse_decode", "sparse_prefill"):
        words = f"backend 'emulated': {op} has no gfx950 kernel for --dtype float32, nvfp4 main"
        assert words in message
    assert "qkv_insert" not in message and "exchange" not in message
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    message = refusal(
        checkpoint, additional_config=EMULATED, dtype="bfloat16", tensor_parallel_size=3
    )
    assert "expected a multiple of 3" in message
    message = refusal(checkpoint, additional_config=EMULATED, dtype="bfloat16")
    assert "backend 'emulated': gfx950_emu compiles its C++ core at first use" in message


def test_a_package_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "rocm_msa.emulated", None)
    monkeypatch.delattr("rocm_msa.emulated")
    refusals = Refusals("no")
    made = types.SimpleNamespace(device_config=types.SimpleNamespace(device_type="cpu"))
    plugin.check_config(made, Options("emulated"), MINIMAX_M3, (), False, refusals)
    (reason,) = refusals.reasons
    assert "pip install 'rocm-msa[emulator,flydsl]'" in reason


@pytest.mark.parametrize(
    ("device", "ranks", "share", "words"),
    [
        ("cuda", 1, False, ["expected cpu (vLLM's CPU build), got cuda"]),
        ("cpu", 2, False, []),
        ("cpu", 2, True, []),
        ("cpu", 1, True, []),
        ("cpu", 2, "other heads", ["the exchange has no gfx950 kernel", "2 ranks"]),
    ],
)
def test_refusals_by_part(device, ranks, share, words, monkeypatch):
    from dcp import exchange_gfx950

    if share == "other heads":
        monkeypatch.setattr(exchange_gfx950, "builds", lambda config: [])
    made = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device_type=device),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=ranks),
    )
    refusals = Refusals("no")
    options = Options("emulated")
    dtypes = (CacheDType.NVFP4, CacheDType.NVFP4)
    plugin.check_config(made, options, MINIMAX_M3, dtypes, bool(share), refusals)
    assert len(refusals.reasons) == bool(words)
    for word in words:
        assert word in refusals.reasons[0]
    for other in (None, "reference", "flydsl"):
        plugin.check_config(None, Options(other), MINIMAX_M3, dtypes, True, refusals)
