"""The Triton kernels against the references, at sizes for Triton's interpreter.

Runs on a GPU, or on the CPU under TRITON_INTERPRET=1 (test_triton_interpreter.py sets it in a
process of its own); skipped otherwise. tests/gpu has the real sizes.
"""

import os

import pytest
import torch

from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from tests.ops.cases import (
    DTYPES,
    empty_cache,
    guarded,
    guards_intact,
    int32,
    make_batch,
    queries,
    random_values,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"
    ),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

# Largest difference from the fp32 reference, relative to the result's largest value: operands of
# 16 bits (q exact, p rounded), fp32 sums in another order; the result's own rounding on top.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
QUERY = (torch.float32,) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def moved(cache):
    """The same cache on DEVICE: all of its storage, so that strides and neighbours stay."""
    pages = cache.pages
    storage = torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage()).to(DEVICE)
    view = storage.as_strided(pages.shape, pages.stride(), pages.storage_offset())
    options = {f"{side}_scale": scale for side, scale in cache.scales.items()}
    if isinstance(cache, MainCache):
        return MainCache.from_tensor(
            view, cache.kv_heads, cache.dtype, head_dim=cache.head_dim, **options
        )
    return IndexCache.from_tensor(view, cache.dtype, head_dim=cache.head_dim, **options)


def close(got, want, dtype):
    got, want = got.cpu().float(), want.cpu().float()
    assert torch.equal(torch.isinf(got), torch.isinf(want)) and not got.isnan().any()
    keep = ~torch.isinf(want)
    if keep.any():
        largest = want[keep].abs().max().clamp(min=1e-3)
        assert ((got - want)[keep].abs().max() / largest) <= TOLERANCE[dtype]


def to(*tensors):
    return [t.to(DEVICE) for t in tensors]


