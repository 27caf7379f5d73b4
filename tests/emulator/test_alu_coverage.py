"""Every vector and scalar ALU opcode of the emulator's table has a test with an oracle.

What is tested is read from the tests themselves: the values of their parameter `opcode`, each of
which the fixture `opcode_is_launched` finds among the instructions that the test ran.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from gfx950_emu.records import SALU, VALU, VOP3P, opcodes

# opcode -> why nothing independent says what it gives
WITHOUT_ORACLE: dict[str, str] = {}


def opcode_tests() -> dict[str, str]:
    """opcode -> the test that takes it as its parameter."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_alu_*.py")):
        module = importlib.import_module(f"tests.emulator.{path.stem}")
        for name, function in vars(module).items():
            if not name.startswith("test_") or function.__module__ != module.__name__:
                continue
            for mark in getattr(function, "pytestmark", ()):
                if mark.name != "parametrize":
                    continue
                names = [n.strip() for n in mark.args[0].split(",")]
                if "opcode" not in names:
                    continue
                assert hasattr(module, "opcode_is_launched"), path.name
                for value in mark.args[1]:
                    opcode = value if len(names) == 1 else value[names.index("opcode")]
                    found[opcode] = f"{path.name}::{name}"
    return found


def test_every_alu_opcode_has_an_oracle():
    alu = {name for name, op in opcodes().items() if op.family in (VALU, VOP3P, SALU)}
    assert len(alu) > 600
    missing = sorted(alu - opcode_tests().keys() - WITHOUT_ORACLE.keys())
    assert not missing, f"{len(missing)} opcodes without an oracle: {', '.join(missing)}"


def test_lists_name_opcodes_of_the_table():
    unknown = (opcode_tests().keys() | WITHOUT_ORACLE.keys()) - opcodes().keys()
    assert not unknown
    both = opcode_tests().keys() & WITHOUT_ORACLE.keys()
    assert not both, f"tested, and listed as not: {both}"


def test_launches_are_what_counts(request):
    """An opcode that a test names and never launches fails that test."""
    module = importlib.import_module("tests.emulator.alu")
    module.LAUNCHED.clear()
    module.start("v_nop\nv_add_u32_e64 v0, v1, v2\nv_mov_b32_dpp v0, v1 row_mirror")
    assert {"v_nop", "v_add_u32", "v_mov_b32"} <= module.LAUNCHED
    assert "v_sub_u32" not in module.LAUNCHED


@pytest.mark.parametrize("family,least", [(VALU, 490), (VOP3P, 30), (SALU, 130)])
def test_enough_opcodes(family, least):
    assert sum(op.family == family for op in opcodes().values()) >= least
