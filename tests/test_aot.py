"""Compiling ahead of time: the set, the folder, the cache; the digest of sources."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import rocm_msa
from gfx950_emu import CodeObject
from rocm_msa import aot, kernel_manifest, kernel_sources
from rocm_msa.aot import ServingConfig, builds, compile_builds
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.code_object import kernel_metadata
from rocm_msa.errors import ConfigError
from tests.launcher import toy

TOY = (toy.__name__,)
CONFIG = ServingConfig.of(MINIMAX_M3, tp=4)
LAYERS = ("mono_kernel.layer_gfx950",)  # launched by themselves, not as an op


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rocm-msa" / "code_objects"


def test_configuration_of_a_model():
    assert (CONFIG.q_heads, CONFIG.kv_heads, CONFIG.index_heads) == (16, 1, 1)
    assert (CONFIG.head_dim, CONFIG.rotary_dim, CONFIG.topk) == (128, 64, 16)
    assert CONFIG.main_dtype is CacheDType.NVFP4 and CONFIG.has_dense_layers
    assert dataclasses.replace(CONFIG, main_dtype="fp8").main_dtype is CacheDType.FP8
    for wrong in ({"dtype": "int8"}, {"q_heads": 0}, {"main_dtype": "int4"}, {"rope_dtype": "x"}):
        with pytest.raises(
            ValueError, match=next(iter(wrong)).replace("main_dtype", "cache dtype")
        ):
            dataclasses.replace(CONFIG, **wrong)


def test_every_kernel_of_the_set_comes_once():
    more = dataclasses.replace(CONFIG, topk=8)
    found = builds(CONFIG, more, CONFIG, modules=TOY)
    assert [b.symbol for b in found] == [
        "toy_add16", "toy_add16_twice", "toy_add8", "toy_add8_twice"
    ]  # fmt: skip


def test_every_op_keeps_to_the_protocol():
    for config in (CONFIG, ServingConfig.of(MINIMAX_M3, 1, "bf16", "fp8", "fp16")):
        found = builds(config)
        assert len({b.symbol for b in found}) == len(found)
        for build in found:
            assert dataclasses.is_dataclass(build) and build.symbol.isidentifier()
            assert json.loads(json.dumps(dataclasses.asdict(build))) == dataclasses.asdict(build)
            assert isinstance(build.grid, str) and hash(build) == hash(dataclasses.replace(build))
    for name in aot.MODULES:
        module = aot.importlib.import_module(name)
        calls = ("compile_build",) if name in LAYERS else ("needs", "run", "compile_build")
        assert all(callable(getattr(module, f)) for f in calls)


def test_the_mono_layer_is_a_kernel_or_two_where_it_is_asked_for():
    """The second shares the index scan, where there is more than one rank."""

    def found(tp=4, caches="nvfp4", dtype="bf16", formats=("mxfp8", "nvfp4", "mxfp8")):
        config = ServingConfig.of(MINIMAX_M3, tp, caches, "nvfp4", dtype, formats)
        return builds(config, modules=LAYERS)

    build, sharing = found()
    assert sharing == dataclasses.replace(build, exchange=True)
    assert [len(found(tp=tp)) for tp in (1, 2, 8)] == [1, 2, 2]
    assert (build.tp, build.experts, build.intermediate, build.shared) == (4, 128, 768, 768)
    assert (build.attention_format, build.routed_format) == ("mxfp8", "nvfp4")
    assert found(formats=None) == found(caches="fp8") == found(dtype="fp16") == []
    with pytest.raises(ConfigError, match="routed_format: expected one of"):
        found(formats=("bf16", "bf16", "bf16"))


def test_every_op_with_kernels_is_in_the_table():
    files = (Path(rocm_msa.__file__).parent / "ops").glob("*/flydsl_gfx950.py")
    ops = {f"rocm_msa.ops.{f.parent.name}.flydsl_gfx950" for f in files}
    assert ops | {"dcp.exchange_gfx950", *LAYERS} == set(aot.MODULES)


def test_the_folder_holds_what_the_manifest_says(own_cache, tmp_path):
    out = tmp_path / "out"
    summary = compile_builds(builds(CONFIG, modules=TOY), out)
    assert (summary.kernels, summary.compiled) == (2, 2)
    assert sorted(p.name for p in out.iterdir()) == [
        "manifest.json", "toy_add16.hsaco", "toy_add16_twice.hsaco"
    ]  # fmt: skip
    manifest = kernel_manifest.read(out)
    assert (manifest.arch, manifest.flydsl) == ("gfx950", aot.FLYDSL_VERSION)
    for entry in manifest.kernels.values():
        code = CodeObject.from_file(out / entry.file)
        kernel = code.kernels[entry.symbol]
        assert code.digest == entry.sha256
        assert [(a.offset, a.size, a.kind) for a in kernel.args] == [
            (a.offset, a.size, a.kind) for a in entry.arguments
        ]
        assert entry.kernarg_bytes == kernel.descriptor.kernarg_bytes == 32
        assert (entry.static_lds, entry.dynamic_lds) == (kernel.descriptor.lds_bytes, 1024)
        assert entry.registers["vgpr"] == kernel.vgpr_count > 0
        assert entry.registers["scratch_bytes"] == entry.registers["vgpr_spills"] == 0
        assert entry.block == (toy.LANES, 1, 1) and entry.grid == "(elements / 256)"
        # No path of the machine that compiled: the objects are shipped.
        data = (out / entry.file).read_bytes()
        assert b"toy_kernel" not in data and str(tmp_path).encode() not in data


def test_unchanged_kernels_are_not_compiled_again(own_cache, tmp_path, monkeypatch):
    both = [toy.Build(1), toy.Build(2)]
    compile_builds(both, tmp_path / "a", processes=1)
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    assert compile_builds(both, tmp_path / "a").compiled == 0
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before
    assert compile_builds([*both, toy.Build(3)], tmp_path / "b", processes=1).compiled == 1
    # A smaller set takes the rest out of its folder; nothing else is touched.
    (tmp_path / "b" / "mine.txt").write_text("x")
    compile_builds(both[:1], tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "manifest.json", "mine.txt", "toy_add1.hsaco"
    ]  # fmt: skip
    # What lies damaged in the cache is compiled again, so is what has other sources.
    next(own_cache.glob("*.hsaco")).write_bytes(b"")
    assert compile_builds([*both, toy.Build(3)], tmp_path / "b", processes=1).compiled == 1
    next(own_cache.glob("*.json")).write_text("{}")
    assert compile_builds([*both, toy.Build(3)], tmp_path / "b", processes=1).compiled == 1
    monkeypatch.setattr(kernel_sources, "_sources", lambda module: ("changed",))
    assert compile_builds(both, tmp_path / "a", processes=1).compiled == 2


def test_without_the_cache(own_cache, tmp_path):
    for _ in range(2):
        summary = compile_builds([toy.Build(1)], tmp_path / "out", use_cache=False)
        assert summary.compiled == 1
    assert not own_cache.exists()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json", "toy_add1.hsaco"
    ]  # fmt: skip


def test_refused(own_cache, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="arch: expected gfx950, got gfx942"):
        compile_builds([], tmp_path, arch="gfx942")

    class Same(toy.Build):
        symbol = "toy_add1"

    with pytest.raises(ValueError, match="two builds are called toy_add1"):
        compile_builds([Same(1), Same(2)], tmp_path)
    assert not (tmp_path / "manifest.json").exists()

    compiled = toy.compile_build(toy.Build(1))
    facts = kernel_metadata(compiled.code_object, compiled.kernel)
    spilling = facts | {".vgpr_spill_count": 3}
    monkeypatch.setattr(aot, "kernel_metadata", lambda *a: spilling)
    with pytest.raises(ValueError, match="toy_add1: it spills registers"):
        compile_builds([toy.Build(1)], tmp_path, processes=1)
    monkeypatch.setattr(aot, "kernel_metadata", lambda *a: facts | {".args": facts[".args"][1:]})
    with pytest.raises(ValueError, match="toy_add1: its `launch` must take exactly"):
        compile_builds([toy.Build(1)], tmp_path, processes=1)


def test_sources_that_change_meanwhile(own_cache, tmp_path, monkeypatch):
    compile_kernel = toy.compile_build

    def compile_build(build):
        monkeypatch.setattr(kernel_sources, "_sources", lambda module: ("edited",))
        return compile_kernel(build)

    monkeypatch.setattr(toy, "compile_build", compile_build)
    with pytest.raises(RuntimeError, match=r"sources changed while these were .*toy_add1"):
        compile_builds([toy.Build(1)], tmp_path, processes=1)
    monkeypatch.setattr(toy, "compile_build", compile_kernel)
    monkeypatch.setattr(aot, "_STARTED", 0.0)
    with pytest.raises(RuntimeError, match=r"since this process began: .*tests\.launcher\.toy"):
        compile_builds([toy.Build(2)], tmp_path, processes=1)
    assert not (tmp_path / "manifest.json").exists()


def test_code_object_metadata_refuses_other_files():
    compiled = toy.compile_build(toy.Build(1))
    with pytest.raises(ValueError, match="holds no kernel other"):
        kernel_metadata(compiled.code_object, "other")
    with pytest.raises(ValueError, match="not a 64-bit"):
        kernel_metadata(b"MZ", "x")
    x86 = bytearray(compiled.code_object)
    x86[18] = 62
    with pytest.raises(ValueError, match="for machine 62"):
        kernel_metadata(bytes(x86), "x")


# The digest of sources


def test_the_digest_follows_imports_inside_functions(tmp_path, monkeypatch):
    package = tmp_path / "digestible"
    package.mkdir()
    files = {
        "__init__.py": "",
        "op.py": "from rocm_msa import launcher\ndef f():\n    from .kernel import trace\n",
        "kernel.py": "from digestible import helpers\nimport json, flydsl\n",
        "helpers.py": "X = 1\n",
        "stranger.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def digest(**parameters):
        kernel_sources._sources.cache_clear()
        return kernel_sources.source_digest("digestible.op", parameters or {"n": 1})

    base = digest()
    names = [part.split(":")[0] for part in kernel_sources._sources("digestible.op")]
    assert [n for n in names if n != "rocm_msa"] == [
        "digestible", "digestible.helpers", "digestible.kernel", "digestible.op"
    ]  # fmt: skip
    assert digest() == base and digest(n=2) != base
    (package / "stranger.py").write_text("Y = 1\n")
    assert digest() == base
    (package / "helpers.py").write_text("X = 2\n")
    assert digest() != base
    (package / "helpers.py").write_text("X = 1\n")
    assert digest() == base
    monkeypatch.setattr(kernel_sources, "FLYDSL_VERSION", "0.5.1")
    assert digest() != base


def test_the_toys_sources_are_the_toys_and_the_shims():
    names = {part.split(":")[0] for part in kernel_sources._sources(toy.__name__)}
    assert {"tests.launcher.toy", "tests.launcher.toy_kernel", "rocm_msa.flydsl_compile"} <= names
    assert not names & kernel_sources.HOST_ONLY


def test_build_parameters_are_scalars():
    with pytest.raises(TypeError):
        kernel_sources.source_digest(toy.__name__, {"dtype": SimpleNamespace()})
