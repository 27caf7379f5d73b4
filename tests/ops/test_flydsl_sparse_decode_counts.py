"""Counts of sparse_decode's gfx950 kernels: instructions, bytes, registers, what is done once."""

from __future__ import annotations

import re

import pytest
import torch

from gfx950_emu import Checks, CodeObject
from rocm_msa.aot import ServingConfig, compile_builds
from rocm_msa.cache import CacheDType
from rocm_msa.cache.pages import main_page
from rocm_msa.kernel_manifest import read
from rocm_msa.ops.flydsl_by_page import KERNELS
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as module
from tests.ops.cases import DTYPES
from tests.ops.flydsl_decode import DIM, Call, check, full, make_call


def dequantised_chunks(report) -> float:
    """Runs of 32 values a lane that went through the table, a lane of a wave."""
    return report.instructions.get("v_perm_b32", 0) / 8


def minimum_bytes(call: Call) -> int:
    """Every byte that a call must touch once: pages, q, out, lse, lists, tables, lengths."""
    pages = call.table[call.table >= 0].unique().numel()
    rows, heads, dim = call.q.shape
    small = call.ids.numel() + call.table.numel() + call.lens.numel() + rows * heads
    return pages * call.cache.page.page_bytes + 4 * rows * heads * dim + 4 * small


PAGE_CHUNKS = 2 * 128 * DIM // 32 // 64
"""Runs of 32 values, K and V, of a page and head: wave-instructions."""


SHAPES = [(1, 1), (3, 1), (4, 4), (16, 1)]


@pytest.mark.parametrize(("requests", "rows"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hbm_bytes_are_the_least(dtype, requests, rows):
    """Pages of their own and pages that rows share, in every cut: no partial result is moved."""
    call = full(requests, rows, dtype=dtype)
    for parts in module.parts_of(CacheDType(dtype)):
        _, reports = call.run(parts, checks=Checks.NONE)
        assert sum(r.hbm_bytes for r in reports) <= 1.02 * minimum_bytes(call)


def test_hbm_bytes_of_a_prefix_that_all_requests_share():
    call = full(64, 1)
    call.table[:] = call.table[0]
    _, reports = call.run(checks=Checks.NONE)
    assert sum(r.hbm_bytes for r in reports) <= 1.02 * minimum_bytes(call)


def test_hbm_bytes_of_partial_results():
    """A page at a time: a partial result of fp16 a (row, slot) is written and read, 4 KB each way,
    with its weights; queries as operands once a row. Nothing else is moved twice."""
    call = full(4, 4)
    items, rows = 4 * 4 * 16, 4 * 4
    _, reports = call.run("shared", checks=Checks.NONE)
    moved = 2 * items * (4096 + 64 + 16) + 2 * rows * (4096 + 64)
    assert sum(r.hbm_bytes for r in reports) <= 1.02 * (minimum_bytes(call) + moved)


@pytest.mark.parametrize("parts", module.PARTS)
def test_valu_counts_and_products(parts):
    """What is done for a part of the dims: all scores, that part of V, and nothing twice."""
    call = full(4, 1)
    _, (rows,) = call.run(parts, checks=Checks.NONE)
    pages = 4 * 16 * parts  # a workgroup each
    chunks = dequantised_chunks(rows)
    assert chunks == pages * PAGE_CHUNKS / 2 * (1 + 1 / parts)
    # All and, shift, permute and bit-operation instructions of the kernel, whatever they are for.
    kinds = ("v_perm_b32", "v_bitop3_b32", "v_and_b32", "v_lshlrev_b32", "v_lshrrev_b32",
             "v_bfe_u32", "v_lshl_or_b32", "v_and_or_b32", "v_or_b32")  # fmt: skip
    assert sum(rows.instructions.get(kind, 0) for kind in kinds) <= 37 * chunks
    assert rows.pipes["valu"] <= {1: 930, 2: 740, 4: 630}[parts] * pages
    assert rows.instructions["v_mfma_f32_16x16x128_f8f6f4"] == pages * (
        8 * 2 + (8 // parts + 1) * 2
    )
    assert rows.counters["lds_conflict_cycles"] == 0


@pytest.mark.parametrize(("requests", "rows"), [(64, 1), (3, 8)])
def test_a_shared_page_is_read_and_dequantised_once(requests, rows):
    call = make_call([256] * requests, rows, kv_heads=1)
    call.table[:, :2] = call.table[0, :2]
    call.ids = torch.full_like(call.ids, -1)
    call.ids[..., 3], call.ids[..., 5] = 1, 0
    _, reports = check(call, "shared", checks=Checks.NONE)
    pages = reports[KERNELS.index("pages")]
    assert sum(dequantised_chunks(r) for r in reports) == 2 * PAGE_CHUNKS
    users = 2 * requests * rows
    assert pages.instructions["v_mfma_f32_16x16x128_f8f6f4"] == users * (8 * 2 + 9 * 2)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(manifest entries by symbol, instructions of each) of all kernels of the three caches."""
    folder = tmp_path_factory.mktemp("kernels")
    configs = [ServingConfig(16, 1, 1, DIM, 64, dtype, dtype) for dtype in DTYPES]
    builds = [b for config in configs for b in module.builds(config) if isinstance(b, module.Build)]
    compile_builds(builds, folder, processes=1)
    entries = {b: read(folder).kernels[b.symbol] for b in builds}
    code = {b: CodeObject.from_file(folder / e.file) for b, e in entries.items()}
    return entries, {b: code[b].kernels[e.symbol].instructions for b, e in entries.items()}


def test_registers_and_lds(compiled):
    """No spills, no scratch; as many waves a SIMD as LDS has room for."""
    for build, entry in compiled[0].items():
        r = entry.registers
        assert not r["vgpr_spills"] and not r["sgpr_spills"] and not r["scratch_bytes"], build
        assert r["vgpr"] + r["agpr"] <= 512 // build.waves_a_simd, build
        assert entry.static_lds * (build.waves_a_simd * 4 // build.waves) <= 160 * 1024, build


def test_a_page_is_in_flight_as_a_whole(compiled):
    """The loads of K, V and scales of 128 tokens are issued before the first is waited for."""
    for build, instructions in compiled[1].items():
        most, outstanding = 0, 0
        for instruction in instructions:
            if "global_load" in instruction.text:
                outstanding += 1
            elif match := re.search(r"vmcnt\((\d+)\)", instruction.text):
                outstanding = min(outstanding, int(match[1]))
            elif "branch" in instruction.text:
                outstanding = 0
            most = max(most, outstanding)
        stored = main_page(1, DIM, CacheDType(build.dtype)).head_layout
        loads = sum(stored[f"{side}_data"].nbytes // size for side, size in
                    (("k", 1024), ("v", 1024 * build.parts)))  # fmt: skip
        assert most >= loads * (2 if build.dtype == "nvfp4" else 1), build
