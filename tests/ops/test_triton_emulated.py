"""The Triton ops on CPU tensors as their gfx950 code objects, in the emulator.

Compared with the references; all of the emulator's checks are on, and no finding is allowed. Free
pages, tails and the bytes beside a page are poison (cases.py), and so is what `torch.empty` gives
the ops. The code is what a GPU gets at these arguments, with caches as in service (larger than
2 GiB) or small enough for buffer instructions.
"""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from gfx950_emu import Schedule
from rocm_msa import ops
from rocm_msa.cache import IndexCache, MainCache
from tests.launcher.emulated import SCHEDULES
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
from tests.ops.emulated_triton import CACHES, emulated
from tests.ops.test_triton_ops import close, edge_values, topk_scores

DIM = 128
FEW = (Schedule(), Schedule("random", 3, (1, 100_000)))
LENS = [200, 0, 129, 1]
PAGES = 5  # of the caches that qkv_insert writes
ODD = 6  # bytes beside a page: then no page but by chance lies on a multiple of 4
slow = pytest.mark.slow
CACHE_SIZES = [
    pytest.param(frozenset(CACHES), id="beyond-2GiB"),
    pytest.param(frozenset(), id="small"),
]
KINDS = ["nvfp4", "fp8", "bf16"]
MIXES = [
    ("nvfp4", "nvfp4"),
    ("fp8", "nvfp4"),
    ("bf16", "fp8"),
    *(pytest.param(m, i, marks=slow) for m in KINDS for i in KINDS
      if (m, i) not in (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "fp8"))),
]  # fmt: skip


@contextlib.contextmanager
def machine(schedule=FEW[0], large=frozenset(CACHES), **how):
    """Ops run in the emulator, and memory that they allocate is NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with emulated(schedule=schedule, large=large, **how) as launches:
            yield launches
    finally:
        torch.use_deterministic_algorithms(before)


def storage(cache) -> torch.Tensor:
    """All bytes that the cache lies in, those of its neighbours included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.pages.untyped_storage())


@contextlib.contextmanager
def unchanged(*caches):
    before = [storage(c).clone() for c in caches]
    yield
    assert all(torch.equal(storage(c), b) for c, b in zip(caches, before, strict=True))


