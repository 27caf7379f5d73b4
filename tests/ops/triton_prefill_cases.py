"""The prefill kernels in Triton's interpreter; test_triton_prefill.py runs this file.

Sizes are small. tests/gpu has the real ones, with 16-bit operands and partial results.
"""

import os
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops.dense_attention import plan as dense_plan
from rocm_msa.ops.dense_attention.triton_impl import run as run_dense
from rocm_msa.ops.index_score_prefill import plan as score_plan
from rocm_msa.ops.index_score_prefill.triton_impl import run as run_score
from rocm_msa.ops.sparse_prefill import plan as sparse_plan
from rocm_msa.ops.sparse_prefill import worklist
from rocm_msa.ops.sparse_prefill.triton_impl import run as run_sparse
from rocm_msa.ops.triton_host import Geometry, prefill_table
from rocm_msa.ops.triton_prefill import find_tile, page_side
from tests.ops.cases import (
    DTYPES,
    POISON,
    empty_cache,
    guarded,
    guards_intact,
    int32,
    make_batch,
    queries,
)

assert os.environ.get("TRITON_INTERPRET") == "1"

DIM, SCALE = 32, 0.3
LENS, COUNTS = [200, 0, 300, 129, 40], [11, 0, 2, 9, 1]
CU = int32([0, 11, 11, 13, 22, 23])
TOKENS = 25  # two of padding
ERROR = 3e-5  # of the largest value: fp32 in another order


def close(got, want):
    assert torch.equal(torch.isinf(got), torch.isinf(want)) and not got.isnan().any()
    keep = ~torch.isinf(want)
    assert (got - want)[keep].abs().max() <= ERROR * want[keep].abs().max()


def lists(heads: int, columns: int, topk: int) -> torch.Tensor:
    """Block lists in any order with ids of -1 and of blocks beyond the causal ones."""
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randperm(columns + 2, generator=draw)[:topk] - 1 for _ in range(heads * TOKENS)]
    return torch.stack(rows).view(heads, TOKENS, topk).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "scale"), [(2, 2, SCALE), (1, 5, -0.2)])
def test_sparse_against_the_reference(dtype, kv_heads, group, scale):
    batch = make_batch(LENS, dtype=dtype, kv_heads=kv_heads, head_dim=DIM, gap=48)
    batch.main.scales.update(k=0.5, v=3.0)
    q = queries(1, TOKENS, kv_heads * group, DIM, dtype=torch.float32)
    ids = lists(kv_heads, batch.table.shape[1], 3)
    arguments = (q, batch.main, ids, batch.table, CU, batch.seq_lens, scale)
    want = ops.sparse_prefill(*arguments, return_lse=True, backend="reference")
    buffer, out = guarded(list(q.shape), torch.float32)
    got = ops.sparse_prefill(*arguments, out=out, return_lse=True, backend="triton")
    assert got[0] is out and guards_intact(buffer)
    close(got[0], want[0])
    close(got[1], want[1])
    assert (got[0][23:] == 0).all()
    t = sparse_plan.select(3, kv_heads, group, DIM, 4, "cpu")
    for change in ({"turn": 7}, {"item": 1}, {"item": 3, "programs": 2, "turn": 1}):
        again = run_sparse(*arguments, tuning=replace(t, **change))
        assert torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])


def test_sparse_bits_for_another_order_of_slots_are_near_and_for_other_companions_the_same():
    batch = make_batch([300], head_dim=DIM)
    q = queries(2, 12, 4, DIM, dtype=torch.float32)
    ids = int32([[[0, 1, 2]] * 12] * 2)
    whole = run_sparse(q, batch.main, ids, batch.table, int32([0, 12]), batch.seq_lens, SCALE)
    for start, stop in ((0, 1), (1, 7), (5, 12)):
        rows = slice(start, stop)
        part = run_sparse(
            q[rows], batch.main, ids[:, rows], batch.table, int32([0, stop - start]),
            batch.seq_lens - 12 + stop, SCALE,
        )  # fmt: skip
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
    turned = run_sparse(
        q, batch.main, ids.flip(-1), batch.table, int32([0, 12]), batch.seq_lens, SCALE
    )
    close(turned[0], whole[0])


