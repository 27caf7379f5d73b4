"""Float arithmetic for oracles, from exact rationals and from the rules of AMD's documents."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

# dtype -> (mantissa bits, lowest exponent of a normal number, largest finite value)
FORMATS = {
    np.float16: (10, -14, 65504.0),
    np.float32: (23, -126, 3.4028234663852886e38),
    np.float64: (52, -1022, 1.7976931348623157e308),
}


def round_exact(x: Fraction, dtype=np.float32):
    """The nearest value of `dtype`, ties to even."""
    mantissa, lowest, high = FORMATS[dtype]
    sign, x = (-1 if x < 0 else 1), abs(x)
    if not x:
        return dtype(0)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= x < Fraction(2) ** e
    step = Fraction(2) ** (max(e, lowest) - mantissa)
    n = round(x / step)  # Python rounds half to even
    if n * step > Fraction(high):
        return dtype(sign * math.inf)
    return dtype(sign * float(n * step))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once, in the type of the arguments."""
    dtype = a.dtype.type
    with np.errstate(all="ignore"):
        plain = a * b + c  # right when not finite, and for the sign of a zero
    out = np.empty_like(plain)
    for k, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            with np.errstate(all="ignore"):
                product = np.float64(x) * np.float64(y)
                out[k] = product + z if not np.isfinite([x, y]).all() else z
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        # Of an exact zero only the signs of product and addend matter.
        if exact == 0:
            product = math.copysign(1, x) * math.copysign(1, y)
            zero = x == 0 or y == 0
            negative = product < 0 and math.copysign(1, z) < 0 and zero and z == 0
            out[k] = -0.0 if negative else 0.0
        else:
            out[k] = round_exact(exact, dtype)
    return out


def is_signalling(x: np.ndarray) -> np.ndarray:
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    quiet = kind(1 << np.finfo(x.dtype).nmant - 1)
    return np.isnan(x) & (x.view(kind) & quiet == 0)


def pick(smaller: bool, ieee: bool = False):
    """minNum (`smaller`) or maxNum: -0 below +0; a NaN loses, a signalling one wins with `ieee`."""

    def of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
        r = np.where(less == smaller, a, b)
        r = np.where((a == b) & (np.signbit(a) == np.signbit(b)), a, r)
        r = np.where(np.isnan(a), b, np.where(np.isnan(b), a, r))
        wins = (is_signalling(a) | is_signalling(b)) & ieee
        return np.where(wins, a.dtype.type(np.nan), r)

    return of


def pick3(smaller: bool, ieee: bool = False):
    two = pick(smaller, ieee)
    return lambda a, b, c: two(two(a, b), c)


def median(ieee: bool = False):
    """The larger of the two that are not the first largest; v_min3 when one is a NaN."""

    def of(a, b, c):
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        high, top = pick(False), pick3(False)(a, b, c)
        rest = np.where(top == a, high(b, c), np.where(top == b, high(a, c), high(a, b)))
        return np.where(nan, pick3(True, ieee)(a, b, c), rest)

    return of


def nan_wins(smaller: bool):
    """IEEE 754-2019 minimum or maximum of three."""

    def of(a, b, c):
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(nan, a.dtype.type(np.nan), pick3(smaller)(a, b, c))

    return of


def turns(function):
    """sin or cos of a number of revolutions: 0 and 1 when it is more than 256 away from zero."""

    def of(a: np.ndarray) -> np.ndarray:
        x = a.astype(np.float64)
        exact = function(2 * np.pi * (x - np.rint(x)))
        # The zero of an odd function has the sign of its argument.
        exact = np.where(a == 0, function(x), exact)
        far = np.isfinite(x) & (np.abs(x) > 256)
        return np.where(far, function(0.0), exact).astype(a.dtype)

    return of


def fraction(a: np.ndarray) -> np.ndarray:
    """a - floor(a), below 1."""
    below = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    r = (a.astype(np.float64) - np.floor(a.astype(np.float64))).astype(a.dtype)
    return np.where(r >= 1, below, r)


