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
    start_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for a server. Default: 300, with --emulated 900."),
    ] = None,
    emulated: Annotated[
        bool,
        typer.Option("--emulated", help="Compare with gfx950 code objects in the emulator."),
    ] = False,
    tp: Annotated[
        int, typer.Option(help="With --emulated: tensor-parallel ranks.", min=1, max=2)
    ] = 1,
    mono: Annotated[
        bool, typer.Option("--mono", help="With --emulated: decode steps by the mono kernel.")
    ] = False,
) -> None:
    """Make a tiny checkpoint, serve it with NVFP4 caches, send requests, stop the server."""
    from rocm_msa import demo

    if emulated and (serve or port):
        raise fail("--emulated: starts and stops servers on free ports; leave --serve, --port out")
    if (tp > 1 or mono) and not emulated:
        raise fail("--tp, --mono: only with --emulated")
    shared = {"keep_files": keep_files, "cache_dir": cache_dir}
    if start_timeout is not None:
        shared["start_timeout"] = start_timeout
    try:
        if emulated:
            code = demo.run_emulated_demo(
                demo.EmulatedOptions(ranks=tp, mono=mono, **shared), out()
            )
        else:
            code = demo.run_demo(demo.DemoOptions(serve=serve, port=port, **shared), out())
    except demo.DemoError as error:
        raise fail(str(error), code=1) from None
    if code:
        raise typer.Exit(code)
