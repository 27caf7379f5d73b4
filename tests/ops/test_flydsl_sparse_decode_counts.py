"""Counts of sparse_decode's gfx950 kernels: instructions, bytes, registers, what is done once."""

from __future__ import annotations

import re

import pytest
import torch

from gfx950_emu import Checks, CodeObject
from rocm_msa.aot import compile_builds
from rocm_msa.cache import CacheDType
from rocm_msa.kernel_manifest import read
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as module
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


def test_own_pages_hbm_bytes_and_valu_counts():
    call = full(16, 1)
    _, reports = call.run(False, checks=Checks.NONE)
    assert sum(r.hbm_bytes for r in reports) <= 1.05 * minimum_bytes(call)
    rows = reports[2]
    chunks = dequantised_chunks(rows)
    assert chunks == 16 * 16 * PAGE_CHUNKS
    # All and, shift, permute and bit-operation instructions of the kernel, whatever they are for.
    kinds = ("v_perm_b32", "v_bitop3_b32", "v_and_b32", "v_lshlrev_b32", "v_lshrrev_b32",
             "v_bfe_u32", "v_lshl_or_b32", "v_and_or_b32", "v_or_b32")  # fmt: skip
    assert sum(rows.instructions.get(kind, 0) for kind in kinds) <= 36 * chunks
    assert rows.instructions["v_mfma_f32_16x16x128_f8f6f4"] == 16 * 16 * (8 * 2 + 9 * 2)
    assert rows.counters["lds_conflict_cycles"] == 0
    # Nothing of it is done twice by `pages`.
    assert dequantised_chunks(reports[1]) == 0


@pytest.mark.parametrize(("requests", "rows"), [(64, 1), (3, 8)])
def test_a_shared_page_is_read_and_dequantised_once(requests, rows):
    call = make_call([256] * requests, rows, kv_heads=1)
    call.table[:, :2] = call.table[0, :2]
    call.ids = torch.full_like(call.ids, -1)
    call.ids[..., 3], call.ids[..., 5] = 1, 0
    _, (_, pages, by_rows) = check(call, checks=Checks.NONE)
    assert dequantised_chunks(pages) == 2 * PAGE_CHUNKS and dequantised_chunks(by_rows) == 0
    assert pages.instructions["global_load_dwordx4"] < 2 * 8 * 4 + 2 * requests * rows * 5
    users = 2 * requests * rows
    assert pages.instructions["v_mfma_f32_16x16x128_f8f6f4"] == users * (8 * 2 + 9 * 2)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(manifest entries by kernel, instructions of each) of the NVFP4 kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    builds = module.kernel_builds(CacheDType.NVFP4, "bf16", 16)
    compile_builds(builds, folder, processes=1)
    entries = {b.kernel: read(folder).kernels[b.symbol] for b in builds}
    code = {k: CodeObject.from_file(folder / e.file) for k, e in entries.items()}
    return entries, {k: code[k].kernels[e.symbol].instructions for k, e in entries.items()}


def test_registers_and_lds(compiled):
    """No spills, no scratch; two waves a SIMD, or more where LDS has room for more workgroups."""
    entries, _ = compiled
    for kernel, entry in entries.items():
        r = entry.registers
        assert not r["vgpr_spills"] and not r["sgpr_spills"] and not r["scratch_bytes"], kernel
        assert r["vgpr"] + r["agpr"] <= 256 and entry.static_lds <= 160 * 1024, kernel


def test_a_page_is_in_flight_as_a_whole(compiled):
    """`rows` issues the loads of K, V and scales of 128 tokens before it waits for the first."""
    most, outstanding = 0, 0
    for instruction in compiled[1]["rows"]:
        if "global_load" in instruction.text:
            outstanding += 1
        elif match := re.search(r"vmcnt\((\d+)\)", instruction.text):
            outstanding = min(outstanding, int(match[1]))
        elif "branch" in instruction.text:
            outstanding = 0
        most = max(most, outstanding)
    assert most >= 4 * 8


def test_rows_of_a_request_share_its_pages():
    call = full(4, 4)
    _, (_, pages, by_rows) = check(call, checks=Checks.NONE)
    assert dequantised_chunks(pages) == 4 * 16 * PAGE_CHUNKS
    assert dequantised_chunks(by_rows) == 0
