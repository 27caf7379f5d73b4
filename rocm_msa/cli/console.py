"""What the commands share: where they print, and how a user's mistake is reported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TextIO, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rocm_msa.errors import ConfigError

USER_ERRORS = (ConfigError, ValueError, NotImplementedError, OSError)
"""What bad input raises; anything else is our own bug and keeps its traceback."""

PLAIN_COLUMNS = 80

P = ParamSpec("P")
R = TypeVar("R")


def out() -> Console:
    """Standard output; 80 columns where it is not a terminal."""
    return _console(sys.stdout, False)


def err() -> Console:
    return _console(sys.stderr, True)


def _console(stream: TextIO, stderr: bool) -> Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """A plain table; the first `left` columns are text, the others are numbers."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i < left else "right", overflow="fold")
    return result


def fail(message: str, code: int = 2) -> typer.Exit:
    """Print an error; raise what comes back."""
    err().print(f"error: {message}", style="red", markup=False)
    return typer.Exit(code)


def user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Bad input ends a command with its message and exit code 2, without a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except USER_ERRORS as error:
            raise fail(str(error)) from None

    return wrapped
