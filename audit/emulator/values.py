"""Number formats of PTX and correctly rounded arithmetic on them, over numpy arrays.

Everything here rounds once, as IEEE 754 asks. Products of two f32 (or f16, bf16) numbers are exact in f64; a
sum of two f64 numbers is kept exact as a pair (sum, error) and folded into one f64 by rounding to odd, after
which rounding to any format of at most 51 bits cannot round twice (S. Boldo and G. Melquiond, "Emulation of
FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57(4),
2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray  # shape [lanes] unless a function says otherwise

F32_NAN = np.uint32(0x7FFFFFFF)  # the NaN that f32 arithmetic returns on every architecture that we build for
F64_NAN = np.uint64(0xFFF8000000000000)

UINT: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
SINT: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


def quiet(function: Callable[..., Array]) -> Callable[..., Array]:
    """Run a function with numpy's floating-point warnings off: NaN and infinity are values here.

    The arithmetic below is not wrapped, for speed: the machine turns the warnings off once for a whole run.
    """

    def wrapped(*args: object, **kwargs: object) -> Array:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    wrapped.__doc__ = function.__doc__
    wrapped.__name__ = function.__name__
    return wrapped


@dataclass(frozen=True)
class Format:
    """A binary float format of at most 16 bits, or tf32.

    `mantissa` counts stored bits. `maximum` is the largest finite value. `nan` is the encoding that
    conversions produce for NaN, None where the format has none. `infinity` is None for formats that saturate.
    """

    name: str
    bits: int
    exponent: int
    mantissa: int
    maximum: float
    nan: int | None
    infinity: int | None

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias


F16 = Format("f16", 16, 5, 10, 65504.0, 0x7FFF, 0x7C00)
BF16 = Format("bf16", 16, 8, 7, float(2.0**127 * (2 - 2**-7)), 0x7FFF, 0x7F80)
TF32 = Format("tf32", 19, 8, 10, float(2.0**127 * (2 - 2**-10)), 0x3FFFF, 0x3FC00)
E4M3 = Format("e4m3", 8, 4, 3, 448.0, 0x7F, None)
E5M2 = Format("e5m2", 8, 5, 2, 57344.0, 0x7F, 0x7C)
E2M1 = Format("e2m1", 4, 2, 1, 6.0, None, None)
E2M3 = Format("e2m3", 6, 2, 3, 7.5, None, None)
E3M2 = Format("e3m2", 6, 3, 2, 28.0, None, None)
FORMATS = {f.name: f for f in (F16, BF16, TF32, E4M3, E5M2, E2M1, E2M3, E3M2)}


# -- exact sums -----------------------------------------------------------------------------------------


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """s + e == a + b exactly, s = rn(a + b) (D. Knuth). For f64 without overflow."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def to_odd(s: Array, e: Array) -> Array:
    """The exact s + e rounded to odd in f64. `e` is the error of `s`, as :func:`two_sum` gives it."""
    e = np.where(np.isfinite(s), e, 0.0)
    bits = np.array(s, dtype=np.float64).view(np.int64)
    # rn may have moved s away from zero; then the truncated value is one step nearer to zero.
    away = (e != 0) & (np.signbit(s) != np.signbit(e))
    return ((bits - away) | (e != 0)).view(np.float64)


def _sum(a: Array, b: Array, mode: str) -> Array:
    """a + b in f64, rounded to odd; the sign of an exact zero follows the rounding mode."""
    s, e = two_sum(a, b)
    odd = to_odd(s, e)
    if mode == "rm":  # IEEE 754 section 6.3: x + (-x) is -0 when rounding downwards
        odd = np.where((s == 0) & (np.signbit(a) != np.signbit(b)), -0.0, odd)
    return odd


# -- rounding to f32 ------------------------------------------------------------------------------------


def _step32(x: Array, up: Array) -> Array:
    """The f32 neighbour of x: towards +infinity where `up`, towards -infinity elsewhere."""
    return np.nextafter(x, np.where(up, np.float32(np.inf), np.float32(-np.inf)))


def round_f32(x: Array, mode: str = "rn") -> Array:
    """f64 -> f32 with one rounding. For `rn` of values rounded to odd this is exact (see the module)."""
    x = np.asarray(x, dtype=np.float64)
    y = x.astype(np.float32)
    if mode == "rn":
        return y
    below, above = y.astype(np.float64) < x, y.astype(np.float64) > x
    if mode == "rz":
        wrong, up = np.where(x < 0, below, above), x < 0
    elif mode == "rm":
        wrong, up = above, np.zeros(x.shape, bool)
    elif mode == "rp":
        wrong, up = below, np.ones(x.shape, bool)
    else:
        raise ValueError(f"rounding mode {mode!r}")
    return np.where(wrong, _step32(y, up), y)


