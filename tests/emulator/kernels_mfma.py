"""FlyDSL kernels for one f8f6f4 MFMA, plain and scaled, in every pair of formats.

The kernel loads operands as they lie in registers; the packing below is the layout, written down
once, independent of the emulator's own:

    16x16x128: lane = row + 16 g, g in 0..3     32x32x64: lane = row + 32 g, g in 0..1
    8 bits: 16 elements from k = 16 g, then 16 from K/2 + 16 g    6, 4 bits: 32 from k = 32 g
    scale of k // 32 in lane group k // 32, in the byte that op_sel names
    D: 16x16 row 4 g + r; 32x32 row 8 (r // 4) + 4 g + r % 4; column = lane % rows
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr import rocdl

from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from tests.emulator.cases import Args, Case, Expected, Tolerance, one_rank

WAVE = 64
OPERAND_WORDS = 8  # dwords a lane in memory, whatever the format needs
DTYPES = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")  # by the instruction's code
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
SHAPES = {16: 128, 32: 64}  # rows = columns: k
SCALE_BLOCK = 32


def decode(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Values of codes, by the definition of the OCP formats; finite codes only."""
    exponent_bits, mantissa_bits = int(kind[1]), int(kind[3])
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = (codes & (2**mantissa_bits - 1)).double()
    exponent = codes >> mantissa_bits & (2**exponent_bits - 1)
    sign = 1.0 - 2.0 * (codes >> (exponent_bits + mantissa_bits) & 1).double()
    normal = (1 + mantissa / 2**mantissa_bits) * torch.exp2(exponent.double() - bias)
    subnormal = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    return sign * torch.where(exponent > 0, normal, subnormal)


def codes(kind: str, rows: int, depth: int, seed: int) -> torch.Tensor:
    """Random finite codes [rows, depth]."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 1 << BITS[kind], (rows, depth), generator=generator)
    if kind == "e4m3":
        found = torch.where(found & 0x7F == 0x7F, found & 0x80, found)  # NaN
    if kind == "e5m2":
        found = torch.where(found & 0x7C == 0x7C, found & 0x83, found)  # infinity and NaN
    return found


def positions(kind: str, rows: int) -> torch.Tensor:
    """k of the 32 elements of each lane group: [groups, 32]."""
    depth = SHAPES[rows]
    group = torch.arange(WAVE // rows)[:, None]
    element = torch.arange(SCALE_BLOCK)[None]
    if BITS[kind] == 8:
        return element // 16 * (depth // 2) + 16 * group + element % 16
    return SCALE_BLOCK * group + element


def pack(found: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes [rows, depth] as registers [64 lanes, OPERAND_WORDS] int32."""
    rows = found.shape[0]
    by_lane = found[:, positions(kind, rows)].transpose(0, 1).reshape(WAVE, SCALE_BLOCK)
    bits = by_lane[:, :, None] >> torch.arange(BITS[kind]) & 1  # lowest bit first
    bits = torch.nn.functional.pad(bits.flatten(1), (0, 32 * (OPERAND_WORDS - BITS[kind])))
    words = (bits.view(WAVE, OPERAND_WORDS, 32) << torch.arange(32)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)


def unpack(words: torch.Tensor, kind: str, rows: int) -> torch.Tensor:
    """The codes [rows, depth] that `pack` laid into registers."""
    bits = (words.long()[:, :, None] >> torch.arange(32) & 1).flatten(1)
    bits = bits[:, : SCALE_BLOCK * BITS[kind]].view(WAVE, SCALE_BLOCK, BITS[kind])
    by_lane = (bits << torch.arange(BITS[kind])).sum(-1).view(-1, rows, SCALE_BLOCK)
    found = torch.empty(rows, SHAPES[rows], dtype=torch.long)
    found[:, positions(kind, rows)] = by_lane.transpose(0, 1)
    return found


