"""Every op's kernels against the references: one GPU of four serving MiniMax-M3 (TP 4).

    for check in checks("flydsl", device, real=True):
        print(check.op, check.case, check.fault())          # None: right

Inputs are seeded and made on the CPU, and so are the references. What may differ:

    qkv_insert      q, index_q: one unit in bf16's last place (QUERY); bytes of the caches: exact
    scores          FlyDSL: the order of 128 fp32 additions (SCORE, of what the vectors allow);
                    Triton: ROUNDED of the largest
    selections      exact
    attention       FlyDSL, against the reference with its roundings: half a unit of bf16 and WEIGHT
                    of the largest value; Triton: ROUNDED of the largest
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from rocm_msa import ops
from rocm_msa.aot import MODULES, Build, ServingConfig
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.ops.rows import decode_rows, prefill_rows
from rocm_msa.ops.sparse_decode import reference_fp8
from rocm_msa.selfcheck.rounded import table_rounded

KINDS = ("nvfp4", "fp8", "bf16")
HEADS = ops.Heads(q=16, kv=1, index=1, head_dim=128, rotary_dim=64)
DIM, TOPK, BLOCK = HEADS.head_dim, 16, BLOCK_TOKENS
SCALE = DIM**-0.5
QUERY = 2.0**-7
SCORE = DIM * 2.0**-23
ROUNDED = 2.0**-7
HALF_UNIT, WEIGHT = 2.0**-8, 2.0**-10
COMPILED = ("flydsl", "emulated")
"""Backends that run the gfx950 kernels."""


@dataclass(frozen=True)
class Check:
    """One call of an op. fault: runs it; what is wrong, in words, or None."""

    op: str
    case: str
    fault: Callable[[], str | None]


@dataclass
class Batch:
    """Requests in shuffled pages, on the CPU. longest: norm of an index key as stored."""

    main: MainCache
    index: IndexCache
    table: torch.Tensor
    lens: torch.Tensor
    longest: float


def checks(backend: str, device: torch.device, real: bool) -> Iterator[Check]:
    """The checks of a backend; real: at the sizes of serving too."""
    for size in ("small", "real")[: 1 + real]:
        for kind in KINDS:
            for op in (qkv_insert, scores, select, sparse_decode, sparse_prefill):
                for name, case, fault in op(size, kind):
                    run = functools.partial(fault, backend, device)
                    yield Check(name, f"{case}, {kind} cache", run)
            if backend == "triton":
                run = functools.partial(_dense, size, kind, backend, device)
                yield Check("dense_attention", f"{size}, {kind} cache", run)
        yield Check("block_topk", size, functools.partial(_topk, size, backend, device))


def builds(kinds: Iterable[str] = KINDS) -> list[Build]:
    """Every gfx950 kernel of the ops that these cache dtypes are served with."""
    found: dict[Build, None] = {}
    for kind in kinds:
        config = ServingConfig(HEADS.q, HEADS.kv, HEADS.index, DIM, HEADS.rotary_dim, kind, kind)
        for name in MODULES:
            if name.startswith("rocm_msa.ops."):
                found.update(dict.fromkeys(importlib.import_module(name).builds(config)))
    return list(found)


def make_batch(lens: list[int], kind: str, seed: int) -> Batch:
    """Random values in caches of `kind`; pages that no request has, and tails, are 0xFF."""
    some = torch.Generator().manual_seed(seed)
    blocks = [-(-n // BLOCK) for n in lens]
    pages = sum(blocks) + 2
    order = torch.randperm(pages, generator=some).int()
    main = MainCache.allocate(pages, HEADS.kv, kind)
    index = IndexCache.allocate(pages, kind)
    main.pages.fill_(0xFF), index.pages.fill_(0xFF)
    table = torch.full((len(lens), max(blocks) + 1), -1, dtype=torch.int32)
    used, longest = 0, 0.0
    for request, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        table[request, :count] = order[used : used + count]
        used += count
        at = torch.arange(length)
        slots = table[request].long()[at // BLOCK] * BLOCK + at % BLOCK
        k, v = torch.randn(2, length, HEADS.kv, DIM, generator=some)
        main.write(k, v, slots)
        keys = torch.randn(length, DIM, generator=some)
        index.write(keys, slots)
        if length:
            stored = index.decode("k", *index.encode("k", keys))
            longest = max(longest, float(stored.norm(dim=-1).max()))
    return Batch(main, index, table, torch.tensor(lens, dtype=torch.int32), longest)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def moved(value, device: torch.device):
    """Tensors and caches on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, MainCache | IndexCache):
        there = copy.copy(value)
        there.pages = value.pages.to(device)
        return there
    if isinstance(value, ops.Norms):
        return ops.Norms(
            *(moved(getattr(value, n), device) for n in ("q", "k", "index_q", "index_k"))
        )
    return value


