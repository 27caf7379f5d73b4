"""The Triton kernels on a GPU at real sizes: 64-bit offsets, graphs, 1M tokens, invariance.

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

DIM, Q_HEADS, TOPK = 128, 16, 16
SCALE = DIM**-0.5
ERROR = 2**-7  # of the largest output: one unit in bf16's last place


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False


def pools(pages: int, dtype: str, stride: int | None = None):
    """(main, index) caches of random finite content in rows of `stride` bytes."""
    kind = CacheDType.parse(dtype)
    caches = []
    for page in (main_page(1, DIM, kind), index_page(DIM, kind)):
        rows = torch.empty(pages, stride or page.page_bytes, dtype=torch.uint8, device="cuda")
        caches.append(rows[:, : page.page_bytes])
    main = MainCache.from_tensor(caches[0], 1, dtype)
    index = IndexCache.from_tensor(caches[1], dtype)
    for start in range(0, pages, 512):
        count = min(512, pages - start) * 128
        slots = torch.arange(count, device="cuda") + start * 128
        k, v = torch.randn(2, count, 1, DIM, device="cuda")
        main.write(k, v, slots)
        index.write(torch.randn(count, DIM, device="cuda"), slots)
    return main, index


def batch(lens: list[int], rows: int, pages: int, heads: int = 1):
    blocks = [-(-n // 128) for n in lens]
    table = torch.full((len(lens), max(blocks)), -1, dtype=torch.int32)
    order, used = torch.randperm(pages).int(), 0
    for r, count in enumerate(blocks):
        table[r, :count] = order[(torch.arange(count) + used) % pages]
        used += count
    n = len(lens) * rows
    q = torch.randn(n, Q_HEADS, DIM, device="cuda").bfloat16()
    index_q = torch.randn(n, heads, DIM, device="cuda").bfloat16()
    return q, index_q, table.cuda(), torch.tensor(lens, dtype=torch.int32, device="cuda")


def chain(q, index_q, index, main, table, lens, rows, backend="triton", ids=None):
    """Scores, selection and attention of a decode step, as the plugin calls them."""
    scores = ops.index_score_decode(index_q, index, table, lens, rows, backend=backend)
    step = torch.arange(rows, device=q.device, dtype=torch.int32)
    n = (lens[:, None] - rows + step + 1).clamp(min=0).flatten()
    nb = ((n + 127) // 128).int()
    if ids is None:
        ids = ops.block_topk(scores, nb, TOPK, backend=backend)
    out, lse = ops.sparse_decode(
        q, main, ids[:1], table, lens, rows, SCALE, return_lse=True, backend=backend
    )
    return scores, ids, out, lse


def compare(got, want):
    assert torch.equal(torch.isinf(got), torch.isinf(want)) and not got.isnan().any()
    keep = ~torch.isinf(want)
    error = (got.float() - want.float())[keep].abs().max()
    assert error <= ERROR * want[keep].float().abs().max(), float(error)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_decode_chain(dtype, rows):
    main, index = pools(700, dtype)
    q, index_q, table, lens = batch([30000, 0, 1, 129, 2048, 9000, 3], rows, 700, heads=4)
    got = chain(q, index_q, index, main, table, lens, rows)
    want = chain(q, index_q, index, main, table, lens, rows, "reference", got[1])
    for a, b in zip(got, want, strict=True):
        compare(a, b)
    ids = ops.block_topk(got[0], row_blocks(lens, rows), TOPK, backend="reference")
    assert torch.equal(got[1], ids)


def row_blocks(lens, rows):
    step = torch.arange(rows, device=lens.device, dtype=torch.int32)
    return ((lens[:, None] - rows + step + 1).clamp(min=0).flatten() + 127).div(128).int()


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
def test_pages_beyond_2_to_31_bytes(dtype):
    """The same pages in a pool of 3 GiB rows and in a small one: the same bits."""
    stride, high = 2_899_968, 1100
    main, index = pools(40, dtype)
    far = []
    for cache in (main, index):
        rows = torch.full((high + 40, stride), 0xFF, dtype=torch.uint8, device="cuda")
        view = rows[:, 1024 : 1024 + cache.page.page_bytes]
        view[high:] = cache.pages
        far.append(
            MainCache.from_tensor(view, 1, dtype)
            if cache is main
            else IndexCache.from_tensor(view, dtype)
        )
    q, index_q, table, lens = batch([5000], 2, 40)
    near = chain(q, index_q, index, main, table, lens, 2)
    away = chain(q, index_q, far[1], far[0], table + high, lens, 2)
    for a, b in zip(near, away, strict=True):
        assert torch.equal(a, b)
    written = MainCache.allocate(4, 1, dtype, "cuda")
    heads = ops.Heads(q=16, kv=1, index=0, head_dim=DIM, rotary_dim=64)
    qkv = torch.randn(8, heads.qkv_columns, device="cuda").bfloat16()
    w = torch.zeros(DIM, device="cuda")
    cos_sin, position = torch.randn(9, 64, device="cuda"), torch.arange(8, device="cuda")
    slots = torch.arange(8, device="cuda") + 130
    for cache, at in ((written, slots), (far[0], slots + high * 128)):
        ops.qkv_insert(qkv, ops.Norms(w, w), cos_sin, position, cache, None, at, None, heads)
    assert torch.equal(
        far[0].region("k_data")[high + 1, 0, 2:10], written.region("k_data")[1, 0, 2:10]
    )


def test_poison_reaches_nothing():
    """Free pages, tails and table entries beyond a request hold NaN patterns or point nowhere."""
    for dtype, poison in (("nvfp4", 0xFF), ("fp8", 0x7F), ("bf16", 0xFF)):
        main, index = pools(64, dtype)
        q, index_q, table, lens = batch([1000, 0, 129, 4], 3, 32)
        clean = chain(q, index_q, index, main, table, lens, 3)
        for cache in (main, index):
            used = torch.zeros(64, 128, dtype=torch.bool, device="cuda")
            for r, n in enumerate(lens.tolist()):
                for b in range(-(-n // 128)):
                    used[table[r, b], : min(128, n - b * 128)] = True
            for region in cache.page.head_layout:
                view = cache.region(region.name)[:, 0]
                view[~used] = poison
        table = torch.where(table < 0, 2**30, table)
        again = chain(q, index_q, index, main, table, lens, 3)
        for a, b in zip(clean, again, strict=True):
            assert torch.equal(a, b)


def test_graph_replay_with_other_lengths():
    """Captured once, replayed with other lengths, tables, queries: the bits of an eager call."""
    main, index = pools(700, "nvfp4")
    torch.cuda.set_sync_debug_mode("error")
    try:
        q, index_q, table, lens = batch([20000, 300, 0], 4, 700)
    except RuntimeError:
        torch.cuda.set_sync_debug_mode("default")
        q, index_q, table, lens = batch([20000, 300, 0], 4, 700)
    torch.cuda.set_sync_debug_mode("error")  # a host read of device values raises
    try:
        chain(q, index_q, index, main, table, lens, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(q, index_q, index, main, table, lens, 4)
    for new in ([64, 20000, 19999], [1, 0, 5], [20000, 20000, 20000]):
        other = batch(new, 4, 700)
        table.fill_(-1)
        table[:, : other[2].shape[1]] = other[2]
        q.copy_(other[0]), index_q.copy_(other[1]), lens.copy_(other[3])
        graph.replay()
        eager = chain(q, index_q, index, main, table, lens, 4)
        for a, b in zip(captured, eager, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_a_context_of_a_million_tokens(dtype):
    main, index = pools(8192, dtype)
    q, index_q, table, lens = batch([1048576], 4, 8192, heads=4)
    got = chain(q, index_q, index, main, table, lens, 4)
    want = chain(q, index_q, index, main, table, lens, 4, "reference", got[1])
    for a, b in zip(got, want, strict=True):
        compare(a, b)
    ids = ops.block_topk(got[0], row_blocks(lens, 4), TOPK, backend="reference")
    assert torch.equal(got[1], ids)


def test_the_same_bits_every_time_and_in_every_batch():
    main, index = pools(700, "nvfp4")
    lens = [30000, 77, 5000, 12000, 129] * 8
    q, index_q, table, lens = batch(lens, 2, 700)
    first = chain(q, index_q, index, main, table, lens, 2)
    for _ in range(10):
        for a, b in zip(first, chain(q, index_q, index, main, table, lens, 2), strict=True):
            assert torch.equal(a, b)
    for r in (0, 3, 39):
        rows = slice(2 * r, 2 * r + 2)
        alone = chain(q[rows], index_q[rows], index, main, table[r : r + 1], lens[r : r + 1], 2)
        assert torch.equal(alone[0], first[0][:, rows]) and torch.equal(alone[1], first[1][:, rows])
        assert torch.equal(alone[2], first[2][rows]) and torch.equal(alone[3], first[3][rows])


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
def test_prefill_chain(dtype):
    main, index = pools(700, dtype)
    _, _, table, lens = batch([40000, 300, 129], 1, 700)
    counts = [700, 300, 0]
    cu = torch.tensor([0, 700, 1000, 1000], dtype=torch.int32, device="cuda")
    tokens = sum(counts) + 5
    q = torch.randn(tokens, Q_HEADS, DIM, device="cuda").bfloat16()
    index_q = torch.randn(tokens, 1, DIM, device="cuda").bfloat16()
    got = ops.index_score_prefill(index_q, index, table, cu, lens, backend="triton")
    compare(got, ops.index_score_prefill(index_q, index, table, cu, lens, backend="reference"))
    n = torch.cat([lens[r] - c + 1 + torch.arange(c, device="cuda") for r, c in enumerate(counts)])
    nb = torch.cat([(n + 127) // 128, torch.zeros(5, device="cuda")]).int()
    ids = ops.block_topk(got, nb, TOPK, backend="triton")
    assert torch.equal(ids, ops.block_topk(got, nb, TOPK, backend="reference"))
    arguments = (q, main, ids, table, cu, lens, SCALE)
    got = ops.sparse_prefill(*arguments, backend="triton")
    compare(got, ops.sparse_prefill(*arguments, backend="reference"))


@pytest.mark.parametrize(("requests", "rows", "heads"), [(1, 1, 1), (70, 4, 4), (5, 8, 4)])
def test_scores_of_nvfp4_pages_do_not_depend_on_how_the_blocks_are_shared_out(
    requests, rows, heads
):
    """Ragged lengths, padding among them, a table wider than any; programs of many requests and
    many programs a request, more of them than blocks; all against the reference."""
    from rocm_msa.ops.index_score_decode.plan import HopperTuning
    from rocm_msa.ops.index_score_decode.triton_impl import run

    _, index = pools(300, "nvfp4")
    lens = [(0, 1, 127, 128, 129, 9000, 385, rows)[(i + 5) % 8] for i in range(requests)]
    _, index_q, table, lens = batch(lens, rows, 300, heads)
    wide = torch.nn.functional.pad(table, (0, 40), value=-1)
    want = ops.index_score_decode(index_q, index, wide, lens, rows, backend="reference")
    got = ops.index_score_decode(index_q, index, wide, lens, rows, backend="triton")
    compare(got, want)
    held = 1 if requests == 1 else 128
    for programs in (1, 2, 7, 64, 20000):
        for tile in (16, 32):
            tuning = HopperTuning(programs, tile, held)
            out = torch.full_like(got, float("nan"))
            run(index_q, index, wide, lens, rows, out=out, tuning=tuning)
            assert torch.equal(out, got), tuning


def test_topk_of_8192_blocks_for_every_split():
    from rocm_msa.ops.block_topk.plan import Tuning
    from rocm_msa.ops.block_topk.triton_impl import run

    scores = (torch.randn(2, 6, 8192, device="cuda") * 4).round() / 4
    scores[:, :, ::5] = float("nan")
    scores[:, :, 1::9] = float("-inf")
    nb = torch.tensor([8192, 8191, 0, 16, 5000, 1025], dtype=torch.int32, device="cuda")
    want = ops.block_topk(scores, nb, TOPK, backend="reference")
    for splits in (1, 2, 4, 8):
        for chunk, group in ((256, 1), (256, 4), (1024, 1), (1024, 8)):
            got = run(scores, nb, TOPK, 0, 1, tuning=Tuning(chunk, 16, splits, 4, group))
            assert torch.equal(got, want)
    assert torch.equal(ops.block_topk(scores, nb, TOPK), want)


def test_insert_differs_from_the_reference_in_last_bits_only(record_property):
    """The sum of squares is added in another order: count how often a bf16 result differs."""
    heads = ops.Heads(q=16, kv=1, index=1, head_dim=DIM, rotary_dim=64)
    tokens = 8192
    qkv = torch.randn(tokens, heads.qkv_columns, device="cuda").bfloat16()
    norms = ops.Norms(*(torch.randn(4, DIM, device="cuda") * 0.1).bfloat16())
    angle = torch.rand(tokens, 32, device="cuda") * 6.28
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
    position, slots = torch.arange(tokens, device="cuda"), torch.randperm(tokens, device="cuda")
    results = {}
    for backend in ("reference", "triton"):
        main = MainCache.allocate(64, 1, "nvfp4", "cuda")
        index = IndexCache.allocate(64, "nvfp4", "cuda")
        q, index_q = ops.qkv_insert(
            qkv, norms, cos_sin, position, main, index, slots, slots, heads, backend=backend
        )
        results[backend] = (q, index_q, main, index)
    ours, theirs = results["triton"], results["reference"]
    for name in ("v_data", "v_scales"):
        assert torch.equal(ours[2].region(name), theirs[2].region(name))
    differ = (ours[0] != theirs[0]).float().mean().item()
    bytes_differ = (ours[2].region("k_data") != theirs[2].region("k_data")).float().mean().item()
    print(f"q values that differ: {differ:.2e}, bytes of K data that differ: {bytes_differ:.2e}")
    assert differ < 1e-2 and bytes_differ < 1e-2
    error = (ours[0].float() - theirs[0].float()).abs()
    assert (error <= 2.0**-7 * theirs[0].float().abs() + 1e-6).all()


def prefix_batch(requests: int, rows: int, pages: int, dtype: str, shared: int = 800):
    """Rows of requests that share the first `shared` tokens and have tails of their own.

    Rows select the same blocks of the prefix, but for every fifth row, and their newest block;
    every seventh request has pages of its own all through, request 3 is padding.
    """
    main, _ = pools(pages, dtype)
    blocks = shared // 128
    tails = torch.randint(1, 300, (requests,)).tolist()
    lens = torch.tensor([blocks * 128 + t for t in tails], dtype=torch.int32)
    lens[3] = 0
    table = torch.randint(0, pages, (requests, blocks + 3), dtype=torch.int32)
    common = [r for r in range(requests) if r % 7 != 6]
    table[common, :blocks] = table[0, :blocks]
    ids = torch.full((1, requests * rows, TOPK), -1, dtype=torch.int32)
    for t in range(requests * rows):
        n = int(lens[t // rows]) - rows + t % rows + 1
        newest = max(0, -(-n // 128) - 1)
        chosen = [newest, *[b for b in range(0 if t % 5 else 1, blocks) if b != newest]][:TOPK]
        ids[0, t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    q = torch.randn(requests * rows, Q_HEADS, DIM, device="cuda").bfloat16()
    return main, q, ids.cuda(), table.cuda(), lens.cuda()


def tunings(dtype: str):
    from rocm_msa.ops.sparse_decode.plan import Tuning

    units, tile = ((1, 2, 4), 4) if dtype == "nvfp4" else ((1, 2), 2)
    return [Tuning(u, share, tile_rows=tile) for u in units for share in (False, True)]


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize(("requests", "rows"), [(64, 1), (16, 4), (70, 2), (5, 8)])
def test_shared_pages_change_no_bit(dtype, requests, rows):
    """Whoever works on a page, and however the lists are cut: the bits of a row alone."""
    from rocm_msa.ops.sparse_decode.triton_impl import run

    main, q, ids, table, lens = prefix_batch(requests, rows, 300, dtype)
    want, want_lse = run(q, main, ids, table, lens, rows, SCALE, tuning=tunings(dtype)[0])
    reference = ops.sparse_decode(q, main, ids, table, lens, rows, SCALE, backend="reference")
    compare(want, reference)
    for tuning in tunings(dtype)[1:]:
        got, lse = run(q, main, ids, table, lens, rows, SCALE, tuning=tuning)
        assert torch.equal(got, want) and torch.equal(lse, want_lse), tuning
    for r in (0, 2, requests - 1):
        mine = slice(r * rows, r * rows + rows)
        alone, _ = run(q[mine], main, ids[:, mine], table[r : r + 1], lens[r : r + 1], rows, SCALE)
        assert torch.equal(alone, want[mine])
    assert not want[3 * rows : 4 * rows].any()


@pytest.mark.parametrize("dtype", ["nvfp4", "bf16"])
def test_shared_pages_with_poison(dtype):
    """NaN patterns behind every request's keys, also in pages that others share."""
    from rocm_msa.ops.sparse_decode.triton_impl import run

    main, q, ids, table, lens = prefix_batch(16, 4, 300, dtype)
    clean = run(q, main, ids, table, lens, 4, SCALE, tuning=tunings(dtype)[-1])
    used = torch.zeros(300, 128, dtype=torch.bool, device="cuda")
    for r, n in enumerate(lens.tolist()):
        for b in range(-(-n // 128)):
            used[table[r, b], : min(128, n - b * 128)] = True
    for region in main.page.head_layout:
        main.region(region.name)[:, 0][~used] = 0xFF
    again = run(q, main, ids, table, lens, 4, SCALE, tuning=tunings(dtype)[-1])
    for a, b in zip(clean, again, strict=True):
        assert torch.equal(a, b)


def test_graph_replay_when_other_pages_are_shared():
    """Captured with a shared prefix, replayed with another, with none and with other lengths."""
    main, q, ids, table, lens = prefix_batch(64, 4, 300, "nvfp4")

    def step():
        return ops.sparse_decode(q, main, ids, table, lens, 4, SCALE, shared_pages=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    shapes = table.shape
    for new in (
        torch.randint(0, 300, shapes, dtype=torch.int32),
        torch.randint(0, 300, (1, shapes[1]), dtype=torch.int32).expand(shapes),
    ):
        table.copy_(new)
        lens.copy_(lens.flip(0))
        graph.replay()
        assert torch.equal(captured, ops.sparse_decode(q, main, ids, table, lens, 4, SCALE))


def test_after_the_warm_up_nothing_is_compiled():
    from rocm_msa.ops.triton_warmup import Config, compiled, warmup

    main, index = pools(700, "nvfp4")
    heads = ops.Heads(q=16, kv=1, index=1, head_dim=DIM, rotary_dim=64)
    config = Config(heads, torch.bfloat16, 240, decode=((1, 4), (3, 4)), prefill=(64,))
    pages = main.pages.clone()
    warmup(config, main, index)
    assert torch.equal(main.pages, pages)
    held = compiled()
    q, index_q, table, lens = batch([30000, 0, 129], 4, 700)
    wide = torch.full((3, 240), -1, dtype=torch.int32, device="cuda")
    wide[:, : table.shape[1]] = table
    chain(q, index_q, index, main, wide, lens, 4)
    chain(q[:4], index_q[:4], index, main, wide[:1], lens[:1], 4)
    assert compiled() == held and warmup(config, main, index) == 0
