"""Compiling ahead of time: every kernel that a configuration serves with, into one folder.

    compile_builds(builds(ServingConfig.of(model, tp=4)), directory)

gives `<symbol>.hsaco` for each kernel and manifest.json (kernel_manifest.py); launcher.py loads
them. What was compiled before from the same sources, parameters and compiler is copied from a cache
in the user's cache folder. Needs FlyDSL and a linker (flydsl_compile.py), no GPU.

An op takes part with a module `rocm_msa/ops/<op>/flydsl_gfx950.py`, listed in MODULES, that holds
what the protocol `OpModule` says; what launches by itself, as the mono layer does, has `builds` and
`compile_build` alone. Importing such a module imports no FlyDSL.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import rocm_msa
from rocm_msa import kernel_manifest
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.code_object import kernel_metadata
from rocm_msa.config import ModelConfig
from rocm_msa.errors import check_int, expect
from rocm_msa.flydsl_compile import FLYDSL_VERSION, Compiled, check_flydsl
from rocm_msa.kernel_manifest import Argument, Entry, Manifest, ManifestError
from rocm_msa.kernel_sources import newer_sources, source_digest

MODULES: tuple[str, ...] = (
    "dcp.exchange_gfx950",
    "mono_kernel.layer_gfx950",
    "rocm_msa.ops.block_topk.flydsl_gfx950",
    "rocm_msa.ops.index_score_decode.flydsl_gfx950",
    "rocm_msa.ops.index_score_prefill.flydsl_gfx950",
    "rocm_msa.ops.index_select_decode.flydsl_gfx950",
    "rocm_msa.ops.qkv_insert.flydsl_gfx950",
    "rocm_msa.ops.sparse_decode.flydsl_gfx950",
    "rocm_msa.ops.sparse_prefill.flydsl_gfx950",
)
"""The modules of the ops that have FlyDSL kernels; an op joins with its line here."""

ACTIVATION_DTYPES = ("bf16", "fp16", "fp32")
_STARTED = time.time()


class Build(Protocol):
    """Build parameters of one kernel: a frozen dataclass of scalars, checked when made.

    No batch size, length or pointer is among them. Two builds are the same kernel exactly when all
    fields are equal; `symbol` is a C identifier made of all fields.
    """

    @property
    def symbol(self) -> str: ...

    @property
    def grid(self) -> str:
        """What the workgroups of a launch are, in words: "(tokens, heads)"."""
        ...


class OpModule(Protocol):
    """What `rocm_msa/ops/<op>/flydsl_gfx950.py` holds, as functions of the module."""

    def builds(self, config: ServingConfig) -> Sequence[Build]:
        """Every kernel that this op launches when `config` is served; none for a case that only
        other backends have."""
        ...

    def compile_build(self, build: Build) -> Compiled:
        """Compile one kernel with `flydsl_compile.compile_kernel`. The traced code lies in a file
        of its own that imports FlyDSL at its top (FlyDSL looks for annotations in a module's
        globals), and that only this function imports."""
        ...

    def needs(self, *args: Any, **options: Any) -> Sequence[Build]:
        """The builds that `run` launches for these arguments of the op; NotImplementedError for a
        case without one. Reads no tensor's values. Called before each `run` when the op chooses its
        backend itself, so cheap."""
        ...

    def run(self, *args: Any, **options: Any) -> Any:
        """The op; launches through `launcher.launch(build, grid, args, device)`. A keyword `builds`
        takes what `needs` gave for these arguments, so that they are looked at once."""
        ...


@dataclass(frozen=True)
class ServingConfig:
    """What one tensor-parallel rank serves.

    q_heads, kv_heads, index_heads: of this rank. main_dtype, index_dtype: of the caches.
    dtype: of activations, bf16, fp16 or fp32. has_dense_layers: layers without an index branch.
    rope_dtype: of the cos_sin table. ranks: of the tensor-parallel group; group_index_heads: the
    index heads of all of them.
    model: whole. weight_formats: how its attention, routed and shared experts are stored
    (mono_kernel/checkpoint_formats.py); with these two the mono layer is served too.
    """

    q_heads: int
    kv_heads: int
    index_heads: int
    head_dim: int
    rotary_dim: int
    main_dtype: CacheDType
    index_dtype: CacheDType
    dtype: str = "bf16"
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    has_dense_layers: bool = True
    rope_dtype: str = "fp32"
    ranks: int = 1
    group_index_heads: int = 0
    model: ModelConfig | None = None
    weight_formats: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "index_heads", "head_dim", "rotary_dim", "topk"):
            check_int(name, getattr(self, name), 1)
        for name in ("main_dtype", "index_dtype"):
            object.__setattr__(self, name, CacheDType.parse(getattr(self, name)))
        for name in ("dtype", "rope_dtype"):
            if getattr(self, name) not in ACTIVATION_DTYPES:
                got = repr(getattr(self, name))
                raise ValueError(expect(name, f"one of {ACTIVATION_DTYPES}", got))

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        tp: int = 1,
        main_dtype: CacheDType | str = CacheDType.NVFP4,
        index_dtype: CacheDType | str = CacheDType.NVFP4,
        dtype: str = "bf16",
        weight_formats: tuple[str, str, str] | None = None,
    ) -> ServingConfig:
        """A rank's share of a model. Raises ConfigError for heads that do not divide."""
        rank = model.shard(tp)
        return cls(
            rank.q_heads,
            rank.kv_heads,
            rank.index_heads,
            model.head_dim,
            model.rope.rotary_dim,
            CacheDType.parse(main_dtype),
            CacheDType.parse(index_dtype),
            dtype,
            model.topk_blocks,
            model.init_blocks,
            model.local_blocks,
            model.num_dense_layers > 0,
            ranks=tp,
            group_index_heads=model.index_heads,
            model=model,
            weight_formats=weight_formats,
        )