def flush(x: Array) -> Array:
    """Subnormal f32 -> zero of the same sign (`.ftz`)."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def finish_f32(x: Array, ftz: bool = False, sat: bool = False) -> Array:
    """The common end of every f32 operation: `.ftz`, `.sat`, canonical NaN."""
    if ftz:
        x = flush(x)
    if sat:
        x = np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))  # NaN -> +0
    nan = np.isnan(x)
    if nan.any():
        x = np.array(x, dtype=np.float32)
        x.view(np.uint32)[nan] = F32_NAN
    return x


# -- f32 arithmetic -------------------------------------------------------------------------------------


def add_f32(a: Array, b: Array, mode: str = "rn", ftz: bool = False, sat: bool = False) -> Array:
    """a + b for f32 arrays, rounded once in `mode` (rn, rz, rm, rp)."""
    if ftz:
        a, b = flush(a), flush(b)
    if mode == "rn":
        return finish_f32(a + b, ftz, sat)
    return finish_f32(round_f32(_sum(a.astype(np.float64), b.astype(np.float64), mode), mode), ftz, sat)


def mul_f32(a: Array, b: Array, mode: str = "rn", ftz: bool = False, sat: bool = False) -> Array:
    """a * b for f32 arrays, rounded once in `mode`."""
    if ftz:
        a, b = flush(a), flush(b)
    if mode == "rn":
        return finish_f32(a * b, ftz, sat)
    return finish_f32(round_f32(a.astype(np.float64) * b.astype(np.float64), mode), ftz, sat)


def fma_f32(a: Array, b: Array, c: Array, mode: str = "rn", ftz: bool = False, sat: bool = False) -> Array:
    """a * b + c for f32 arrays with a single rounding in `mode`."""
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    p, z = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    if mode != "rn":
        return finish_f32(round_f32(_sum(p, z, mode), mode), ftz, sat)
    s = p + z
    # The second rounding can only go wrong where s lies half-way between two f32 numbers: among normal
    # numbers it then ends in a 1 and 28 zeros; subnormal ones take more forms, so all of them are redone.
    risky = (s.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    risky |= (np.abs(s) < 2.0**-125) & (s != 0)
    again = np.flatnonzero(risky)
    if again.size:
        p, z = np.broadcast_arrays(p, z)
        s[again] = _sum(p[again], z[again], mode)
    return finish_f32(s.astype(np.float32), ftz, sat)


def div_f32(a: Array, b: Array, mode: str = "rn", ftz: bool = False) -> Array:
    """a / b for f32 arrays, rounded once in `mode`."""
    if ftz:
        a, b = flush(a), flush(b)
    q = a / b
    if mode != "rn":
        a64, b64 = a.astype(np.float64), b.astype(np.float64)
        # A quotient of 24-bit numbers is either a f32 (or subnormal f64-exact) number or far from one, so the
        # 53-bit quotient compares with its f32 rounding as the exact quotient does.
        q = round_f32(a64 / b64, mode)
    return finish_f32(q, ftz)


def sqrt_f32(a: Array, mode: str = "rn", ftz: bool = False) -> Array:
    """Square root of an f32 array, rounded once in `mode`."""
    if ftz:
        a = flush(a)
    # As for division: an irrational root cannot come nearer than 2^-49 (relative) to a f32 number.
    return finish_f32(np.sqrt(a) if mode == "rn" else round_f32(np.sqrt(a.astype(np.float64)), mode), ftz)


def minmax_f32(a: Array, b: Array, largest: bool, nan: bool = False, ftz: bool = False) -> Array:
    """PTX min and max: a NaN operand loses (with `.NaN` it wins); -0 < +0."""
    if ftz:
        a, b = flush(a), flush(b)
    return finish_f32(minmax(a, b, largest, nan), ftz)


def minmax(a: Array, b: Array, largest: bool, nan: bool) -> Array:
    """The selection behind min and max for any numpy float type."""
    first = np.where(a == b, np.signbit(b) if largest else np.signbit(a), (a > b) if largest else (a < b))
    chosen = np.where(first, a, b)
    return np.where(np.isnan(a), a if nan else b, np.where(np.isnan(b), b if nan else a, chosen))


# -- f64 ------------------------------------------------------------------------------------------------


def fma_f64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c for f64 arrays with a single rounding. Exact rational arithmetic, element by element."""
    a, b, c = np.broadcast_arrays(a, b, c)
    out = np.asarray(a * b + c)  # right for NaN, infinity and exact zeros
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for i in np.flatnonzero(finite):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            out[i] = fraction_to_f64(exact, mode)
        elif mode == "rm" and np.signbit(a[i] * b[i]) != np.signbit(c[i]):
            out[i] = -0.0
    return _canonical_f64(out)


