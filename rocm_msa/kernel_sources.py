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


def newer_sources(module: str, moment: float) -> list[str]:
    """Modules that `source_digest` covers and that were written after `moment` (Unix time)."""
    return [name for name, path in _files(module).items() if path.stat().st_mtime > moment]


@functools.cache
def _sources(module: str) -> tuple[str, ...]:
    """`name:digest` of each file of the digest."""
    files = sorted(_files(module).items())
    return tuple(f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in files)


def _files(module: str) -> dict[str, Path]:
    """`module` and all that it imports of its own top-level package and of rocm_msa."""
    top, todo, found = module.partition(".")[0], [module], {}
    tops = {top, "rocm_msa"}
    while todo:
        name = todo.pop()
        if name in found or name in HOST_ONLY or name.partition(".")[0] not in tops:
            continue
        path = _file(name)
        if path is None:
            continue  # `from module import value`
        found[name] = path
        todo += _imports(path.read_text(), name, path.name == "__init__.py")
    return found


@functools.lru_cache(maxsize=512)  # ops share most of their modules, and parsing takes 20 ms
def _imports(text: str, name: str, is_package: bool) -> tuple[str, ...]:
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
    return tuple(found)


def _file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None
