"""The command `rocm-msa`: one file a command."""

from __future__ import annotations

import typer

from rocm_msa.cli import capacity, compile, demo, doctor, make_checkpoint, serve, verify

app = typer.Typer(
    name="rocm-msa",
    help="MiniMax Sparse Attention with NVFP4 KV caches for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve", context_settings=serve.SERVE_SETTINGS)(serve.serve)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("capacity")(capacity.capacity)
app.command("compile")(compile.compile_kernels)
app.command("verify")(verify.verify)
app.command("make-checkpoint")(make_checkpoint.make_checkpoint)


def main() -> None:
    """Entry point of the console script."""
    app()
