"""Triton kernels for the emulator's tests: rows, sorting, atomics, attention.

Each comes with what PyTorch makes of the same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from rocm_msa.flydsl_compile import Compiled, compile_triton
from tests.emulator.cases import Args, Case, Expected, Tolerance, generator, normal, one_rank

WAVE = 64
FP32 = Tolerance(1e-5, 1e-5)  # exp, division and the order of sums differ from PyTorch's
HALF = Tolerance(1e-2, 1e-2)  # results rounded to 16 bits


# Rows


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + i, weights / tl.sum(weights, 0), mask=i < columns)


@triton.jit
def layer_norm(x, weight, bias, y, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < columns
    values = tl.load(x + row * columns + i, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(mask, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    scaled = centred * scale * tl.load(weight + i, mask=mask).to(tl.float32)
    tl.store(y + row * columns + i, scaled + tl.load(bias + i, mask=mask), mask=mask)


# Sorting and atomics


@triton.jit
def top_k(x, values, places, N: tl.constexpr, K: tl.constexpr):
    """The K largest of a row, largest first, and their places; ties: the larger place first."""
    row = tl.program_id(0)
    i = tl.arange(0, N)
    bits = tl.load(x + row * N + i).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they order like the floats
    key = (ordered.to(tl.int64) << 32) | i
    key = tl.sort(key, descending=True)
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    tl.store(values + row * K + i, bits.to(tl.float32, bitcast=True), mask=i < K)
    tl.store(places + row * K + i, (key & 0xFFFFFFFF).to(tl.int32), mask=i < K)


@triton.jit
def atomics(x, bins, total, largest, wide, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.atomic_add(bins + value % BINS, 1)
    tl.atomic_add(total, tl.sum(value.to(tl.float32), 0))
    tl.atomic_max(largest, tl.max(value, 0))
    tl.atomic_add(wide, tl.sum(value.to(tl.int64), 0) << 20)


@triton.jit
def locked_sum(x, lock, total, BLOCK: tl.constexpr):
    """A plain read-modify-write under a spin lock: compare-and-swap takes it, exchange frees it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.sum(tl.load(x + i), 0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total, volatile=True) + value)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


# A call


@triton.jit(noinline=True)
def mix(value, other):
    return value * 3 + other


@triton.jit
def call(x, y):
    """A device function that is called, not inlined: s_swappc_b64 there, s_setpc_b64 back."""
    i = tl.program_id(0)
    tl.store(y + i, mix(mix(tl.load(x + i), i), 7))


# Attention


