"""tools/setup_env.py as a module: it lies in no package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _load():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_env"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup_env = _load()
