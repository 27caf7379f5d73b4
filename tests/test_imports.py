"""The dependency rule of docs/architecture.md, from one small table.

Every Python file is scanned with `ast`: who imports what, at the top level or inside a function.
Packages that do not exist yet are allowed to be missing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("rocm_msa", "mono_kernel", "dcp")
TOP = (*PRODUCT, "gfx950_emu", "tests", "benchmarks")

# Each layer may import the layers before it, and itself.
LAYERS = [
    "arch config config_read errors layout",
    "formats",
    "cache device comm code_object flydsl_compile hip kernel_manifest kernel_sources",
    "aot launcher",
    "ops capacity checkpoint emulated",
    "parallel /mono_kernel /dcp",
    "selfcheck",
    "vllm_plugin cli demo",
]
LAYERS = [
    [m[1:] if m.startswith("/") else f"rocm_msa.{m}" for m in layer.split()] for layer in LAYERS
]
# Within one layer, these may not import each other.
STRANGERS = [
    ("rocm_msa.ops", "rocm_msa.capacity", "rocm_msa.checkpoint"),
    ("rocm_msa.parallel", "mono_kernel", "dcp"),
]
# Of the ops' package, what makes one call of several ops.
ABOVE_OPS = ("rocm_msa.ops", "rocm_msa.ops.select_decode")
# Test support: sees everything below the plugin, is seen by tests and benchmarks alone.
TESTING = "rocm_msa.testing"

# Without these at the top level, whatever imports them.
PURE = {
    "rocm_msa": ("torch", "triton", "flydsl", "vllm", "numpy"),
    "rocm_msa.arch": ("torch", "triton", "flydsl", "vllm"),
    "rocm_msa.config": ("torch", "triton", "flydsl", "vllm"),
    "rocm_msa.config_read": ("torch", "triton", "flydsl", "vllm"),
    "rocm_msa.errors": ("torch", "triton", "flydsl", "vllm"),
    "rocm_msa.layout": ("torch", "triton", "flydsl", "vllm"),
}
# Never, not even inside a function: by file name, and by package.
NEVER_IN_FILE = dict.fromkeys(
    ("plan.py", "shard.py", "layout.py", "mailbox_layout.py"), ("torch", "flydsl")
)
NEVER_IN_PACKAGE = {"rocm_msa.device": ("torch",), "gfx950_emu": PRODUCT}

# The one package of the product that may import gfx950_emu: backend "emulated" and tests ask for it
# by name. Nothing else of the product may import it at its top level.
EMULATED = "rocm_msa.emulated"

# Modules outside of the plugin that may import vllm inside a function: name -> why.
VLLM_INSIDE_FUNCTIONS: dict[str, str] = {}


@dataclass(frozen=True)
class Import:
    module: str  # that imports
    path: Path
    target: str  # that is imported, dotted
    line: int
    top_level: bool

    def __str__(self) -> str:
        where = "" if self.top_level else " (inside a function)"
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.target}{where}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[Import]:
    """All imports of a file; `if TYPE_CHECKING:` blocks do not count."""
    module, found = module_name(path), []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            targets = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, *([base] if base else [])])
                # `from a import b` may name the module a.b: both are looked at
                targets = [base, *(f"{base}.{alias.name}" for alias in child.names)]
            found.extend(Import(module, path, t, child.lineno, top) for t in targets)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, top and not function)

    visit(ast.parse(path.read_text(), str(path)), True)
    return found


def scan() -> list[Import]:
    files = [f for top in TOP for f in sorted((ROOT / top).rglob("*.py")) if (ROOT / top).is_dir()]
    return [i for f in files for i in imports_of(f)]


ALL = scan()


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def place(name: str) -> tuple[int, str] | None:
    """(layer, member of the table) of a module, None for what is not in the table."""
    for level, members in enumerate(LAYERS):
        for member in members:
            if under(name, member):
                return level, member
    return None


def in_product(name: str) -> bool:
    return any(under(name, p) for p in PRODUCT)


def none_of(faults: list[Import]) -> None:
    assert not faults, "\n".join(sorted({str(f) for f in faults}))


def test_the_scan_sees_the_packages():
    seen = {i.module for i in ALL}
    assert {"rocm_msa.config", "rocm_msa.formats.nvfp4", "rocm_msa.cache.paged"} <= seen
    assert "rocm_msa.ops.block_topk.api" in seen and "tests.test_imports" in seen


def test_every_module_of_the_product_has_a_place():
    modules = {i.module for i in ALL if in_product(i.module)} - {"rocm_msa"}
    homeless = {m for m in modules if place(m) is None and not under(m, TESTING)}
    assert not homeless, f"not in the table of tests/test_imports.py: {sorted(homeless)}"


def test_layers_import_only_what_lies_above_them():
    faults = []
    for i in ALL:
        here, there = place(i.module), place(i.target)
        if here and there and there[0] > here[0]:
            faults.append(i)
    none_of(faults)


@pytest.mark.parametrize("group", STRANGERS, ids=lambda g: "-".join(g))
def test_neighbours_do_not_import_each_other(group):
    none_of(
        [
            i
            for i in ALL
            for a in group
            for b in group
            if a != b and under(i.module, a) and under(i.target, b)
        ]
    )


def op_of(name: str) -> str | None:
    """The op folder that a module lies in; None for the parts that ops share."""
    parts = name.split(".")
    inside = parts[:2] == ["rocm_msa", "ops"] and len(parts) > 2
    return parts[2] if inside and (ROOT / "rocm_msa" / "ops" / parts[2]).is_dir() else None


def test_an_op_imports_no_other_op():
    assert op_of("rocm_msa.ops.block_topk.api") == "block_topk"
    assert op_of("rocm_msa.ops.rows") is None
    faults = []
    for i in ALL:
        of_ops = under(i.module, "rocm_msa.ops") and i.module not in ABOVE_OPS
        if of_ops and op_of(i.target) not in (None, op_of(i.module)):
            faults.append(i)
    none_of(faults)


def test_only_the_plugin_imports_vllm():
    faults = []
    for i in ALL:
        if not under(i.target, "vllm") or not (
            in_product(i.module) or under(i.module, "gfx950_emu")
        ):
            continue
        if under(i.module, "rocm_msa.vllm_plugin"):
            continue
        if i.module in VLLM_INSIDE_FUNCTIONS and not i.top_level:
            continue
        faults.append(i)
    none_of(faults)


def test_test_support_is_for_tests_and_benchmarks():
    none_of(
        [
            i
            for i in ALL
            if under(i.target, TESTING)
            and not under(i.module, TESTING)
            and not under(i.module, "tests")
            and not under(i.module, "benchmarks")
        ]
    )
    none_of([i for i in ALL if under(i.module, TESTING) and (place(i.target) or (0,))[0] > 5])


def test_emulator_and_product_do_not_know_each_other():
    product = [i for i in ALL if in_product(i.module) and not under(i.module, EMULATED)]
    none_of([i for i in product if under(i.target, "gfx950_emu")])
    none_of([i for i in product if under(i.target, EMULATED) and i.top_level])
    none_of([i for i in ALL if under(i.module, "gfx950_emu") and in_product(i.target)])


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_heavy(module):
    faults = [i for i in ALL if i.module == module and i.top_level]
    none_of([i for i in faults if any(under(i.target, heavy) for heavy in PURE[module])])


def test_packages_and_files_that_never_touch_torch():
    faults = []
    for i in ALL:
        never = NEVER_IN_FILE.get(i.path.name, ()) if in_product(i.module) else ()
        for package, names in NEVER_IN_PACKAGE.items():
            never += names if under(i.module, package) else ()
        faults += [i for name in never if under(i.target, name)]
    none_of(faults)


def test_flydsl_stays_in_device_code():
    """FlyDSL: in device/, traced files and the compiler shim, there inside functions.

    Traced files: the ops' flydsl_*.py, dcp's *_kernel.py, mono_kernel's layer.py and phases/.
    device/ itself is for those alone. What loads with an op: the test of heavy packages.
    """

    def kernel_file(i: Import) -> bool:
        if under(i.module, "dcp"):
            return i.path.name.endswith("_kernel.py")
        if under(i.module, "mono_kernel"):
            return any(under(i.module, f"mono_kernel.{part}") for part in ("layer", "phases"))
        return under(i.module, "rocm_msa.ops") and i.path.name.startswith("flydsl_")

    faults = []
    for i in ALL:
        if not in_product(i.module) or under(i.module, "rocm_msa.device"):
            continue
        if under(i.target, "flydsl"):
            shim = i.module == "rocm_msa.flydsl_compile" and not i.top_level
            faults += [] if shim or kernel_file(i) else [i]
        if under(i.target, "rocm_msa.device"):
            faults += [] if kernel_file(i) else [i]
    none_of(faults)


def test_the_product_does_not_import_tests():
    none_of([i for i in ALL if in_product(i.module) and under(i.target, "tests")])


HEAVY = ("torch", "triton", "flydsl", "vllm", "transformers", "numpy")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after `code`."""
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module", ["rocm_msa", *sorted(m for m in PURE if m != "rocm_msa" and "." in m)]
)
def test_importing_them_loads_nothing_heavy(module):
    assert loaded_by(f"import {module}") == set()


def test_ops_and_caches_load_torch_only():
    code = "import rocm_msa.ops, rocm_msa.cache, rocm_msa.formats"
    assert loaded_by(code) <= {"torch", "numpy"}


def test_the_interface_of_the_exchange_loads_nothing_heavy():
    assert loaded_by("import dcp.api, dcp.plan, dcp.shard") == set()


def test_the_rule_is_not_vacuous(tmp_path, monkeypatch):
    """The scanner finds relative imports, `from a import b`, and imports in functions."""
    file = ROOT / "rocm_msa" / "ops" / "block_topk" / "api.py"
    found = imports_of(file)
    targets = {i.target for i in found}
    assert "rocm_msa.ops.block_topk.reference" in targets and "torch" in targets
    source = tmp_path / "rocm_msa" / "ops" / "x" / "api.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "from __future__ import annotations\nfrom .. import y\nfrom ...cache import pages\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n"
        "def f():\n    import vllm.config\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    got = {(i.target, i.top_level) for i in imports_of(source)}
    assert {("rocm_msa.ops.y", True), ("rocm_msa.cache.pages", True)} <= got
    assert ("vllm.config", False) in got and ("vllm", True) not in got
