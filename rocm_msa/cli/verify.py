"""`rocm-msa verify`: this machine's kernels and times against what is known; a report.

Exit code 0 when every check is right, 1 when one is wrong, 2 when the target is not there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from rocm_msa.cli.console import err, fail, out, table, user_errors

SHOWN_FAULTS = 20


@user_errors
def verify(
    target: Annotated[
        str,
        typer.Option(
            help="gpu: whatever GPU is here; gfx950: that alone; emulator: the gfx950 kernels "
            "without a GPU."
        ),
    ] = "gpu",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of verify.json and verify.html.")
    ] = Path("rocm-msa-verify"),
    small: Annotated[
        bool, typer.Option("--small", help="Small shapes and NVFP4 caches alone: a minute.")
    ] = False,
    step: Annotated[
        list[str] | None,
        typer.Option(help="opcodes, kernels, mono, times, exchange; may be given again. All."),
    ] = None,
    code_objects: Annotated[
        Path | None,
        typer.Option(help="Folder of `rocm-msa compile`. Default: compile, or the package's."),
    ] = None,
) -> None:
    """Check instructions, kernels and times against references and the model; write a report."""
    from rocm_msa.errors import expect
    from rocm_msa.selfcheck import report, run
    from rocm_msa.selfcheck.targets import TargetError, open_target

    steps = step or list(run.STEPS)
    for name in steps:
        if name not in run.STEPS:
            raise ValueError(expect("--step", f"one of {', '.join(run.STEPS)}", repr(name)))
    try:
        with open_target(target, code_objects, small) as opened:
            say = functools.partial(err().print, markup=False)
            say(f"target {target}: {opened.arch}")
            result = run.run(opened, steps, small=small, say=say)
    except TargetError as error:
        raise fail(str(error)) from None
    as_json, as_html = report.write(result, output)
    _print(result)
    out().print(f"{as_json}\n{as_html}", markup=False, soft_wrap=True)
    if result.faults:
        raise typer.Exit(1)


def _print(result) -> None:
    from rocm_msa.selfcheck.run import FAULT, OK, SKIPPED, STEPS

    rows = table("step", "right", "wrong", "not run")
    for step in STEPS:
        counts = [result.count(step, status) for status in (OK, FAULT, SKIPPED)]
        if any(counts):
            rows.add_row(step, *map(str, counts))
    console = out()
    console.print(rows)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for o in result.faults[:SHOWN_FAULTS]:
        console.print(
            f"{o.step} {o.name}, {o.case}: {o.text}", markup=False, style="red", soft_wrap=True
        )
    if len(result.faults) > SHOWN_FAULTS:
        console.print(f"... and {len(result.faults) - SHOWN_FAULTS} more, in the report")
    differing = [t for t in result.times if t.differs]
    if differing:
        console.print(f"{len(differing)} of {len(result.times)} times differ from the model")
