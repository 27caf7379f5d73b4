"""Static contract with both pinned vLLM versions: symbols, signatures and fields we use."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.vllm_plugin import contract

ROOT = Path(__file__).resolve().parents[2]


def _sources_033() -> Path:
    spec = importlib.util.spec_from_file_location(
        "fetch_vllm_sources", ROOT / "tools" / "fetch_vllm_sources.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fetch(module.PINNED)


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def sources(request) -> tuple[str, Path]:
    """(version, directory that holds vllm/)."""
    if request.param == "0.33":
        return request.param, _sources_033()
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin, "vllm is not installed in this environment"
    return request.param, Path(spec.origin).parents[1]


def test_every_import_of_the_plugin_exists(sources):
    version, root = sources
    imports = contract.plugin_imports()
    assert len(imports) > 20
    missing = [f"{m}.{n}" for m, n in sorted(imports) if not contract.module_binds(root, m, n)]
    assert not missing, f"vllm {version} lacks {missing}"


def test_signatures(sources):
    version, root = sources
    faults = []
    for path, functions in contract.SIGNATURES.items():
        tree = contract.parse(root / path)
        for qualname, wanted in functions.items():
            node = contract.find(tree, qualname)
            if node is None:
                faults.append(f"{path}: no {qualname}")
                continue
            got = contract.parameters(node)
            faults += [f"{path}: {qualname} has no parameter {p}" for p in wanted if p not in got]
    assert not faults, f"vllm {version}: {faults}"


def _field_faults(root: Path, table: dict) -> list[str]:
    faults = []
    for path, classes in table.items():
        tree = contract.parse(root / path)
        for name, wanted in classes.items():
            node = contract.find(tree, name)
            if not isinstance(node, ast.ClassDef):
                faults.append(f"{path}: no class {name}")
                continue
            got = contract.class_attributes(node)
            faults += [f"{path}: {name} has no {f}" for f in wanted if f not in got]
    return faults


def test_fields(sources):
    version, root = sources
    assert not _field_faults(root, contract.FIELDS), f"vllm {version}"


def test_version_specific_fields(sources):
    version, root = sources
    for only, table in contract.ONLY_IN.items():
        faults = _field_faults(root, table)
        assert bool(faults) == (version != only), f"vllm {version}: {faults}"


def test_upstream_vl_class_finds_what_it_asks_of_our_text_model(sources):
    """The VL class builds its text part through the registry, so it gets our class."""
    from rocm_msa.vllm_plugin import model

    _, root = sources
    asked = contract.asked_of_the_text_model(root)
    assert {"compute_logits", "get_expert_mapping", "make_empty_intermediate_tensors"} <= asked
    ours = contract.find(contract.parse(Path(model.__file__)), "RocmMsaM3ForCausalLM")
    assert asked <= contract.class_attributes(ours)


def test_the_checker_can_fail(sources):
    _, root = sources
    assert not contract.module_binds(root, "vllm.config", "NoSuchConfig")
    assert not contract.module_binds(root, "vllm.no_such_module", "x")
    assert _field_faults(root, {"vllm/config/cache.py": {"CacheConfig": ["no_such_field"]}})
    tree = contract.parse(root / "vllm/config/cache.py")
    assert contract.find(tree, "NoSuchClass") is None


def test_unsupported_version_is_refused(monkeypatch):
    import vllm

    from rocm_msa.vllm_plugin import compat

    compat.check_version()
    for bad in ("0.31.2", "0.34.0", "1.0.0"):
        monkeypatch.setattr(vllm, "__version__", bad)
        with pytest.raises(RuntimeError, match=rf"expected >= 0.32, < 0.34, got {bad}"):
            compat.check_version()


def test_register_is_idempotent_and_needs_no_torch_of_its_own():
    import rocm_msa.vllm_plugin as plugin

    plugin.register()
    plugin.register()
    tree = contract.parse(Path(plugin.__file__))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert all("torch" not in ast.dump(n) for n in imports)
    assert "torch" in sys.modules


@pytest.mark.parametrize("name", ["cpu_attn", "rocm_attn", "rocm_aiter_fa", "triton_attn"])
def test_attention_of_drafters_knows_one_of_our_layouts(name, sources):
    """All caches of an engine have one layout: LBHNC, unless a backend takes any."""
    version, root = sources
    tree = contract.parse(root / f"vllm/v1/attention/backends/{name}.py")
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "supported_kv_cache_layouts"
    ]
    assert len(functions) == (0 if name == "triton_attn" else 1), version
    for node in [n for f in functions for n in ast.walk(f) if isinstance(n, ast.Return)]:
        known = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        assert "LBHNC" in known and "BLHNC" not in known, (version, known)