def lists(seed: int, heads: int, rows: int, count: int, topk: int) -> torch.Tensor:
    """Distinct ids of a row out of -1 .. count - 1, some beyond the causal blocks."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(count + 1, generator=draw)[:topk] - 1 for _ in range(heads * rows)]
    return torch.stack(ids).view(heads, rows, -1).int()


def decode_case(dtype, q_dtype, rows, lens=LENS, topk=3, gap=48):
    batch = make_batch(lens, dtype=dtype, head_dim=DIM, gap=gap, extra_blocks=2)
    q = queries(5, len(lens) * rows, 4, DIM, dtype=q_dtype)
    ids = lists(3, 2, len(q), batch.table.shape[1], topk)
    arguments = (q, batch.main, ids, batch.table, batch.seq_lens, rows, 0.3)
    return batch, arguments, ops.sparse_decode(*arguments, return_lse=True, backend="reference")


def check_decode(case, schedule, large=frozenset(CACHES)):
    batch, arguments, (want, want_lse) = case
    q = arguments[0]
    buffer, out = guarded(list(q.shape), q.dtype)
    with unchanged(batch.main), machine(schedule, large):
        _, lse = ops.sparse_decode(*arguments, out=out, return_lse=True, backend="triton")
    assert guards_intact(buffer)
    close(out, want, q.dtype)
    close(lse, want_lse, q.dtype)
    return out


@pytest.mark.parametrize("large", CACHE_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_decode(dtype, large):
    case = decode_case(dtype, torch.bfloat16, 1)
    results = [check_decode(case, schedule, large) for schedule in FEW]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_decode_under_all_schedules(dtype):
    assert len(SCHEDULES) >= 20
    case = decode_case(dtype, torch.bfloat16, 1, lens=[129])
    results = [check_decode(case, schedule) for schedule in SCHEDULES]
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("dtype", ["nvfp4", *(pytest.param(d, marks=slow) for d in KINDS[1:])])
def test_sparse_decode_of_shared_pages(dtype):
    """32 rows whose requests begin with the same two pages: right, and the same bits alone."""
    rows, batch = 4, make_batch([300] * 8, dtype=dtype, head_dim=DIM, gap=48)
    batch.table[:, :2] = batch.table[0, :2]
    q, ids = queries(5, 8 * rows, 4, DIM), lists(3, 2, 8 * rows, 3, 3)
    arguments = (q, batch.main, ids, batch.table, batch.seq_lens, rows, 0.3)
    want = ops.sparse_decode(*arguments, return_lse=True, backend="reference")
    out = check_decode((batch, arguments, want), FEW[1])
    for request in (0, 5):
        own, part = slice(request, request + 1), slice(request * rows, (request + 1) * rows)
        with machine():
            alone = ops.sparse_decode(
                q[part], batch.main, ids[:, part].contiguous(), batch.table[own],
                batch.seq_lens[own], rows, 0.3, backend="triton",
            )  # fmt: skip
        assert torch.equal(alone, out[part])


@slow
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "topk", "gap"), [(3, 5, ODD), (1, 2, 48), (2, 16, 16)])
def test_sparse_decode_more(dtype, q_dtype, rows, topk, gap):
    lens = [1000, 0, 129, 128, 2300, 1]
    case = decode_case(dtype, q_dtype, rows, lens, topk, gap)
    for schedule in FEW:
        check_decode(case, schedule)


def prefill_case(dtype, q_dtype=torch.bfloat16, lens=LENS, counts=(3, 0, 2, 1), gap=48, padding=2):
    batch = make_batch(lens, dtype=dtype, head_dim=DIM, gap=gap)
    cu = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    q = queries(6, sum(counts) + padding, 4, DIM, dtype=q_dtype)
    return batch, q, cu


def check_prefill(case, op, ids, schedule, large=frozenset(CACHES)):
    batch, q, cu = case
    arguments = [q, batch.main, *ids, batch.table, cu, batch.seq_lens, 0.2]
    want, want_lse = op(*arguments, return_lse=True, backend="reference")
    buffer, out = guarded(list(q.shape), q.dtype)
    with unchanged(batch.main), machine(schedule, large):
        _, lse = op(*arguments, out=out, return_lse=True, backend="triton")
    assert guards_intact(buffer)
    close(out, want, q.dtype)
    close(lse, want_lse, q.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_dense(dtype):
    case = prefill_case(dtype)
    ids = lists(4, 2, len(case[1]), case[0].table.shape[1], 3)
    for op, chosen in ((ops.sparse_prefill, [ids]), (ops.dense_attention, [])):
        results = [check_prefill(case, op, chosen, schedule) for schedule in FEW]
        assert torch.equal(*results)


@pytest.mark.parametrize("op", [ops.sparse_prefill, ops.dense_attention])
def test_prefill_and_dense_under_all_schedules(op):
    case = prefill_case("nvfp4", lens=[129], counts=[2], padding=1)
    ids = [lists(4, 2, len(case[1]), 3, 3)] if op is ops.sparse_prefill else []
    results = [check_prefill(case, op, ids, schedule) for schedule in SCHEDULES]
    assert all(torch.equal(results[0], r) for r in results)


@slow
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gap", "large"), [(16, frozenset()), (ODD, frozenset(CACHES))])
def test_prefill_and_dense_more(dtype, q_dtype, large, gap):
    case = prefill_case(dtype, q_dtype, [500, 0, 129, 1, 700], (30, 0, 2, 1, 9), gap)
    ids = lists(4, 2, len(case[1]), case[0].table.shape[1], 5)
    for op, chosen in ((ops.sparse_prefill, [ids]), (ops.dense_attention, [])):
        check_prefill(case, op, chosen, FEW[1], large)


def check_scores(case, heads, rows, schedule, large=frozenset(CACHES)):
    """Both scoring ops; rows=0: prefill."""
    batch, q, cu = case
    q = queries(7, rows * len(batch.lens) or len(q), heads, DIM, dtype=q.dtype)
    if rows:
        op, tail = ops.index_score_decode, (batch.seq_lens, rows)
    else:
        op, tail = ops.index_score_prefill, (cu, batch.seq_lens)
    arguments = (q, batch.index, batch.table, *tail)
    want = op(*arguments, backend="reference")
    buffer, out = guarded(list(want.shape), torch.float32)
    with unchanged(batch.index), machine(schedule, large):
        op(*arguments, out=out, backend="triton")
    assert guards_intact(buffer)
    close(out, want, torch.float32)
    return out


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(dtype, rows):
    case = prefill_case(dtype)
    results = [check_scores(case, 4, rows, schedule) for schedule in FEW]
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [0, 1])
def test_scores_under_all_schedules(rows):
    case = prefill_case("nvfp4", lens=[129], counts=[2], padding=1)
    results = [check_scores(case, 1, rows, schedule) for schedule in SCHEDULES]
    assert all(torch.equal(results[0], r) for r in results)


@slow
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rows", "gap", "large"),
    [
        (1, 3, ODD, frozenset(CACHES)),
        (4, 8, 16, frozenset()),
        (3, 0, ODD, frozenset()),
        (4, 0, 16, frozenset(CACHES)),
    ],
)
def test_scores_more(dtype, q_dtype, heads, rows, gap, large):
    case = prefill_case(dtype, q_dtype, [500, 0, 129, 1, 700], (30, 0, 2, 1, 40), gap)
    check_scores(case, heads, rows, FEW[1], large)


TOPK = [(40, 16, 0, 1), (9, 5, 2, 2), (70, 3, 0, 1)]


def check_topk(blocks, topk, init, local, schedule):
    nb = int32([0, 1, topk, blocks, blocks - 1])
    scores = topk_scores(2, len(nb), blocks)
    want = ops.block_topk(scores, nb, topk, init, local, backend="reference")
    buffer, out = guarded(list(want.shape), torch.int32)
    with machine(schedule):
        ops.block_topk(scores, nb, topk, init, local, out=out, backend="triton")
    assert guards_intact(buffer)
    assert torch.equal(out, want)


@pytest.mark.parametrize("case", TOPK, ids=str)
def test_block_topk(case):
    for schedule in SCHEDULES if case == TOPK[1] else FEW:
        check_topk(*case, schedule)


@pytest.mark.parametrize("case", [(2100, 16, 0, 1), pytest.param((8192, 16, 1, 2), marks=slow)])
def test_block_topk_split(case):
    """Several sorted runs a row, merged by a second launch."""
    check_topk(*case, FEW[1])


def insert_case(tokens=7, index=2):
    heads = ops.Heads(q=4, kv=2, index=index, head_dim=DIM, rotary_dim=DIM // 2)
    w = [random_values(i, DIM, scale=0.1).bfloat16() for i in range(4)]
    slots = torch.randperm(PAGES * 128, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[2] = -1
    other = torch.randperm(PAGES * 128, generator=torch.Generator().manual_seed(2))[:tokens]
    other[tokens - 1] = -1
    return {
        "qkv": queries(4, tokens, heads.qkv_columns),
        "norms": ops.Norms(*w) if index else ops.Norms(*w[:2]),
        "cos_sin": random_values(9, 4000, DIM // 2).clamp(-1, 1),
        "positions": torch.arange(tokens) * 7,
        "main_slots": slots,
        "index_slots": other if index else None,
        "heads": heads,
    }


def insert(case, main_dtype, index_dtype, gap, backend, g=1.0):
    """(caches, (q, index_q)) of one call on poisoned caches."""
    main = empty_cache(MainCache, PAGES, main_dtype, 2, DIM, gap)
    index = empty_cache(IndexCache, PAGES, index_dtype, 1, DIM, gap)
    main.scales.update(k=g, v=g / 3)
    index.scales.update(k=g / 2)
    caches = {"main_cache": main, "index_cache": index if case["heads"].index else None}
    return (main, index), ops.qkv_insert(**case, **caches, backend=backend)


def check_insert(main_dtype, index_dtype, schedule, gap=48, g=0.037, **options):
    """Values within the last bit of the reference's; every stored bit that of the values."""
    case = insert_case(**options)
    _, want_q = insert(case, "bf16", "bf16", gap, "reference")
    with machine(schedule):
        wide, q16 = insert(case, "bf16", "bf16", gap, "triton")
        caches, q = insert(case, main_dtype, index_dtype, gap, "triton", g)
    expected, _ = insert(case, "bf16", "bf16", gap, "reference")
    pairs = [(c.pages.view(torch.bfloat16), e.pages.view(torch.bfloat16))
             for c, e in zip(wide, expected, strict=True)]  # fmt: skip
    pairs += [(a, b) for a, b in zip(q, want_q, strict=True) if b is not None]
    for got, want in pairs:
        got, want = got.float(), want.float()
        assert torch.equal(got.isnan(), want.isnan())
        assert ((got - want).nan_to_num().abs() <= 2.0**-7 * want.nan_to_num().abs() + 1e-6).all()
    assert all(torch.equal(a, b) for a, b in zip(q, q16, strict=True) if a is not None)
    stored = [empty_cache(kind, PAGES, dtype, heads, DIM, gap) for kind, dtype, heads in
              ((MainCache, main_dtype, 2), (IndexCache, index_dtype, 1))]  # fmt: skip
    for cache, like in zip(stored, caches, strict=True):
        cache.scales.update(like.scales)
    at = {"main": case["main_slots"], "index": case["index_slots"]}
    stored[0].write(*(values(wide[0], side, at["main"]) for side in "kv"), at["main"])
    if at["index"] is not None:
        stored[1].write(values(wide[1], "k", at["index"]), at["index"])
    for got, want in zip(caches, stored, strict=True):
        assert torch.equal(storage(got), storage(want))


