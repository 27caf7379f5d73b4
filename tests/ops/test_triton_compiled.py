"""What the Triton ops take of a compute unit, compiled for gfx950 and gfx942 with no GPU.

Every kernel that warm-up would compile for a rank of a TP1, TP4 or TP8 group, on tensors without
memory, caches larger than 2 GiB.
"""

import functools

import pytest
import torch

pytest.importorskip("triton")

from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.code_object import kernel_metadata
from rocm_msa.ops import triton_warmup
from tests.ops.emulated_triton import Launch, emulated

LDS_BYTES = {"gfx950": 160 * 1024, "gfx942": 64 * 1024}
# One into an accumulation register, which is no memory: the scratch is none.
VGPR_SPILLS = {"gfx950": 0, "gfx942": 1}
# Of SGPRs: a spilled one is a lane of a VGPR, moved in one instruction, not memory. Two VGPRs.
SGPR_SPILLS = 128
MAX_BLOCKS = 8192
CASES = [
    pytest.param(arch, tp, dtype, marks=() if (tp, dtype) == (4, "nvfp4") else pytest.mark.slow)
    for arch in LDS_BYTES
    for tp in (1, 4, 8)
    for dtype in ("nvfp4", "fp8", "bf16")
]


@functools.cache
def warmed_up(arch: str, tp: int, dtype: str) -> tuple[list[Launch], list[int]]:
    """The launches of warm-up of sparse and dense layers, and what each said; then once more."""
    kv = max(1, 4 // tp)
    said = []
    with emulated(arch=arch, run=False) as launches:
        for index in (kv, 0, kv, 0):
            heads = ops.Heads(q=64 // tp, kv=kv, index=index, head_dim=128, rotary_dim=64)
            config = triton_warmup.Config(heads, torch.bfloat16, MAX_BLOCKS)
            main = MainCache.allocate(2**20, kv, dtype, "meta")
            keys = IndexCache.allocate(2**20, dtype, "meta") if index else None
            said.append(triton_warmup.warmup(config, main, keys))
    return launches, said


@pytest.mark.parametrize(("arch", "tp", "dtype"), CASES)
def test_no_scratch_no_spills_and_lds(arch, tp, dtype):
    launches, _ = warmed_up(arch, tp, dtype)
    names = {launch.kernel for launch in launches}
    assert len(names) >= 6 and all("kernel" in name for name in names), names
    for launch in launches:
        compiled = launch.compiled
        assert compiled.arch == arch
        facts = kernel_metadata(compiled.code_object, compiled.kernel)
        what = (launch.kernel, launch.grid, compiled.lds_bytes, facts)
        assert facts[".private_segment_fixed_size"] == 0, what
        assert facts[".vgpr_spill_count"] <= VGPR_SPILLS[arch], what
        assert facts[".sgpr_spill_count"] <= SGPR_SPILLS, what
        assert compiled.lds_bytes <= LDS_BYTES[arch], what


@pytest.mark.parametrize(("arch", "tp", "dtype"), CASES)
def test_a_second_warm_up_compiles_nothing(arch, tp, dtype):
    launches, (*_, sparse_again, dense_again) = warmed_up(arch, tp, dtype)
    assert launches and (sparse_again, dense_again) == (0, 0)
