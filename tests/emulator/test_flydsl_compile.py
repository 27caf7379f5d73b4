"""The compile shim: what it gives, what it leaves alone, what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch

import rocm_msa.flydsl_compile as shim
from gfx950_emu.code_object import CodeObject
from rocm_msa.flydsl_compile import compile_flydsl, compile_triton
from tests.emulator.cases import Case
from tests.emulator.corpus import BY_NAME
from tests.emulator.kernels_flydsl import pointer
from tests.emulator.kernels_triton import softmax

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = {"x": "*fp32", "y": "*fp32", "columns": "i32"}


def make_launch(factor=2.0, block=128):
    @flyc.kernel(name="scale")
    def scale(x: fx.Pointer, count: fx.Int32):
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Float32, block, 16]).peek().ptr
        i = fx.thread_idx.x
        lds[i] = x[i]
        fx.barrier()
        if i < count:
            x[i] = lds[(i + 1) % block] * factor

    @flyc.kernel(name="other")
    def other(x: fx.Pointer):
        x[0] = fx.Float32(1.0)

    @flyc.jit
    def one(x: fx.Pointer, count: fx.Int32):
        scale(x, count).launch(grid=(1, 1, 1), block=(block, 1, 1))

    @flyc.jit
    def two(x: fx.Pointer, count: fx.Int32):
        scale(x, count).launch(grid=(1, 1, 1), block=(block, 1, 1))
        other(x).launch(grid=(1, 1, 1), block=(64, 1, 1))

    return one, two, scale


def instructions(compiled):
    kernel = CodeObject.from_bytes(compiled.code_object).kernels[compiled.kernel]
    return [(i.pc, i.raw) for i in kernel.instructions]


# FlyDSL


def test_flydsl_result():
    one, _, _ = make_launch()
    before = dict(os.environ)
    compiled = compile_flydsl(one, pointer(), 7)
    assert dict(os.environ) == before
    assert compiled.kernel == "scale" and compiled.arch == "gfx950"
    assert compiled.block == (128, 1, 1) and compiled.num_warps == 2
    assert compiled.lds_bytes == 512 and compiled.dynamic_lds_bytes == 0
    assert compiled.arguments == ("x", "count") and compiled.compiler == "flydsl 0.5.0"
    assert compiled.argument_types == ("ptr", "i32")
    assert CodeObject.from_bytes(compiled.code_object).digest == compiled.digest


def test_flydsl_is_repeatable_and_values_of_arguments_do_not_matter():
    one, _, _ = make_launch()
    first, second = compile_flydsl(one, pointer(), 7), compile_flydsl(one, pointer(), 8)
    assert first == second
    again, _, _ = make_launch()
    assert compile_flydsl(again, pointer(), 7).source_digest == first.source_digest
    other, _, _ = make_launch(factor=3.0)
    assert compile_flydsl(other, pointer(), 7).source_digest != first.source_digest


def test_line_info_changes_no_instruction():
    one, _, _ = make_launch()
    with_lines = compile_flydsl(one, pointer(), 7)
    without = compile_flydsl(one, pointer(), 7, line_info=False)
    assert instructions(with_lines) == instructions(without)
    assert len(without.code_object) < len(with_lines.code_object)
    kernel = CodeObject.from_bytes(without.code_object).kernels["scale"]
    assert {kernel.line(i.pc) for i in kernel.instructions} == {None}


def test_one_of_several_kernels_is_named():
    _, two, _ = make_launch()
    assert compile_flydsl(two, pointer(), 7, kernel="other").block == (64, 1, 1)
    assert compile_flydsl(two, pointer(), 7, kernel="scale").block == (128, 1, 1)
    for name in (None, "missing"):
        with pytest.raises(ValueError, match=r"\['other', 'scale'\]"):
            compile_flydsl(two, pointer(), 7, kernel=name)


def test_hints_reach_the_compiler():
    one, _, _ = make_launch()
    plain = compile_flydsl(one, pointer(), 7)
    hinted = compile_flydsl(one, pointer(), 7, hints={"waves_per_eu": 2})
    assert hinted.source_digest != plain.source_digest
    assert compile_flydsl(one, pointer(), 7) == plain


def make_dynamic(block=128):
    @flyc.kernel(name="dynamic")
    def kernel(x: fx.Pointer):
        lds = fx.SharedAllocator(static=False).allocate(fx.Array[fx.Float32, block, 16]).peek().ptr
        i = fx.thread_idx.x
        lds[i] = x[i]
        fx.barrier()
        x[i] = lds[block - 1 - i]

    @flyc.jit
    def inferred(x: fx.Pointer):
        kernel(x).launch(grid=(1, 1, 1), block=(block, 1, 1))

    @flyc.jit
    def computed(x: fx.Pointer, more: fx.Int32):
        kernel(x).launch(grid=(1, 1, 1), block=(block, 1, 1), smem=more + block * 4)

    return inferred, computed


def test_dynamic_lds_is_what_the_launch_asks_for():
    inferred, computed = make_dynamic()
    compiled = compile_flydsl(inferred, pointer())
    assert compiled.lds_bytes == compiled.dynamic_lds_bytes == 512
    kernel = CodeObject.from_bytes(compiled.code_object).kernels["dynamic"]
    assert kernel.descriptor.lds_bytes == 0
    with pytest.raises(NotImplementedError, match="size of LDS from an argument"):
        compile_flydsl(computed, pointer(), 4)


def test_tensors_are_a_pointer_and_a_layout():
    @flyc.kernel(name="copy_tensors")
    def kernel(x: fx.Tensor, y: fx.Tensor, count: fx.Int32, factor: fx.Float32):
        y[fx.thread_idx.x] = x[fx.thread_idx.x]

    @flyc.jit
    def launch(x: fx.Tensor, y: fx.Tensor, count: fx.Int32, factor: fx.Float32):
        kernel(x, y, count, factor).launch(grid=(1, 1, 1), block=(64, 1, 1))

    compiled = compile_flydsl(launch, torch.zeros(64), torch.zeros(4, 16), 3, 1.0)
    args = CodeObject.from_bytes(compiled.code_object).kernels["copy_tensors"].args
    assert len(compiled.arguments) == len(args) == 6
    assert [a.size for a in args] == [8, 4, 8, 16, 4, 4]  # i32 shapes, i64 strides


def test_kernel_without_a_launch_is_refused():
    _, _, scale = make_launch()
    with pytest.raises(TypeError, match=r"@flyc\.jit function, not KernelFunction"):
        compile_flydsl(scale, pointer(), 7)


def test_arguments_and_structures_are_told_apart_at_the_outer_level():
    types = shim._argument_types
    assert types("") == () and types("ptr<1>") == ("ptr",)
    structure = "struct<(i32, struct<(i64, i64)>)>"
    assert types(f"ptr<1>, {structure}, f32") == ("ptr", structure, "f32")


@pytest.mark.parametrize("version", [None, "0.4.9"])
def test_another_flydsl_is_refused(monkeypatch, version):
    def answer(name):
        if version is None:
            raise shim.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(shim.importlib.metadata, "version", answer)
    with pytest.raises(RuntimeError, match=r"pip install flydsl==0\.5\.0") as caught:
        compile_flydsl(None)
    assert (version or "not installed") in str(caught.value)


# The linker


@pytest.fixture
def no_linker(monkeypatch, tmp_path):
    """As on a machine without any ld.lld; gives the folder for a cache and a ROCm."""
    for name in shim.ROCM_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shim, "find_lld", lambda: None)
    if Path("/opt/rocm/llvm/bin/ld.lld").exists():
        pytest.skip("this machine has a ROCm with ld.lld")
    return tmp_path


def test_missing_linker_says_what_to_install(no_linker):
    one, _, _ = make_launch()
    with pytest.raises(RuntimeError, match=r"lld-19.*ROCM_PATH"):
        compile_flydsl(one, pointer(), 7)


@pytest.mark.parametrize("variable", shim.ROCM_VARIABLES)
def test_rocm_is_used_as_it_is(no_linker, monkeypatch, variable):
    (no_linker / "rocm" / "llvm" / "bin").mkdir(parents=True)
    (no_linker / "rocm" / "llvm" / "bin" / "ld.lld").touch()
    monkeypatch.setenv(variable, str(no_linker / "rocm"))
    assert shim.find_rocm_root() == no_linker / "rocm"


def test_other_linkers_get_a_root_of_their_own(no_linker, monkeypatch):
    linker = no_linker / "ld.lld"
    linker.touch()
    monkeypatch.setattr(shim, "find_lld", lambda: linker)
    root = shim.find_rocm_root()
    assert root.is_relative_to(no_linker / "cache")
    assert (root / "llvm" / "bin" / "ld.lld").readlink() == linker
    assert shim.find_rocm_root() == root
    # a home that cannot be written to: the cache's parent is a file
    (no_linker / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_linker / "file"))
    monkeypatch.setattr(shim.tempfile, "gettempdir", lambda: str(no_linker / "temporary"))
    assert shim.find_rocm_root().is_relative_to(no_linker / "temporary")


def test_newest_fitting_linker_is_taken(monkeypatch, tmp_path):
    versions = {tmp_path / f"llvm-{n}/bin/ld.lld": n for n in (14, 19, 21)}
    monkeypatch.setattr(shim, "_lld_version", lambda path: versions[path])
    monkeypatch.setattr(shim.Path, "glob", lambda self, pattern: list(versions))
    monkeypatch.setattr(shim.shutil, "which", lambda name: None)
    assert shim.find_lld() == tmp_path / "llvm-21/bin/ld.lld"
    versions = {tmp_path / "llvm-14/bin/ld.lld": 14}
    assert shim.find_lld() is None


def test_versions_of_linkers(tmp_path):
    linker = tmp_path / "ld.lld"
    linker.write_text("#!/bin/sh\necho 'Debian LLD 19.1.7 (compatible with GNU linkers)'\n")
    linker.chmod(0o755)
    assert shim._lld_version(linker) == 19
    assert shim._lld_version(tmp_path / "missing") == 0


# Triton


def test_triton_result():
    compiled = compile_triton(softmax, SOFTMAX, {"BLOCK": 1024}, num_warps=8)
    assert compiled.kernel == "softmax" and compiled.block == (512, 1, 1)
    assert compiled.num_warps == 8 and compiled.lds_bytes == compiled.dynamic_lds_bytes > 0
    assert compiled.arguments == ("x", "y", "columns", "global_scratch", "profile_scratch")
    assert compiled.compiler.startswith("triton ")
    assert compile_triton(softmax, SOFTMAX, {"BLOCK": 1024}, num_warps=8) == compiled
    other = compile_triton(softmax, SOFTMAX, {"BLOCK": 2048}, num_warps=8)
    assert other.source_digest != compiled.source_digest


def test_alignment_is_a_build_parameter():
    aligned = compile_triton(softmax, SOFTMAX, {"BLOCK": 1024})
    plain = compile_triton(softmax, SOFTMAX, {"BLOCK": 1024}, aligned=())
    both = compile_triton(softmax, SOFTMAX, {"BLOCK": 1024}, aligned=("x", "y", "columns"))
    assert len({c.source_digest for c in (aligned, plain, both)}) == 3


@pytest.mark.parametrize(
    ("signature", "constexprs"),
    [(SOFTMAX, {}), (SOFTMAX | {"z": "i32"}, {"BLOCK": 64}), (SOFTMAX, {"BLOCK": 64, "Z": 1})],
)
def test_wrong_argument_names_are_refused(signature, constexprs):
    with pytest.raises(ValueError, match=r"softmax\(x, y, columns, BLOCK\): unknown .* missing"):
        compile_triton(softmax, signature, constexprs)


# What is imported and loaded


def test_importing_the_shim_imports_no_compiler():
    code = (
        "import sys, rocm_msa, rocm_msa.flydsl_compile\n"
        "print(*[m for m in ('torch', 'triton', 'flydsl', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_compiling_loads_no_gpu_library():
    code = (
        "from tests.emulator.kernels_flydsl import CASES\n"
        "from tests.emulator.kernels_triton import CASES as TRITON\n"
        "CASES[0].build(), TRITON[0].build()\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(*{x for x in maps if 'amdhip' in x or 'hsa-runtime' in x})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


# The cache of the test kernels


def test_cases_are_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.emulator.cases.cache_folder", lambda: tmp_path)
    built = []
    real = BY_NAME["flydsl_copy"]

    def build():
        built.append(1)
        return real.build()

    case = Case("counted", build, real.make_args, real.grid, real.block, real.expected)
    first = case.compile()
    assert case.compile() == first and len(built) == 1
    (code,) = tmp_path.glob("*.hsaco")
    code.write_bytes(b"cut short")
    assert case.compile() == first and len(built) == 2
