"""The prefill ops in Triton on a GPU at real sizes: graphs, 1M tokens, invariance, poison.

Everything here needs a GPU (`make test-gpu`). The references run on the same GPU in fp32.
"""

import pytest
import torch

from rocm_msa import ops
from rocm_msa.cache import CacheDType, IndexCache, MainCache, index_page, main_page

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DIM, TOPK = 128, 16
SCALE = DIM**-0.5
KINDS = ("nvfp4", "fp8", "bf16")
ERROR = 1e-2  # of the largest output: one step of bf16 (2^-7), 16-bit p and partial results


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(2)
    torch.backends.cuda.matmul.allow_tf32 = False


def caches(pages: int, dtype: str, kv_heads: int = 1, stride: int | None = None):
    """(main, index) caches of random finite content, pages `stride` bytes apart."""
    kind = CacheDType.parse(dtype)
    made = []
    for page in (main_page(kv_heads, DIM, kind), index_page(DIM, kind)):
        rows = torch.empty(pages, stride or page.page_bytes, dtype=torch.uint8, device="cuda")
        made.append(rows[:, : page.page_bytes])
    main = MainCache.from_tensor(made[0], kv_heads, dtype, k_scale=0.5, v_scale=2.0)
    index = IndexCache.from_tensor(made[1], dtype, k_scale=0.25)
    for start in range(0, pages, 512):
        count = min(512, pages - start) * 128
        slots = torch.arange(count, device="cuda") + start * 128
        k, v = torch.randn(2, count, kv_heads, DIM, device="cuda")
        main.write(k, v, slots)
        index.write(torch.randn(count, DIM, device="cuda"), slots)
    return main, index