def add_f64(a: Array, b: Array, mode: str = "rn") -> Array:
    """a + b for f64 arrays, rounded once."""
    return _canonical_f64(a + b) if mode == "rn" else fma_f64(a, np.ones(1), b, mode)


def mul_f64(a: Array, b: Array, mode: str = "rn") -> Array:
    """a * b for f64 arrays, rounded once."""
    return _canonical_f64(a * b) if mode == "rn" else fma_f64(a, b, np.full(1, -0.0), mode)


def div_f64(a: Array, b: Array, mode: str = "rn") -> Array:
    """a / b for f64 arrays, rounded once."""
    q = np.asarray(a / b)
    if mode != "rn":
        for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)):
            q[i] = fraction_to_f64(Fraction(float(a[i])) / Fraction(float(b[i])), mode)
    return _canonical_f64(q)


def sqrt_f64(a: Array, mode: str = "rn") -> Array:
    """Square root of an f64 array, rounded once."""
    r = np.asarray(np.sqrt(a))
    if mode != "rn":
        for i in np.flatnonzero(np.isfinite(a) & (a > 0)):
            below = Fraction(float(r[i])) ** 2 < Fraction(float(a[i]))
            above = Fraction(float(r[i])) ** 2 > Fraction(float(a[i]))
            if below and mode == "rp":
                r[i] = np.nextafter(r[i], np.inf)
            elif above and mode in ("rz", "rm"):
                r[i] = np.nextafter(r[i], 0)
    return _canonical_f64(r)


def _canonical_f64(x: Array) -> Array:
    nan = np.isnan(x)
    if nan.any():
        x = np.array(x)
        x.view(np.uint64)[nan] = F64_NAN
    return x


def fraction_to_f64(x: Fraction, mode: str = "rn") -> float:
    """A non-zero rational, rounded once to f64."""
    nearest = 0.0
    try:
        nearest = x.numerator / x.denominator  # Python rounds this correctly, subnormals included
    except OverflowError:
        nearest = float("inf") if x > 0 else float("-inf")
    if mode == "rn":
        return nearest
    if np.isinf(nearest):
        below, above = nearest < 0, nearest > 0
    else:
        below, above = Fraction(nearest) < x, Fraction(nearest) > x
    towards_zero = mode == "rz"
    if above and (mode == "rm" or (towards_zero and x > 0)):
        return float(np.nextafter(nearest, -np.inf))
    if below and (mode == "rp" or (towards_zero and x < 0)):
        return float(np.nextafter(nearest, np.inf))
    return nearest


# -- narrow formats -------------------------------------------------------------------------------------

_ROUND: dict[str, Callable[[Array], Array]] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda q: np.trunc(q + np.copysign(0.5, q)),
}


@quiet
def encode(x: Array, f: Format, mode: str = "rn", relu: bool = False, satfinite: bool = False) -> Array:
    """f64 -> bits of `f` (uint32) with one rounding. `rna` rounds ties away from zero.

    Formats without infinity always saturate. NaN becomes the format's NaN, if it has none its largest value.
    """
    x = np.asarray(x, dtype=np.float64)
    if relu:
        x = np.where(np.isnan(x), x, np.maximum(x, 0.0))
    sign = np.signbit(x)
    magnitude = np.abs(x)
    _, e = np.frexp(magnitude)
    quantum = np.maximum(e - 1, f.emin) - f.mantissa  # exponent of the unit in the last place
    signed_mode = {"rm": "rp", "rp": "rm"}.get(mode, mode)
    units = np.where(sign, _ROUND[signed_mode](np.ldexp(magnitude, -quantum)), 0)
    units = np.where(sign, units, _ROUND[mode](np.ldexp(magnitude, -quantum)))
    value = np.ldexp(units, quantum)
    overflow = ~np.isnan(value) & (value > f.maximum)
    # Bits: subnormals are the integer itself; a normal number adds its exponent above the mantissa.
    # Rounding up to the next binade carries into the exponent by itself.
    steps = np.where(np.isfinite(units), units, 0).astype(np.int64)
    field = np.where(steps >= (1 << f.mantissa), quantum + f.mantissa - f.emin, 0).astype(np.int64)
    bits = (field << f.mantissa) + steps
    largest = int(_largest_bits(f))
    if f.infinity is None or satfinite:
        bits = np.where(overflow, largest, bits)
    else:
        toward = {"rz": np.zeros_like(sign), "rm": sign, "rp": ~sign}.get(mode, np.ones_like(sign))
        infinite = np.isinf(x)
        bits = np.where(overflow, np.where(toward | infinite, f.infinity, largest), bits)
    bits = bits | (sign.astype(np.int64) << (f.bits - 1))
    bits = np.where(np.isnan(x), largest if f.nan is None else f.nan, bits)
    return bits.astype(np.uint32)


