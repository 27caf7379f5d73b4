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
_OPENS = re.compile(r"(?:^|[\s=])['\"]")
"""A quote of the shell; an apostrophe stands within a word."""
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
            words, opens = split(line), _OPENS.search(line)
            begins = opens and split(line[: opens.start()])
            waiting = line if begins and not words else ""
            found += [words] if words else []
        assert not waiting, f"a quote is not closed: {waiting}"
    for code in _INLINE.findall(_FENCE.sub("", text)):
        words = split(code)
        found += [words] if len(words) > 1 else []
    return found


def documented() -> dict[tuple[str, ...], str]:
    """Every command of the documents -> the name of one that shows it; prose is left out."""
    texts = {path.name: path.read_text() for path in documents()}
    return {
        tuple(words): name
        for name, text in texts.items()
        for words in commands(text)
        if not is_prose(words)
    }


def is_prose(words: list[str]) -> bool:
    """Whether a line only begins like a command: no option, and no word of the program's second."""
    program, second = words[0], (words[1:2] or [""])[0]
    options = any(word.startswith("-") for word in words)
    return not options and program in SUBCOMMANDS and second not in SUBCOMMANDS[program]()


def check(words: list[str], checkpoint: str) -> None:
    """Check one command that is no prose."""
    program, *rest = words
    CHECKS[program](rest, checkpoint)


def _make(rest: list[str], checkpoint: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    names = [word for word in rest if "=" not in word and word not in PLACEHOLDERS | {"TARGET"}]
    unknown = [name for name in names if name not in targets]
    assert not unknown, f"no such target: {unknown}"


def _rocm_msa(rest: list[str], checkpoint: str) -> None:
    import typer

    from rocm_msa.cli import app

    group = typer.main.get_command(app)
    if rest == ["--help"]:
        return
    assert rest[0] in group.commands, f"no command {rest[0]}"
    if rest[0] == "serve":
        _vllm(rest, checkpoint)
        return
    command = group.commands[rest[0]]
    needed = sum(p.required for p in command.params if p.param_type_name == "argument")
    given = [*rest[1:], *["X"] * (needed if len(rest) == 1 else 0)]
    command.make_context(rest[0], given)


def _vllm(rest: list[str], checkpoint: str) -> None:
    from vllm.entrypoints.launchers import cli_args
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert rest[0] == "serve", f"vllm {rest[0]} is not checked here"
    load_general_plugins()
    if len(rest) == 1:
        return
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    options = [word for word in rest[2:] if word != "[OPTIONS]"]
    parsed = parser.parse_args(["--model", checkpoint, *options])
    cli_args.validate_parsed_serve_args(parsed)


def _python(rest: list[str], checkpoint: str) -> None:
    if rest[0] == "-m":
        package, *options = rest[1:]
        source = ROOT / package / "__main__.py"
        assert source.exists() or package in ("build", "pytest", "pip"), f"no module {package}"
        return
    source = ROOT / rest[0]
    assert source.exists(), f"no file {rest[0]}"
    options = [word.partition("=")[0] for word in rest[1:] if word.startswith("--")]
    text = source.read_text()
    unknown = [option for option in options if f'"{option}"' not in text]
    assert not unknown, f"{rest[0]} has no {unknown}"


def _pip(rest: list[str], checkpoint: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in rest:
        for extra in re.findall(r"rocm-msa\[([\w,-]+)\]", word):
            missing = set(extra.split(",")) - set(project["optional-dependencies"])
            assert not missing, f"no extra {missing}"


def _docker(rest: list[str], checkpoint: str) -> None:
    for option, value in itertools.pairwise(rest):
        if option in ("-f", "--env-file"):
            assert (ROOT / value).exists(), f"no file {value}"


def _mkdocs(rest: list[str], checkpoint: str) -> None:
    assert rest[0] == "build", rest


def _rocm_msa_commands() -> set[str]:
    import typer

    from rocm_msa.cli import app

    return {*typer.main.get_command(app).commands, "--help"}


SUBCOMMANDS = {
    "rocm-msa": _rocm_msa_commands,
    "vllm": lambda: {"serve"},
    "docker": lambda: {"build", "compose", "run"},
    "mkdocs": lambda: {"build"},
}
CHECKS = {
    "make": _make,
    "rocm-msa": _rocm_msa,
    "vllm": _vllm,
    "python": _python,
    "pip": _pip,
    "docker": _docker,
    "mkdocs": _mkdocs,
}
