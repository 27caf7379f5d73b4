"""Compiling kernels to gfx950 code objects on any machine, with no launch and no GPU.

    launch = ...                                   # a @flyc.jit function that launches one kernel
    null = flyc.from_c_void_p(fx.Float32, None, assumed_align=16)
    compiled = compile_flydsl(launch, null, null, 1024)

    compiled = compile_triton(fn, {"x": "*fp32", "n": "i32"}, {"BLOCK": 128}, num_warps=4)

The result holds the bytes that a loader takes and what a launch must know. It is made of plain
values, so that ahead-of-time output can write it down as it is. Every private use of FlyDSL is in
this module, and its version is pinned for that reason. Importing this imports no compiler.

Refused with a RuntimeError: a compiler that is missing or of another version, a missing linker.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_msa.arch import GFX950

ARCH, WAVE_SIZE = GFX950.name, GFX950.wave_size
FLYDSL_VERSION = "0.5.0"
# FlyDSL's own search: it takes the first of these that is set, and /opt/rocm otherwise.
ROCM_VARIABLES = ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")
OLDEST_LLD = 19  # the first that writes code objects of version 6
TRITON_HIDDEN_POINTERS = ("global_scratch", "profile_scratch")

# One kernel in the text of a compiled module, and the LDS that its launch adds.
METADATA = re.compile(r'"([^"]+)", !llvm\.func<\w+ \((.*?)\)>, metadata = ')
DYNAMIC_LDS = r"gpu\.launch_func .*@{kernel} .* dynamic_shared_memory_size (%\w+) "
CONSTANT = r"{value} = llvm\.mlir\.constant\((\d+) : i32\)"

# FlyDSL reads its settings from the environment, which is the process's: one compile at a time.
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled."""

    code_object: bytes  # a linked ELF file
    kernel: str  # its symbol
    arch: str
    block: tuple[int, int, int]  # lanes
    num_warps: int  # waves of a workgroup
    lds_bytes: int  # of a workgroup, static and dynamic together
    dynamic_lds_bytes: int  # the part that the launch must ask for
    arguments: tuple[str, ...]  # by position in the kernel's argument block; "" has no name
    compiler: str  # name and version
    source_digest: str  # changes with the kernel's source and the build parameters
    argument_types: tuple[str, ...] = ()  # FlyDSL only: ptr, i32, i64, f32, ...

    @property
    def digest(self) -> str:
        """SHA-256 of the code object."""
        return hashlib.sha256(self.code_object).hexdigest()


# FlyDSL


