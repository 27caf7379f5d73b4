"""The stored opcode checks cover what the kernels hold, and can be written anew."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from gfx950_emu import CodeObject
from rocm_msa import kernel_manifest
from rocm_msa.aot import compile_builds
from rocm_msa.selfcheck import kernels, opcode_data
from tools import make_opcode_checks as maker


def mnemonics(builds) -> set[str]:
    """Of the compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        compile_builds(builds, Path(folder), processes=1)
        found = set()
        for entry in kernel_manifest.read(Path(folder)).kernels.values():
            code = CodeObject.from_bytes(kernel_manifest.read_code_object(Path(folder), entry))
            for kernel in code.kernels.values():
                found |= {maker.mnemonic_of(i.text) for i in kernel.instructions}
        return found


def covered() -> set[str]:
    stored = opcode_data.load()
    return {case.mnemonic for case in stored.cases} | stored.not_covered.keys()


@pytest.mark.slow
def test_every_instruction_of_the_nvfp4_kernels_is_checked():
    found = mnemonics(kernels.builds(["nvfp4"]))
    assert len(found) > 100
    missing = found - covered()
    assert not missing, f"run tools/make_opcode_checks.py: {sorted(missing)}"


@pytest.mark.slow
def test_the_tool_writes_checks_of_every_kernel(tmp_path, monkeypatch):
    """All kernels of TP 4 and TP 8; what it writes passes, and no instruction is new."""
    monkeypatch.setattr(sys, "argv", ["make_opcode_checks.py", "--output", str(tmp_path)])
    maker.main()
    made = opcode_data.load(tmp_path)
    assert len(made.cases) > 400 and made.not_covered == maker.NOT_COVERED
    names = {case.mnemonic for case in made.cases}
    assert names <= covered(), sorted(names - covered())


def test_data_that_does_not_belong_together_is_refused(tmp_path):
    stored = opcode_data.load()
    opcode_data.save(stored, tmp_path)
    again = opcode_data.load(tmp_path)
    assert again.cases == stored.cases and again.code_object == stored.code_object
    fewer = opcode_data.Stored(
        stored.source, stored.cases[:-1], {}, stored.code_object, stored.expected
    )
    opcode_data.save(fewer, tmp_path)
    with pytest.raises(ValueError, match="words of answers"):
        opcode_data.load(tmp_path)
    (tmp_path / "opcodes.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="format: expected 1, got 0"):
        opcode_data.load(tmp_path)


PLACED = {
    "v_add_f32_e32 v9, s3, v2": "v_add_f32_e32 v40, s20, v4",
    "v_fma_f32 v7, -v15, v15, 1.0": "v_fma_f32 v40, -v4, v4, 1.0",
    "v_mad_u64_u32 v[2:3], s[0:1], s8, v6, v[4:5]": (
        "v_mad_u64_u32 v[40:41], s[40:41], s20, v4, v[6:7]"
    ),
    "s_and_b64 vcc, exec, s[42:43]": "s_and_b64 vcc, exec, s[20:21]",
    "ds_read2_b64 v[8:11], v4 offset0:4 offset1:32": (
        "ds_read2_b64 v[40:43], v4 offset0:1 offset1:1"
    ),
    "global_store_dwordx2 v1, v[2:3], s[4:5] sc1": "global_store_dwordx2 v4, v[8:9], s[8:9] sc1",
    "global_load_dword v1, v[2:3], off offset:-16": (
        "global_load_dword v40, v[6:7], off offset:128"
    ),
}


@pytest.mark.parametrize("text", PLACED)
def test_an_instruction_gets_registers_that_are_loaded(text):
    assert maker.check_of(text).text == PLACED[text]


def test_one_check_for_one_form():
    key = maker.form_key
    assert key("v_add_f32_e32 v9, s3, v2") == key("v_add_f32_e32 v1, s99, v7")
    assert key("v_add_f32_e32 v9, s3, v2") != key("v_add_f32_e32 v9, v3, v2")
    assert key("s_and_b32 s1, s2, 3") == key("s_and_b32 s1, s2, 0xff")
    assert key("v_perm_b32 v1, v2, v3, v4") != key("v_perm_b32 v1, v2, v3, s4")
    assert key("global_load_dword v1, v2, s[4:5] offset:4") != key(
        "global_load_dword v1, v2, s[4:5]"
    )