def test_the_work_list_holds_each_entry_once():
    """Entries of a page are neighbours, items cover them, and nothing else is in the list."""
    lens, topk, heads, pages = [700, 300], 4, 2, 20
    cu, seq_lens = int32([0, 60, 91]), int32(lens)
    table = torch.randperm(pages)[:14].int().view(2, 7)
    table[1, 0] = pages  # names no page
    rows = prefill_table(cu, seq_lens, 93)
    draw = torch.Generator().manual_seed(1)
    ids = (torch.rand(heads, 93, 8, generator=draw).argsort(-1)[..., :topk] - 1).int()
    ids[:, 5:40] = ids[:, :1]  # a page that many tokens want
    for tokens in (range(93), range(10, 70)):
        size = len(tokens) * heads * topk
        part_lse = torch.full((size, 3), 7.0)
        order, items, totals = worklist.build(ids, table, rows, tokens, pages, 16, part_lse)
        want = {}
        for t in tokens:
            request, n = rows[0, t], int(rows[1, t])
            for h in range(heads):
                for slot in range(topk):
                    entry = ((t - tokens.start) * heads + h) * topk + slot
                    block = int(ids[h, t, slot])
                    live = 0 <= block < -(-n // 128) and int(table[request, block]) < pages
                    assert bool((part_lse[entry] == -float("inf")).all()) != live
                    if live:
                        key = h * pages + int(table[request, block])
                        want[entry] = (key, min(128, n - block * 128))
        assert totals.tolist() == [len(want), int(totals[1]), 0]
        seen = {}
        for key, place, count in items[:, : int(totals[1])].T.tolist():
            assert 1 <= count <= 16
            for packed in order[place : place + count].tolist():
                assert packed // 128 not in seen
                seen[packed // 128] = (key, packed % 128 + 1)
        assert seen == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
def test_scores_against_the_reference(dtype, heads):
    batch = make_batch(LENS, dtype=dtype, head_dim=DIM, gap=16, extra_blocks=2)
    batch.index.scales.update(k=0.25)
    q = queries(3, TOKENS, heads, DIM, dtype=torch.float32)
    arguments = (q, batch.index, batch.table, CU, batch.seq_lens)
    want = ops.index_score_prefill(*arguments, backend="reference")
    buffer, out = guarded(list(want.shape), torch.float32)
    got = ops.index_score_prefill(*arguments, out=out, backend="triton")
    assert got is out and guards_intact(buffer)
    close(got, want)
    t = score_plan.select(TOKENS, heads, batch.table.shape[1], 0, False, "cpu")
    assert torch.equal(run_score(*arguments, tuning=replace(t, run=3)), got)
    for change in ({"pairs": 16}, {"products": 2, "pairs": 8}):  # NumPy's product differs in bits
        close(run_score(*arguments, tuning=replace(t, **change)), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 2), (1, 3)])
def test_dense_against_the_reference(dtype, kv_heads, group):
    batch = make_batch(LENS, dtype=dtype, kv_heads=kv_heads, head_dim=DIM, gap=48)
    batch.main.scales.update(k=0.5, v=3.0)
    q = queries(4, TOKENS, kv_heads * group, DIM, dtype=torch.float32)
    arguments = (q, batch.main, batch.table, CU, batch.seq_lens, SCALE)
    want = ops.dense_attention(*arguments, return_lse=True, backend="reference")
    buffer, out = guarded(list(q.shape), torch.float32)
    got = ops.dense_attention(*arguments, out=out, return_lse=True, backend="triton")
    assert got[0] is out and guards_intact(buffer)
    close(got[0], want[0])
    close(got[1], want[1])
    case = (batch.table.shape[1], kv_heads * group, DIM, False, "cpu")
    many, few = dense_plan.select(*case), dense_plan.select_few(*case)
    again = run_dense(*arguments, many=replace(many, turn=10), few=replace(few, turn=8))
    assert torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])


