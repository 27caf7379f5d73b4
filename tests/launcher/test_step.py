"""A sparse layer's step on compiled kernels alone: every op chooses FlyDSL by itself.

Decode and prefill at the TP 4 geometry, all kernels of the configuration loaded as when serving.
Each op has its own tests; here the set, the choice and the chain are looked at. With at most 16
blocks all are selected, so the outputs differ from the references' by the rounding to FP8 alone.
"""

import pytest
import torch

from rocm_msa import aot, ops
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.ops import dispatch
from tests.launcher.emulated import assert_clean, emulated
from tests.ops.cases import int32, make_batch, queries
from tests.ops.test_qkv_insert import norms_of, table_of

LENS = [300, 131]
HEADS = ops.Heads(16, 1, 1, 128, 64)
SCALE = 128**-0.5


def step(rows: int, prefill: bool):
    """(attention output, block ids, causal blocks) of the newest `rows` tokens of each request."""
    batch = make_batch(LENS, kv_heads=1, head_dim=128)
    tokens = rows * len(LENS)
    qkv = queries(9, tokens, HEADS.qkv_columns)
    positions = torch.cat([torch.arange(n - rows, n) for n in LENS])
    slots = torch.cat([batch.slots(r, n - rows) for r, n in enumerate(LENS)])
    cos_sin = table_of(HEADS)
    q, index_q = ops.qkv_insert(
        qkv, norms_of(HEADS), cos_sin, positions % len(cos_sin), batch.main, batch.index,
        slots, slots, HEADS,
    )  # fmt: skip
    lens, table = batch.seq_lens, batch.table
    causal = torch.cat([torch.arange(n - rows, n) + 1 for n in LENS])
    num_blocks = ((causal + 127) // 128).int()
    cu = int32([0, rows, 2 * rows])
    if prefill:
        scores = ops.index_score_prefill(index_q, batch.index, table, cu, lens)
    else:
        scores = ops.index_score_decode(index_q, batch.index, table, lens, rows)
    ids = ops.block_topk(scores, num_blocks, 16, 0, 1)
    if prefill:
        return ops.sparse_prefill(q, batch.main, ids, table, cu, lens, SCALE), ids, num_blocks
    return ops.sparse_decode(q, batch.main, ids, table, lens, rows, SCALE), ids, num_blocks


@pytest.mark.parametrize(("rows", "prefill"), [(1, False), (4, False), (40, True)])
def test_a_step(rows, prefill):
    want, _, _ = step(rows, prefill)
    kinds = ("index_score_prefill", "sparse_prefill") if prefill else (
        "index_score_decode", "sparse_decode"
    )  # fmt: skip
    used = ("qkv_insert", "block_topk", *kinds)
    before = {op: dispatch.taken[op, "flydsl"] for op in used}
    with emulated(aot.builds(aot.ServingConfig.of(MINIMAX_M3, 4))) as reports:
        got, ids, num_blocks = step(rows, prefill)
    assert_clean(reports)
    assert {op: dispatch.taken[op, "flydsl"] - n for op, n in before.items()} == dict.fromkeys(
        used, 1
    )
    for row, count in zip(ids[0].tolist(), num_blocks.tolist(), strict=True):
        assert set(row[:count]) == set(range(count)) and set(row[count:]) == {-1}
    error = (got - want).float().norm() / want.float().norm()
    assert error < 0.04, error  # 0.030 to 0.032: rounding to E4M3
