"""The flag `mono`: both ways to ask, every refusal at once, before any worker starts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mono_kernel.checkpoint_formats import LAYOUTS
from mono_kernel.layer_gfx950 import Build
from mono_kernel.shapes import Formats
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.config import ModelConfig
from rocm_msa.flydsl_compile import FLYDSL_VERSION
from rocm_msa.kernel_manifest import Entry, Manifest, write
from rocm_msa.vllm_plugin import compat, mono_config
from rocm_msa.vllm_plugin.mono_config import Facts, reasons
from rocm_msa.vllm_plugin.verify import Options, resolve
from tests.vllm_plugin.test_verify import config, refusal

ROOT = Path(__file__).resolve().parents[2]
MONO = {"additional_config": {"rocm_msa": {"mono": True}}}
SERVED = {"dtype": "bfloat16", "attention_config": {"indexer_kv_dtype": "nvfp4"}}
GOOD = Facts(
    MINIMAX_M3, 4, "nvfp4", "nvfp4", "bfloat16", "cpu", None, weight_formats=LAYOUTS["mxfp8"]
)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> str:
    """A tiny checkpoint that two ranks can serve."""
    path = tmp_path_factory.mktemp("mono") / "mxfp4"
    make_checkpoint(path, "tiny", "mxfp4", intermediate_size=256)
    return str(path)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_public_geometry_is_served(layout, tp):
    facts = dataclasses.replace(GOOD, tp=tp, weight_formats=LAYOUTS[layout])
    assert reasons(facts) == []
    assert facts.shape.tp == tp and facts.shape.routed_format == LAYOUTS[layout].routed


REFUSED = [
    ({"main": "fp8"}, ["--kv-cache-dtype: expected nvfp4, got fp8"]),
    ({"index": "bf16"}, ["indexer_kv_dtype: expected nvfp4, got bf16"]),
    ({"dtype": "float16"}, ["--dtype: expected bfloat16, got float16"]),
    ({"tp": 16}, ["tp: expected one of (1, 2, 4, 8), got 16", "intermediate"]),
    ({"tp": 3}, ["num_attention_heads: expected a multiple of 3, got 64", "num_key_value_heads"]),
    ({"weight_formats": Formats("bf16", "bf16", "mxfp8")}, ["routed_format: expected one of"]),
    ({"weight_formats": ("a.b: expected x, got y", "c")}, ["a.b: expected x, got y", "c"]),
    (
        {"model": dataclasses.replace(MINIMAX_M3, hidden_size=6200, topk_blocks=8)},
        ["hidden: expected a multiple of 128, >= 1, got 6200", "topk: expected 16, got 8"],
    ),
    ({"data_parallel": 2}, ["--data-parallel-size: expected 1, got 2"]),
    ({"expert_parallel": True}, ["--enable-expert-parallel: expected False, got True"]),
    ({"sleep_mode": True}, ["--enable-sleep-mode"]),
    ({"weight_transfer": True}, ["weight_transfer_config"]),
    ({"routed_experts": True}, ["enable_return_routed_experts"]),
    ({"load_format": "dummy"}, ["--load-format: its weights come from a checkpoint, got dummy"]),
    ({"nodes": 2}, []),
    ({"device": "xpu"}, ["device: expected one of ('cpu', 'rocm'), got xpu"]),
    ({"device": "cuda"}, ["device: expected one of ('cpu', 'rocm'), got cuda"]),
    ({"backend": "reference"}, []),
    ({"backend": "emulated"}, []),
    ({"backend": "triton"}, ["backend: expected None or one of ('reference', 'emulated'), got tr"]),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_each_reason(change, words):
    found = reasons(dataclasses.replace(GOOD, **change))
    assert len(found) >= len(words) and bool(found) == bool(words)
    for word, reason in zip(words, found, strict=False):
        assert reason.startswith("mono: ") and word in reason


def test_all_reasons_come_at_once():
    """Those that do not stand in each other's way."""
    chosen = [(c, words) for c, words in REFUSED if not {"weight_formats", "device"} & set(c)]
    chosen = [(c, words) for c, words in chosen if words and c != {"tp": 3}]
    together = {key: value for change, _ in chosen for key, value in change.items()}
    found = "\n".join(reasons(dataclasses.replace(GOOD, **together)))
    assert len(chosen) >= 11
    for _, words in chosen:
        assert words[0] in found


def kernels(folder: Path, facts: Facts) -> Path:
    """A manifest that lists the layer's kernel."""
    symbol = Build.from_shape(facts.shape).symbol
    values = {f.name: "" for f in dataclasses.fields(Entry)}
    values |= {
        "name": symbol,
        "file": f"{symbol}.hsaco",
        "build": {},
        "arguments": (),
        "registers": {},
        "block": (256, 1, 1),
    }
    values |= dict.fromkeys(("bytes", "static_lds", "dynamic_lds", "kernarg_bytes"), 0)
    write(folder, Manifest("gfx950", FLYDSL_VERSION, "0", {symbol: Entry(**values)}))
    return folder


