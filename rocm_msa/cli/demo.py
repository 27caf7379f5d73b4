"""`rocm-msa demo`: a vLLM server over NVFP4 caches answers, then everything stops."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rocm_msa.cli.console import fail, out, user_errors


@user_errors
def demo(
    serve: Annotated[
        bool,
        typer.Option("--serve", "--keep-serving", help="Leave the server running until Ctrl-C."),
    ] = False,
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 0,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep the server's log.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where the checkpoint is kept. Default: the user's cache.")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 300.0,
) -> None:
    """Make a tiny checkpoint, serve it with NVFP4 caches, send requests, stop the server."""
    from rocm_msa.demo import DemoError, DemoOptions, run_demo

    options = DemoOptions(
        serve=serve,
        port=port,
        keep_files=keep_files,
        cache_dir=cache_dir,
        start_timeout=start_timeout,
    )
    try:
        code = run_demo(options, out())
    except DemoError as error:
        raise fail(str(error), code=1) from None
    if code:
        raise typer.Exit(code)
