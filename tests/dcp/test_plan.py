"""What is sent and when it pays: by hand, by brute force, and the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.plan import (
    MEASURED_H200,
    NEVER,
    Batch,
    Costs,
    Results,
    Scan,
    choose_results,
    decide,
    exchange_bytes,
    representatives,
    result_bytes,
    threshold,
)
from dcp.shard import Shard
from rocm_msa.arch import GFX950

NVFP4, FP8 = Scan(page_bytes=9216, query_bytes=256), Scan(page_bytes=16384, query_bytes=256)
steady = settings(derandomize=True, deadline=None, max_examples=200)
batches = st.builds(Batch, st.integers(1, 512), st.integers(1, 9), st.integers(0, 8192))
groups = st.sampled_from([(2, 4), (4, 4), (8, 4), (2, 2), (3, 1)])


def test_the_form_with_fewer_bytes_is_sent():
    shard = Shard(1, 4, 4)
    assert result_bytes(shard, 128, 16, Results.SCORES) == 32 * 4
    assert result_bytes(shard, 128, 16, Results.CANDIDATES) == 16 * 8
    assert choose_results(shard, 128, 16) is Results.SCORES  # as many bytes: no selection to make
    assert choose_results(shard, 129, 16) is Results.CANDIDATES
    assert choose_results(Shard(0, 8, 4), 256, 16) is Results.SCORES
    assert choose_results(Shard(0, 8, 4), 257, 16) is Results.CANDIDATES
    assert choose_results(shard, 0, 16) is Results.SCORES


def test_threshold_by_hand():
    """4 ranks, 45 requests of 4 rows, NVFP4: 7 us and 138,240 B against 3/4 of the scan."""
    shard, batch = Shard(0, 4, 4), Batch(45, 4, 1641)
    assert exchange_bytes(shard, batch, NVFP4) == 2 * 180 * (256 + 16 * 8) == 138240
    cost = 7e-6 + 138240 / 76.8e9
    block = 45 * 9216 * 0.75 / 8e12
    assert 226 * block < cost < 227 * block
    assert threshold(shard, batch, NVFP4) == 227
    assert decide(shard, batch, NVFP4) == decide(Shard(3, 4, 4), batch, NVFP4)
    assert decide(shard, batch, NVFP4).shared


# Two H200s: requests, rows, blocks of the longest, microseconds a layer alone and by the exchange
# (docs/measured_facts.md).
MEASURED = [
    (NVFP4, 1, 1, 4096, 24.5, 56.9),
    (NVFP4, 8, 1, 1024, 39.2, 45.8),
    (NVFP4, 8, 1, 4096, 104.7, 123.8),
    (NVFP4, 8, 4, 1641, 38.0, 51.2),
    (NVFP4, 8, 4, 4096, 107.4, 141.5),
    (NVFP4, 45, 1, 256, 44.8, 48.7),
    (NVFP4, 45, 1, 1024, 142.1, 128.3),
    (NVFP4, 45, 1, 1641, 136.5, 130.3),
    (NVFP4, 45, 1, 4096, 539.1, 459.5),
    (NVFP4, 45, 4, 256, 45.9, 59.3),
    (NVFP4, 45, 4, 1024, 146.1, 148.5),
    (NVFP4, 45, 4, 1641, 144.4, 148.9),
    (NVFP4, 45, 4, 4096, 571.9, 515.0),
    (FP8, 1, 4, 4096, 37.7, 70.6),
    (FP8, 8, 1, 256, 22.1, 28.4),
    (FP8, 8, 1, 4096, 181.7, 179.4),
    (FP8, 8, 4, 256, 22.5, 30.7),
    (FP8, 8, 4, 1641, 58.9, 56.9),
    (FP8, 45, 1, 256, 71.0, 67.0),
    (FP8, 45, 1, 1641, 247.5, 198.3),
    (FP8, 45, 4, 1024, 248.1, 199.6),
    (FP8, 45, 4, 4096, 1022.3, 742.1),
]


@pytest.mark.parametrize(("scan", "requests", "rows", "blocks", "alone", "shared"), MEASURED)
def test_nothing_that_was_measured_slower_is_shared_on_the_h200(
    scan, requests, rows, blocks, alone, shared
):
    batch = Batch(requests, rows, blocks)
    decision = decide(Shard(0, 2, 4), batch, scan, costs=MEASURED_H200)
    assert shared < alone or not decision.shared
    if shared < 0.9 * alone:
        assert decision.shared


def test_what_saves_nothing_is_never_shared():
    costs = Costs(scan_bytes_per_s=4e12, shared_bytes_per_s=2e12)
    assert threshold(Shard(0, 2, 4), Batch(45, 1, 8192), NVFP4, costs) == NEVER


@steady
@given(groups, batches, st.sampled_from([NVFP4, FP8]))
def test_it_is_shared_exactly_when_that_is_modelled_faster(group, batch, scan):
    ranks, heads = group
    decision = decide(Shard(0, ranks, heads), batch, scan)
    whole = batch.requests * batch.max_blocks * scan.page_bytes / GFX950.hbm_bytes_per_s
    rows = batch.rows * max(1, heads // ranks)
    moved = 2 * rows * (scan.query_bytes + 16 * 8) / GFX950.fabric_link_bytes_per_s
    gain = whole - whole / ranks - moved - Costs().fixed_s
    if abs(gain) > 1e-12:
        assert decision.shared == (gain > 0 and batch.max_blocks >= ranks)
    assert decision.reason == ("long" if decision.shared else "short")


@steady
@given(groups, batches, st.integers(1, 9000) | st.none())
def test_every_rank_decides_alike_and_longer_is_never_less_shared(group, batch, least):
    ranks, heads = group
    decisions = {decide(Shard(r, ranks, heads), batch, NVFP4, least) for r in range(ranks)}
    assert len(decisions) == 1
    decision = decisions.pop()
    longer = Batch(batch.requests, batch.rows_per_request, batch.max_blocks + 1)
    assert decide(Shard(0, ranks, heads), longer, NVFP4, least).shared >= decision.shared
    assert decision.shared == (batch.max_blocks >= decision.threshold)
    assert least is None or decision.threshold == least
    assert decision.threshold >= (ranks if least is None else 1)


def test_nothing_to_share():
    batch = Batch(64, 4, 8192)
    assert decide(Shard(0, 1, 4), batch, NVFP4, 1).reason == "one rank"
    assert decide(Shard(0, 4, 4), Batch(0, 4, 8192), NVFP4, 1).reason == "no rows"


@pytest.mark.parametrize("costs", [Costs(fixed_s=0.0), Costs(fixed_s=1.0)])
def test_costs_move_the_threshold(costs):
    shard, batch = Shard(0, 4, 4), Batch(45, 4, 0)
    assert (threshold(shard, batch, NVFP4, costs) < threshold(shard, batch, NVFP4)) == (
        costs.fixed_s == 0.0
    )
    assert threshold(shard, batch, NVFP4, costs) >= 4


@steady
@given(groups, batches, st.integers(1, 40))
def test_every_batch_has_a_representative(group, most, topk):
    shard = Shard(0, *group)
    stand_ins = representatives(shard, most, topk)
    assert all(b.requests <= most.requests and b.max_blocks <= most.max_blocks for b in stand_ins)

    def kind(batch):
        return (batch.requests - 1).bit_length(), choose_results(shard, batch.max_blocks, topk)

    found = {kind(b) for b in stand_ins}
    for requests in {1, 2, 3, most.requests // 2, most.requests - 1, most.requests} - {-1, 0}:
        for width in {1, shard.ranks, most.max_blocks // 2, most.max_blocks} - {0}:
            if requests <= most.requests and width <= most.max_blocks:
                assert kind(Batch(requests, 1, width)) in found