def mantissa(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def exponent(a: np.ndarray) -> np.ndarray:
    """As v_frexp_exp: 0 of what is not finite."""
    return np.where(np.isfinite(a), np.frexp(np.where(np.isfinite(a), a, 0))[1], 0)


def clamp(x: np.ndarray, dx10: bool = True) -> np.ndarray:
    """To 0..1; a NaN becomes 0 with DX10_CLAMP."""
    r = np.where(x > 1, 1, np.where(x > 0, x, 0))
    return np.where(np.isnan(x) & ~np.bool_(dx10), x, r).astype(x.dtype)


def fixup(q: np.ndarray, den: np.ndarray, num: np.ndarray, underflow: int | None) -> np.ndarray:
    """v_div_fixup: the quotient `q` of finite numbers, the exact answers of the other cases.

    `underflow`: difference of the exponents below which the result is zero (none for f16). An
    infinite or NaN quotient of finite numbers is an overflow.
    """
    dtype = q.dtype.type
    negative = np.signbit(num) != np.signbit(den)
    sign = np.where(negative, dtype(-1), dtype(1))
    bias_exponent = biased(num) - biased(den)
    r = np.copysign(np.abs(q), sign)
    if underflow is not None:
        r = np.where(~np.isfinite(q), dtype(np.inf) * sign, r)
        r = np.where(bias_exponent < underflow, dtype(0) * sign, r)
    r = np.where(np.isinf(den) | (num == 0), dtype(0) * sign, r)
    r = np.where(np.isinf(num) | (den == 0), dtype(np.inf) * sign, r)
    invalid = ((num == 0) & (den == 0)) | (np.isinf(num) & np.isinf(den))
    return np.where(invalid | np.isnan(num) | np.isnan(den), dtype(np.nan), r)


def biased(x: np.ndarray) -> np.ndarray:
    """The exponent field of f32 or f64."""
    if x.dtype == np.float32:
        return (x.view(np.uint32) >> 23 & 0xFF).astype(np.int64)
    return (x.view(np.uint64) >> np.uint64(52) & np.uint64(0x7FF)).astype(np.int64)


def denormal(x: np.ndarray) -> np.ndarray:
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)


def div_scale(s0: np.ndarray, den: np.ndarray, num: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(result, VCC bit) of v_div_scale, s0 being the denominator or the numerator.

    Where reciprocal and quotient are both denormal, the denominator is scaled down: up, as the
    document has it, would overflow.
    """
    dtype = s0.dtype.type
    scale, near_max, tiny = (64, 96, 23) if dtype is np.float32 else (128, 768, 53)
    with np.errstate(all="ignore"):
        up, down = np.ldexp(s0, scale).astype(dtype), np.ldexp(s0, -scale).astype(dtype)
        quotient = num / den
        reciprocal = dtype(1) / den
    is_den, is_num = s0 == den, s0 == num
    small_q, small_r = denormal(quotient), denormal(reciprocal)
    cases = [  # the first one that holds: (condition, result, VCC)
        ((num == 0) | (den == 0), np.full_like(s0, np.nan), False),
        (biased(num) - biased(den) >= near_max, np.where(is_den, up, s0), True),
        (denormal(den), up, False),
        (small_r & small_q, np.where(is_den, down, s0), True),
        (small_r, down, False),
        (small_q, np.where(is_num, up, s0), True),
        (biased(num) <= tiny, up, False),
    ]
    conditions = [c[0] for c in cases]
    result = np.select(conditions, [c[1] for c in cases], s0)
    vcc = np.select(conditions, [np.full(len(s0), c[2]) for c in cases], False)
    return result, vcc


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What v_div_fmas gives with VCC set: a * b + c, scaled back and then rounded."""
    dtype = a.dtype.type
    scale, bias = (64, 127) if dtype is np.float32 else (128, 1023)
    plain = fma(a, b, c)
    out = np.empty_like(plain)
    for k, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        shift = scale if biased(c[k : k + 1])[0] > bias else -scale
        out[k] = plain[k]
        if math.isfinite(x) and math.isfinite(y) and math.isfinite(z):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            if exact:
                out[k] = round_exact(exact * Fraction(2) ** shift, dtype)
    return out
