"""A row by all waves of a workgroup: norms, and the split into operands of the next product.

A thread holds vectors of eight neighbouring values: vector v of a row is thread v % 256's, its
number v // 256 there. Sums and maxima go through LDS, wave after wave: one fixed order.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mono_kernel.plan import LANES, WAVES
from rocm_msa.device import wave
from rocm_msa.device.convert import bf16_values, bf16_word, fp8_values, fp8_word
from rocm_msa.device.memory import Bytes
from rocm_msa.device.norm import rsqrt
from rocm_msa.device.query import STEP

VECTOR = 8  # values
_BIAS, _MANTISSA, _TOP = 127, 23, 7
_LIMIT = 126


class Spread:
    """Which vectors of a row of `size` values this thread holds."""

    def __init__(self, ctx, size: int) -> None:
        count = size // VECTOR
        self.size, self.number = size, -(-count // LANES)
        self.at, self.live = [], []
        for i in range(self.number):
            index = ctx.thread + LANES * i
            live = index < count
            self.live.append(live)
            # A thread without a vector looks at the first one, and counts for nothing.
            self.at.append(live.select(index, fx.Int32(0)) * VECTOR)


def reduce(ctx, x, within, combine):
    """One value of the workgroup from a value a lane; `within` reduces a wave."""
    x = within(x)
    # Writer: each wave, its word (all its lanes the same value). Readers: all waves.
    ctx.work.store(x, offset=ctx.wave * 4)
    fx.barrier()
    found = [ctx.work.load(x.dtype, offset=4 * w) for w in range(WAVES)]
    fx.barrier()  # before the words are written again
    total = found[0]
    for other in found[1:]:
        total = combine(total, other)
    return total


def block_sum(ctx, x: fx.Float32) -> fx.Float32:
    return reduce(ctx, x, wave.wave_sum, lambda a, b: a + b)


def block_max(ctx, x: fx.Float32) -> fx.Float32:
    return reduce(ctx, x, wave.wave_max, wave.maximum)


def load_bf16(place: Bytes, at) -> list[fx.Float32]:
    """Eight bf16 values, `at` elements on."""
    words = place.load(fx.Uint32, 4, offset=at * 2)
    return [x for i in range(4) for x in bf16_values(words[i])]


def rounded(values: list) -> list[fx.Float32]:
    """fp32 values rounded to bf16."""
    return [x for word in bf16_words(values) for x in bf16_values(fx.Uint32(word))]


def bf16_words(values: list) -> list[fx.Int32]:
    return [bf16_word(*values[i : i + 2]) for i in range(0, len(values), 2)]


def normalise(ctx, spread: Spread, x: list[list], weight: Bytes) -> list[list]:
    """bf16 values of the Gemma RMSNorm of a row; x: vectors of fp32; weight: bf16 [size]."""
    weights = [load_bf16(weight, at) for at in spread.at]
    total = fx.Float32(0.0)
    for vector, live in zip(x, spread.live, strict=True):
        part = fx.Float32(0.0)
        for value in vector:
            part = part + value * value
        total = total + live.select(part, fx.Float32(0.0))
    mean = block_sum(ctx, total) * fx.Float32(1.0 / spread.size)
    factor = rsqrt(mean + fx.Float32(ctx.s.eps))
    return [
        rounded([v * factor * (w + 1.0) for v, w in zip(vector, ws, strict=True)])
        for vector, ws in zip(x, weights, strict=True)
    ]


def split(ctx, values: list[list], live: list) -> tuple[list, fx.Float32]:
    """Terms of a row's bf16 values, scaled as one: ([(words of t0, words of t1)], factor).

    See reference.split.
    """
    top = fx.Float32(0.0)
    for vector, here in zip(values, live, strict=True):
        for value in vector:
            top = wave.maximum(top, here.select(wave.magnitude(value), fx.Float32(0.0)))
    top = block_max(ctx, top)
    power = (top.bitcast(fx.Int32) >> _MANTISSA) - (_BIAS + _TOP)
    power = fx.max(fx.min(power, fx.Int32(_LIMIT)), fx.Int32(-_LIMIT))
    up = ((_BIAS - power) << _MANTISSA).bitcast(fx.Float32)
    down = ((_BIAS + power) << _MANTISSA).bitcast(fx.Float32)
    return [terms([x * up for x in vector]) for vector in values], down


def terms(values: list) -> tuple[list, list]:
    """Words of the two E4M3 terms of 4 n scaled values."""
    high, low = [], []
    for i in range(0, len(values), 4):
        four = values[i : i + 4]
        high.append(fp8_word(four))
        rest = zip(four, fp8_values(high[-1]), strict=True)
        low.append(fp8_word([(x - h) * float(1 << STEP) for x, h in rest]))
    return high, low


def store_operand(ctx, kind: str, values: list[list], places: list, live: list, plane: int,
                  targets: list) -> None:  # fmt: skip
    """Write a row's operand and its factor.

    kind: format of the weights that it meets. values: vectors of bf16 values; places: their first
    elements; plane: values a term. targets: where to, and whether: (Boolean, (operand, factor)).
    """
    found, factor = None, fx.Float32(1.0)
    if kind != "bf16":
        found, factor = split(ctx, values, live)
    for wanted, (row, factor_at) in targets:
        for i, (vector, at, here) in enumerate(zip(values, places, live, strict=True)):
            if found is None:
                store_words_if(here & wanted, row, at * 2, bf16_words(vector))
            else:
                high, low = found[i]
                store_words_if(here & wanted, row, at, high)
                store_words_if(here & wanted, row.at(plane), at, low)
        store_if((ctx.thread == 0) & wanted, factor_at, fx.Int32(0), factor)


def targets(ctx, name: str, row, size: int, own: bool) -> list:
    """Where a row's operand goes, for `store_operand`. own: into this workgroup's LDS; one of the
    workgroups that do so writes the region, too."""
    shared = ctx.operand(name, row, size, False)
    if not own:
        return [(fx.Boolean(True), shared)]
    return [
        (fx.Boolean(True), ctx.operand(name, row, size, True)),
        (ctx.workgroup == row % ctx.workgroups, shared),
    ]


def store_words_if(condition, place: Bytes, offset, words: list) -> None:
    """Store neighbouring words in the lanes where `condition` holds."""
    store_if(condition, place, offset, fx.Vector.from_elements(words, fx.Int32))


@flyc.jit
def store_if(condition, place, offset, value):
    if condition:
        place.store(value, offset=offset)
