"""Which kernels serving would still compile after warm-up: counted on tensors without memory.

Steps as the plugin makes them: any number of requests and tokens, block tables cut to the longest
request of the step, the prefill part after the decode part in the same tensors. Nothing is
compiled: a specialisation is what Triton would compile separately.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops import triton_warmup
from tests.ops import emulated_triton
from tests.ops.emulated_triton import emulated

HEADS = ops.Heads(q=16, kv=1, index=1, head_dim=128, rotary_dim=64)
MAX_BLOCKS = 8192
# (requests, rows a request) of decode, (tokens, requests) of prefill, blocks of the longest.
STEPS = [
    ((1, 1), (0, 0), 1),
    ((3, 1), (0, 0), 5),
    ((7, 1), (0, 0), 37),
    ((33, 1), (0, 0), 1000),
    ((200, 1), (0, 0), 1008),
    ((0, 1), (17, 1), 1),
    ((0, 1), (500, 3), 4),
    ((0, 1), (4097, 1), 129),
    ((3, 1), (1000, 2), 33),
    ((16, 1), (8192, 1), 2000),
]


@pytest.fixture
def compiled(monkeypatch):
    """Specialisations in the order of their first call: (kernel, types, constants)."""
    seen = []

    def fake(fn, signature, constexprs, **options):
        seen.append((fn.__name__, signature, constexprs, options))
        return SimpleNamespace(arguments=())

    monkeypatch.setattr(emulated_triton, "compile_triton", fake)
    monkeypatch.setattr(emulated_triton, "PLACE", f"counted {id(seen)}")
    return seen


def serve(main, index, decode, prefill, reach) -> None:
    (requests, rows), (tokens, prompts) = decode, prefill

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    count = requests * rows
    triton_warmup._insert(
        triton_warmup.Config(HEADS, torch.bfloat16, 1), main, index, count + tokens
    )
    q, out = (empty(count + tokens, HEADS.q, 128) for _ in range(2))
    index_q = empty(count + tokens, HEADS.index, 128)
    table = empty(512, MAX_BLOCKS, dtype=torch.int32)[:, :reach]
    lens, starts = empty(512, dtype=torch.int32), empty(513, dtype=torch.int32)

    def nb(n):
        return empty(n, dtype=torch.int32)

    if count:
        own, part = (table[:requests], lens[:requests]), slice(0, count)
        scores = ops.index_score_decode(index_q[part], index, *own, rows, backend="triton")
        ids = ops.block_topk(scores, nb(count), backend="triton")
        ops.sparse_decode(q[part], main, ids, *own, rows, 0.1, out=out[part], backend="triton")
    if tokens:
        which, part = slice(requests, requests + prompts), slice(count, count + tokens)
        cu = starts[requests : requests + prompts + 1] - count
        own = (table[which], cu, lens[which])
        scores = ops.index_score_prefill(index_q[part], index, *own, backend="triton")
        ids = ops.block_topk(scores, nb(tokens), backend="triton")
        ops.sparse_prefill(q[part], main, ids, *own, 0.1, out=out[part], backend="triton")
        ops.dense_attention(q[part], main, *own, 0.1, out=out[part], backend="triton")


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
def test_serving_compiles_nothing_new(compiled, dtype):
    main = MainCache.allocate(2**20, HEADS.kv, dtype, "meta")
    index = IndexCache.allocate(2**20, dtype, "meta")
    with emulated(run=False):
        for heads in (HEADS, ops.Heads(q=16, kv=1, index=0, head_dim=128, rotary_dim=64)):
            config = triton_warmup.Config(heads, torch.bfloat16, MAX_BLOCKS)
            triton_warmup.warmup(config, main, index if heads.index else None)
        warmed = len(compiled)
        assert warmed > 5
        for step in STEPS:
            serve(main, index, *step)
    late = defaultdict(int)
    for kernel, *_ in compiled[warmed:]:
        late[kernel] += 1
    assert not late, (warmed, dict(late))
