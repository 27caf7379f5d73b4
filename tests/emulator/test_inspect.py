"""`python -m gfx950_emu inspect`, the pipes and the occupancy rule."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gfx950_emu.__main__ import app
from gfx950_emu.code_object import CodeObject
from gfx950_emu.occupancy import occupancy
from gfx950_emu.pipes import Pipe, histogram, pipe_of
from tests.emulator.corpus import BY_NAME, CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernel.hsaco"
    path.write_bytes(BY_NAME["flydsl_reduce"].compile().code_object)
    return path


def inspect(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], env={"COLUMNS": "200"})


def kernel_of(name, **descriptor):
    compiled = BY_NAME[name].compile()
    kernel = CodeObject.from_bytes(compiled.code_object).kernels[compiled.kernel]
    return dataclasses.replace(
        kernel, descriptor=dataclasses.replace(kernel.descriptor, **descriptor)
    )


def test_text(file):
    result = inspect(file)
    assert result.exit_code == 0
    for part in ("reduce", "lds bytes", "waves a SIMD", "global_buffer", "VALU", "s_barrier 1"):
        assert part in result.stdout
    assert "s_endpgm\n" not in result.stdout


def test_instructions(file):
    result = inspect(file, "--asm")
    assert result.exit_code == 0 and "reduce:\n" in result.stdout
    assert "  s_endpgm" in result.stdout and "kernels_flydsl.py:" in result.stdout


def test_json(file):
    result = inspect(file, "--json", "--asm", "--lds", "81920")
    answer = json.loads(result.stdout)
    (kernel,) = answer["kernels"]
    assert answer["target"].endswith("gfx950") and len(answer["digest"]) == 64
    assert kernel["resources"]["lds_bytes"] == 16
    assert kernel["resources"]["dynamic_lds_bytes"] == 81920
    assert kernel["resources"]["required_workgroup_size"] == [256, 1, 1]
    assert kernel["occupancy"]["limited_by"] == ["LDS"]
    assert sum(n for pipe in kernel["pipes"].values() for n in pipe.values()) == len(kernel["asm"])
    assert kernel["pipes"]["wait, barrier"]["s_barrier"] == 1
    assert [a["kind"] for a in kernel["arguments"]] == ["global_buffer"] * 2


def test_one_kernel(file):
    assert inspect(file, "--kernel", "reduce").exit_code == 0
    result = inspect(file, "--kernel", "missing")
    assert result.exit_code == 1 and "no kernel missing; it has reduce" in result.stderr


def test_errors_are_one_line(file, tmp_path):
    file.write_bytes(b"text")
    for path in (file, tmp_path / "missing"):
        result = inspect(path)
        assert result.exit_code == 1 and str(path) in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_as_a_module(file):
    done = subprocess.run(
        [sys.executable, "-m", "gfx950_emu", "inspect", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "reduce" in done.stdout


# Pipes


@pytest.mark.parametrize(
    ("mnemonic", "pipe"),
    [
        ("v_mfma_scale_f32_16x16x128_f8f6f4", Pipe.MFMA),
        ("v_accvgpr_read_b32", Pipe.VALU),
        ("v_cmpx_lt_u32_e64", Pipe.VOPC),
        ("v_rcp_iflag_f32_e32", Pipe.TRANS),
        ("v_exp_f32_e32", Pipe.TRANS),
        ("v_frexp_exp_i32_f32_e32", Pipe.VALU),
        ("v_ldexp_f32", Pipe.VALU),
        ("s_cbranch_execz", Pipe.BRANCH),
        ("s_waitcnt", Pipe.WAIT),
        ("s_memrealtime", Pipe.SMEM),
        ("s_buffer_load_dwordx4", Pipe.SMEM),
        ("s_setreg_imm32_b32", Pipe.SALU),
        ("s_set_gpr_idx_on", Pipe.OTHER),
        ("s_nop", Pipe.OTHER),
        ("ds_read_b64_tr_b16", Pipe.DS),
        ("buffer_wbl2", Pipe.CACHE),
        ("buffer_inv", Pipe.CACHE),
        ("global_load_lds_dwordx4", Pipe.VMEM_LOAD),
        ("buffer_store_short", Pipe.VMEM_STORE),
        ("flat_atomic_cmpswap_x2", Pipe.ATOMIC),
    ],
)
def test_pipe_of(mnemonic, pipe):
    assert pipe_of(mnemonic) is pipe


def test_every_instruction_of_the_corpus_has_a_pipe():
    seen = set()
    for case in CASES:
        compiled = case.compile()
        kernel = CodeObject.from_bytes(compiled.code_object).kernels[compiled.kernel]
        seen |= {i.mnemonic for i in kernel.instructions}
    counts = histogram(seen)
    assert set(counts.get(Pipe.OTHER, ())) <= {"s_nop", "s_setprio", "s_sethalt", "s_trap"}
    assert set(Pipe) - set(counts) == set()


# Occupancy


@pytest.mark.parametrize(
    ("vgprs", "waves"), [(64, 8), (72, 7), (128, 4), (136, 3), (256, 2), (264, 1), (512, 1)]
)
def test_registers_limit_waves(vgprs, waves):
    kernel = kernel_of("flydsl_copy", vgprs=vgprs, sgprs=16)
    fit = occupancy(kernel)  # 4 waves a workgroup: one on each SIMD
    assert fit.workgroup_waves == 4 and fit.waves_per_simd == waves
    assert ("VGPRs" in fit.limited_by) and (fit.limited_by == ("VGPRs",) or waves == 8)


def test_lds_is_given_in_granules():
    kernel = kernel_of("flydsl_copy", vgprs=8, sgprs=16, lds_bytes=80 * 1024)
    assert occupancy(kernel).workgroups_per_cu == 2
    assert occupancy(kernel, dynamic_lds_bytes=1).workgroups_per_cu == 1
    assert occupancy(kernel, dynamic_lds_bytes=80 * 1024).workgroups_per_cu == 1
    too_much = occupancy(kernel, dynamic_lds_bytes=80 * 1024 + 1)
    assert too_much.workgroups_per_cu == 0 and too_much.limited_by == ("LDS",)


def test_large_and_small_workgroups():
    kernel = kernel_of("flydsl_copy", vgprs=8, sgprs=16)
    assert occupancy(kernel, lanes=64).workgroups_per_cu == 32
    assert occupancy(kernel, lanes=128).limits["barriers"] == 16
    assert occupancy(kernel, lanes=1024).workgroups_per_cu == 2
    assert occupancy(kernel, lanes=65).workgroup_waves == 2
    many = kernel_of("flydsl_copy", vgprs=256, sgprs=16)
    assert occupancy(many, lanes=1024).workgroups_per_cu == 0  # 16 waves, room for 8
    assert occupancy(kernel_of("flydsl_copy", vgprs=8, sgprs=112)).waves_per_simd == 7