def compile_flydsl(
    launch: Any,
    *args: Any,
    arch: str = ARCH,
    kernel: str | None = None,
    hints: dict[str, Any] | None = None,
    line_info: bool = True,
) -> Compiled:
    """Compile what a `@flyc.jit` function launches, for the types of `args`.

    The kernel's arguments are called as those of `launch` when it has as many: write a `launch`
    that takes exactly the kernel's arguments, in the same order.

    args      null pointers (`flyc.from_c_void_p`), torch tensors of any device, scalars
    kernel    which one, when the function launches several; a symbol or what it starts with
    hints     FlyDSL's compile hints, for example {"waves_per_eu": 2}
    line_info source lines in the object: the instructions are the same with and without, but
              paths of this machine are then in the object and in the source digest
    """
    check_flydsl()
    from flydsl.compiler.jit_function import CompilationContext, JitFunction

    if not isinstance(launch, JitFunction):
        raise TypeError(
            f"compile_flydsl takes a @flyc.jit function, not {type(launch).__name__}: a kernel "
            "alone says neither its block nor its grid"
        )
    settings = {
        "ROCM_PATH": str(find_rocm_root()),
        "FLYDSL_GPU_ARCH": arch,
        "ARCH": arch,
        # Its key holds a digest of the host's ROCm; the callers keep what they compile.
        "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        "FLYDSL_RUNTIME_RUN_ONLY": "0",
        "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1" if line_info else "0",
    }
    with _environment(settings), CompilationContext.compile_hints(dict(hints or {})):
        # Neither makes an execution engine nor touches a GPU library.
        launch._compile_only(*args)
        digest, artifact = launch._last_compiled
        entries = _flydsl_entries(artifact._ir_text)
    found = [name for _, name, _ in entries]
    chosen = [e for e in entries if kernel is None or e[1] == kernel or _stem(e[1]) == kernel]
    if len(chosen) != 1:
        raise ValueError(f"kernel must name one of {found}, got {kernel!r}")
    code_object, name, facts = chosen[0]
    block, types = facts["reqd_workgroup_size"], facts["argument_types"]
    names = tuple(inspect.signature(launch.func).parameters)
    dynamic_lds = _dynamic_lds(artifact._ir_text, name)
    return Compiled(
        code_object=code_object,
        kernel=name,
        arch=arch,
        block=tuple(block) if len(block) == 3 else (facts["max_flat_workgroup_size"][0], 1, 1),
        num_warps=-(-facts["max_flat_workgroup_size"][0] // WAVE_SIZE),
        lds_bytes=facts["group_segment_fixed_size"][0] + dynamic_lds,
        dynamic_lds_bytes=dynamic_lds,
        arguments=names if len(names) == len(types) else ("",) * len(types),
        compiler=f"flydsl {FLYDSL_VERSION}",
        source_digest=digest,
        argument_types=types,
    )


def compile_kernel(
    kernel: Any,
    lanes: int,
    *,
    pointers: dict[str, Any] | None = None,
    hints: dict[str, Any] | None = None,
) -> Compiled:
    """Compile a `@flyc.kernel` whose arguments are declared once, by its own signature.

    kernel    a one-dimensional workgroup of `lanes`; arguments annotated fx.Pointer, fx.Int32,
              fx.Int64 or fx.Float32
    pointers  element type by name, of pointers that the kernel indexes and that are aligned to
              an element. The others are bytes, of which nothing is known
    hints     see compile_flydsl
    """
    check_flydsl()
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    signature = inspect.signature(kernel._func, eval_str=True)

    @flyc.jit
    def launch(**arguments):
        kernel(*arguments.values()).launch(grid=(1, 1, 1), block=(lanes, 1, 1))

    launch.func.__signature__ = signature
    examples = {fx.Int32: 1, fx.Int64: fx.Int64(1), fx.Float32: 1.0}
    args = []
    for name, parameter in signature.parameters.items():
        if parameter.annotation is fx.Pointer:
            kind = (pointers or {}).get(name, fx.Uint8)
            args.append(flyc.from_c_void_p(kind, None, assumed_align=kind.width // 8))
        else:
            args.append(examples[parameter.annotation])
    return compile_flydsl(launch, *args, hints=hints, line_info=False)


def check_flydsl() -> None:
    """RuntimeError unless the one FlyDSL that this module knows is installed."""
    advice = f"Install it: pip install flydsl=={FLYDSL_VERSION}"
    try:
        version = importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"FlyDSL {FLYDSL_VERSION} is not installed. {advice}") from None
    if version != FLYDSL_VERSION:
        raise RuntimeError(
            f"FlyDSL {version} is installed; rocm_msa is written for {FLYDSL_VERSION}, since it "
            f"uses private parts of the compiler. {advice}"
        )


def _stem(name: str) -> str:
    """FlyDSL numbers the kernels of a launch: copy_0 was written as copy."""
    return re.sub(r"_\d+$", "", name)


def _flydsl_entries(text: str) -> list[tuple[bytes, str, dict[str, Any]]]:
    """(code object, symbol, facts) of each kernel in a compiled MLIR module."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    found = []
    with _create_mlir_context():
        for op in ir.Module.parse(text).body.operations:
            if op.operation.name != "gpu.binary":
                continue
            for attribute in op.operation.attributes["objects"]:
                item = gpu.ObjectAttr(attribute)
                # Their only Python face is the text: <"name", !llvm.func<...>, metadata = {...}>
                for part in str(item.kernels).split("#gpu.kernel_metadata<")[1:]:
                    name, signature = METADATA.match(part).groups()
                    pairs = re.findall(r"(\w+) = (?:array<i32: )?(-?\d+(?:, -?\d+)*)", part)
                    facts = {key: [int(n) for n in value.split(",")] for key, value in pairs}
                    facts.setdefault("reqd_workgroup_size", [])
                    facts["argument_types"] = _argument_types(signature)
                    found.append((item.object, name, facts))
    return found


def _dynamic_lds(text: str, kernel: str) -> int:
    """Bytes of LDS that the launch of a kernel asks for beyond the kernel's own."""
    launch = re.search(DYNAMIC_LDS.format(kernel=re.escape(kernel)), text)
    if launch is None:
        return 0
    constant = re.search(CONSTANT.format(value=re.escape(launch[1])), text)
    if constant is None:
        raise NotImplementedError(
            f"kernel {kernel}: its launch computes the size of LDS from an argument; give `smem` "
            "a build parameter"
        )
    return int(constant[1])


def _argument_types(signature: str) -> tuple[str, ...]:
    """`ptr<1>, struct<(i32, i32)>, i32` -> ("ptr", "struct<(i32, i32)>", "i32")."""
    types, depth = [""], 0
    for letter in signature:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            types.append("")
        else:
            types[-1] += letter
    types = [re.sub(r"ptr<\d+>", "ptr", kind.strip()) for kind in types]
    return tuple(kind for kind in types if kind)


# The linker


def find_rocm_root() -> Path:
    """A folder whose llvm/bin/ld.lld FlyDSL can use: a ROCm, or one made around another ld.lld."""
    roots = [Path(os.environ[name]) for name in ROCM_VARIABLES if os.environ.get(name)]
    for root in (*roots, Path("/opt/rocm")):
        if (root / "llvm" / "bin" / "ld.lld").exists():
            return root
    linker = find_lld()
    if linker is None:
        looked = ", ".join([f"{root}/llvm/bin" for root in (*roots, "/opt/rocm")])
        raise RuntimeError(
            f"FlyDSL links with ld.lld (LLVM {OLDEST_LLD} or later), which was not found in "
            f"{looked}, on PATH or in /usr/lib/llvm-*/bin. Install it (Debian, Ubuntu: package "
            f"lld-{OLDEST_LLD}), or set ROCM_PATH to a ROCm that has it."
        )
    return _root_around(linker)


def find_lld() -> Path | None:
    """The newest ld.lld on PATH or in Debian's LLVM folders that is new enough."""
    candidates = [Path(found)] if (found := shutil.which("ld.lld")) else []
    candidates += Path("/usr/lib").glob("llvm-*/bin/ld.lld")
    versions = [(_lld_version(path), path) for path in candidates]
    fitting = [pair for pair in versions if pair[0] >= OLDEST_LLD]
    return max(fitting)[1] if fitting else None


@functools.cache
def _lld_version(path: Path) -> int:
    import subprocess

    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return 0
    found = re.search(r"LLD (\d+)\.", done.stdout)
    return int(found[1]) if found else 0


def _root_around(linker: Path) -> Path:
    """A cache folder that looks like a ROCm as far as FlyDSL's linker search goes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mark = hashlib.sha256(str(linker).encode()).hexdigest()[:12]
    root = cache / "rocm-msa" / f"lld-{mark}"
    try:
        return _link_into(root, linker)
    except OSError:  # a home that cannot be written to
        return _link_into(
            Path(tempfile.gettempdir()) / f"rocm-msa-lld-{os.getuid()}-{mark}", linker
        )


def _link_into(root: Path, linker: Path) -> Path:
    target = root / "llvm" / "bin" / "ld.lld"
    if not (target.is_symlink() and target.readlink() == linker):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        part.symlink_to(linker)
        part.replace(target)  # in one step: another process sees the old one or the new one
    return root


@contextlib.contextmanager
def _environment(settings: dict[str, str]):
    """Set variables of the process, and put back what was there."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


# Triton


def compile_triton(
    fn: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any] | None = None,
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    aligned: tuple[str, ...] | None = None,
    small: tuple[str, ...] = (),
    arch: str = ARCH,
    **options: Any,
) -> Compiled:
    """Compile a `@triton.jit` function.

    signature   Triton's type of each run-time argument: {"x": "*bf16", "n": "i32"}
    aligned     arguments that are multiples of 16; None stands for every pointer
    small       pointers to less than 2 GiB: buffer instructions may be used for them
    options     further options of Triton's AMD backend: waves_per_eu, matrix_instr_nonkdim, ...
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise RuntimeError(f"Triton is not installed ({error}). pip install triton") from error

    constexprs = dict(constexprs or {})
    names = list(fn.arg_names)
    unknown = [name for name in (*signature, *constexprs) if name not in names]
    missing = [name for name in names if name not in signature and name not in constexprs]
    if unknown or missing:
        raise ValueError(f"{fn.__name__}({', '.join(names)}): unknown {unknown}, missing {missing}")
    if aligned is None:
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    types = {name: signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    for name in small:
        attrs.setdefault((names.index(name),), []).append(["tt.pointer_range", 32])
    source = ASTSource(fn, signature=types, constexprs=constexprs, attrs=attrs)
    # Said aloud: Triton warns that its default changes.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True} | options
    pointers = (sorted(aligned), sorted(small))
    build = (fn.cache_key, types, constexprs, *pointers, sorted(options.items()), arch)
    target = GPUTarget("hip", arch, WAVE_SIZE)
    compiled = triton.compile(source, target=target, options=options)
    facts = compiled.metadata
    return Compiled(
        code_object=compiled.asm["hsaco"],
        kernel=facts.name,
        arch=arch,
        block=(facts.num_warps * WAVE_SIZE, 1, 1),
        num_warps=facts.num_warps,
        lds_bytes=facts.shared,
        dynamic_lds_bytes=facts.shared,
        arguments=tuple(n for n in names if n not in constexprs) + TRITON_HIDDEN_POINTERS,
        compiler=f"triton {triton.__version__}",
        # Triton's own hash holds paths of this machine.
        source_digest=hashlib.sha256(repr(build).encode()).hexdigest(),
    )
