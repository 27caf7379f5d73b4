"""Shared by the plugin tests: vLLM in this process, and the tiny checkpoint."""

from __future__ import annotations

import os

import pytest

# One process: an engine starts in about two seconds, and the layers can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """The tiny bf16 text checkpoint."""
    from rocm_msa.checkpoint.make import make_checkpoint

    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(path)
    return str(path)