def different(name: str, got: torch.Tensor, want: torch.Tensor, limit) -> str | None:
    """Where `got` leaves `want` by more than `limit` (a number or a tensor), worst place first."""
    got, want = got.cpu().double(), want.double()
    if got.shape != want.shape:
        return f"{name}: expected shape {list(want.shape)}, got {list(got.shape)}"
    off = (got - want).abs() - limit
    off[(got == want) | (got.isnan() & want.isnan())] = -1  # infinities too
    off[got.isnan() != want.isnan()] = torch.inf
    bad = int((off > 0).sum())
    if not bad:
        return None
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    return (
        f"{name}{list(place)}: expected {float(want[place]):.6g}, got {float(got[place]):.6g}; "
        f"{bad} of {got.numel()} values are wrong"
    )


def qkv_insert(size: str, kind: str):
    tokens = {"small": 9, "real": 1024}[size]
    yield "qkv_insert", f"{tokens} tokens", functools.partial(_insert, tokens, kind)


def _insert(tokens: int, kind: str, backend: str, device: torch.device) -> str | None:
    blocks = -(-tokens // BLOCK) + 1
    some = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, HEADS.qkv_columns, generator=some).bfloat16()
    x = qkv.view(tokens, -1, DIM)
    # The key heads are query heads too: what they were encoded from then comes out.
    x[:, : HEADS.kv] = x[:, HEADS.q : HEADS.q + HEADS.kv].clone()
    x[:, HEADS.q + 2 * HEADS.kv] = x[:, -1].clone()
    k, index_k = (torch.randn(2, DIM, generator=some) * 0.1).bfloat16()
    angles = torch.rand(tokens, HEADS.rotary_dim // 2, generator=some) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    slots = torch.randperm(blocks * BLOCK, generator=some)[:tokens]
    slots[tokens // 2] = -1
    written = slots >= 0

    def call(backend: str, device: torch.device):
        main, index = MainCache.allocate(blocks, HEADS.kv, kind), IndexCache.allocate(blocks, kind)
        given = (qkv, ops.Norms(k, k, index_k, index_k), cos_sin, torch.arange(tokens), main, index,
                 slots, slots, HEADS)  # fmt: skip
        given = [moved(value, device) for value in given]
        return *ops.qkv_insert(*given, backend=backend), given[4].pages.cpu(), given[5].pages.cpu()

    q, index_q, main_pages, index_pages = call(backend, device)
    want_q, want_index_q, *_ = call("reference", torch.device("cpu"))
    main, index = MainCache.allocate(blocks, HEADS.kv, kind), IndexCache.allocate(blocks, kind)
    v = x[:, HEADS.q + HEADS.kv : HEADS.q + 2 * HEADS.kv]
    main.write(q.cpu()[written, : HEADS.kv], v[written], slots[written])
    index.write(index_q.cpu()[written, 0], slots[written])
    return (
        different("q", q, want_q, QUERY * want_q.double().abs() + QUERY / 100)
        or different("index_q", index_q, want_index_q, QUERY * want_index_q.double().abs() + 1e-4)
        or different("main cache bytes", main_pages, main.pages, 0)
        or different("index cache bytes", index_pages, index.pages, 0)
    )


def scores(size: str, kind: str):
    decode = {"small": [([300, 1, 0], 4)], "real": [([16384] * 16, 1), ([9000, 0, 129], 4)]}[size]
    for lens, rows in decode:
        case = f"{len(lens)} requests of up to {max(lens)} tokens, {rows} rows each"
        yield "index_score_decode", case, functools.partial(_score, lens, rows, None, kind)
    lens, counts = {"small": ([300, 70], [9, 70]), "real": ([8192, 1000], [1024, 3])}[size]
    case = f"{sum(counts)} tokens at up to {max(lens)}"
    yield "index_score_prefill", case, functools.partial(_score, lens, 1, counts, kind)


def _score(lens, rows, counts, kind: str, backend: str, device: torch.device) -> str | None:
    b = make_batch(lens, kind, seed=rows)
    if counts is None:
        op, more = ops.index_score_decode, (b.table, b.lens, rows)
        q = normal(5, len(lens) * rows, HEADS.index, DIM)
    else:
        cu = torch.tensor([0, *counts]).cumsum(0).int()
        op, more = ops.index_score_prefill, (b.table, cu, b.lens)
        q = normal(5, sum(counts), HEADS.index, DIM)
    given = [moved(value, device) for value in (q, b.index, *more)]
    got = op(*given, backend=backend)
    rounds = backend in COMPILED and kind == "nvfp4"
    want = op(q, table_rounded(b.index) if rounds else b.index, *more, backend="reference")
    if backend not in COMPILED:
        return different("scores", got, want, ROUNDED * want[want.isfinite()].abs().max())
    limit = SCORE * b.longest * float(q.float().norm(dim=-1).max())
    return different("scores", got, want, limit)


def select(size: str, kind: str):
    lens, rows = {"small": ([2500, 1, 0, 128], 2), "real": ([16384] * 4, 4)}[size]
    case = f"{len(lens)} requests of up to {max(lens)} tokens, {rows} rows each"
    yield "select_decode", case, functools.partial(_select, lens, rows, kind)


def _select(lens, rows, kind: str, backend: str, device: torch.device) -> str | None:
    b = make_batch(lens, kind, seed=rows)
    q = normal(5, len(lens) * rows, HEADS.index, DIM)
    blocks = decode_rows(b.lens, rows).num_blocks.int()
    given = [moved(v, device) for v in (q, b.index, b.table, b.lens, rows, blocks)]
    counters = torch.zeros(len(lens), dtype=torch.int32, device=device)
    got = ops.select_decode(*given, counters=counters, backend=backend)
    alone = ops.index_score_decode(*given[:5], backend=backend)
    want = ops.block_topk(alone.cpu(), blocks, TOPK, backend="reference")
    return different("ids", got, want, 0) or different("counters", counters, counters.cpu() * 0, 0)


def _topk(size: str, backend: str, device: torch.device) -> str | None:
    rows, blocks = {"small": (5, 70), "real": (64, 8192)}[size]
    some = torch.Generator().manual_seed(rows)
    given = (torch.randn(HEADS.index, rows, blocks, generator=some) * 4).round() / 4  # with ties
    given[..., ::5], given[..., 1::9], given[..., 2::7] = torch.nan, -torch.inf, -0.0
    counts = torch.randint(0, blocks + 1, (rows,), generator=some).int()
    counts[:3] = torch.tensor([blocks, 0, 1])
    got = ops.block_topk(given.to(device), counts.to(device), TOPK, backend=backend)
    return different("ids", got, ops.block_topk(given, counts, TOPK, backend="reference"), 0)


def sparse_decode(size: str, kind: str):
    lens, rows = {"small": ([700, 1, 0], 2), "real": ([2048] * 32, 4)}[size]
    for shared in (False, True):
        case = f"{len(lens)} requests of up to {max(lens)} tokens, {rows} rows each"
        case += ", pages shared" if shared else ""
        yield "sparse_decode", case, functools.partial(_decode, lens, rows, shared, kind)


def _decode(lens, rows, shared, kind: str, backend: str, device: torch.device) -> str | None:
    b = make_batch(lens, kind, seed=rows)
    q = normal(6, len(lens) * rows, HEADS.q, DIM)
    each = decode_rows(b.lens, rows)
    ids = _random_ids(each.num_blocks.int(), b.table.shape[1])
    given = (q, b.main, ids, b.table, b.lens, rows, SCALE)
    on = [moved(value, device) for value in given]
    got = ops.sparse_decode(*on, return_lse=True, shared_pages=shared, backend=backend)
    plain = functools.partial(ops.sparse_decode, *given, return_lse=True, backend="reference")
    return _attention(got, backend, lambda: reference_fp8.run(*given), plain)


def sparse_prefill(size: str, kind: str):
    lens, counts = {"small": ([300, 70], [9, 5]), "real": ([4096], [256])}[size]
    case = f"{sum(counts)} tokens at up to {max(lens)}"
    yield "sparse_prefill", case, functools.partial(_prefill, lens, counts, kind)


def _prefill(lens, counts, kind: str, backend: str, device: torch.device) -> str | None:
    b = make_batch(lens, kind, seed=3)
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    rows = prefill_rows(cu, b.lens, sum(counts))
    ids = _random_ids(rows.num_blocks.int(), b.table.shape[1])
    q = normal(7, sum(counts), HEADS.q, DIM)
    given = (q, b.main, ids, b.table, cu, b.lens, SCALE)
    on = [moved(value, device) for value in given]
    got = ops.sparse_prefill(*on, return_lse=True, backend=backend)
    alone = (q, b.main, ids, b.table[rows.request], rows.length.int(), 1, SCALE)
    plain = functools.partial(ops.sparse_prefill, *given, return_lse=True, backend="reference")
    return _attention(got, backend, lambda: reference_fp8.run(*alone), plain)


def _dense(size: str, kind: str, backend: str, device: torch.device) -> str | None:
    lens, counts = {"small": ([300, 70], [9, 5]), "real": ([2048], [256])}[size]
    b = make_batch(lens, kind, seed=3)
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    given = (normal(7, sum(counts), HEADS.q, DIM), b.main, b.table, cu, b.lens, SCALE)
    got = ops.dense_attention(*(moved(value, device) for value in given), backend=backend)
    want = ops.dense_attention(*given, backend="reference")
    return different("out", got, want, ROUNDED * want.double().abs().max())


def _random_ids(num_blocks: torch.Tensor, width: int) -> torch.Tensor:
    some = torch.Generator().manual_seed(width)
    given = torch.randn(HEADS.kv, len(num_blocks), width, generator=some)
    return ops.block_topk(given, num_blocks, TOPK, backend="reference")


def _attention(got, backend: str, compiled: Callable, plain: Callable) -> str | None:
    out, lse = got
    if backend in COMPILED:
        want, want_lse = compiled()
        limit = HALF_UNIT * want.double().abs() + WEIGHT * want.double().abs().max()
        loose = 1e-4 + 1e-5 * want_lse.double().abs().nan_to_num(posinf=0)
    else:
        want, want_lse = plain()
        limit = ROUNDED * want.double().abs().max()
        loose = ROUNDED * want_lse[want_lse.isfinite()].abs().max()
    return different("out", out, want, limit) or different("lse", lse, want_lse, loose)
