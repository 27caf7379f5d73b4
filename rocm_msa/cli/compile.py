"""`rocm-msa compile`: the FlyDSL kernels that a configuration serves with, as code objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocm_msa.arch import GFX950
from rocm_msa.cli.console import fail, out, table, user_errors
from rocm_msa.errors import expect

if TYPE_CHECKING:
    from mono_kernel.shapes import Formats
    from rocm_msa.config import ModelConfig


@user_errors
def compile_kernels(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder. Default: where the package looks for them."),
    ] = None,
    arch: Annotated[str, typer.Option(help=f"{GFX950.name} is the only one.")] = GFX950.name,
    model: Annotated[
        Path | None,
        typer.Option(help="config.json or its directory. Default: the public MiniMax-M3 geometry."),
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option(help="Tensor-parallel ranks; may be given again.")
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="Main cache: nvfp4, fp8 or bf16; may be given again.")
    ] = None,
    indexer_kv_dtype: Annotated[
        list[str] | None, typer.Option(help="Index cache: the same names.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")] = "bf16",
    mono: Annotated[
        list[str] | None,
        typer.Option(
            help="The mono layer too, for weights stored as a checkpoint layout has them: mxfp8, "
            "mxfp4 or nvfp4; config: as --model says. May be given again."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(help="Compiles at once.", min=1)] = 2,
    cache: Annotated[
        bool, typer.Option(help="Reuse what the same sources and parameters gave before.")
    ] = True,
) -> None:
    """Compile every kernel that these configurations need. Needs FlyDSL and ld.lld, no GPU."""
    from rocm_msa.aot import ServingConfig, builds, compile_builds
    from rocm_msa.capacity import MINIMAX_M3
    from rocm_msa.config import ModelConfig
    from rocm_msa.launcher import PACKAGE_DIRECTORY

    geometry = MINIMAX_M3 if model is None else ModelConfig.from_json(model)
    configs = [
        ServingConfig.of(geometry, ranks, main, index, dtype, formats)
        for ranks in tp or [4]
        for main in kv_cache_dtype or ["nvfp4"]
        for index in indexer_kv_dtype or ["nvfp4"]
        for formats in _weight_formats(mono or [], geometry, model)
    ]
    wanted = builds(*configs)
    if mono and not any(build.symbol.startswith("mono_") for build in wanted):
        raise fail("--mono: the layer takes nvfp4 caches, both, and bf16 activations")
    directory = output or PACKAGE_DIRECTORY
    try:
        summary = compile_builds(wanted, directory, arch=arch, processes=processes, use_cache=cache)
    except RuntimeError as error:
        raise fail(str(error), code=1) from None
    rows = table("kernel", "grid (workgroups)", left=2)
    for build in wanted:
        rows.add_row(build.symbol, build.grid)
    out().print(rows)
    out().print(
        f"{summary.kernels} kernels for {arch}, {summary.bytes / 1e3:,.0f} kB, in {directory}: "
        f"{summary.compiled} compiled, {summary.kernels - summary.compiled} unchanged, "
        f"{summary.seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )


def _weight_formats(mono: list[str], geometry, model: Path | None) -> list:
    """How weights are stored, for each --mono; None stands for no mono layer."""
    if not mono:
        return [None]
    from mono_kernel.checkpoint_formats import LAYOUTS

    found = []
    for name in mono:
        if name == "config" and model is not None:
            formats = formats_of_model(model, geometry)
        elif name in LAYOUTS:
            formats = LAYOUTS[name]
        else:
            raise fail(expect("--mono", f"one of {sorted(LAYOUTS)}, or config with --model", name))
        found.append((formats.attention, formats.routed, formats.shared))
    return found


def formats_of_model(model: Path, geometry: ModelConfig) -> Formats:
    """How the checkpoint of a config.json, or of its directory, stores the mono layers' weights."""
    from mono_kernel.checkpoint_formats import formats_of_config

    path = model / "config.json" if model.is_dir() else model
    return formats_of_config(json.loads(path.read_text()), geometry)
