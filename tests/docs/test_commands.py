"""Every command in the documents exists with its options; those that are cheap are run.

Servers, demos, compilers and the test suite have tests of their own; no GPU and no Docker is here.
"""

from __future__ import annotations

import ast
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from rocm_msa.cli import app
from tests.docs import commands
from tests.docs.runs import RUNS, run_of

RUN = ("capacity", "doctor", "make-checkpoint")
"""Commands of rocm-msa that take a moment and only write where they are told to."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    from rocm_msa.checkpoint.make import make_checkpoint

    path = tmp_path_factory.mktemp("docs") / "tiny"
    make_checkpoint(path)
    return str(path)


@pytest.mark.parametrize("path", commands.documents(), ids=lambda path: path.name)
def test_commands_exist(path, checkpoint):
    for words in commands.commands(path.read_text()):
        if commands.is_prose(words):
            continue
        try:
            commands.check(words, checkpoint)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{path.name}: {' '.join(words)}: {error}")


def test_every_command_is_run_or_needs_what_is_not_here():
    without = [
        f"{name}: {' '.join(words)}"
        for words, name in commands.documented().items()
        if run_of(list(words)) is None
    ]
    assert not without, f"say in tests/docs/runs.py what runs {without}"


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_what_runs_a_command_exists(words):
    run = RUNS[words]
    assert run.by in ("test", "gpu", "engine", "index")
    path, _, name = run.test.partition("::")
    tree = ast.parse((commands.ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_longest_entry_counts():
    assert run_of(["rocm-msa", "serve", "/tmp/tiny"]).by == "test"
    assert run_of(["rocm-msa", "serve", "MODEL", "-tp", "4"]).by == "gpu"
    assert run_of(["rocm-msa", "unheard-of"]) is None


def cheap() -> list[list[str]]:
    named = {
        words[1:]
        for words in commands.documented()
        if words[0] == "rocm-msa" and words[1] in RUN and not commands.PLACEHOLDERS & {*words}
    }
    return sorted(map(list, named))


def test_cheap_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = cheap()
    assert {words[0] for words in run} == {*RUN}
    for words in run:
        words = [word.replace("/tmp/", f"{tmp_path}/") for word in words]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{words}: {result.output}"


MAKE = {
    "test": ("ruff check .", 'pytest -m "not slow and not gpu" -k topk'),
    "test-slow": ('pytest -m "slow and not gpu" -k topk',),
    "test-gpu": ("pytest -m gpu -k topk",),
    "lint": ("ruff check .", "ruff format --check ."),
    "format": ("ruff check --fix .", "ruff format ."),
    "demo": ("rocm-msa demo -k topk",),
    "demo-pd": ("examples/pd/demo.py -k topk",),
    "demo-emulated": ("rocm-msa demo --emulated -k topk",),
    "serve": ("rocm-msa demo --keep-serving -k topk",),
    "verify": ("rocm-msa verify -k topk",),
    "bench": ("benchmarks/bench_*.py", '"$bench" -k topk'),
    "docs": ("mkdocs build --strict",),
}


@pytest.mark.parametrize("target", MAKE)
def test_make_targets_run_what_they_say(target):
    """Without running it; the environment comes first, ARGS go through."""
    command = ["make", "--dry-run", target, "ARGS=-k topk"]
    done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    place = 0
    for part in ("tools/setup_env.py", *MAKE[target]):
        place = done.stdout.find(part, place)
        assert place >= 0, f"{part} is not, or not in its place, in {done.stdout}"


def test_make_clean(tmp_path):
    shutil.copy(commands.ROOT / "Makefile", tmp_path)
    kept, gone = (
        ("mine.txt", "src/a.py"),
        (".venv/x", "build/y", "src/__pycache__/a.pyc", "a.egg-info/z"),
    )
    for name in (*kept, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert all((tmp_path / name).exists() for name in kept)
    assert not any((tmp_path / name).exists() for name in gone)


TEXT = """
A command `rocm-msa capacity --context 8K` and a word `make`.

```
OMP_NUM_THREADS=1 vllm serve MODEL -tp 4 \\
    --block-size 128   # why
rocm-msa serves 3 layers; this is output
vllm serve MODEL --attention-config '{"indexer_kv_dtype":
                         "fp8"}'
make's own words, as make says "no rule", and docker isn't here
rocm-msa doctor  # what isn't there
```

```python
make = "no command"
```
"""


def test_what_is_found():
    assert commands.commands(TEXT) == [
        ["vllm", "serve", "MODEL", "-tp", "4", "--block-size", "128"],
        ["rocm-msa", "serves", "3", "layers;", "this", "is", "output"],
        ["vllm", "serve", "MODEL", "--attention-config", '{"indexer_kv_dtype": "fp8"}'],
        ["rocm-msa", "doctor"],
        ["rocm-msa", "capacity", "--context", "8K"],
    ]


def test_a_quote_that_is_not_closed_is_said():
    with pytest.raises(AssertionError, match="a quote is not closed: vllm serve"):
        commands.commands("```\nvllm serve MODEL --attention-config '{}\nmore\n```\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rocm-msa", "serves", "3", "layers"], True),
        (["docker", "steps"], True),
        (["rocm-msa"], True),
        (["rocm-msa", "capcity", "--context", "8K"], False),
        (["rocm-msa", "capacity"], False),
        (["make", "anything"], False),
    ],
)
def test_what_is_prose(words, expected):
    assert commands.is_prose(words) is expected


@pytest.mark.parametrize(
    "wrong",
    [
        ["make", "tset"],
        ["rocm-msa", "capcity", "--context", "8K"],
        ["rocm-msa", "capacity", "--contxt", "8K"],
        ["rocm-msa", "--nonsense"],
        ["vllm", "serve", "MODEL", "--blocksize", "128"],
        ["vllm", "serve", "MODEL", "--attention-config", '{"indexer_dtype": "fp8"}'],
        ["rocm-msa", "serve", "MODEL", "--block-sizes", "128"],
        ["python", "benchmarks/no_such.py"],
        ["python", "benchmarks/bench_transfer.py", "--tokns", "1"],
        ["pip", "install", "rocm-msa[cuda]"],
        ["docker", "compose", "-f", "docker/compose.tp3.yaml", "up"],
    ],
)
def test_a_wrong_command_is_found(wrong, checkpoint):
    with pytest.raises((Exception, SystemExit)):
        commands.check(wrong, checkpoint)
