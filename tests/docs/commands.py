"""The shell commands that the documents show, and a check of each kind of command.

A check raises AssertionError. `rocm-msa`, `make` and `python FILE` are checked against what exists
here; `vllm serve` by vLLM's own parser. What also needs a GPU, or changes the machine, is not run.
"""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("make", "rocm-msa", "vllm", "python", "pip", "docker", "mkdocs")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SETTING = re.compile(r"[A-Z_]+=")
PLACEHOLDERS = {"DIR", "FILE", "MODEL", "FOLDER"}


def documents() -> list[Path]:
    """README and the site's pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def split(line: str) -> list[str]:
    """Words of a command line, `NAME=value` settings before it taken off; [] for no command."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # quotes that end on a later line
        return []
    while words and _SETTING.match(words[0]):
        words.pop(0)
    if not words or Path(words[0]).name not in PROGRAMS:
        return []
    words[0] = Path(words[0]).name
    return [word for word in words if word not in ("...", "[...]")]


def commands(text: str) -> list[list[str]]:
    """Commands of a Markdown text: in fenced blocks, continued lines joined, and in backticks."""
    found = []
    for language, block in _FENCE.findall(text):
        if language not in ("", "sh", "bash"):
            continue
        waiting = ""
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = f"{waiting} {line.strip()}".strip() if waiting else line.strip()
            begins = split(line.partition("'")[0].partition('"')[0])
            waiting = line if begins and not split(line) else ""
            found += [split(line)] if split(line) else []
        assert not waiting, f"a quote is not closed: {waiting}"
    for code in _INLINE.findall(_FENCE.sub("", text)):
        words = split(code)
        found += [words] if len(words) > 1 else []
    return found


def check(words: list[str], checkpoint: str) -> bool:
    """Check one command; False when it is prose or output that only begins like one."""
    program, *rest = words
    return CHECKS[program](rest, checkpoint)


def _make(rest: list[str], checkpoint: str) -> bool:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    names = [word for word in rest if "=" not in word and word not in PLACEHOLDERS | {"TARGET"}]
    unknown = [name for name in names if name not in targets]
    assert not unknown, f"no such target: {unknown}"
    return True


def _rocm_msa(rest: list[str], checkpoint: str) -> bool:
    import typer

    from rocm_msa.cli import app

    group = typer.main.get_command(app)
    if not rest or rest[0] not in group.commands:
        assert not rest or not rest[0].startswith("-") or rest[0] == "--help"
        return False
    if rest[0] == "serve":
        return _vllm(rest, checkpoint)
    command = group.commands[rest[0]]
    needed = sum(p.required for p in command.params if p.param_type_name == "argument")
    given = [*rest[1:], *["X"] * (needed if len(rest) == 1 else 0)]
    command.make_context(rest[0], given)
    return True


def _vllm(rest: list[str], checkpoint: str) -> bool:
    from vllm.entrypoints.launchers import cli_args
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if rest[0] != "serve":
        return False
    load_general_plugins()
    if len(rest) == 1:
        return True
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    options = [word for word in rest[2:] if word != "[OPTIONS]"]
    parsed = parser.parse_args(["--model", checkpoint, *options])
    cli_args.validate_parsed_serve_args(parsed)
    return True


def _python(rest: list[str], checkpoint: str) -> bool:
    if rest[0] == "-m":
        package, *options = rest[1:]
        source = ROOT / package / "__main__.py"
        assert source.exists() or package in ("build", "pytest", "pip"), f"no module {package}"
        return True
    source = ROOT / rest[0]
    if rest[0] in PLACEHOLDERS:
        return False
    assert source.exists(), f"no file {rest[0]}"
    options = [word.partition("=")[0] for word in rest[1:] if word.startswith("--")]
    text = source.read_text()
    unknown = [option for option in options if f'"{option}"' not in text]
    assert not unknown, f"{rest[0]} has no {unknown}"
    return True


def _pip(rest: list[str], checkpoint: str) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in rest:
        for extra in re.findall(r"rocm-msa\[([\w,-]+)\]", word):
            missing = set(extra.split(",")) - set(project["optional-dependencies"])
            assert not missing, f"no extra {missing}"
    return True


def _docker(rest: list[str], checkpoint: str) -> bool:
    for option, value in itertools.pairwise(rest):
        if option in ("-f", "--env-file"):
            assert (ROOT / value).exists(), f"no file {value}"
    return True


def _mkdocs(rest: list[str], checkpoint: str) -> bool:
    assert rest[0] in ("build", "serve"), rest
    return True


CHECKS = {
    "make": _make,
    "rocm-msa": _rocm_msa,
    "vllm": _vllm,
    "python": _python,
    "pip": _pip,
    "docker": _docker,
    "mkdocs": _mkdocs,
}