def scale_words(scales: torch.Tensor, rows: int, byte: int, seed: int) -> torch.Tensor:
    """E8M0 codes [rows, depth / 32] as one dword a lane; the other bytes are noise."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, 255, (WAVE, 4), generator=generator)
    parts[:, byte] = scales.transpose(0, 1).reshape(WAVE)
    return parts.to(torch.uint8).view(torch.int32).flatten()


def scale_codes(words: torch.Tensor, rows: int, byte: int) -> torch.Tensor:
    """The E8M0 codes [rows, depth / 32] that `scale_words` laid into registers."""
    return words.view(torch.uint8).view(-1, rows, 4)[:, :, byte].T.long()


def unpack_output(matrix: torch.Tensor) -> torch.Tensor:
    """D [rows, columns] as registers [64 lanes, rows * columns / 64]."""
    rows = matrix.shape[0]
    group, r = torch.arange(WAVE // rows)[:, None], torch.arange(rows * rows // WAVE)[None]
    row = 4 * group + r if rows == 16 else 8 * (r // 4) + 4 * group + r % 4
    by_group = matrix[row]  # [groups, registers, columns]
    return by_group.permute(0, 2, 1).reshape(WAVE, -1).contiguous()


def op_sel(a: str, b: str) -> tuple[int, int]:
    """Which byte of the scale registers: every one is used by some pair."""
    return DTYPES.index(a) % 4, (DTYPES.index(b) + 1) % 4


def _build(rows: int, a_kind: str, b_kind: str) -> Compiled:
    call = {
        16: rocdl.mfma_scale_f32_16x16x128_f8f6f4,
        32: rocdl.mfma_scale_f32_32x32x64_f8f6f4,
    }[rows]
    formats = DTYPES.index(a_kind), DTYPES.index(b_kind)
    byte_a, byte_b = op_sel(a_kind, b_kind)
    registers = rows * rows // WAVE

    @flyc.kernel(name=f"mfma_{rows}_{a_kind}_{b_kind}")
    def kernel(
        a: fx.Pointer,
        b: fx.Pointer,
        a_scales: fx.Pointer,
        b_scales: fx.Pointer,
        plain: fx.Pointer,
        scaled: fx.Pointer,
    ):
        lane = fx.thread_idx.x
        left = fx.generic_load(a + lane * OPERAND_WORDS, count=BITS[a_kind])
        right = fx.generic_load(b + lane * OPERAND_WORDS, count=BITS[b_kind])
        zero = fx.Vector.filled(registers, 0.0, fx.Float32)
        kind = fx.Vector.make_type(registers, fx.Float32)
        # Constant zero scales stand for the instruction without scales.
        got = call(kind, [left, right, zero, *formats, 0, 0, 0, 0])
        fx.generic_store(plain + lane * registers, fx.Vector(got))
        got = call(
            kind,
            [left, right, zero, *formats, byte_a, a_scales[lane], byte_b, b_scales[lane]],
        )
        fx.generic_store(scaled + lane * registers, fx.Vector(got))

    @flyc.jit
    def launch(
        a: fx.Pointer,
        b: fx.Pointer,
        a_scales: fx.Pointer,
        b_scales: fx.Pointer,
        plain: fx.Pointer,
        scaled: fx.Pointer,
    ):
        kernel(a, b, a_scales, b_scales, plain, scaled).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))

    words = flyc.from_c_void_p(fx.Int32, None, assumed_align=16)
    floats = flyc.from_c_void_p(fx.Float32, None, assumed_align=16)
    return compile_flydsl(launch, words, words, words, words, floats, floats)


def _inputs(rows: int, a_kind: str, b_kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    depth = SHAPES[rows]
    generator = torch.Generator().manual_seed(seed + 3)
    a, b = codes(a_kind, rows, depth, seed), codes(b_kind, rows, depth, seed + 1)
    scales = torch.randint(124, 131, (2, rows, depth // SCALE_BLOCK), generator=generator)
    return a, b, scales[0], scales[1]


def _case(rows: int, a_kind: str, b_kind: str) -> Case:
    byte_a, byte_b = op_sel(a_kind, b_kind)
    registers = rows * rows // WAVE

    def make_args(seed: int) -> Args:
        a, b, a_scales, b_scales = _inputs(rows, a_kind, b_kind, seed)
        return one_rank(
            pack(a, a_kind),
            pack(b, b_kind),
            scale_words(a_scales, rows, byte_a, seed + 4),
            scale_words(b_scales, rows, byte_b, seed + 5),
            torch.zeros(WAVE, registers),
            torch.zeros(WAVE, registers),
        )

    def expected(args: Args) -> Expected:
        left = decode(unpack(args[0][0], a_kind, rows), a_kind)
        right = decode(unpack(args[0][1], b_kind, rows), b_kind)
        a_scales = scale_codes(args[0][2], rows, byte_a)
        b_scales = scale_codes(args[0][3], rows, byte_b)
        plain = left @ right.T
        left = left * torch.exp2(a_scales.double() - 127).repeat_interleave(SCALE_BLOCK, 1)
        right = right * torch.exp2(b_scales.double() - 127).repeat_interleave(SCALE_BLOCK, 1)
        scaled = left @ right.T
        return ({4: unpack_output(plain.float()), 5: unpack_output(scaled.float())},)

    # E5M2 spans 2^32: sums are then dominated by a few terms, and small ones may be rounded off.
    wide = "e5m2" in (a_kind, b_kind)
    return Case(
        f"flydsl_mfma_{rows}_{a_kind}_{b_kind}",
        lambda: _build(rows, a_kind, b_kind),
        make_args,
        (1, 1, 1),
        (WAVE, 1, 1),
        expected,
        Tolerance(1e-5, 1e4 if a_kind == b_kind == "e5m2" else 8.0 if wide else 1e-2),
    )


CASES = [_case(rows, a, b) for rows in SHAPES for a in DTYPES for b in DTYPES]
