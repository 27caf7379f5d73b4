"""`python -m gfx950_emu inspect FILE`: what a code object holds and needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gfx950_emu.code_object import CodeObject, CodeObjectError, Kernel
from gfx950_emu.disassembler import ToolchainError
from gfx950_emu.occupancy import WAVES_PER_SIMD, occupancy
from gfx950_emu.pipes import histogram

app = typer.Typer(
    help="A functional emulator of gfx950.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main() -> None:
    """Keeps `inspect` a command of its own name."""


def describe(kernel: Kernel, dynamic_lds_bytes: int) -> dict[str, Any]:
    """What is shown of a kernel, as plain values."""
    descriptor, fit = kernel.descriptor, occupancy(kernel, dynamic_lds_bytes)
    return {
        "name": kernel.name,
        "entry": kernel.entry,
        "instructions": len(kernel.instructions),
        "code_bytes": sum(i.size for i in kernel.instructions),
        "resources": {
            "vgprs": kernel.vgpr_count - kernel.agpr_count,
            "agprs": kernel.agpr_count,
            "vgprs_allocated": descriptor.vgprs,
            "sgprs": kernel.sgpr_count,
            "lds_bytes": descriptor.lds_bytes,
            "dynamic_lds_bytes": dynamic_lds_bytes,
            "scratch_bytes_per_lane": descriptor.scratch_bytes,
            "vgpr_spills": kernel.vgpr_spills,
            "sgpr_spills": kernel.sgpr_spills,
            "kernarg_bytes": descriptor.kernarg_bytes,
            "preloaded_dwords": descriptor.preload_length,
            "max_workgroup_size": kernel.max_workgroup_size,
            "required_workgroup_size": kernel.reqd_workgroup_size,
        },
        "occupancy": {
            "waves_per_simd": fit.waves_per_simd,
            "workgroups_per_cu": fit.workgroups_per_cu,
            "workgroup_waves": fit.workgroup_waves,
            "limited_by": list(fit.limited_by),
        },
        "arguments": [
            {"offset": a.offset, "size": a.size, "kind": a.kind, "name": a.name}
            for a in kernel.args
        ],
        "pipes": {
            pipe.value: dict(counts.most_common())
            for pipe, counts in histogram(i.mnemonic for i in kernel.instructions).items()
        },
    }


def show(facts: dict[str, Any], console: Console) -> None:
    resources, fit = facts["resources"], facts["occupancy"]
    console.print(f"\n[bold]{facts['name']}[/bold]", highlight=False)
    console.print(
        f"  {facts['instructions']} instructions, {facts['code_bytes']} bytes, entry at pc "
        f"{facts['entry']:#x}",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, value in resources.items():
        if value is not None:
            table.add_row(name.replace("_", " "), str(value))
    console.print(table, highlight=False)
    console.print(
        f"  occupancy: {fit['waves_per_simd']:g} of {WAVES_PER_SIMD} waves a SIMD, "
        f"{fit['workgroups_per_cu']} workgroups of {fit['workgroup_waves']} waves a CU, limited "
        f"by {', '.join(fit['limited_by'])}",
        highlight=False,
    )
    table = Table("offset", "bytes", "kind", "name", box=None, padding=(0, 2))
    for a in facts["arguments"]:
        table.add_row(str(a["offset"]), str(a["size"]), a["kind"], a["name"])
    console.print(table, highlight=False)
    table = Table("pipe", "count", "opcodes", box=None, padding=(0, 2))
    for pipe, counts in facts["pipes"].items():
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        table.add_row(pipe, str(sum(counts.values())), listed)
    console.print(table, highlight=False)


def listing(kernel: Kernel) -> str:
    lines, before = [f"{kernel.name}:"], None
    for i in kernel.instructions:
        place = kernel.line(i.pc)
        note = f"  ; {place}" if place and place != before else ""
        before = place or before
        lines.append(f"{i.pc:8x}  {i.text}{note}")
    return "\n".join(lines)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A gfx950 code object (.hsaco, .co).")],
    kernel: Annotated[str | None, typer.Option(help="This kernel only.")] = None,
    asm: Annotated[bool, typer.Option("--asm", help="The instructions too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    lds: Annotated[int, typer.Option(help="Bytes of LDS that the launch adds.")] = 0,
) -> None:
    """Kernels, resources, occupancy and instructions by pipe."""
    try:
        code = CodeObject.from_file(file)
        chosen = list(code.kernels.values())
        if kernel is not None:
            chosen = [k for k in chosen if k.name == kernel]
            if not chosen:
                names = ", ".join(code.kernels)
                raise CodeObjectError(f"{file}: no kernel {kernel}; it has {names}")
    except (OSError, CodeObjectError, ToolchainError) as error:
        print(f"gfx950_emu: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    facts = [describe(k, lds) for k in chosen]
    if as_json:
        if asm:
            for entry, k in zip(facts, chosen, strict=True):
                entry["asm"] = [{"pc": i.pc, "text": i.text} for i in k.instructions]
        head = {"file": str(file), "target": code.target, "digest": code.digest}
        print(json.dumps({**head, "version": code.version, "kernels": facts}, indent=1))
        return
    console = Console()
    console.print(f"{file}: {code.target}, code object v{code.version}", highlight=False)
    for entry, k in zip(facts, chosen, strict=True):
        show(entry, console)
        if asm:
            print(f"\n{listing(k)}")


if __name__ == "__main__":
    app(prog_name="gfx950_emu")
