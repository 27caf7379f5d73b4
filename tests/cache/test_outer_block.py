"""The outer-block row: order, offsets, sizes, and what its digest tells apart."""

from __future__ import annotations

import dataclasses

import pytest

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import DRAFT, INDEX, MAIN, OuterBlockRow
from rocm_msa.cache.pages import main_page
from rocm_msa.capacity import MINIMAX_M3, CacheDTypes, KVCache

NVFP4, FP8, BF16 = CacheDType.NVFP4, CacheDType.FP8, CacheDType.BF16


def row(tp=4, main=NVFP4, index=NVFP4, **options) -> OuterBlockRow:
    return OuterBlockRow.of(MINIMAX_M3, MINIMAX_M3.shard(tp), main, index, **options)


def test_full_model_at_tp4():
    full = row()
    assert full.nbytes == 1_631_232 == 60 * 128 * 144 + 57 * 128 * 72
    assert len(full.pages) == 117
    assert [p.kind for p in full.pages] == [MAIN] * 60 + [INDEX] * 57
    assert [p.layer for p in full.pages] == [*range(60), *range(3, 60)]


@pytest.mark.parametrize(
    ("tp", "main", "index", "expected"),
    [
        (1, NVFP4, NVFP4, 60 * 4 * 18_432 + 57 * 9_216),
        (2, NVFP4, NVFP4, 60 * 2 * 18_432 + 57 * 9_216),
        (8, NVFP4, NVFP4, 1_631_232),
        (4, FP8, FP8, 2_899_968),
        (4, BF16, BF16, 2 * 2_899_968),
        (4, NVFP4, FP8, 60 * 18_432 + 57 * 16_384),
    ],
)
def test_bytes_a_rank(tp, main, index, expected):
    assert row(tp, main, index).nbytes == expected


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("main", list(CacheDType))
def test_pages_are_contiguous_and_aligned(tp, main):
    full, end = row(tp, main, FP8), 0
    for page in full.pages:
        assert page.offset == end
        assert page.offset % 16 == 0
        end += page.page.page_bytes
    assert full.nbytes == end


def test_layout_and_pages_agree():
    full = row(draft=[main_page(1, 128, FP8)] * 2)
    for page, region in zip(full.pages, full.layout, strict=True):
        assert (page.name, page.offset) == (region.name, region.offset)
        assert page.page.page_bytes == region.nbytes
    assert full.layout["layer 1 draft"].end == full.nbytes


def test_draft_pages_follow_and_dense_layers_may_differ():
    base = row()
    with_draft = row(draft=[main_page(1, 128, NVFP4)])
    assert with_draft.pages[:-1] == base.pages
    assert (with_draft.pages[-1].kind, with_draft.pages[-1].offset) == (DRAFT, base.nbytes)
    dense = row(dense=FP8)
    assert [p.page.dtype for p in dense.pages[:4]] == [FP8] * 3 + [NVFP4]
    assert dense.nbytes == base.nbytes + 3 * (32_768 - 18_432)


def test_capacity_prints_this_row():
    cache = KVCache.of(MINIMAX_M3, CacheDTypes(NVFP4, FP8), 2)
    assert cache.row == row(2, NVFP4, FP8).layout
    assert cache.block_bytes == row(2, NVFP4, FP8).nbytes


def test_digest_is_of_the_format_and_not_of_the_ranks():
    digests = {row(tp).digest for tp in (1, 2, 4, 8)}
    assert len(digests) == 1
    fewer = dataclasses.replace(
        MINIMAX_M3,
        num_layers=59,
        sparse_layers=MINIMAX_M3.sparse_layers[:-1],
        moe_layers=MINIMAX_M3.moe_layers[:-1],
    )
    others = {
        row(main=FP8).digest,
        row(index=FP8).digest,
        row(dense=FP8).digest,
        row(draft=[main_page(1, 128, NVFP4)]).digest,
        row(draft=[main_page(1, 128, FP8)]).digest,
        OuterBlockRow.of(fewer, fewer.shard(4), NVFP4, NVFP4).digest,
    }
    assert len(others) == 6
    assert not digests & others