def test_dense_bits_depend_on_the_request_alone():
    batch = make_batch([600, 40, 1300], content=[1, 2, 3], head_dim=DIM)
    q = queries(5, 32, 4, DIM, dtype=torch.float32)
    cu = int32([0, 12, 15, 32])
    whole = run_dense(q, batch.main, batch.table, cu, batch.seq_lens, SCALE)
    for r, length in enumerate([600, 40, 1300]):
        rows = slice(int(cu[r]), int(cu[r + 1]))
        alone = make_batch([length], content=[r + 1], head_dim=DIM, extra_blocks=3 * r, shuffle=r)
        count = rows.stop - rows.start
        part = run_dense(q[rows], alone.main, alone.table, int32([0, count]), alone.seq_lens, SCALE)
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
    part = run_dense(q[0:9], batch.main, batch.table[:1], int32([0, 9]), int32([597]), SCALE)
    assert torch.equal(part[0], whole[0][0:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_and_strange_table_entries_reach_nothing(dtype):
    batch = make_batch(LENS, dtype=dtype, head_dim=DIM)
    q = queries(6, TOKENS, 4, DIM, dtype=torch.float32)
    ids = lists(2, batch.table.shape[1], 3)

    def chain(table):
        rest = (table, CU, batch.seq_lens)
        return (
            run_score(q[:, :2], batch.index, *rest),
            *run_sparse(q, batch.main, ids, *rest, SCALE),
            *run_dense(q, batch.main, *rest, SCALE),
        )

    first = chain(batch.table)
    table = torch.where(batch.table < 0, 2**30, batch.table)
    for cache in (batch.main, batch.index):
        owned = torch.zeros(cache.num_blocks, 128, dtype=torch.bool)
        for r, n in enumerate(LENS):
            for b in range(-(-n // 128)):
                owned[batch.table[r, b], : min(128, n - b * 128)] = True
        for region in cache.page.head_layout:
            for head in range(cache.kv_heads):
                cache.region(region.name)[:, head][~owned] = POISON[dtype] ^ 0x80
    for a, b in zip(first, chain(table), strict=True):
        assert torch.equal(a, b)


def test_a_causal_block_without_a_page_adds_nothing():
    batch = make_batch([300], head_dim=DIM)
    q = queries(8, 2, 4, DIM, dtype=torch.float32)
    batch.table[0, 1] = 10**6
    rest = (batch.table, int32([0, 2]), batch.seq_lens)
    scores = run_score(q, batch.index, *rest)
    assert torch.isinf(scores[:, :, 1]).all() and not torch.isinf(scores[:, :, [0, 2]]).any()
    kept = int32([[[0, 2]] * 2] * 2)
    want = ops.sparse_prefill(q, batch.main, kept, *rest, SCALE, backend="reference")
    close(run_dense(q, batch.main, *rest, SCALE)[0], want)
    ids = int32([[[0, 1, 2]] * 2] * 2)
    close(run_sparse(q, batch.main, ids, *rest, SCALE)[0], want)


@pytest.mark.parametrize("kind", ["main", "index"])
def test_a_cache_without_pages(kind):
    q = queries(7, 3, 2, DIM, dtype=torch.float32)
    rest = (int32([[-1]]), int32([0, 3]), int32([3]))
    if kind == "index":
        cache = IndexCache.allocate(0, "nvfp4", head_dim=DIM)
        assert torch.isinf(run_score(q, cache, *rest)).all()
        return
    cache = MainCache.allocate(0, 2, "nvfp4", head_dim=DIM)
    for out, lse in (
        run_sparse(q, cache, torch.zeros(2, 3, 1, dtype=torch.int32), *rest, SCALE),
        run_dense(q, cache, *rest, SCALE),
    ):
        assert (out == 0).all() and torch.isinf(lse).all()


@triton.jit
def decode_kernel(
    pages, out, DATA: tl.constexpr, SCALES: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
    CLEAN: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, 128)
    x = page_side(pages, token, token < 100, DATA, SCALES, D, KIND, tl.float32, False, CLEAN)
    tl.store(out + token[:, None] * D + tl.arange(0, D)[None, :], x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_decodes_as_the_cache_says(dtype):
    cache = empty_cache(MainCache, 1, dtype, 1, DIM)
    count = cache.pages.numel()
    cache.pages[0] = (torch.arange(count) * 7 % 256).to(torch.uint8)  # every byte, mixed
    g = Geometry.of(cache)
    for data, scales, side in ((g.k_data, g.k_scales, "k"), (g.v_data, g.v_scales, "v")):
        out = torch.full((128, DIM), 7.0)
        decode_kernel[(1,)](cache.pages, out, data, scales, DIM, g.kind, True)
        want = cache.gather(side, torch.tensor([0]), 0)[0]
        want = want.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        assert torch.equal(out[:100], want[:100]) and (out[100:] == 0).all()


@triton.jit
def tile_kernel(cu, requests, rows, out, TOKENS: tl.constexpr):
    tile = tl.program_id(0)
    request, first, end = find_tile(tile, cu, requests, rows, TOKENS)
    tl.store(out + tile * 3, request)
    tl.store(out + tile * 3 + 1, first)
    tl.store(out + tile * 3 + 2, end)


@pytest.mark.parametrize("counts", [[5], [0, 0], [8, 0, 3, 16, 1, 7, 0], [1] * 9, [31, 2]])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_tiles_cover_each_token_once(counts, tokens):
    cu = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    rows, requests = int(cu[-1]) + 6, len(counts)
    tiles = rows // tokens + requests + 1
    out = torch.zeros(tiles, 3, dtype=torch.int32)
    tile_kernel[(tiles,)](cu, requests, rows, out, tokens)
    owner = [-1] * rows
    for request, first, end in out.tolist():
        for t in range(first, min(first + tokens, end)):
            assert owner[t] == -1
            owner[t] = request
    want = [r for r, c in enumerate(counts) for _ in range(c)] + [requests] * 6
    assert owner == want


def test_plans_are_constants_but_for_memory_and_grids():
    assert sparse_plan.select(16, 1, 16, 128, 2, "cuda").turn * 16 * 16 * 128 * 2 == 2**29
    for target in ("cuda", "gfx950", "gfx942", "cpu"):
        a, b = (score_plan.select(t, 1, 1024, 0, False, target) for t in (1, 16384))
        assert replace(a, run=0) == replace(b, run=0) and 1 <= a.run <= b.run
        a, b = (dense_plan.select(w, 16, 128, False, target) for w in (1, 8192))
        assert replace(a, turn=0, units=0) == replace(b, turn=0, units=0)
        assert a.unit * a.units >= 1 and b.unit * b.units >= 8192
        few = dense_plan.select_few(8192, 16, 128, False, target)
        assert few.units * few.turn * 16 * 128 * 4 <= 2**28
