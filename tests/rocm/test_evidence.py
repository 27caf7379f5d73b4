"""docs/rocm_evidence.md: every claim has a line of evidence, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "rocm_evidence.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and line.count("|") == 4
]
CLAIMS = [row for row in ROWS if row[0] != "claim"]
LINES = re.findall(r"^\| (\S+) \| ", TEXT.partition("## vLLM")[0], re.MULTILINE)[1:]


def named_in(row: list[str]) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", row[2])


def test_there_are_claims_on_every_line():
    assert len(CLAIMS) > 30
    assert {row[1] for row in CLAIMS} == set(LINES)


@pytest.mark.parametrize("row", CLAIMS, ids=[row[0][:60] for row in CLAIMS])
def test_a_claim_has_its_evidence(row):
    claim, line, cell = row
    assert line in LINES
    named = named_in(row)
    assert bool(named) == (line != "none"), claim
    assert re.sub(r"`[^`]+`|[, ]", "", cell) == "", "only tests are named"
    for path, _, function in (name.partition("::") for name in named):
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