@triton.jit
def paged_decode(
    q,
    k_pages,
    v_pages,
    table,
    lengths,
    partial,
    log_sums,
    scale,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """q [tokens, HEADS, D] bf16, pages [.., PAGE, D] bf16, one part of the keys a workgroup.

    partial [tokens, SPLITS, HEADS, D] and log_sums [tokens, SPLITS, HEADS], both fp32, base 2.
    """
    token, split = tl.program_id(0), tl.program_id(1)
    head, d, j = tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, PAGE)
    length = tl.load(lengths + token)
    query = tl.load(q + (token * HEADS + head[:, None]) * D + d[None, :])
    best = tl.full((HEADS,), -float("inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, D), tl.float32)
    for number in range(split, tl.cdiv(length, PAGE), SPLITS):
        page = tl.load(table + token * PAGES + number)
        keys = tl.load(k_pages + (page * PAGE + j[None, :]) * D + d[:, None])
        scores = tl.dot(query, keys) * scale
        scores = tl.where(number * PAGE + j[None, :] < length, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        old = tl.exp2(best - new_best)
        parts = tl.exp2(scores - new_best[:, None])
        values = tl.load(v_pages + (page * PAGE + j[:, None]) * D + d[None, :])
        total = total * old[:, None] + tl.dot(parts.to(tl.bfloat16), values)
        weight = weight * old + tl.sum(parts, 1)
        best = new_best
    at = (token * SPLITS + split) * HEADS + head
    tl.store(partial + at[:, None] * D + d[None, :], total / weight[:, None])
    tl.store(log_sums + at, best + tl.log2(weight))


@triton.jit
def merge(partial, log_sums, out, SPLITS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """out [tokens, HEADS, D] bf16 = parts weighted by 2^log_sum; a part without keys has -inf."""
    token, head = tl.program_id(0), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    at = (token * SPLITS + s) * HEADS + head
    sums = tl.load(log_sums + at)
    weights = tl.exp2(sums - tl.max(sums, 0))
    weights = weights / tl.sum(weights, 0)
    parts = tl.load(partial + at[:, None] * D + d[None, :])
    # 0 * NaN is NaN: a part without keys is left out, not multiplied by nothing
    parts = tl.where(weights[:, None] > 0, parts, 0.0)
    tl.store(out + (token * HEADS + head) * D + d, tl.sum(parts * weights[:, None], 0))


# Cases


def source_of(fn) -> str:
    return fn.fn.__code__.co_filename


def case(
    name: str,
    fn,
    signature: dict[str, str],
    constexprs: dict,
    make_args: Callable[[int], Args],
    grid: tuple[int, int, int],
    expected: Callable[[Args], Expected],
    tolerance: Tolerance = FP32,
    num_warps: int = 4,
    **options,
) -> Case:
    def build() -> Compiled:
        return compile_triton(fn, signature, constexprs, num_warps=num_warps, **options)

    block = (num_warps * WAVE, 1, 1)
    return Case(
        f"triton_{name}", build, make_args, grid, block, expected, tolerance, source=source_of(fn)
    )


def _softmax_case(rows: int, columns: int, block: int, num_warps: int) -> Case:
    return case(
        f"softmax_{columns}",
        softmax,
        {"x": "*fp32", "y": "*fp32", "columns": "i32"},
        {"BLOCK": block},
        lambda seed: one_rank(normal((rows, columns), seed), torch.zeros(rows, columns), columns),
        (rows, 1, 1),
        lambda args: ({1: torch.softmax(args[0][0], -1)},),
        num_warps=num_warps,
    )


def _layer_norm_case() -> Case:
    rows, columns, eps = 3, 300, 1e-5

    def make_args(seed: int) -> Args:
        x = normal((rows, columns), seed, torch.bfloat16)
        weight, bias = normal((columns,), seed + 1), normal((columns,), seed + 2)
        return one_rank(x, weight.bfloat16(), bias, torch.zeros_like(x), columns, eps)

    def expected(args: Args) -> Expected:
        x, weight, bias = (t.float() for t in args[0][:3])
        return ({3: torch.nn.functional.layer_norm(x, (columns,), weight, bias, eps).bfloat16()},)

    kinds = {"x": "*bf16", "weight": "*bf16", "bias": "*fp32", "y": "*bf16"}
    signature = kinds | {"columns": "i32", "eps": "fp32"}
    constexprs = {"BLOCK": 512}
    return case(
        "layer_norm", layer_norm, signature, constexprs, make_args, (rows, 1, 1), expected, HALF
    )


def _top_k_case(rows: int, n: int, k: int) -> Case:
    def expected(args: Args) -> Expected:
        x = args[0][0]
        flipped = torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)
        places = n - 1 - flipped.indices[:, :k]
        return ({1: flipped.values[:, :k].contiguous(), 2: places.int().contiguous()},)

    def make_args(seed: int) -> Args:
        x = normal((rows, n), seed)
        x[:, ::7] = x[:, :1]  # ties
        return one_rank(x, torch.zeros(rows, k), torch.zeros(rows, k, dtype=torch.int32))

    kinds = {"x": "*fp32", "values": "*fp32", "places": "*i32"}
    shape = {"N": n, "K": k}
    return case(f"top_k_{n}", top_k, kinds, shape, make_args, (rows, 1, 1), expected, Tolerance())


def _atomics_case() -> Case:
    groups, block, bins = 4, 256, 16

    def make_args(seed: int) -> Args:
        x = torch.randint(0, 1000, (groups * block,), generator=generator(seed)).int()
        zero = functools.partial(torch.zeros, 1)
        counts = torch.zeros(bins, dtype=torch.int32)
        return one_rank(x, counts, zero(), zero(dtype=torch.int32), zero(dtype=torch.int64))

    def expected(args: Args) -> Expected:
        x = args[0][0].long()
        counts = torch.bincount(x % bins, minlength=bins).int()
        total = x.sum().reshape(1)
        return ({1: counts, 2: total.float(), 3: x.max().int().reshape(1), 4: total << 20},)

    kinds = ("*i32", "*i32", "*fp32", "*i32", "*i64")
    signature = dict(zip(("x", "bins", "total", "largest", "wide"), kinds, strict=True))
    constexprs = {"BINS": bins, "BLOCK": block}
    return case(
        "atomics",
        atomics,
        signature,
        constexprs,
        make_args,
        (groups, 1, 1),
        expected,
        Tolerance(),  # sums of integers below 2^24: exact in any order
    )


def _locked_sum_case() -> Case:
    groups, block = 20, 64  # some share an XCD, and its L2

    def make_args(seed: int) -> Args:
        x = torch.randint(0, 1000, (groups * block,), generator=generator(seed)).int()
        return one_rank(x, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))

    return case(
        "locked_sum",
        locked_sum,
        {"x": "*i32", "lock": "*i32", "total": "*i32"},
        {"BLOCK": block},
        make_args,
        (groups, 1, 1),
        lambda args: ({1: torch.zeros(1).int(), 2: args[0][0].sum().int().reshape(1)},),
        Tolerance(),
        num_warps=1,
    )


def _call_case() -> Case:
    groups = 8

    def make_args(seed: int) -> Args:
        x = torch.randint(-1000, 1000, (groups,), generator=generator(seed)).int()
        return one_rank(x, torch.zeros_like(x))

    def expected(args: Args) -> Expected:
        x = args[0][0]
        return ({1: (x * 3 + torch.arange(groups).int()) * 3 + 7},)

    kinds, grid = {"x": "*i32", "y": "*i32"}, (groups, 1, 1)
    return case("call", call, kinds, {}, make_args, grid, expected, Tolerance())


TOKENS, SPLITS, HEADS, D, PAGE, PAGES = 2, 4, 16, 64, 32, 8


def _paged_decode_case() -> Case:
    scale = 1.4426950408889634 / D**0.5

    def make_args(seed: int) -> Args:
        total = TOKENS * PAGES + 1
        table = torch.randperm(total, generator=generator(seed))[: TOKENS * PAGES].int()
        return one_rank(
            normal((TOKENS, HEADS, D), seed, torch.bfloat16),
            normal((total, PAGE, D), seed + 1, torch.bfloat16),
            normal((total, PAGE, D), seed + 2, torch.bfloat16),
            table.view(TOKENS, PAGES),
            torch.tensor([PAGES * PAGE - 5, 4 * PAGE + 1], dtype=torch.int32),
            torch.zeros(TOKENS, SPLITS, HEADS, D),
            torch.zeros(TOKENS, SPLITS, HEADS),
            scale,
        )

    def expected(args: Args) -> Expected:
        q, k_pages, v_pages, table, lengths = args[0][:5]
        partial, sums = torch.zeros_like(args[0][5]), torch.zeros_like(args[0][6])
        for token in range(TOKENS):
            pages = table[token].long()
            keep = torch.arange(PAGES * PAGE).view(PAGES, PAGE) < lengths[token]
            for split in range(SPLITS):
                mine = pages[split::SPLITS]
                mask = keep[split::SPLITS].flatten()
                keys, values = (p[mine].float().flatten(0, 1)[mask] for p in (k_pages, v_pages))
                scores = q[token].float() @ keys.T * scale * 0.6931471805599453
                partial[token, split] = torch.softmax(scores, -1) @ values
                sums[token, split] = torch.logsumexp(scores, -1) * 1.4426950408889634
        return ({5: partial, 6: sums},)

    kinds = ("*bf16",) * 3 + ("*i32",) * 2 + ("*fp32",) * 2 + ("fp32",)
    names = ("q", "k_pages", "v_pages", "table", "lengths", "partial", "log_sums", "scale")
    shape = {"PAGES": PAGES, "SPLITS": SPLITS, "HEADS": HEADS, "D": D, "PAGE": PAGE}
    signature = dict(zip(names, kinds, strict=True))
    grid = (TOKENS, SPLITS, 1)
    return case("paged_decode", paged_decode, signature, shape, make_args, grid, expected, HALF)


def _merge_case() -> Case:
    def make_args(seed: int) -> Args:
        sums = 3 * normal((TOKENS, SPLITS, HEADS), seed)
        partial = normal((TOKENS, SPLITS, HEADS, D), seed + 1)
        sums[:, -1] = -torch.inf  # a part without keys: nothing was summed, 0 / 0
        partial[:, -1] = torch.nan
        out = torch.zeros(TOKENS, HEADS, D, dtype=torch.bfloat16)
        return one_rank(partial, sums, out)

    def expected(args: Args) -> Expected:
        partial, sums, _ = args[0]
        weights = torch.softmax(sums * 0.6931471805599453, 1)[:, :-1, :, None]
        return ({2: (partial[:, :-1] * weights).sum(1).bfloat16()},)

    kinds = {"partial": "*fp32", "log_sums": "*fp32", "out": "*bf16"}
    shape = {"SPLITS": SPLITS, "HEADS": HEADS, "D": D}
    grid = (TOKENS, HEADS, 1)
    return case("split_k_merge", merge, kinds, shape, make_args, grid, expected, HALF, num_warps=1)


CASES = [
    _softmax_case(3, 200, 256, 1),
    _softmax_case(2, 1000, 1024, 4),
    _layer_norm_case(),
    _top_k_case(2, 128, 16),
    _top_k_case(1, 1024, 64),
    _atomics_case(),
    _locked_sum_case(),
    _call_case(),
    _paged_decode_case(),
    _merge_case(),
]
