"""Tiles of matrix products: 16 outputs of all rows, k split over the waves of a workgroup.

    D[output, row] = sum over k of W[output, k] x[row, k]

A lane holds outputs 4 g + r of row lane % 16, g = lane // 16: weights are A operands, rows columns.
Wave w takes chunks w, w + 4, ... of 128 inputs; several are asked for before the first is used.
Weights: see mono_kernel/weights.py. Rows: E4M3 [2, inputs] terms, or bf16 [inputs].
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.plan import WAVES, chunks
from mono_kernel.shapes import CHUNK, TILE
from mono_kernel.weights import PIECE_BYTES, PIECES, SCALE_BYTES
from rocm_msa.device import mfma, nvfp4
from rocm_msa.device.memory import Bytes, loads_are_issued
from rocm_msa.device.query import STEP
from rocm_msa.device.wave import WAVE

_AT_ONCE = 6  # chunks of a wave in flight
_DIVISORS = range(_AT_ONCE, 0, -1)
_RUN = PIECE_BYTES * WAVE  # bytes of a piece of all lanes
_ROW_PIECES = 4  # of 16 bytes that a lane holds of a row's chunk, in either form


@dataclass(frozen=True)
class Linear:
    """Packed weights of one format. data, scales: of the first tile; scales is None for bf16."""

    kind: str
    inputs: int
    data: Bytes
    scales: Bytes | None

    @classmethod
    def of(cls, ctx, name: str, kind: str, inputs: int) -> Linear:
        scales = ctx.weights(f"{name}_scales") if SCALE_BYTES[kind] else None
        return cls(kind, inputs, ctx.weights(name), scales)

    @property
    def tile_bytes(self) -> int:
        return chunks(self.inputs) * PIECES[self.kind] * _RUN

    @property
    def tile_scale_bytes(self) -> int:
        return chunks(self.inputs) * SCALE_BYTES[self.kind] * WAVE

    def load(self, chunk, lane):
        """A lane's part of a chunk: (data as 16-byte vectors, scales or None)."""
        count = PIECES[self.kind]
        place = self.data.at(chunk * (count * _RUN) + lane * PIECE_BYTES)
        data = [place.load(fx.Uint32, 4, offset=i * _RUN) for i in range(count)]
        if self.scales is None:
            return data, None
        each = SCALE_BYTES[self.kind]
        dtype = fx.Uint8 if each == 1 else fx.Uint16
        place = self.scales.at(chunk * (each * WAVE) + lane * each)
        return data, place.load(dtype)


def tile_at(linear: Linear, number: fx.Int32) -> Linear:
    """The weights from tile `number` on."""
    data = linear.data.at(fx.Int64(number) * linear.tile_bytes)
    scales = linear.scales
    if scales is not None:
        scales = scales.at(fx.Int64(number) * linear.tile_scale_bytes)
    return Linear(linear.kind, linear.inputs, data, scales)


def load_row(kind: str, row: Bytes, plane: int, chunk, group):
    """A lane's part of a chunk of its row: operands for weights of `kind`.

    row: the row's first byte; plane: bytes from one term to the next.
    """
    if kind == "bf16":
        place = row.at(chunk * (2 * CHUNK) + group * 16)
        return [place.load(fx.Uint32, 4, offset=64 * i) for i in range(_ROW_PIECES)]
    found = []
    place = row.at(chunk * CHUNK + group * 16)
    for term in (0, 1):
        low, high = (place.load(fx.Uint32, 4, offset=plane * term + 64 * i) for i in (0, 1))
        found.append(low.shuffle(high, list(range(8))))
    return found


def multiply(kind: str, table: Bytes | None, loaded, rows: list, total):
    """total + W x of one chunk."""
    data, scales = loaded
    if kind == "bf16":
        for a, b in zip(data, rows, strict=True):
            total = mfma.mfma_bf16(a, b, total)
        return total
    if kind == "nvfp4":
        # 16-bit loads come back sign-extended.
        a = nvfp4.dequantise_chunk(data[0], nvfp4.scale_rows(table, fx.Uint32(scales) & 0xFFFF))
        for i, b in enumerate(rows):
            total = mfma.mfma_fp8(a, b, total, b_exponent=-STEP * i)
        return total
    a = data[0] if kind == "mxfp4" else data[0].shuffle(data[1], list(range(8)))
    scale = fx.Int32(scales) & 0xFF
    for i, b in enumerate(rows):
        total = mfma.mfma_mx(a, b, total, scale, b_exponent=-STEP * i)
    return total


@flyc.jit
def wave_sums(ctx, linears, row, plane, totals):
    """totals + this wave's part of the products of tiles that take the same rows."""
    kind, count = linears[0].kind, chunks(linears[0].inputs)
    group, each, left = ctx.lane // TILE, count // WAVES, count % WAVES
    step = max([n for n in _DIVISORS if each % n == 0], default=1)

    def add(totals, numbers):
        loaded = [[linear.load(c, ctx.lane) for linear in linears] for c in numbers]
        rows = [load_row(kind, row, plane, c, group) for c in numbers]
        loads_are_issued()
        for weights, x in zip(loaded, rows, strict=True):
            pairs = zip(weights, totals, strict=True)
            totals = [multiply(kind, ctx.table, w, x, total) for w, total in pairs]
        return totals

    if fx.const_expr(each == step):
        totals = add(totals, [ctx.wave + WAVES * i for i in range(each)])
    else:
        for first in range(fx.Int32(0), fx.Int32(each), fx.Int32(step)):
            begin = ctx.wave + fx.Int32(first) * WAVES
            totals = add(totals, [begin + WAVES * i for i in range(step)])
    if fx.const_expr(left > 0):  # noqa: SIM102
        if ctx.wave < left:
            totals = add(totals, [ctx.wave + WAVES * each])
    return totals


def zeros(count: int) -> list:
    return [mfma.zeros() for _ in range(count)]


def gather(ctx, totals: list) -> list:
    """The waves' sums, added in wave order; for wave 0. Barriers inside: all waves call it."""
    for i, total in enumerate(totals):
        # Writers: all waves, each its own run. Reader: wave 0.
        ctx.work.store(total, offset=ctx.wave * _RUN + (ctx.lane * 16 + i * WAVES * _RUN))
    fx.barrier()
    found = []
    for i in range(len(totals)):
        parts = [
            ctx.work.load(fx.Float32, 4, offset=ctx.lane * 16 + (i * WAVES + w) * _RUN)
            for w in range(WAVES)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found.append(total)
    fx.barrier()  # before the next task writes
    return found


def column(ctx):
    """(row that this lane multiplies, whether the batch has it, first output of the lane)."""
    row = ctx.lane % TILE
    live = row < ctx.rows
    return live.select(row, fx.Int32(0)), live, (ctx.lane // TILE) * 4
