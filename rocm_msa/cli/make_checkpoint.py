"""`rocm-msa make-checkpoint`: a small checkpoint with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rocm_msa.cli.console import out, user_errors


@user_errors
def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="New or empty directory.", show_default=False)],
    size: Annotated[str, typer.Option(help="tiny or small.")] = "tiny",
    layout: Annotated[str, typer.Option(help="bf16, mxfp8, nvfp4 or mxfp4.")] = "bf16",
    arch: Annotated[str, typer.Option(help="text, or vl with a vision tower.")] = "text",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a small MiniMax-M3 checkpoint with random weights."""
    from rocm_msa.checkpoint.make import make_checkpoint as make

    summary = make(directory, size=size, layout=layout, arch=arch, seed=seed)
    out().print(
        f"{summary.directory}: {size} {arch} model, {layout}, seed {seed}; {summary.tensors} "
        f"tensors, {summary.weight_bytes / 1e6:,.1f} MB in {summary.shards} files. "
        "Random weights: answers mean nothing.",
        markup=False,
    )
