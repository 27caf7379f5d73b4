"""NVFP4 through the table in LDS: the reference's bytes, for all codes; instruction count."""

from __future__ import annotations

import flydsl.expr as fx
import pytest
import torch

from rocm_msa.device import nvfp4
from rocm_msa.device.memory import lds_bytes
from rocm_msa.formats import nvfp4_lut
from tests.device.harness import run

LANES = 256


def dequantise(data, scales, table, out):
    lane = fx.thread_idx.x
    lds = lds_bytes(nvfp4.TABLE_BYTES)
    nvfp4.copy_table(table, lds, lane, LANES)
    fx.barrier()
    words = data.load(fx.Uint32, 4, offset=lane * 16)
    rows = nvfp4.scale_rows(lds, fx.Uint32(scales.load(fx.Uint16, offset=lane * 2)))
    found = nvfp4.dequantise_chunk(words, rows)
    out.store(found.shuffle(found, [0, 1, 2, 3]), offset=lane * 32)
    out.store(found.shuffle(found, [4, 5, 6, 7]), offset=lane * 32 + 16)


@pytest.mark.parametrize("fold", [0, -3])
def test_bytes_equal_the_reference_for_every_scale(fold):
    scales = torch.arange(512).to(torch.uint8).view(LANES, 2)  # each twice, beside another
    generator = torch.Generator().manual_seed(fold + 9)
    data = torch.randint(0, 256, (LANES, 16), generator=generator).to(torch.uint8)
    data[:, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])  # every code
    out = torch.zeros(LANES, 32, dtype=torch.uint8)
    report = run(dequantise, [data, scales, nvfp4_lut.build(fold), out], LANES)
    want = nvfp4_lut.dequantize_via_lut(data, scales, fold).view(torch.uint8)
    assert torch.equal(out, want[:, nvfp4.value_order()])
    # 32 values a lane: all VALU instructions of the kernel, its own addressing included.
    waves = LANES // 64
    assert report.launches[0].pipes["valu"] <= (36 + 4) * waves
    mix = report.launches[0].instructions
    assert mix["v_perm_b32"] == 8 * waves and mix["ds_read_b64"] == 2 * waves


def test_value_order_is_a_permutation_within_words():
    order = nvfp4.value_order()
    assert sorted(order) == list(range(32)) and order[:8] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_thread_counts_that_do_not_divide_the_table_are_refused():
    with pytest.raises(ValueError, match="threads"):
        nvfp4.copy_table(None, None, None, 192)
