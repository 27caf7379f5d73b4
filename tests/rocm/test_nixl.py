"""The KV connector takes NIXL's build for ROCm beside a ROCm PyTorch, as vLLM 0.33 does."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from rocm_msa.vllm_plugin.nixl.agent import nixl_api
from tests.vllm_plugin import vllm_033


@pytest.fixture
def rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.0")


def test_the_package_for_rocm_is_taken(rocm, monkeypatch):
    api = types.ModuleType("nixl_rocm._api")
    monkeypatch.setitem(sys.modules, "nixl_rocm", types.ModuleType("nixl_rocm"))
    monkeypatch.setitem(sys.modules, "nixl_rocm._api", api)
    assert nixl_api() is api


def test_without_it_the_message_names_it(rocm, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_rocm", None)
    with pytest.raises(RuntimeError, match=r"needs the package nixl_rocm \(NIXL built for ROCm\)"):
        nixl_api()


def test_elsewhere_it_is_the_other_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(RuntimeError, match=r"needs the package nixl \(rocm-msa's extra `nixl`\)"):
        nixl_api()


def test_vllm_033_takes_the_same_package():
    source = vllm_033.sources()[1] / "vllm" / "distributed" / "nixl_utils.py"
    assert '"nixl_rocm" if current_platform.is_rocm() else "nixl"' in source.read_text()
