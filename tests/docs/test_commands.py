"""Every command in the documents exists with its options; those that are cheap are run.

Servers, demos, compilers and the test suite have tests of their own; no GPU and no Docker is here.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rocm_msa.cli import app
from tests.docs import commands

RUN = ("capacity", "make-checkpoint")
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
        try:
            commands.check(words, checkpoint)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{path.name}: {' '.join(words)}: {error}")


def cheap() -> list[list[str]]:
    texts = [path.read_text() for path in commands.documents()]
    found = [words[1:] for text in texts for words in commands.commands(text)]
    named = {tuple(w) for w in found if w and w[0] in RUN and not commands.PLACEHOLDERS & {*w}}
    return sorted(map(list, named))


def test_cheap_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(cheap()) > 3
    for words in cheap():
        words = [word.replace("/tmp/", f"{tmp_path}/") for word in words]
        if words == ["make-checkpoint"]:
            continue
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{words}: {result.output}"


TEXT = """
A command `rocm-msa capacity --context 8K` and a word `make`.

```
OMP_NUM_THREADS=1 vllm serve MODEL -tp 4 \\
    --block-size 128   # why
rocm-msa serves 3 layers; this is output
vllm serve MODEL --attention-config '{"indexer_kv_dtype":
                         "fp8"}'
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
        ["rocm-msa", "capacity", "--context", "8K"],
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        ["make", "tset"],
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