def test_on_rocm_the_kernel_must_have_been_compiled(tmp_path):
    gpu = dataclasses.replace(GOOD, device="rocm", folder=tmp_path)
    (reason,) = reasons(gpu)
    assert "manifest.json does not exist; to build it: rocm-msa compile" in reason
    kernels(tmp_path, gpu)
    assert reasons(gpu) == reasons(dataclasses.replace(gpu, backend="flydsl")) == []
    (reason,) = reasons(dataclasses.replace(gpu, tp=2))
    assert "lacks mono_layer_tp2_" in reason and reason.endswith("--mono config")
    (reason,) = reasons(dataclasses.replace(gpu, backend="reference"))
    assert "backend: expected None or one of ('flydsl',), got reference" in reason
    (reason,) = reasons(dataclasses.replace(gpu, share_scan=True))
    assert "lacks mono_layer_tp4_" in reason
    (reason,) = reasons(dataclasses.replace(gpu, nodes=2))
    assert "--nnodes: expected 1, got 2" in reason


@pytest.mark.parametrize("tp", [1, 2])
def test_the_additional_config_asks_for_it(quantised, tp):
    serving = resolve(config(quantised, tensor_parallel_size=tp, **SERVED, **MONO))
    assert (serving.mono.tp, serving.mono.intermediate) == (tp, 256 // tp)
    assert serving.mono.routed_format == "mxfp4"
    assert resolve(config(quantised, tensor_parallel_size=tp, **SERVED)).mono is None


def test_rocm_calls_its_devices_cuda(quantised, tmp_path, monkeypatch):
    made = config(quantised, **SERVED)
    model = ModelConfig.from_hf(made.model_config.hf_config)
    assert mono_config.facts_of(made, Options(), model).device == "cpu"
    monkeypatch.setattr(made.device_config, "device_type", "cuda")
    assert mono_config.facts_of(made, Options(), model).device == "cuda"
    monkeypatch.setattr(compat, "on_rocm", lambda: True)
    options = Options(mono=True, code_objects=str(tmp_path), indexer_decode_cp=True)
    facts = mono_config.facts_of(made, options, model)
    assert (facts.device, facts.folder, facts.share_scan) == ("rocm", tmp_path, True)
    assert facts.weight_formats == LAYOUTS["mxfp4"]


def test_the_engines_own_flag_asks_for_it(quantised):
    made = config(quantised, **SERVED)
    assert not mono_config.asked_for(made, Options())
    assert not compat.mono_kernel_requested(made)  # 0.32 does not have it
    newer = SimpleNamespace(kernel_config=SimpleNamespace(monokernel=True))
    assert mono_config.asked_for(newer, Options())


def test_what_the_engine_reads_is_refused_with_every_reason(checkpoint, quantised):
    """The first checkpoint is bf16 throughout, with experts of 128."""
    bad = MONO | {"dtype": "float32", "tensor_parallel_size": 2, "block_size": 64}
    message = refusal(checkpoint, **bad, attention_config={"indexer_kv_dtype": "fp8"})
    for words in (
        "--block-size: expected 128",
        "mono: indexer_kv_dtype: expected nvfp4, got fp8",
        "mono: --dtype: expected bfloat16, got float32",
        "mono: intermediate: expected a multiple of 128, >= 1, got 64",
        "mono: routed_format: expected one of ('mxfp4', 'nvfp4', 'mxfp8'), got bf16",
    ):
        assert words in message
    assert "--load-format" in refusal(quantised, **SERVED, **MONO, load_format="dummy")
    asked = {"additional_config": {"rocm_msa": {"mono": "yes"}}}
    assert "rocm_msa.mono: expected a bool, got yes" in refusal(quantised, **SERVED, **asked)


@pytest.mark.slow
def test_vllm_033_has_a_flag_of_its_own(quantised, tmp_path):
    """`--kernel-config monokernel` in 0.33's own configuration code."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from rocm_msa.vllm_plugin.verify import resolve\n"
        "made = EngineArgs(**json.loads(sys.argv[1])).create_engine_config()\n"
        "print('TP', resolve(made).mono.tp)\n"
    )
    options = SERVED | {
        "model": quantised,
        "block_size": 128,
        "kv_cache_dtype": "nvfp4",
        "max_model_len": 2048,
        "kernel_config": {"monokernel": True},
    }
    runner = str(Path(__file__).with_name("vllm_033.py"))
    done = subprocess.run(
        [sys.executable, runner, str(script), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TP 1" in done.stdout