@dataclass(frozen=True)
class Summary:
    """What compile_builds did. seconds: wall time."""

    directory: Path
    kernels: int
    compiled: int
    bytes: int
    seconds: float


def builds(*configs: ServingConfig, modules: Iterable[str] = MODULES) -> list[Build]:
    """Every kernel that these configurations need, each once."""
    found: dict[Build, None] = {}
    for name in modules:
        module = importlib.import_module(name)
        for config in configs:
            found.update(dict.fromkeys(module.builds(config)))
    return list(found)


def compile_builds(
    builds: Sequence[Build],
    directory: Path,
    *,
    arch: str = GFX950.name,
    processes: int = 2,
    use_cache: bool = True,
) -> Summary:
    """Compile `builds` into `directory`, which afterwards holds these kernels and no other.

    Args:
        processes: compile at once in so many processes; 1 compiles in this one.
        use_cache: take from and add to the user's cache of compiled kernels.

    Raises:
        ValueError: another arch; two builds with one symbol; a kernel that spills registers.
        RuntimeError: see flydsl_compile: FlyDSL or the linker is missing.
    """
    if arch != GFX950.name:
        raise ValueError(expect("arch", GFX950.name, arch))
    symbols: dict[str, Build] = {}
    for build in builds:
        other = symbols.setdefault(build.symbol, build)
        if other != build:
            raise ValueError(f"two builds are called {build.symbol}: {other} and {build}")
    start = time.perf_counter()
    folder = cache_folder() if use_cache else directory / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    todo = [b for b in symbols.values() if _cached(folder, b) is None]
    if todo:
        check_flydsl()
    if processes > 1 and len(todo) > 1:
        # FlyDSL holds one compile at a time and process; a fork of its state is not safe.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(todo)), context) as pool:
            list(pool.map(_compile_into, [folder] * len(todo), todo))
    else:
        for build in todo:
            _compile_into(folder, build)
    entries = {name: _cached(folder, build) for name, build in symbols.items()}
    lost = [name for name, entry in entries.items() if entry is None]
    if lost:
        raise RuntimeError(f"sources changed while these were compiled: {lost}; run again")
    _publish(folder, directory, entries, arch)
    if not use_cache:
        shutil.rmtree(folder)
    total = sum(entry.bytes for entry in entries.values())
    return Summary(directory, len(entries), len(todo), total, time.perf_counter() - start)


