"""A digest of everything that a compiled kernel is a function of.

    sha256(sources of the op's module and of all it imports from the project, build parameters,
           compiler version)

It needs no compiler, so that the launcher can compare it with the manifest's: host code and kernels
that do not belong together are refused. A change that only touches a comment counts as a change.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocm_msa.flydsl_compile import FLYDSL_VERSION

# Imported by the ops' host code; nothing of them is traced into a kernel.
HOST_ONLY = frozenset(
    f"rocm_msa.{name}"
    for name in ("aot", "errors", "launcher", "hip", "kernel_manifest", "kernel_sources")
)


def source_digest(module: str, parameters: Mapping[str, Any]) -> str:
    """Digest for a kernel that `module.compile_build` makes of these build parameters."""
    parts = [FLYDSL_VERSION, module, *_sources(module), json.dumps(parameters, sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _sources(module: str) -> tuple[str, ...]:
    """`name:digest` of each file that `module` imports from its own top-level package."""
    top, todo, found = module.partition(".")[0], [module], {}
    tops = {top, "rocm_msa"}
    while todo:
        name = todo.pop()
        if name in found or name in HOST_ONLY or name.partition(".")[0] not in tops:
            continue
        path = _file(name)
        if path is None:
            continue  # `from module import value`
        text = path.read_text()
        found[name] = hashlib.sha256(text.encode()).hexdigest()
        todo += _imports(text, name, path.name == "__init__.py")
    return tuple(f"{name}:{found[name]}" for name in sorted(found))


def _imports(text: str, name: str, is_package: bool) -> list[str]:
    package = name.split(".") if is_package else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b` may name the module a.b: both are looked at.
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def _file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None