DIM = 32 if INTERPRETED else 128
LENS = [200, 0, 129] if INTERPRETED else [1000, 0, 129, 128, 4000, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("q_dtype", QUERY)
def test_sparse_decode(dtype, rows, q_dtype):
    batch = make_batch(LENS, dtype=dtype, head_dim=DIM, gap=48)
    q = queries(5, len(LENS) * rows, 4, DIM, dtype=q_dtype)
    count = batch.table.shape[1]
    draw = torch.Generator().manual_seed(3)
    lists = [torch.randperm(count + 1, generator=draw)[:5] - 1 for _ in range(2 * len(q))]
    ids = torch.stack(lists).view(2, len(q), -1).int()
    arguments = (batch.table, batch.seq_lens, rows, 0.3)
    want, want_lse = ops.sparse_decode(q, batch.main, ids, *arguments, return_lse=True)
    buffer, out = guarded(list(q.shape), q_dtype)
    buffer = buffer.to(DEVICE)
    out = buffer[64:-64].view(q.shape)
    q, ids, table, lens = to(q, ids, batch.table, batch.seq_lens)
    got, lse = ops.sparse_decode(
        q,
        moved(batch.main),
        ids,
        table,
        lens,
        rows,
        0.3,
        out=out,
        return_lse=True,
        backend="triton",
    )
    assert got is out and guards_intact(buffer.cpu())
    close(got, want, q_dtype)
    close(lse, want_lse, q_dtype)


def shared_batch(dtype: str, rows: int, lens: list[int], own_tail: bool, q_dtype, topk: int = 5):
    """Requests that share the pages of a prefix, and selections that agree in part.

    Of each request's rows the last has its list in another order; the third request selects the
    shared pages but one. With `own_tail` every request has its newest block for itself.
    """
    batch = make_batch(lens, dtype=dtype, head_dim=DIM, gap=48)
    table = batch.table.clone()
    for r in range(1, len(lens)):
        blocks = -(-lens[r] // 128)
        shared = min(blocks - own_tail, -(-lens[0] // 128) - own_tail)
        table[r, : max(shared, 0)] = table[0, : max(shared, 0)]
    q = queries(15, len(lens) * rows, 4, DIM, dtype=q_dtype)
    ids = torch.full((2, len(q), topk), -1, dtype=torch.int32)
    for r, n in enumerate(lens):
        newest = max(0, -(-n // 128) - 1)
        for i in range(rows):
            chosen = [newest, *range(min(newest, topk - 1))]
            if r == 2 and newest > topk:
                chosen[2] = topk
            if i == rows - 1:
                chosen = chosen[::-1]
            ids[:, r * rows + i, : len(chosen)] = int32(chosen)
    return batch, table, q, ids


SHARED = [(d, rows, tail) for d in DTYPES for rows in range(1, 7) for tail in (False, True)]
if INTERPRETED:
    SHARED = [("nvfp4", 4, False), ("fp8", 1, True), ("bf16", 1, False)]


@pytest.mark.parametrize(("dtype", "rows", "own_tail"), SHARED)
def test_shared_pages(dtype, rows, own_tail):
    """Rows that share pages: the reference's result, and on a GPU the bits of rows one by one."""
    from rocm_msa.ops.sparse_decode.plan import Tuning
    from rocm_msa.ops.sparse_decode.triton_impl import run

    lens = [300, 300, 290] if INTERPRETED else [900, 900, 890, 0, 900, 897, 900, 1]
    batch, table, q, ids = shared_batch(dtype, rows, lens, own_tail, QUERY[-1])
    want, want_lse = ops.sparse_decode(
        q, batch.main, ids, table, batch.seq_lens, rows, 0.3, return_lse=True
    )
    main = moved(batch.main)
    arguments = (*to(ids, table, batch.seq_lens), rows, 0.3)
    (q,) = to(q)
    alone = None if INTERPRETED else run(q, main, *arguments, tuning=Tuning(1, False))
    hopper = not INTERPRETED and dtype == "nvfp4"
    for unit in (2,) if INTERPRETED else (1, 2, 4, 8) if hopper else (1, 2):
        tuning = Tuning(unit, True, tile_rows=4 if hopper else 2)
        got, lse = run(q, main, *arguments, tuning=tuning)
        close(got, want, QUERY[-1])
        close(lse, want_lse, QUERY[-1])
        if not INTERPRETED:
            assert torch.equal(got, alone[0]) and torch.equal(lse, alone[1])


def plan_oracle(ids, table, lens, rows, pages, unit):
    """Units that are taken, and the pages of each tile's, from the lists in plain Python."""
    heads, total, topk = ids.shape
    sorted_lists = {}
    for h in range(heads):
        for t in range(total):
            n = int(lens[t // rows]) - rows + t % rows + 1
            found = []
            for b in sorted(int(b) for b in ids[h, t] if 0 <= int(b) * 128 < n):
                page = int(table[t // rows, b])
                found.append(page if 0 <= page < pages else None)
            sorted_lists[h, t] = found + [None] * (topk - len(found))
    tiles, used = [], set()
    for r in range(len(lens)):
        if rows >= 4 or rows == 3 or lens[r] == 0:
            tiles += [[r * rows + i for i in range(a, min(a + 4, rows))] for a in range(0, rows, 4)]
        elif r not in used:
            window = range(r, min(len(lens), r // 64 * 64 + 64))
            same = [o for o in window if o not in used and lens[o] and table[o, 0] == table[r, 0]]
            group = same[: 4 // rows]
            used.update(group)
            tiles.append([o * rows + i for o in group for i in range(rows)])
    taken, work = {}, {}
    for h in range(heads):
        for tile in tiles:
            for u in range(-(-topk // unit)):
                slots = range(u * unit, min(u * unit + unit, topk))
                rows_ = [[sorted_lists[h, t][s] for t in tile] for s in slots]
                live = [[p for p in row if p is not None] for row in rows_]
                blocks, used_slots = sum(map(len, live)), sum(bool(x) for x in live)
                take = (
                    blocks > 0 and blocks >= 2 * used_slots and all(len(set(x)) <= 1 for x in live)
                )
                work[tile[0], h, u] = [x[0] if x else 0 for x in live] if take else []
                for t in tile:
                    taken[t, h, u] = take
    return taken, work


@pytest.mark.parametrize(("rows", "unit"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_plan_of_shared_pages(rows, unit):
    from rocm_msa.ops.sparse_decode.sharing import plan

    lens = [900, 900, 890, 0, 900, 129, 900, 900]
    _, table, _, ids = shared_batch("bf16", rows, lens, True, torch.float32)
    table[6, 3] = 2**30  # names no page
    pages = int(table[table < 2**30].max()) + 1
    made = plan(*to(ids, table, int32(lens)), rows, pages, unit, 4, False)
    taken, work = plan_oracle(ids, table, lens, rows, pages, unit)
    heads, total, topk = ids.shape
    units = -(-topk // unit)
    got = made.taken.cpu().view(total, heads, units)
    leading = made.leading.cpu().view(total, heads, units)
    lists = made.work.cpu().view(total, heads, units, unit)
    assert any(taken.values()) and not all(taken.values())
    for (t, h, u), take in taken.items():
        assert bool(got[t, h, u]) == take
        pages_ = work.get((t, h, u), [])
        assert bool(leading[t, h, u]) == bool(pages_)
        assert not pages_ or lists[t, h, u, : len(pages_)].tolist() == pages_


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_dense(dtype):
    batch = make_batch(LENS, dtype=dtype, head_dim=DIM)
    counts = [min(n, c) for n, c in zip(LENS, [3, 0, 2, 40, 70, 1], strict=False)]
    tokens = sum(counts) + 2
    cu = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    dt = QUERY[-1]
    q = queries(6, tokens, 4, DIM, dtype=dt)
    ids = int32([[[0, 1, -1, 5]] * tokens, [[1, 9, 0, -1]] * tokens])
    main = moved(batch.main)
    table, cu_d, lens, q_d, ids_d = to(batch.table, cu, batch.seq_lens, q, ids)
    want = ops.sparse_prefill(q, batch.main, ids, batch.table, cu, batch.seq_lens, 0.2)
    got = ops.sparse_prefill(q_d, main, ids_d, table, cu_d, lens, 0.2, backend="triton")
    close(got, want, dt)
    want = ops.dense_attention(q, batch.main, batch.table, cu, batch.seq_lens, 0.2)
    got = ops.dense_attention(q_d, main, table, cu_d, lens, 0.2, backend="triton")
    close(got, want, dt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4])
def test_scores(dtype, heads):
    batch = make_batch(LENS, dtype=dtype, head_dim=DIM, gap=16)
    index = moved(batch.index)
    dt = QUERY[-1]
    q = queries(7, 3 * len(LENS), heads, DIM, dtype=dt)
    want = ops.index_score_decode(q, batch.index, batch.table, batch.seq_lens, 3)
    q_d, table, lens = to(q, batch.table, batch.seq_lens)
    got = ops.index_score_decode(q_d, index, table, lens, 3, backend="triton")
    close(got, want, torch.float32)
    counts = [min(n, c) for n, c in zip(LENS, [3, 0, 2, 40, 70, 1], strict=False)]
    cu = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    q = queries(8, sum(counts) + 2, heads, DIM, dtype=dt)
    want = ops.index_score_prefill(q, batch.index, batch.table, cu, batch.seq_lens)
    q_d, cu_d = to(q, cu)
    got = ops.index_score_prefill(q_d, index, table, cu_d, lens, backend="triton")
    close(got, want, torch.float32)


def topk_scores(heads: int, rows: int, blocks: int) -> torch.Tensor:
    """Scores with ties, NaN, infinities and both zeros."""
    scores = (random_values(3, heads, rows, blocks) * 3).round() / 2
    scores[..., ::7] = float("nan")
    scores[..., 1::11] = float("-inf")
    scores[..., 2::13] = -0.0
    return scores


@pytest.mark.parametrize(
    ("blocks", "topk", "init", "local"), [(40, 16, 0, 1), (9, 5, 2, 2), (70, 3, 0, 1)]
)
def test_block_topk(blocks, topk, init, local):
    from rocm_msa.ops.block_topk.plan import Tuning
    from rocm_msa.ops.block_topk.triton_impl import run

    nb = int32([0, 1, topk, blocks, blocks - 1])
    scores = topk_scores(2, len(nb), blocks)
    want = ops.block_topk(scores, nb, topk, init, local)
    scores, nb = to(scores, nb)
    got = ops.block_topk(scores, nb, topk, init, local, backend="triton")
    assert torch.equal(got.cpu(), want)
    kept = 4 if topk == 3 else 16 if topk == 16 else 8
    for splits, group in ((1, 1), (2, 1), (1, 16 // kept), (2, 16 // kept)):
        got = run(scores, nb, topk, init, local, tuning=Tuning(16, kept, splits, 1, group))
        assert torch.equal(got.cpu(), want)


def edge_values(columns: int) -> torch.Tensor:
    """fp32 rows that reach every rule of the encoders."""
    rows = [random_values(i, columns, scale=10.0 ** (i % 9 - 5)) for i in range(12)]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(columns // 8)
    for factor in (1.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 448.0, 500.0, 2.0**-20):
        rows.append(ties * factor)
        rows.append(-ties * factor)
    special = ties.clone()
    special[0], special[17], special[18] = float("nan"), float("inf"), -float("nan")
    rows += [special, -special, torch.zeros(columns), -torch.zeros(columns)]
    rows.append(torch.full((columns,), 1e-42))
    rows.append(torch.full((columns,), 3.4e38))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [1.0, 0.037, 3.0])
def test_stored_bytes(dtype, g):
    """V is not changed before its encoding: its bytes are the reference's, bit for bit."""
    v = edge_values(DIM)
    tokens = len(v)
    heads = ops.Heads(q=1, kv=1, index=0, head_dim=DIM, rotary_dim=DIM // 2)
    qkv = torch.cat([random_values(1, tokens, 2 * DIM), v], dim=1)
    one = torch.zeros(DIM)
    table = torch.ones(tokens, DIM // 2)
    cache = empty_cache(MainCache, 2, dtype, 1, DIM, 32)
    cache.scales.update(k=g, v=g)
    other = moved(cache) if DEVICE == "cuda" else moved_copy(cache)
    slots = torch.arange(tokens) * 5 % 256
    slots[3] = -1
    position = torch.arange(tokens)
    ops.qkv_insert(
        qkv, ops.Norms(one, one), table, position, cache, None, slots, None, heads,
        backend="reference",
    )  # fmt: skip
    qkv, one, table, position, slots = to(qkv, one, table, position, slots)
    ops.qkv_insert(
        qkv, ops.Norms(one, one), table, position, other, None, slots, None, heads,
        backend="triton",
    )  # fmt: skip
    for name in cache._region_names("v"):
        want, got = cache.region(name), other.region(name).cpu()
        if dtype == "bf16":  # the sign of a NaN, which PyTorch's cast to bf16 drops, is kept
            want, got = want.view(torch.int16), got.view(torch.int16)
            want, got = (x.masked_fill(x == -32768, 0) for x in (want, got))
        assert torch.equal(want, got), name


def moved_copy(cache):
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.pages.untyped_storage()).clone()
    view = storage.as_strided(cache.pages.shape, cache.pages.stride(), cache.pages.storage_offset())
    copy = MainCache.from_tensor(view, cache.kv_heads, cache.dtype, head_dim=cache.head_dim)
    copy.scales.update(cache.scales)
    return copy


@pytest.mark.parametrize("index", [0, 2])
def test_qkv_insert(index):
    heads = ops.Heads(q=4, kv=2, index=index, head_dim=DIM, rotary_dim=DIM // 2)
    tokens = 6 if INTERPRETED else 700
    dt = QUERY[-1]
    qkv = queries(4, tokens, heads.qkv_columns, dtype=dt)
    w = [random_values(i, DIM, scale=0.1).to(dt) for i in range(4)]
    norms = ops.Norms(*w) if index else ops.Norms(w[0], w[1])
    cos_sin = random_values(9, 900, DIM // 2).clamp(-1, 1)
    position = torch.arange(tokens)
    slots = torch.randperm(768)[:tokens]
    slots[2] = -1
    results = {}
    for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
        main = empty_cache(MainCache, 6, "bf16", 2, DIM)
        ik = empty_cache(IndexCache, 6, "bf16", 1, DIM)
        if device == "cuda":
            main, ik = moved(main), moved(ik)
        n = ops.Norms(
            *(
                x if x is None else x.to(device)
                for x in (norms.q, norms.k, norms.index_q, norms.index_k)
            )
        )
        q, iq = ops.qkv_insert(
            qkv.to(device), n, cos_sin.to(device), position.to(device), main, ik if index else None,
            slots.to(device), slots.to(device) if index else None, heads, backend=backend,
        )  # fmt: skip
        values = [q, main.pages.view(torch.bfloat16)]
        values += [iq, ik.pages.view(torch.bfloat16)] if index else []
        results[backend] = [v.cpu().float() for v in values]
    for got, want in zip(results["triton"], results["reference"], strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        unit = 2.0**-7 if dt is not torch.float32 else 1e-6
        assert ((got - want).nan_to_num().abs() <= unit * want.nan_to_num().abs() + 1e-6).all()
