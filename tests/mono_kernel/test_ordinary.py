"""The emulated layer beside the ordinary path, layer by layer.

Attention: the path's own kernels in the emulator, bit for bit. The whole layer: the whole-model
reference in bf16 with NVFP4 caches, within the tolerances of test_reference.py, which says why they
differ; the next layer takes what the emulated one gave.
"""

from __future__ import annotations

import pytest
import torch

from mono_kernel import reference
from rocm_msa import ops
from rocm_msa.aot import ServingConfig, builds
from rocm_msa.ops.rows import decode_rows
from rocm_msa.testing.reference_model import Details
from rocm_msa.testing.reference_parts import blocks_to_mask
from tests.launcher.emulated import assert_clean, emulated
from tests.mono_kernel import regions
from tests.mono_kernel.emulated import RANDOM, Group
from tests.mono_kernel.steps import Step
from tests.mono_kernel.test_reference import EXPERTS, STREAM, OneLayer, close

LAYERS, PROMPT, ROWS = 4, 2300, 2
SHARED = 14  # blocks of 16 that both select at least: keys through the table, see test_reference.py


def check_ops(group: Group, rank: int) -> None:
    """Insertion, scores, selection and attention by the ordinary path's own gfx950 kernels, from
    what the layer projected: the same bits."""
    step = group.step
    s, batch, weights = step.shape, step.batch, step.weights[rank]
    main, index = step.copies()[rank]
    v = weights.vectors
    norms = ops.Norms(v["q_norm"], v["k_norm"], v["index_q_norm"], v["index_k_norm"], s.eps)
    heads = ops.Heads(s.q_heads, s.kv_heads, s.index_heads, 128, s.rotary_dim)
    config = ServingConfig(
        s.q_heads, s.kv_heads, s.index_heads, 128, s.rotary_dim, "nvfp4", "nvfp4",
        has_dense_layers=False,
    )  # fmt: skip
    paging = (batch.block_table, batch.seq_lens, batch.most_rows)
    with emulated(builds(config), schedule=RANDOM) as reports:
        q, index_q = ops.qkv_insert(
            group.region("projected", rank).contiguous(), norms, batch.cos_sin, batch.positions,
            main, index, batch.main_slots, batch.index_slots, heads, backend="flydsl",
        )  # fmt: skip
        scores = ops.index_score_decode(index_q, index, *paging, backend="flydsl")
        count = decode_rows(batch.seq_lens, batch.most_rows).num_blocks.int()
        selected = ops.block_topk(scores, count, s.topk, backend="flydsl")
        out = ops.sparse_decode(q, main, selected, *paging, 128**-0.5, backend="flydsl")
    assert_clean(reports)
    assert torch.equal(group.region("q", rank), q)
    assert torch.equal(group.region("index_q", rank), index_q)
    live = torch.arange(scores.shape[-1]) < count[:, None] - s.local_blocks
    assert torch.equal(group.region("scores", rank)[:, live], scores[:, live])
    assert torch.equal(group.region("selected", rank), selected)
    want = reference.join(weights, {"attention": out})
    for name, wanted in want.items():
        assert torch.equal(group.region(name, rank).view(torch.uint8), wanted.view(torch.uint8))
    for ours, theirs in zip(group.ranks[rank].caches, (main, index), strict=True):
        assert torch.equal(ours.pages, theirs.pages)


@pytest.mark.slow
def test_the_ops_give_the_same_bits():
    group = Group(Step("mxfp4", 4, lens=[2400, 642], rows=2, seed=9))
    group.run()
    check_ops(group, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tp"), [("mxfp8", 2), ("nvfp4", 4)])
def test_layers_in_a_row(layout, tp):
    """A prompt of PROMPT tokens in each layer's caches, then ROWS rows through all layers."""
    outs = None
    for layer in range(LAYERS):
        step = Step(layout, tp, [PROMPT + ROWS], ROWS, seed=3, layer=layer)
        if outs:
            step.hidden, step.residual = outs
        model, state, details = OneLayer(layout, layer), {}, Details()
        model.layer(step.prompt(0), 0, state, Details())
        step.fill(state[0], PROMPT)
        group = Group(step)
        group.run()
        regions.check(group)  # all ranks alike bitwise, too
        check_ops(group, tp - 1)
        stream = (step.hidden.float() + step.residual.float()).to(torch.bfloat16)
        middle, out = model.layer(stream, PROMPT, state, details)
        outs = [group.region(name).clone() for name in ("hidden_out", "residual_out")]
        close(outs[1], middle, STREAM)
        close(outs[0], out, EXPERTS)
        selected = torch.cat([group.region("selected", rank) for rank in range(tp)])
        width = step.table.shape[1]
        ours, theirs = (blocks_to_mask(x.long(), width) for x in (selected, details.selected[0]))
        assert ((ours & theirs).sum(-1) >= SHARED).all() and (ours.sum(-1) == 16).all()