def _largest_bits(f: Format) -> int:
    mantissa, exponent = np.frexp(f.maximum)
    e = int(exponent) - 1
    return ((e - f.emin + 1) << f.mantissa) + int(mantissa * 2 * (1 << f.mantissa)) - (1 << f.mantissa)


def decode(bits: Array, f: Format) -> Array:
    """Bits of `f` -> f32, exactly."""
    if f is BF16:
        return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if f is F16:
        return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)
    return _table(f)[np.asarray(bits).astype(np.int64) & ((1 << f.bits) - 1)]


_TABLES: dict[str, Array] = {}


def _table(f: Format) -> Array:
    if f.name not in _TABLES:
        codes = np.arange(1 << f.bits)
        field = (codes >> f.mantissa) & ((1 << f.exponent) - 1)
        fraction = codes & ((1 << f.mantissa) - 1)
        normal = field > 0
        significand = fraction + np.where(normal, 1 << f.mantissa, 0)
        value = np.ldexp(significand.astype(np.float64), np.where(normal, field - 1, 0) + f.emin - f.mantissa)
        if f.infinity is not None:
            value = np.where(field == (1 << f.exponent) - 1, np.where(fraction == 0, np.inf, np.nan), value)
        elif f.nan is not None:
            value = np.where((codes & ((1 << (f.bits - 1)) - 1)) == f.nan, np.nan, value)
        _TABLES[f.name] = np.where(codes >> (f.bits - 1), -value, value).astype(np.float32)
    return _TABLES[f.name]


def narrow(x: Array, f: Format, mode: str = "rn", relu: bool = False, satfinite: bool = False) -> Array:
    """f32 -> bits of `f` (uint32): :func:`encode` with a short cut for the most common conversion."""
    if relu or satfinite or mode != "rn":
        return encode(x, f, mode, relu, satfinite)
    if f is BF16:
        bits = np.asarray(x, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)
    return encode(x, f)


def bf16(x: Array) -> Array:
    """f32 or f64 array -> bf16 bits (uint16), nearest even: what tests and callers use to build operands."""
    return encode(x, BF16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bf16 bits (uint16) -> f32."""
    return decode(bits, BF16)


def fma_narrow(
    a: Array, b: Array, c: Array, f: Format, relu: bool = False, sat: bool = False, ftz: bool = False
) -> Array:
    """a * b + c for bits of f16 or bf16, rounded once to nearest even. Returns bits (uint32).

    Addition is `fma(a, 1, c)`, multiplication `fma(a, b, -0)`.
    """
    x, y, z = (decode(v, f).astype(np.float64) for v in (a, b, c))
    if ftz:
        x, y, z = (np.where(np.abs(v) < 2.0**f.emin, np.copysign(0.0, v), v) for v in (x, y, z))
    odd = _sum(x * y, z, "rn")
    bits = encode(odd, f, relu=relu)
    if ftz:
        value = decode(bits, f)
        bits = np.where(np.abs(value) < 2.0**f.emin, bits & np.uint32(1 << (f.bits - 1)), bits)
    if sat:
        value = decode(bits, f)
        one = encode(np.ones(1), f)
        bits = np.where(value > 0, np.where(value > 1, one, bits), 0)
    return bits.astype(np.uint32)


# -- conversions between integers and floats ------------------------------------------------------------


def float_to_int(x: Array, mode: str, bytes_: int, signed: bool, nan: int) -> Array:
    """Round (`rni`, `rzi`, `rmi`, `rpi`) and clamp to the range of the integer type; NaN gives `nan`.

    `x` is f32 or f64; the result has the unsigned dtype of `bytes_`.
    """
    y = _ROUND[mode[:-1]](x.astype(np.float64))
    bits = 8 * bytes_
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    inside = (y >= float(low)) & (y <= float(high)) & (y < 2.0 ** (bits - signed))
    kept = np.where(inside, y, 0.0)
    wide = kept.astype(np.int64) if signed else kept.astype(np.uint64)
    mask = (1 << bits) - 1
    out = wide.astype(UINT[bytes_])
    out = np.where(~inside & (y > 0), UINT[bytes_].type(high & mask), out)
    out = np.where(~inside & (y < 0), UINT[bytes_].type(low & mask), out)
    return np.where(np.isnan(x), UINT[bytes_].type(nan & mask), out).astype(UINT[bytes_])


def int_to_odd(x: Array) -> Array:
    """An integer array of any width -> f64 rounded to odd (exact up to 53 bits)."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return to_odd(*two_sum(high, low))


def int_to_f64(x: Array, mode: str = "rn") -> Array:
    """Integer -> f64, rounded once."""
    y = x.astype(np.float64)
    if mode == "rn" or x.dtype.itemsize < 8:
        return y
    for i, v in enumerate(x.tolist()):
        if v and int(y[i]) != v:
            y[i] = fraction_to_f64(Fraction(v), mode)
    return y
