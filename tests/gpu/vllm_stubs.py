"""Stands in for vLLM on a machine with a GPU and without it: enough to import the plugin's layers.

Every module below `vllm` exists and holds whatever class is asked of it, an empty one. The few
names that the code under test calls are given. Where vLLM is installed, nothing is done.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        for name, value in _GIVEN.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Builder:
    """Of vLLM's attention metadata builder."""

    def __class_getitem__(cls, item):
        return cls

    def __init__(self, spec, layer_names, vllm_config, device) -> None:
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, least: int, supports_spec_as_decode: bool) -> None:
        self.reorder_batch_threshold = self.vllm_config.rows


def _all_decode(common, decode_threshold: int, require_uniform: bool):
    """Of split_decodes_and_prefills, for steps of decode rows."""
    return common.num_reqs, 0, common.num_actual_tokens, 0


_GIVEN = {
    "vllm.v1.attention.backend": {
        "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH=2),
        "AttentionMetadataBuilder": _Builder,
    },
    "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": _all_decode},
}


def install() -> None:
    """For the rest of the process."""
    if importlib.util.find_spec("vllm") is None:
        sys.meta_path.append(_Finder())
