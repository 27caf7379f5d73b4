"""Compiled kernels at start-up: loaded on gfx950, refused or warned of, ignored elsewhere."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

from rocm_msa import aot, launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.vllm_plugin import kernels
from tests.launcher import toy
from tests.launcher.emulated import FakeHip

GPU = torch.device("cuda", 0)


def serving(code_objects=None, backend=None):
    options = SimpleNamespace(code_objects=code_objects, backend=backend)
    nvfp4 = CacheDType.NVFP4
    return SimpleNamespace(
        model=MINIMAX_M3, rank=MINIMAX_M3.shard(4), main_dtype=nvfp4, index_dtype=nvfp4,
        options=options, mono=None,
    )  # fmt: skip


@pytest.fixture
def gfx950(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_active", {})
    monkeypatch.setattr(launcher, "_faults", {})
    monkeypatch.setattr(launcher, "Hip", FakeHip().runtime)
    monkeypatch.setattr(kernels, "_check_ops", lambda serving: None)
    monkeypatch.setattr(aot.builds, "__kwdefaults__", {"modules": (toy.__name__,)})


def start(**options):
    kernels.start(serving(**options), torch.bfloat16)


def test_kernels_of_the_configuration_are_loaded(gfx950, tmp_path, caplog):
    aot.compile_builds(toy.builds(SimpleNamespace(topk=16)), tmp_path, processes=1)
    with caplog.at_level(logging.WARNING):
        start(code_objects=str(tmp_path), backend="flydsl")
    assert not caplog.records
    assert launcher.active(GPU).missing([toy.Build(16)]) == []


@pytest.mark.parametrize("missing_file", [True, False])
def test_missing_kernels_are_refused_when_asked_for_and_else_said(
    gfx950, tmp_path, caplog, missing_file, monkeypatch
):
    if not missing_file:
        aot.compile_builds([toy.Build(16)], tmp_path, processes=1)
    words = "manifest.json does not exist" if missing_file else "lacks toy_add16_twice"
    monkeypatch.setattr(launcher, "PACKAGE_DIRECTORY", tmp_path)
    for options in ({"code_objects": str(tmp_path)}, {"backend": "flydsl"}):
        with pytest.raises(RuntimeError, match=words) as caught:
            start(**options)
        assert launcher.BUILD_COMMAND in str(caught.value)
    logger = logging.getLogger("vllm.rocm_msa")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    start()
    assert words in caplog.text and "run on Triton" in caplog.text


def test_other_devices_load_nothing(monkeypatch, caplog):
    monkeypatch.setattr(launcher, "start", None)
    start(code_objects="/nowhere")
    assert not caplog.records


def test_a_backend_that_an_op_lacks_is_refused_at_once():
    with pytest.raises(RuntimeError, match=r"backend flydsl: .*dense_attention has no FlyDSL"):
        start(backend="flydsl")
    only_sparse = serving(backend="flydsl")
    only_sparse.model = dataclasses.replace(MINIMAX_M3, sparse_layers=(True,) * 60)
    try:
        kernels.start(only_sparse, torch.bfloat16)
    except RuntimeError as error:
        assert "dense_attention" not in str(error)