def cache_folder() -> Path:
    """Where compiled kernels are kept by source digest."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "rocm-msa" / "code_objects"


def _publish(folder: Path, directory: Path, entries: dict[str, Entry], arch: str) -> None:
    """Copy the code objects and write the manifest last; remove what is in neither."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, entry in entries.items():
        data = kernel_manifest.read_code_object(folder, entry)
        kept[name] = Entry(**{**vars(entry), "file": f"{name}.hsaco"})
        part = directory / f"{name}.part"
        part.write_bytes(data)
        part.replace(directory / kept[name].file)
    manifest = Manifest(arch, FLYDSL_VERSION, rocm_msa.__version__, kept)
    kernel_manifest.write(directory, manifest)
    for old in set(directory.glob("*.hsaco")) - {directory / e.file for e in kept.values()}:
        old.unlink()


def _digest(build: Build) -> str:
    return source_digest(type(build).__module__, asdict(build))


def _cached(folder: Path, build: Build) -> Entry | None:
    """The entry of a build that was compiled before, None when there is none (any more)."""
    path = folder / f"{_digest(build)}.json"
    try:
        entry = kernel_manifest.entry_from_json(str(path), json.loads(path.read_text()))
        kernel_manifest.read_code_object(folder, entry)
    except (OSError, ValueError, ManifestError):
        return None
    return entry


def _compile_into(folder: Path, build: Build) -> None:
    """Compile one build and leave `<digest>.hsaco`, `<digest>.json` in `folder`."""
    digest, name = _digest(build), type(build).__module__
    compiled = importlib.import_module(name).compile_build(build)
    # Modules may have been imported before an edit that the digest saw, or the other way round.
    newer = newer_sources(name, _STARTED)
    if newer:
        raise RuntimeError(f"sources changed since this process began: {newer}; run again")
    entry = _entry(compiled, build, digest)
    data = compiled.code_object
    for path, content in (
        (folder / entry.file, data),
        (folder / f"{digest}.json", json.dumps(asdict(entry), indent=1).encode()),
    ):
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(content)
        part.replace(path)  # in one step: two processes may compile the same


def _entry(compiled: Compiled, build: Build, digest: str) -> Entry:
    facts = kernel_metadata(compiled.code_object, compiled.kernel)
    args = facts.get(".args", [])
    types = compiled.argument_types
    hidden = [a for a in args if a[".value_kind"].startswith("hidden_")]
    if hidden or len(args) != len(types) or "" in compiled.arguments:
        raise ValueError(
            f"kernel {build.symbol}: its `launch` must take exactly the kernel's arguments, "
            f"pointers and scalars alone; the code object has {args}, `launch` {types}"
        )
    registers = {
        "vgpr": facts[".vgpr_count"],
        "agpr": facts.get(".agpr_count", 0),
        "sgpr": facts[".sgpr_count"],
        "vgpr_spills": facts.get(".vgpr_spill_count", 0),
        "sgpr_spills": facts.get(".sgpr_spill_count", 0),
        "scratch_bytes": facts[".private_segment_fixed_size"],
    }
    if any(registers[key] for key in ("vgpr_spills", "sgpr_spills", "scratch_bytes")):
        raise ValueError(f"kernel {build.symbol}: it spills registers or uses scratch: {registers}")
    return Entry(
        name=build.symbol,
        module=type(build).__module__,
        build=asdict(build),
        symbol=compiled.kernel,
        file=f"{digest}.hsaco",
        bytes=len(compiled.code_object),
        sha256=compiled.digest,
        source_digest=digest,
        block=compiled.block,
        grid=build.grid,
        static_lds=compiled.lds_bytes - compiled.dynamic_lds_bytes,
        dynamic_lds=compiled.dynamic_lds_bytes,
        kernarg_bytes=facts[".kernarg_segment_size"],
        arguments=tuple(
            Argument(name, a[".offset"], a[".size"], a[".value_kind"], kind)
            for name, a, kind in zip(compiled.arguments, args, types, strict=True)
        ),
        registers=registers,
    )
