"""Runs triton_prefill_cases.py in Triton's interpreter, in a process of its own."""

import importlib.util
from pathlib import Path

import pytest

from tests.ops.interpreter import run_in_interpreter

FILE = Path(__file__).with_name("triton_prefill_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_prefill_kernels_in_the_interpreter():
    run_in_interpreter(FILE)


LDS = {"gfx950": 160 * 1024, "gfx942": 64 * 1024}  # bytes a workgroup can have
POINTERS = {
    "q_ptr": "*bf16", "pages": "*u8", "order": "*i32", "items": "*i32", "totals": "*i32",
    "table": "*i32", "cu_seqlens": "*i32", "seq_lens": "*i32", "part": "*fp16",
    "part_lse": "*fp32", "out": "*fp32", "qk_scale": "fp32", "k_scale": "fp32", "v_scale": "fp32",
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("arch", LDS)
@pytest.mark.parametrize("op", ["sparse_prefill", "index_score_prefill", "dense_attention"])
def test_compiles_for_amd_with_the_tiles_of_its_plan(op, arch):
    """NVFP4 pages, bf16 queries, 16 heads of 128: what a rank of M3 runs."""
    import triton.language as tl

    from rocm_msa.flydsl_compile import compile_triton

    implementation = importlib.import_module(f"rocm_msa.ops.{op}.triton_impl")
    plan = importlib.import_module(f"rocm_msa.ops.{op}.plan")
    constants = {
        "q_dim": 1, "table_column": 1, "out_block": 1, "KV_HEADS": 1, "GROUP": 16,
        "GROUP_PAD": 16, "HEADS": 1, "HEAD_BYTES": 18432, "K_DATA": 0, "K_SCALES": 8192,
        "V_DATA": 9216, "V_SCALES": 17408, "D": 128, "KIND": 0, "FAST": False,
        "K_TYPE": tl.bfloat16, "Q_PARTS": 1, "V_TYPE": tl.float16, "P_PARTS": 1,
        "NEGATIVE": False, "SCALED": False,
    }  # fmt: skip
    if op == "sparse_prefill":
        kernel, t = implementation.attend_kernel, plan.select(16, 1, 16, 128, 2, arch)
    elif op == "dense_attention":
        kernel, t = implementation.attend_kernel, plan.select(8192, 16, 128, False, arch)
        constants |= {"UNIT": t.unit, "TOKENS": t.rows // 16, "FEW": plan.FEW, "FEWER": False}
    else:
        kernel, t = implementation.score_kernel, plan.select(4096, 1, 8192, 0, False, arch)
        constants |= {"TOKENS": t.pairs * t.products, "PAIRS": t.pairs, "PRODUCTS": t.products}
    constants["STAGES"] = t.stages
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {n: POINTERS.get(n, "i32") for n in names if n not in constants}
    compiled = compile_triton(kernel, signature, constants, num_warps=t.warps, arch=arch)
    assert 0 < compiled.lds_bytes <= LDS[arch]
