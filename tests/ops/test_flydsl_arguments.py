"""A kernel declares its arguments once: what is compiled and launched follows from that."""

from __future__ import annotations

from rocm_msa.ops.block_topk import flydsl_gfx950 as topk
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as decode


def test_names_types_and_workgroup_are_those_of_the_kernel():
    compiled = topk.compile_build(topk.Build(4, 4, 16))
    assert dict(zip(compiled.arguments, compiled.argument_types, strict=True)) == {
        "scores": "ptr", "score_head": "i64", "score_row": "i64", "score_block": "i64",
        "num_blocks": "ptr", "num_blocks_stride": "i64", "max_blocks": "i32", "topk": "i32",
        "init_blocks": "i32", "local_blocks": "i32",
        "out": "ptr", "out_head": "i64", "out_row": "i64", "out_slot": "i64",
    }  # fmt: skip
    assert compiled.block == (4 * 64, 1, 1) and compiled.kernel.startswith("block_topk_r4_w4_k16")


def test_floats_and_many_arguments():
    compiled = decode.compile_build(decode.Build("fp8", "bf16", 1, 4))
    types = dict(zip(compiled.arguments, compiled.argument_types, strict=True))
    assert len(types) == 26 and types["factor"] == types["v_scale"] == "f32"
    assert types["q_row"] == "i64" and types["group"] == "i32" and types["lse"] == "ptr"
