"""`rocm-msa doctor`: what is installed, which path would run and why, what to do about the rest.

Exit code 0 when `rocm-msa serve` would work here, 1 otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from rocm_msa import __version__
from rocm_msa.cli.console import out, table, user_errors
from rocm_msa.cli.doctor_checks import FAIL, Check, judge
from rocm_msa.cli.doctor_facts import gather

FORMAT = 1
"""Of the JSON, described in doctor_schema.json."""

_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", FAIL: "bold red"}


@user_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of the table.")] = False,
) -> None:
    """Check this machine: packages, devices, the vLLM plugin, the path of each op."""
    checks = judge(gather())
    failed = [check for check in checks if check.status == FAIL]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "format": FORMAT,
                    "rocm_msa": __version__,
                    "ok": not failed,
                    "checks": [vars(check) for check in checks],
                },
                indent=2,
            )
        )
    else:
        _print(checks, failed)
    if failed:
        raise typer.Exit(1)


def _print(checks: list[Check], failed: list[Check]) -> None:
    console = out()
    rows = table("", "what", "found", left=3)
    for check in checks:
        mark = Text(check.status, style=_STYLES[check.status])
        found = Text(check.found)
        if check.todo:
            found.append(f"\n-> {check.todo}", style="italic")
        rows.add_row(mark, Text(check.name), found)
    console.print(rows)
    if failed:
        names = ", ".join(check.name for check in failed)
        console.print(f"Serving would not work: {names}. What to do is beside each.", markup=False)
    else:
        console.print("Serving would work here.")
