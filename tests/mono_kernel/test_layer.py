"""The mono kernel in the emulator: every region of every phase, all checks on."""

from __future__ import annotations

import pytest
import torch

from rocm_msa import ops
from rocm_msa.aot import ServingConfig, builds
from rocm_msa.ops.rows import decode_rows
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import RANDOM, Group
from tests.mono_kernel.layers import LAYOUTS
from tests.mono_kernel.steps import Step


def check(layout: str, tp: int, lens, per: int, schedule=RANDOM, **options):
    group = Group(Step(layout, tp, lens=lens, rows_per_request=per, seed=len(lens)))
    report = group.run(schedule, **options)
    regions.check(group)
    return group, report


def test_every_region_on_four_ranks():
    """Two requests of two rows: a block edge between rows, a request within its first blocks."""
    check("mxfp4", 4, [642, 129], 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_region(layout, tp):
    check(layout, tp, [642, 129], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lens", "per"),
    [
        ([1], 1),  # the first token: its own block, inserted by this launch
        ([2049, 2048, 2047], 1),  # 17 and 16 blocks
        ([5000], 4),  # more blocks than slots
        ([300, 0, 1024], 3),  # a padded request
        ([130] * 16, 1),
        ([3000, 700], 8),
    ],
    ids=str,
)
def test_batches(lens, per):
    check("nvfp4", 4, lens, per)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_schedules(schedule):
    first, _ = check("mxfp4", 2, [642, 129], 2, RANDOM)
    group, _ = check("mxfp4", 2, [642, 129], 2, schedule)
    for name in ("residual_out", "hidden_out", "selected"):
        assert torch.equal(group.region(name, 1), first.region(name, 1))


@pytest.mark.slow
def test_the_ops_give_the_same_bits():
    """Insertion, scores, selection and attention of the ordinary path's own gfx950 kernels."""
    step = Step("mxfp4", 4, lens=[2400, 642], rows_per_request=2, seed=9)
    group = Group(step)
    group.run()
    s, batch, weights = step.shape, step.batch, step.weights[1]
    main, index = step.copies()[1]
    v = weights.vectors
    norms = ops.Norms(v["q_norm"], v["k_norm"], v["index_q_norm"], v["index_k_norm"], s.eps)
    heads = ops.Heads(s.q_heads, s.kv_heads, s.index_heads, 128, s.rotary_dim)
    config = ServingConfig(
        s.q_heads, s.kv_heads, s.index_heads, 128, s.rotary_dim, "nvfp4", "nvfp4",
        has_dense_layers=False,
    )  # fmt: skip
    paging = (batch.block_table, batch.seq_lens, batch.rows_per_request)
    with emulated(builds(config), schedule=RANDOM) as reports:
        q, index_q = ops.qkv_insert(
            group.region("projected", 1).contiguous(), norms, batch.cos_sin, batch.positions,
            main, index, batch.main_slots, batch.index_slots, heads, backend="flydsl",
        )  # fmt: skip
        scores = ops.index_score_decode(index_q, index, *paging, backend="flydsl")
        count = decode_rows(batch.seq_lens, batch.rows_per_request).num_blocks.int()
        selected = ops.block_topk(scores, count, s.topk, backend="flydsl")
        out = ops.sparse_decode(q, main, selected, *paging, 128**-0.5, backend="flydsl")
    assert_clean(reports)
    assert torch.equal(group.region("q", 1), q)
    assert torch.equal(group.region("index_q", 1), index_q)
    live = torch.arange(scores.shape[-1]) < count[:, None] - s.local_blocks
    assert torch.equal(group.region("scores", 1)[:, live], scores[:, live])
    assert torch.equal(group.region("selected", 1), selected)
    assert torch.equal(group.region("attended", 1), out.flatten(1))
    for ours, theirs in zip(group.ranks[1].caches, (main, index), strict=True):
        assert torch.equal(ours.pages, theirs.pages)
