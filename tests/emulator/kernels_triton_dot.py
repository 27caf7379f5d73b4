"""Triton's matrix products for the emulator's tests: plain and scaled, in several shapes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.emulator.cases import Args, Case, Expected, Tolerance, generator, normal, one_rank
from tests.emulator.kernels_triton import case

DOT = Tolerance(1e-4, 1e-3)  # fp32 sums of another order
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BLOCK = 32


@triton.jit
def dot(a, b, c, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """c [M, N] fp32 = a [M, K] b [K, N], one tile."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, STEP):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def dot_scaled(
    a,
    b,
    a_scales,
    b_scales,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
):
    """c [M, N] fp32; a [M, K], b [K, N]; FP4 is packed along K, low nibble first.

    A bf16 operand has no scales: Triton's compiler leaves scales of such an operand out.
    """
    A_PACK: tl.constexpr = 2 if A_KIND == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_KIND == "e2m1" else 1
    m, n = tl.arange(0, M), tl.arange(0, N)
    ka, kb, block = tl.arange(0, K // A_PACK), tl.arange(0, K // B_PACK), tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * (K // A_PACK) + ka[None, :])
    right = tl.load(b + kb[:, None] * N + n[None, :])
    right_scales = tl.load(b_scales + n[:, None] * (K // 32) + block[None, :])
    if A_KIND == "bf16":
        total = tl.dot_scaled(left, None, A_KIND, right, right_scales, B_KIND)
    else:
        left_scales = tl.load(a_scales + m[:, None] * (K // 32) + block[None, :])
        total = tl.dot_scaled(left, left_scales, A_KIND, right, right_scales, B_KIND)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def dot_int8(a, b, c, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right, out_dtype=tl.int32))


# Cases


DOT_TYPES = {
    "bf16": (torch.bfloat16, "*bf16"),
    "fp16": (torch.float16, "*fp16"),
    "fp32": (torch.float32, "*fp32"),
    "e4m3": (torch.float8_e4m3fn, "*fp8e4nv"),
    "e5m2": (torch.float8_e5m2, "*fp8e5"),
}


def _dot_case(kind: str, m: int, n: int, k: int, step: int, num_warps: int, **options) -> Case:
    dtype, name = DOT_TYPES[kind]

    def make_args(seed: int) -> Args:
        a, b = normal((m, k), seed, dtype), normal((k, n), seed + 1, dtype)
        return one_rank(a, b, torch.zeros(m, n), k)

    suffix = "".join(f"_{value}" for value in options.values())
    return case(
        f"dot_{kind}_{m}x{n}x{k}{suffix}",
        dot,
        {"a": name, "b": name, "c": "*fp32", "K": "i32"},
        {"M": m, "N": n, "STEP": step},
        make_args,
        (1, 1, 1),
        lambda args: ({2: (args[0][0].double() @ args[0][1].double()).float()},),
        DOT,
        num_warps,
        **options,
    )


def _int8_dot_case(m: int, n: int, k: int) -> Case:
    def make_args(seed: int) -> Args:
        parts = [
            torch.randint(-128, 128, shape, generator=generator(seed + i), dtype=torch.int8)
            for i, shape in enumerate(((m, k), (k, n)))
        ]
        return one_rank(*parts, torch.zeros(m, n, dtype=torch.int32), k)

    return case(
        f"dot_int8_{m}x{n}x{k}",
        dot_int8,
        {"a": "*i8", "b": "*i8", "c": "*i32", "K": "i32"},
        {"M": m, "N": n, "STEP": k},
        make_args,
        (1, 1, 1),
        lambda args: ({2: (args[0][0].double() @ args[0][1].double()).int()},),
        Tolerance(),
    )


def _operand(kind: str, rows: int, depth: int, seed: int) -> torch.Tensor:
    """[rows, depth] of a format; FP4 as [rows, depth / 2] bytes."""
    if kind == "e2m1":
        return torch.randint(
            0, 256, (rows, depth // 2), generator=generator(seed), dtype=torch.uint8
        )
    return normal((rows, depth), seed, DOT_TYPES[kind][0])


def _operand_values(stored: torch.Tensor, kind: str) -> torch.Tensor:
    if kind != "e2m1":
        return stored.double()
    nibbles = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).long()
    table = torch.tensor(FP4_VALUES, dtype=torch.float64)
    return torch.cat([table, -table])[nibbles]


def _dot_scaled_case(a_kind: str, b_kind: str, m: int, n: int, k: int, num_warps: int) -> Case:
    def make_args(seed: int) -> Args:
        scales = [
            torch.randint(
                122, 131, (rows, k // SCALE_BLOCK), generator=generator(seed + i), dtype=torch.uint8
            )
            for i, rows in enumerate((m, n))
        ]
        b = _operand(b_kind, n, k, seed + 3).view(torch.uint8).T.contiguous()
        a = _operand(a_kind, m, k, seed + 2)
        b = b.view(torch.uint8 if b_kind == "e2m1" else DOT_TYPES[b_kind][0])
        return one_rank(a, b, *scales, torch.zeros(m, n))

    def expected(args: Args) -> Expected:
        a, b, a_scales, b_scales, _ = args[0]
        left = _operand_values(a, a_kind)
        right = _operand_values(b.view(torch.uint8).T.contiguous().view(b.dtype), b_kind)
        if a_kind != "bf16":
            left = left * torch.exp2(a_scales.double() - 127).repeat_interleave(SCALE_BLOCK, 1)
        right = right * torch.exp2(b_scales.double() - 127).repeat_interleave(SCALE_BLOCK, 1)
        return ({4: (left @ right.T).float()},)

    def pointer(kind: str) -> str:
        return "*u8" if kind == "e2m1" else DOT_TYPES[kind][1]

    scale = {"a_scales": "*u8", "b_scales": "*u8"}
    return case(
        f"dot_scaled_{a_kind}_{b_kind}_{m}x{n}x{k}",
        dot_scaled,
        {"a": pointer(a_kind), "b": pointer(b_kind), **scale, "c": "*fp32"},
        {"M": m, "N": n, "K": k, "A_KIND": a_kind, "B_KIND": b_kind},
        make_args,
        (1, 1, 1),
        expected,
        DOT,
        num_warps,
    )


CASES = [
    *(
        _dot_case(kind, *shape)
        for kind in ("bf16", "fp16", "e4m3", "e5m2")
        for shape in ((16, 16, 128, 64, 1), (32, 32, 128, 128, 1), (64, 128, 256, 64, 4))
    ),
    _dot_case("bf16", 64, 64, 128, 32, 4, matrix_instr_nonkdim=32),
    _dot_case("e4m3", 64, 64, 128, 64, 4, matrix_instr_nonkdim=32),
    _dot_case("fp32", 32, 32, 64, 32, 4),
    _int8_dot_case(32, 32, 64),
    *(
        _dot_scaled_case(a, b, *shape)
        for a, b in (("e2m1", "e2m1"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e2m1"))
        for shape in ((32, 32, 128, 1), (64, 64, 256, 4))
    ),
    _dot_scaled_case("e2m1", "e4m3", 32, 64, 128, 4),
    _dot_scaled_case("bf16", "e2m1", 32, 32, 128, 4),
]