class Batch:
    """A varlen batch: request r has the last `counts[r]` of its `lens[r]` tokens as queries."""

    def __init__(self, lens, counts, pages, q_heads=16, heads=1, pad=0, width=0, dtype="bfloat16"):
        blocks = [-(-n // 128) for n in lens]
        table = torch.full((len(lens), max([*blocks, width])), -1, dtype=torch.int32)
        order, used = torch.randperm(pages).int(), 0
        for r, count in enumerate(blocks):
            table[r, :count] = order[(torch.arange(count) + used) % pages]
            used += count
        self.counts, self.table = counts, table.cuda()
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.cu = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
        self.tokens = ends[-1] + pad
        dt = getattr(torch, dtype)
        self.q = torch.randn(self.tokens, q_heads, DIM, device="cuda").to(dt)
        self.index_q = torch.randn(self.tokens, heads, DIM, device="cuda").to(dt)
        n = [lens[r] - c + 1 + torch.arange(c) for r, c in enumerate(counts)]
        n = torch.cat([*n, torch.zeros(pad, dtype=torch.int64)])
        self.blocks = ((n + 127) // 128).int().cuda()

    def scores(self, index, backend="triton", **options):
        arguments = (self.index_q, index, self.table, self.cu, self.lens)
        return ops.index_score_prefill(*arguments, backend=backend, **options)

    def sparse(self, main, ids, backend="triton", **options):
        arguments = (self.q, main, ids, self.table, self.cu, self.lens, SCALE)
        return ops.sparse_prefill(*arguments, return_lse=True, backend=backend, **options)

    def dense(self, main, backend="triton", **options):
        arguments = (self.q, main, self.table, self.cu, self.lens, SCALE)
        return ops.dense_attention(*arguments, return_lse=True, backend=backend, **options)

    def select(self, scores, kv_heads=1):
        return ops.block_topk(scores, self.blocks, TOPK)[:kv_heads]

    def chain(self, main, index):
        """Scores, selection, sparse and dense attention: what a step of the model calls."""
        scores = self.scores(index)
        ids = self.select(scores)
        return (scores, ids, *self.sparse(main, ids), *self.dense(main))

    def part(self, start, stop):
        """Tokens start..stop - 1 of a batch of one request, as a step of their own."""
        other = object.__new__(Batch)
        other.__dict__.update(self.__dict__)
        rows = slice(start, stop)
        other.q, other.index_q, other.blocks = self.q[rows], self.index_q[rows], self.blocks[rows]
        other.tokens, other.counts = stop - start, [stop - start]
        other.cu = torch.tensor([0, stop - start], dtype=torch.int32, device="cuda")
        other.lens = self.lens - (self.tokens - stop)
        return other


def compare(got, want, error=ERROR):
    assert torch.equal(torch.isinf(got), torch.isinf(want)) and not got.isnan().any()
    keep = ~torch.isinf(want)
    difference = (got.float() - want.float())[keep].abs().max()
    assert difference <= error * want[keep].float().abs().max(), float(difference)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


LENS, COUNTS = [40000, 300, 129, 5000, 0, 700], [700, 300, 0, 4, 0, 9]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16", "float32"])
def test_chain_against_the_references(dtype, q_dtype):
    main, index = caches(700, dtype)
    b = Batch(LENS, COUNTS, 700, pad=5, dtype=q_dtype)
    scores = b.scores(index)
    compare(scores, b.scores(index, "reference"), 2e-5)
    ids = b.select(scores)
    assert torch.equal(ids, ops.block_topk(scores, b.blocks, TOPK, backend="reference"))
    error = 2e-5 if q_dtype == "float32" else ERROR
    for got, want in zip(b.sparse(main, ids), b.sparse(main, ids, "reference"), strict=True):
        compare(got, want, error)
    for got, want in zip(b.dense(main), b.dense(main, "reference"), strict=True):
        compare(got, want, error)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("kv_heads", "q_heads", "heads"), [(4, 64, 4), (2, 6, 3), (1, 1, 1)])
def test_other_heads(dtype, kv_heads, q_heads, heads):
    """C10, C11: one list a KV head, other groups than 16, views with strides."""
    main, index = caches(200, dtype, kv_heads)
    b = Batch([9000, 700], [90, 700], 200, q_heads, heads, pad=3)
    b.q = torch.stack([b.q, b.q], 1)[:, 0]
    compare(b.scores(index), b.scores(index, "reference"), 2e-5)
    lists = torch.rand(b.tokens, 4, b.table.shape[1] + 2, device="cuda").argsort(-1)[..., :11] - 1
    ids = lists.int().transpose(0, 1)[:kv_heads]
    for got, want in zip(b.sparse(main, ids), b.sparse(main, ids, "reference"), strict=True):
        compare(got, want)
    for got, want in zip(b.dense(main), b.dense(main, "reference"), strict=True):
        compare(got, want)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_other_softmax_scales(scale):
    main, _ = caches(60, "nvfp4")
    b = Batch([3000, 130], [40, 7], 60)
    ids = torch.rand(1, b.tokens, 24, device="cuda").argsort(-1)[..., :9].int()
    arguments = (b.q, main, ids, b.table, b.cu, b.lens, scale)
    got = ops.sparse_prefill(*arguments, backend="triton")
    compare(got, ops.sparse_prefill(*arguments, backend="reference"), 1e-2)
    arguments = (b.q, main, b.table, b.cu, b.lens, scale)
    got = ops.dense_attention(*arguments, backend="triton")
    compare(got, ops.dense_attention(*arguments, backend="reference"), 1e-2)


@pytest.mark.parametrize("dtype", KINDS)
def test_pages_beyond_2_to_31_bytes(dtype):
    """The same pages in a pool of 3 GiB rows and in a small one: the same bits."""
    stride, high = 2_899_968, 1100
    main, index = caches(64, dtype)
    far = []
    for cache in (main, index):
        rows = torch.full((high + 64, stride), 0xFF, dtype=torch.uint8, device="cuda")
        view = rows[:, 1024 : 1024 + cache.page.page_bytes]
        view[high:] = cache.pages
        options = {f"{side}_scale": s for side, s in cache.scales.items()}
        far.append(
            MainCache.from_tensor(view, 1, dtype, **options)
            if cache is main
            else IndexCache.from_tensor(view, dtype, **options)
        )
    b = Batch([8000], [300], 64)
    near = b.chain(main, index)
    b.table = torch.where(b.table >= 0, b.table + high, b.table)
    same(b.chain(*far), near)


@pytest.mark.parametrize(("dtype", "poison"), [("nvfp4", 0xFF), ("fp8", 0x7F), ("bf16", 0xFF)])
def test_poison_reaches_nothing(dtype, poison):
    """Free pages, tails and table entries beyond a request hold NaN patterns or point nowhere."""
    main, index = caches(64, dtype)
    lens = [1000, 0, 129, 40]
    b = Batch(lens, [200, 0, 129, 4], 32, pad=9)
    clean = b.chain(main, index)
    used = torch.zeros(64, 128, dtype=torch.bool, device="cuda")
    for r, n in enumerate(lens):
        for block in range(-(-n // 128)):
            used[b.table[r, block], : min(128, n - block * 128)] = True
    for cache in (main, index):
        for region in cache.page.head_layout:
            cache.region(region.name)[:, 0][~used] = poison
    b.table = torch.where(b.table < 0, 2**30, b.table)
    same(b.chain(main, index), clean)
    junk = torch.full((b.tokens, 16, DIM), float("nan"), device="cuda").bfloat16()
    assert torch.equal(b.sparse(main, clean[1], out=junk)[0], clean[2])
    assert (junk[-9:].view(torch.int16) == 0).all()


def test_graph_replay_with_other_lengths():
    """Captured once, replayed with other lengths, tables, queries: the bits of an eager call."""
    main, index = caches(700, "nvfp4")
    b = Batch([40000, 3000, 7], [600, 100, 7], 700, pad=53, width=340)
    b.chain(main, index)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a host read of device values raises
    try:
        b.chain(main, index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = b.chain(main, index)
    cases = [
        ([700, 30000, 0], [700, 60, 0]),
        ([1, 0, 5], [1, 0, 5]),
        ([20000] * 3, [8, 9, 743]),
    ]
    for lens, counts in cases:
        other = Batch(lens, counts, 700, pad=760 - sum(counts), width=340)
        for name in ("q", "index_q", "table", "cu", "lens", "blocks"):
            getattr(b, name).copy_(getattr(other, name))
        graph.replay()
        same(other.chain(main, index), captured)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_a_context_of_a_million_tokens(dtype):
    main, index = caches(8192, dtype)
    b = Batch([1048576], [20], 8192, heads=4)
    scores = b.scores(index)
    compare(scores, b.scores(index, "reference"), 2e-5)
    ids = b.select(scores)
    for got, want in zip(b.sparse(main, ids), b.sparse(main, ids, "reference"), strict=True):
        compare(got, want)
    for got, want in zip(b.dense(main), b.dense(main, "reference"), strict=True):
        compare(got, want)
    few = b.part(16, 20)
    for got, want in zip(few.dense(main), few.dense(main, "reference"), strict=True):
        compare(got, want)


@pytest.mark.parametrize("dtype", KINDS)
def test_the_same_bits_every_time_and_for_every_chunking(dtype):
    main, index = caches(400, dtype)
    b = Batch([50000], [9000], 400)
    first = b.chain(main, index)
    for _ in range(10):
        same(b.chain(main, index), first)
    for start, stop in ((0, 4096), (4096, 9000), (777, 1800), (8991, 9000)):
        scores, ids, out, lse, dense, dense_lse = b.part(start, stop).chain(main, index)
        same((scores, ids), (x[:, start:stop] for x in first[:2]))
        same((out, lse, dense, dense_lse), (x[start:stop] for x in first[2:]))
    for start, stop in ((8992, 9000), (5000, 5001)):  # few tokens: dense splits them otherwise
        scores, ids, out, lse, _, _ = b.part(start, stop).chain(main, index)
        same((scores, ids), (x[:, start:stop] for x in first[:2]))
        same((out, lse), (x[start:stop] for x in first[2:4]))


@pytest.mark.parametrize("dtype", ["nvfp4", "bf16"])
def test_the_same_bits_in_every_batch_table_and_pool(dtype):
    main, index = caches(700, dtype)
    lens, counts = [30000, 77, 5000, 12000, 129] * 3, [500, 5, 60, 3, 129] * 3
    b = Batch(lens, counts, 700, pad=7)
    first = b.chain(main, index)
    for r in (0, 1, 3, 14):
        rows = slice(int(b.cu[r]), int(b.cu[r + 1]))
        alone = Batch([lens[r]], [counts[r]], 700, width=400)
        alone.q, alone.index_q = b.q[rows], b.index_q[rows]
        blocks = -(-lens[r] // 128)
        alone.table[0, :blocks] = b.table[r, :blocks]
        scores, ids, *rest = alone.chain(main, index)
        assert torch.equal(scores[..., :blocks], first[0][:, rows, :blocks])
        assert torch.equal(ids, first[1][:, rows])
        same(rest, (x[rows] for x in first[2:]))


def test_turns_that_bound_the_memory_change_no_bit():
    from dataclasses import replace

    from rocm_msa.ops.dense_attention import plan as dense_plan
    from rocm_msa.ops.dense_attention.triton_impl import run as dense
    from rocm_msa.ops.sparse_prefill import plan as sparse_plan
    from rocm_msa.ops.sparse_prefill.triton_impl import run as sparse

    main, _ = caches(400, "nvfp4")
    b = Batch([20000, 700, 4000, 900], [900, 4, 70, 8], 400, pad=11)
    ids = torch.rand(1, b.tokens, 160, device="cuda").argsort(-1)[..., :TOPK].int()
    arguments = (b.q, main, ids, b.table, b.cu, b.lens, SCALE)
    t = sparse_plan.select(TOPK, 1, 16, DIM, 2, "cuda")
    want = sparse(*arguments, tuning=t)
    for change in ({"turn": 100}, {"item": 7, "programs": 3}, {"turn": 1000, "item": 1000}):
        same(sparse(*arguments, tuning=replace(t, **change)), want)
    arguments = (b.q, main, b.table, b.cu, b.lens, SCALE)
    case = (b.table.shape[1], 16, DIM, False, "cuda")
    many, few = dense_plan.select(*case), dense_plan.select_few(*case)
    want = dense(*arguments, many=many, few=few)
    for turn in (100, 101, 8):
        same(dense(*arguments, many=replace(many, turn=turn), few=replace(few, turn=turn)), want)


def test_no_tokens_and_no_requests():
    """C14."""
    main, index = caches(8, "nvfp4")
    b = Batch([300], [0], 8)
    assert b.scores(index).shape == (1, 0, 3)
    assert b.sparse(main, torch.zeros(1, 0, 16, dtype=torch.int32, device="cuda"))[0].numel() == 0
    assert b.dense(main)[0].numel() == 0
    none = Batch([300], [0], 8, pad=12)  # padding alone
    none.table, none.lens, none.cu = none.table[:0], none.lens[:0], none.cu[:1]
    assert torch.isinf(none.scores(index)).all()
    ids = torch.zeros(1, 12, 16, dtype=torch.int32, device="cuda")
    for out, lse in (none.sparse(main, ids), none.dense(main)):
        assert (out == 0).all() and torch.isinf(lse).all()


def test_after_the_warm_up_nothing_is_compiled():
    """C49: other counts, lengths and strides of q than those of the warm-up."""
    from rocm_msa.ops.triton_warmup import Config, compiled, warmup

    main, index = caches(700, "nvfp4")
    heads = ops.Heads(q=16, kv=1, index=1, head_dim=DIM, rotary_dim=64)
    dense = ops.Heads(q=16, kv=1, index=0, head_dim=DIM, rotary_dim=64)
    for kind in (heads, dense):
        warmup(Config(kind, torch.bfloat16, 352, decode=((1, 1),), prefill=(16, 2048)), main, index)
    held = compiled()
    for lens, counts in (([40000, 3000, 7], [600, 100, 7]), ([129], [129]), ([45000], [2500])):
        Batch(lens, counts, 700, pad=3, width=352).chain(main, index)
    assert compiled() == held
