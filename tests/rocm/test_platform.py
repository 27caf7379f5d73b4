"""vLLM 0.33's own code for ROCm with our plugin: platform, configuration, model, runner V2's hooks.

What stands for amdsmi, torch.cuda and the compiled library is in fake_rocm.py; no layer is run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_plugin import vllm_033

RUN = Path(__file__).with_name("run_033.py")
LAYOUTS = {
    "mxfp8": ("mxfp8", "ModelOptMxFp8FusedMoE"),
    "nvfp4": ("modelopt_mixed", "ModelOptNvFp4FusedMoE"),
}
"""Checkpoint layout -> vLLM's quantisation and its class for the experts. MXFP4 needs AITER or
Quark, which are not here."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    from rocm_msa.checkpoint.make import make_checkpoint

    folder = tmp_path_factory.mktemp("rocm")
    make_checkpoint(folder / "tiny")
    for layout in LAYOUTS:
        make_checkpoint(folder / layout, layout=layout)
    command = [sys.executable, RUN, *(folder / name for name in ("tiny", *LAYOUTS))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=vllm_033.environment()
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_the_platform_is_rocm_and_the_runner_v2(found):
    assert found["platform"] == {
        "platform": "RocmPlatform",
        "is_rocm": True,
        "capability": [9, 5],
        "runner_v2": True,
        "compilation": "NONE",
        "graphs": "FULL_DECODE_ONLY",
        "block_size": 128,
        "device": "cuda",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_public_command_on_rocm(layout, found):
    """Every flag, on a quantised checkpoint; `--quantization-config.moe` adds to it."""
    line = found["public"][layout]
    assert "error" not in line, line
    assert line["moe"] == "mxfp8" and line["indexer_decode_cp"] is True
    made = {"tp": 2, "block_size": 128, "draft": "ngram", "drafts": 3, "one_manager": True}
    assert line["made"] == made


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aiter", "VLLM_ROCM_USE_AITER: the package aiter is not installed"),
        ("attention_backend", "--attention-backend: these layers bring their own backend"),
        ("quantization", "--quantization-config: the checkpoint is not quantised"),
        ("block_size", "--block-size: expected 128 (one sparse block a page), got 64"),
    ],
)
def test_refused_on_rocm(name, words, found):
    assert found["refusals"]["nothing"] == ""
    assert words in found["refusals"][name]


def test_the_model_is_made_and_loaded(found):
    model = found["model"]
    assert model["class"] == "RocmMsaM3ForCausalLM"
    assert model["experts"] == ["RoutedExperts", "SharedExperts"]  # vLLM's, not the CPU's
    assert model["parameters"] > 40 and model["not_loaded"] == []
    assert model["state"] == "MsaModelState"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_checkpoints_go_through_vllms_code(layout, found):
    quantization, experts = LAYOUTS[layout]
    model = found["quantised"][layout]
    assert model["quantization"] == quantization
    assert experts in model["methods"] and "ModelOptLinearMethod" in model["methods"]
    assert model["not_loaded"] == []


def test_the_caches_are_rows_of_one_allocation(found):
    cache = found["cache"]
    assert cache["layout"] == "BLHNC"
    assert (cache["groups"], cache["allocations"], cache["kernel_block_sizes"]) == (1, 1, [128])
    assert cache["block_strides"] == [cache["block_bytes"]] == [175104]
    assert cache["graphs"] == "UNIFORM_BATCH"
    blocks = cache["blocks"]
    assert blocks == 64 * 2**20 // cache["block_bytes"]
    main, index = [blocks, 36864], [blocks, 9216]
    assert sorted(cache["layers"].values()) == sorted([main] * 4 + [index] * 3)


def test_the_metadata_of_a_batch(found):
    """Decode rows first; rows of the runner's buffers that no request has are left out."""
    for batch in found["batches"].values():
        assert batch["layers"] == sorted(found["cache"]["layers"])
    tables = [[16 * i + j for j in range(6)] for i in range(4)]
    assert {k: v for k, v in found["batches"]["mixed"].items() if k != "layers"} == {
        "tokens": 242,
        "decode": {
            "tokens": [0, 2],
            "rows": 1,
            "seq_lens": [300, 5],
            "starts": [0, 1, 2],
            "table": tables[:2],
            "last_blocks": [3, 1],
        },
        "prefill": {
            "tokens": [2, 242],
            "rows": None,
            "seq_lens": [40, 700],
            "starts": [0, 40, 240],
            "table": tables[2:],
            "last_blocks": [1, 6],
        },
    }
    decode = found["batches"]["decode"]
    assert decode["prefill"] is None and decode["decode"]["last_blocks"] == [3, 1, 2]
    prefill = found["batches"]["prefill"]
    assert prefill["decode"] is None and prefill["prefill"]["tokens"] == [0, 129]


def test_the_runner_puts_first_what_our_metadata_takes_as_decode_rows(found):
    """Requests of equal length lead; the builder takes them as decode rows and the rest as prefill,
    a request with fewer drafts than the others too."""
    assert found["order"] == {"plain": [1, 1, 40, 600], "drafted": [4, 4, 3, 1, 600]}


def test_decode_steps_have_full_graphs_by_default(found):
    modes = found["modes"]
    for name in ("default", "O3", "both", "triton"):
        assert modes[name] == ["NONE", "FULL_DECODE_ONLY"], name
    for name in ("eager", "O0", "none", "reference"):
        assert modes[name] == ["NONE", "NONE"], name
    assert found["resolved"] == "FULL_DECODE_ONLY"  # as the runner settles it with our builders


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("piecewise", "got PIECEWISE: torch does not compile these layers"),
        ("full", "got FULL: steps with prompts are planned by their lengths"),
        ("compiled", "mode: expected NONE or unset, got VLLM_COMPILE"),
    ],
)
def test_other_graphs_and_compilation_are_refused(name, words, found):
    assert words in found["modes"][name]


def test_caches_that_are_taken_away_and_given_anew_are_warmed_up_anew(found):
    """As the runner does it around the measurement of graphs."""
    layers = len(found["cache"]["layers"])
    assert found["measured"] == {"released": layers, "bound": True, "warm_ups": 1}


@pytest.mark.parametrize(("which", "rows"), [("graphs", 1), ("drafts", 4)])
def test_the_runners_manager_captures_and_replays_decode_steps(which, rows, found):
    """Each size warmed up and captured, the largest first, then the next size up for each step."""
    graphs = found[which]
    sizes = {"graphs": [8, 4, 2, 1], "drafts": [6, 4, 3, 2, 1]}[which]
    assert graphs["state"] == "MsaModelState"
    assert graphs["graphs"] == [[n, n * rows] for n in sizes]
    assert graphs["forwards"] == [n * rows for n in sizes for _ in range(2)]
    chosen = {name: step["size"][0] for name, step in graphs["steps"].items()}
    assert chosen == {"all": {1: 4, 4: 3}[rows], "fewer": 1, "other": 2}
    for step in graphs["steps"].values():
        assert step["mode"] == "FULL" and step["size"][1] == step["size"][0] * rows
        assert step["alike"]
    # Four layers add the row's blocks to its token: 5 * token + 14 * blocks of each row.
    lengths = [n - rows + 1 + i for n in (300, 5, 140) for i in range(rows)]
    tokens = [n for n in (300, 5, 140) for _ in range(rows)]
    wanted = [5 * t + 14 * -(-n // 128) for t, n in zip(tokens, lengths, strict=True)]
    assert graphs["steps"]["all"]["rows"] == wanted
    assert graphs["counted"] == 4 and graphs["python_in_a_replay"] == 0