def values(cache, side: str, slots: torch.Tensor) -> torch.Tensor:
    """bf16 values of a bf16 cache at `slots`, anything at -1."""
    region = cache.region(f"{side}_data").contiguous().view(torch.bfloat16)
    found = region[slots // 128, :, slots % 128].float()
    return found[:, 0] if isinstance(cache, IndexCache) else found


@pytest.mark.parametrize(("main", "index"), MIXES)
def test_qkv_insert(main, index):
    for schedule in FEW:
        check_insert(main, index, schedule)


def test_qkv_insert_under_all_schedules():
    for schedule in SCHEDULES:
        check_insert("nvfp4", "nvfp4", schedule, tokens=3)


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"index": 0}, {"tokens": 530}, {"gap": ODD}], ids=str)
def test_qkv_insert_more(dtype, options):
    check_insert(dtype, dtype, FEW[1], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [0.037, pytest.param(1.0, marks=slow), pytest.param(3.0, marks=slow)])
def test_stored_bytes(dtype, g):
    """V is not changed before its encoding: bytes of all of its edge values, bit for bit."""
    v = edge_values(DIM)
    tokens = len(v)
    heads = ops.Heads(q=1, kv=1, index=0, head_dim=DIM, rotary_dim=DIM // 2)
    qkv = torch.cat([random_values(1, tokens, 2 * DIM), v], dim=1)
    one, position = torch.zeros(DIM), torch.arange(tokens)
    slots = position * 5 % 256
    slots[3] = -1
    caches = []
    for backend in ("reference", "triton"):
        cache = empty_cache(MainCache, 2, dtype, 1, DIM, 32)
        cache.scales.update(k=g, v=g)
        with machine():
            ops.qkv_insert(
                qkv, ops.Norms(one, one), torch.ones(tokens, DIM // 2), position, cache, None,
                slots, None, heads, backend=backend,
            )  # fmt: skip
        caches.append(cache)
    for name in caches[0]._region_names("v"):
        want, got = (c.region(name) for c in caches)
        if dtype == "bf16":  # the sign of a NaN, which PyTorch's cast to bf16 drops, is kept
            want, got = want.view(torch.int16), got.view(torch.int16)
            want, got = (x.masked_fill(x == -32768, 0) for x in (want, got))
        assert torch.equal(want, got), name
