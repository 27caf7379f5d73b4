"""Which configurations have graphs, what is refused, and what is said. ROCm's: tests/rocm."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from vllm.config import CompilationMode, CUDAGraphMode

from rocm_msa.errors import Refusals
from rocm_msa.vllm_plugin import graph_config
from rocm_msa.vllm_plugin.verify import Options
from tests.vllm_plugin.test_verify import config, refusal

FULL_DECODE_ONLY, NONE = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE


def made(
    *, device: str = "cuda", v2: bool = True, eager: bool = False, level: int = 2, mode=None,
    asked=None,
):  # fmt: skip
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(enforce_eager=eager),
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=asked),
        use_v2_model_runner=v2,
        optimization_level=level,
    )


@pytest.mark.parametrize(
    ("what", "backend", "mode", "said"),
    [
        ({}, None, FULL_DECODE_ONLY, "decode steps are captured"),
        ({}, "flydsl", FULL_DECODE_ONLY, "decode steps are captured"),
        ({}, "triton", FULL_DECODE_ONLY, "decode steps are captured"),
        ({"level": 1}, None, FULL_DECODE_ONLY, "decode steps are captured"),
        ({"asked": CUDAGraphMode.FULL_AND_PIECEWISE}, None, FULL_DECODE_ONLY, "decode steps are"),
        ({"asked": FULL_DECODE_ONLY, "level": 0}, None, FULL_DECODE_ONLY, "decode steps are"),
        ({}, "reference", NONE, "no graphs: the reference ops read lengths on the host"),
        ({"v2": False}, None, NONE, "no graphs: vLLM takes its model runner V1"),
        ({"eager": True}, None, NONE, "no graphs: --enforce-eager"),
        ({"asked": NONE}, None, NONE, "no graphs: --compilation-config cudagraph_mode is NONE"),
        ({"level": 0}, None, NONE, "no graphs: -O0"),
        ({"device": "cpu"}, None, NONE, "no graphs: there are none on the CPU"),
        ({"device": "cpu"}, "emulated", NONE, "no graphs: there are none on the CPU"),
        ({"device": "cpu", "asked": FULL_DECODE_ONLY}, None, NONE, "none on the CPU"),
    ],
)
def test_the_mode_and_the_line_in_the_log(what, backend, mode, said, monkeypatch, caplog):
    monkeypatch.setattr(graph_config.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(graph_config.logger, "propagate", False)
    caplog.set_level(logging.INFO, graph_config.logger.name)
    vllm_config, refusals = made(**what), Refusals("no")
    graph_config.check_config(vllm_config, Options(backend), refusals)
    assert refusals.reasons == []
    graph_config.settle(vllm_config, Options(backend))
    assert vllm_config.compilation_config.mode == CompilationMode.NONE
    assert vllm_config.compilation_config.cudagraph_mode == mode
    (record,) = caplog.records
    assert said in record.getMessage()
    graph_config.check_config(vllm_config, Options(backend), refusals)  # again, in a worker
    assert refusals.reasons == []


@pytest.mark.parametrize(
    ("what", "backend", "words"),
    [
        ({"asked": CUDAGraphMode.PIECEWISE}, None, ["got PIECEWISE: torch does not compile"]),
        ({"asked": CUDAGraphMode.FULL}, None, ["got FULL: steps with prompts are planned"]),
        ({"mode": CompilationMode.VLLM_COMPILE}, None, ["expected NONE or unset, got VLLM_COMP"]),
        (
            {"asked": FULL_DECODE_ONLY},
            "reference",
            ["FULL_DECODE_ONLY is asked for, and there are none: the reference ops read"],
        ),
        ({"asked": FULL_DECODE_ONLY, "v2": False}, None, ["there are none: vLLM takes its model"]),
        (
            {"asked": CUDAGraphMode.FULL, "mode": CompilationMode.STOCK_TORCH_COMPILE, "v2": False},
            None,
            ["got STOCK_TORCH_COMPILE", "got FULL", "V1"],
        ),
    ],
)
def test_what_is_refused_with_its_reason(what, backend, words):
    refusals = Refusals("no")
    graph_config.check_config(made(**what), Options(backend), refusals)
    assert len(refusals.reasons) == len(words)
    for reason, word in zip(refusals.reasons, words, strict=True):
        assert word in reason


def test_in_vllms_own_configuration(checkpoint):
    """Of this machine, which has no GPU: no graphs, and compilation is refused among the rest."""
    compilation = config(checkpoint).compilation_config
    assert (compilation.mode, compilation.cudagraph_mode) == (CompilationMode.NONE, NONE)
    message = refusal(checkpoint, compilation_config={"mode": 3}, block_size=64)
    assert "--compilation-config mode: torch does not compile these layers" in message
    assert "--block-size: expected 128" in message
