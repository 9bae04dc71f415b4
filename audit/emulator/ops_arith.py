"""Floating-point arithmetic and conversions.

PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Mixed Precision
Floating Point Instructions", and `cvt` of "Data Movement and Conversion Instructions".

`add`, `mul` and `fma` of f32 without a rounding modifier may be contracted by the assembler into one fma.
Here each is rounded on its own, as with `.rn`; that is one more allowed result, see docs/emulator.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..ptx.ir import Pair
from . import values
from .program import WIDTH, Decoder, Reader, Step, dtype, op
from .values import BF16, F16, FORMATS, UINT, Array, Format

if TYPE_CHECKING:
    from .grid import Grid, Selection

NARROW = {"f16": F16, "bf16": BF16, "f16x2": F16, "bf16x2": BF16}


def _emit(d: Decoder, type_: str, compute: Callable[..., Array], *types: str) -> Step:
    write = d.dst(0, type_)
    sources = [d.src(k + 1, t) for k, t in enumerate(types)]

    def run(g: Grid, sel: Selection) -> None:
        write(g, sel, compute(*[s(g, sel) for s in sources]))

    return run


def _flags(d: Decoder) -> tuple[str, bool, bool]:
    return d.rounding(), "ftz" in d.mods, "sat" in d.mods


def _need_blackwell(d: Decoder) -> None:
    """`.f32x2` and mixed precision exist from sm_100 on."""
    if int("".join(c for c in d.arch if c.isdigit()) or 0) < 100:
        raise d.fail(f"needs sm_100 or later, not {d.arch}")


def _pairs(compute: Callable[..., Array], part: int, as_float: bool = False) -> Callable[..., Array]:
    """Apply a function of half-width elements to both halves of packed registers."""
    small, whole = UINT[part], UINT[2 * part]
    view = np.dtype(np.float32) if as_float else small

    def packed(*xs: Array) -> Array:
        size = max(x.size for x in xs)
        split = [np.ascontiguousarray(np.broadcast_to(x, size)).view(view) for x in xs]
        return np.ascontiguousarray(compute(*split)).view(view).astype(view).view(small).view(whole)

    return packed


def _narrow_result(f: Format, compute: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function that returns uint32 bits return the 16-bit register type."""
    return lambda *xs: compute(*xs).astype(np.uint16)


def _sum_like(
    d: Decoder, n: int, f32: Callable[..., Array], f64: Callable[..., Array], narrow: Callable[..., Array]
) -> Step:
    """Decode an instruction that exists for f32, f64, f32x2 and the 16-bit types."""
    t = d.type
    if t == "f32":
        return _emit(d, t, f32, *[t] * n)
    if t == "f64":
        return _emit(d, t, f64, *[t] * n)
    if t == "f32x2":
        _need_blackwell(d)
        return _emit(d, t, _pairs(f32, 4, True), *[t] * n)
    f = NARROW[t]
    compute = _narrow_result(f, lambda *xs: narrow(f, *xs))
    return _emit(d, t, _pairs(compute, 2) if "x2" in t else compute, *[t] * n)


def _mixed(d: Decoder) -> str:
    """`add.f32.bf16`, `fma.rn.f32.f16`: the narrow operand type, else ""."""
    if d.type in ("f16", "bf16") and d.mods[-2:-1] == ("f32",):
        _need_blackwell(d)
        return d.type
    return ""


def _negate(bits: Array) -> Array:
    return bits ^ np.uint16(0x8000)


def add(d: Decoder) -> Step:
    mode, ftz, sat = _flags(d)
    minus = d.ins.opcode == "sub"
    wide = _mixed(d)
    if wide:
        f = FORMATS[wide]

        def mixed(a: Array, c: Array) -> Array:
            return values.add_f32(values.decode(a, f), -c if minus else c, mode, ftz, sat)

        return _emit(d, "f32", mixed, wide, "f32")

    def narrow(f: Format, a: Array, b: Array) -> Array:
        one = values.encode(np.ones(1), f)
        return values.fma_narrow(a, one, _negate(b) if minus else b, f, sat=sat, ftz=ftz)

    def f32(a: Array, b: Array) -> Array:
        return values.add_f32(a, -b if minus else b, mode, ftz, sat)

    return _sum_like(d, 2, f32, lambda a, b: values.add_f64(a, -b if minus else b, mode), narrow)


def mul(d: Decoder) -> Step:
    mode, ftz, sat = _flags(d)

    def narrow(f: Format, a: Array, b: Array) -> Array:
        return values.fma_narrow(a, b, np.full(1, 0x8000, np.uint16), f, sat=sat, ftz=ftz)

    return _sum_like(
        d,
        2,
        lambda a, b: values.mul_f32(a, b, mode, ftz, sat),
        lambda a, b: values.mul_f64(a, b, mode),
        narrow,
    )


@op("fma")
def fma(d: Decoder) -> Step:
    mode, ftz, sat = _flags(d)
    relu = "relu" in d.mods
    if "oob" in d.mods:
        raise d.fail(".oob")
    wide = _mixed(d)
    if wide:
        f = FORMATS[wide]

        def mixed(a: Array, b: Array, c: Array) -> Array:
            return values.fma_f32(values.decode(a, f), values.decode(b, f), c, mode, ftz, sat)

        return _emit(d, "f32", mixed, wide, wide, "f32")
    return _sum_like(
        d,
        3,
        lambda a, b, c: values.fma_f32(a, b, c, mode, ftz, sat),
        lambda a, b, c: values.fma_f64(a, b, c, mode),
        lambda f, a, b, c: values.fma_narrow(a, b, c, f, relu, sat, ftz),
    )


def div(d: Decoder) -> Step:
    mode, ftz, _ = _flags(d)
    t = d.type
    if d.ins.opcode == "rem" or t not in ("f32", "f64"):
        raise d.fail()
    if t == "f64":
        return _emit(d, t, lambda a, b: values.div_f64(a, b, mode), t, t)
    if "approx" in d.mods or "full" in d.mods:
        full = "full" in d.mods
        return _approximate(d, lambda g, a, b: g.machine.approx.divide(a, b, ftz, full), t, t)
    return _emit(d, t, lambda a, b: values.div_f32(a, b, mode, ftz), t, t)


def _approximate(d: Decoder, compute: Callable[..., Array], *types: str) -> Step:
    """Like :func:`_emit`, with the machine's approximator: compute(g, operands...)."""
    write = d.dst(0, d.type)
    sources = [d.src(k + 1, t) for k, t in enumerate(types)]

    def run(g: Grid, sel: Selection) -> None:
        write(g, sel, compute(g, *[s(g, sel) for s in sources]))

    return run


@op("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def unary(d: Decoder) -> Step:
    name, t = d.ins.opcode, d.type
    mode, ftz, _ = _flags(d)
    if t == "f64":
        if name == "rsqrt" or "approx" in d.mods:
            return _emit(d, t, lambda a: _coarse_f64(name, a, ftz), t)
        one = np.ones(1)
        if name == "rcp":
            return _emit(d, t, lambda a: values.div_f64(np.broadcast_to(one, a.shape), a, mode), t)
        return _emit(d, t, lambda a: values.sqrt_f64(a, mode), t)
    if t == "f32":
        if "approx" in d.mods:
            return _approximate(d, lambda g, a: g.machine.approx.unary(name, a, ftz), t)
        if name == "rcp":
            return _emit(d, t, lambda a: values.div_f32(np.ones_like(a), a, mode, ftz), t)
        return _emit(d, t, lambda a: values.sqrt_f32(a, mode, ftz), t)
    f = NARROW[t]

    def half(g: Grid, a: Array) -> Array:
        compute = lambda x: g.machine.approx.half(name, x, f, ftz).astype(np.uint16)  # noqa: E731
        return _pairs(compute, 2)(a) if "x2" in t else compute(a)

    return _approximate(d, half, t)


@values.quiet
def _coarse_f64(name: str, a: Array, ftz: bool) -> Array:
    """rcp/rsqrt.approx.ftz.f64 look at the upper word only and return a zero lower word."""
    upper = np.uint64(0xFFFFFFFF00000000)
    x = (np.ascontiguousarray(a).view(np.uint64) & upper).view(np.float64) if ftz else a
    if ftz:
        x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
    y = 1.0 / x if name == "rcp" else 1.0 / np.sqrt(x)
    if not ftz:
        return y
    out = y.view(np.uint64) & upper
    return np.where(np.isnan(y), np.uint64(0x7FFFFFFF00000000), out).view(np.float64)


def sign(d: Decoder) -> Step:
    """abs and neg: bit operations, NaN included; `.ftz` flushes first."""
    t = d.type
    width = WIDTH[t]
    u = UINT[width]
    half = width * 8 // (2 if "x2" in t else 1)
    mask = sum(1 << (half * i + half - 1) for i in range(width * 8 // half))
    flip = d.ins.opcode == "neg"
    ftz = "ftz" in d.mods and t == "f32"

    def compute(a: Array) -> Array:
        bits = (values.flush(a) if ftz else a).view(u)
        return bits ^ u.type(mask) if flip else bits & ~u.type(mask)

    return _emit(d, t, compute, t)


@op("copysign")
def copysign(d: Decoder) -> Step:
    # The sign comes from the first operand, unlike C's copysign.
    return _emit(d, d.type, lambda a, b: np.copysign(b, a), d.type, d.type)


def minmax(d: Decoder) -> Step:
    t = d.type
    largest = d.ins.opcode == "max"
    nan, ftz, xorsign = "NaN" in d.mods, "ftz" in d.mods, "xorsign" in d.mods
    n = len(d.ins.operands) - 1

    def f32(*xs: Array) -> Array:
        out = xs[0]
        for x in xs[1:]:
            a, b = (np.abs(out), np.abs(x)) if xorsign else (out, x)
            both = np.signbit(out) != np.signbit(x)
            out = values.minmax_f32(a, b, largest, nan, ftz)
            if "abs" in d.mods and not xorsign:
                out = values.minmax_f32(np.abs(a), np.abs(b), largest, nan, ftz)
            if xorsign:
                out = np.where(both, -np.abs(out), np.abs(out))
        return out

    if t == "f32":
        return _emit(d, t, f32, *[t] * n)
    if t == "f64":
        return _emit(d, t, lambda a, b: values.minmax(a, b, largest, False), t, t)
    f = NARROW[t]

    def narrow(a: Array, b: Array) -> Array:
        x, y = values.decode(a, f), values.decode(b, f)
        if ftz:
            x, y = (
                np.where(np.abs(v) < np.float32(2.0**f.emin), np.copysign(np.float32(0), v), v)
                for v in (x, y)
            )
        negative = np.signbit(x) != np.signbit(y)
        if xorsign:
            x, y = np.abs(x), np.abs(y)
        out = values.minmax(x, y, largest, nan)
        if xorsign:
            out = np.where(negative, -np.abs(out), np.abs(out))
        return values.encode(out, f).astype(np.uint16)

    return _emit(d, t, _pairs(narrow, 2) if "x2" in t else narrow, t, t)


@op("testp")
def testp(d: Decoder) -> Step:
    kind, t = d.mods[0], d.type
    tiny = 2.0**-126 if t == "f32" else 2.0**-1022
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < tiny),
    }
    test, write, source = tests[kind], d.dst_pred(0), d.src(1, t)

    def run(g: Grid, sel: Selection) -> None:
        write(g, sel, test(source(g, sel)))

    return run


# -- comparison -----------------------------------------------------------------------------------------


def comparable(d: Decoder, t: str, first: int) -> tuple[Reader, Reader, bool]:
    """Readers of the two operands of a comparison as numpy numbers, and whether they are floats."""
    a, b = d.src(first, t), d.src(first + 1, t)
    if t in ("f16", "bf16"):
        f = FORMATS[t]
        return (lambda g, s: values.decode(a(g, s), f)), (lambda g, s: values.decode(b(g, s), f)), True
    if t == "f32" and "ftz" in d.mods:
        return (lambda g, s: values.flush(a(g, s))), (lambda g, s: values.flush(b(g, s))), True
    return a, b, t in ("f32", "f64")


def setp_packed(d: Decoder, compare: Callable[[Array, Array], Array], combine: str) -> Step:
    """`setp.cmp.f16x2 p|q, a, b`: one predicate for each half."""
    o = d.operand(0)
    if d.ins.opcode != "setp" or combine or not isinstance(o, Pair):
        raise d.fail()
    f = NARROW[d.type]
    writers = (d.dst_pred(o.first), d.dst_pred(o.second))
    a, b = d.src(1, d.type), d.src(2, d.type)

    def run(g: Grid, sel: Selection) -> None:
        x, y = a(g, sel).copy(), b(g, sel).copy()
        for k, write in enumerate(writers):
            low = np.uint32(16 * k)
            write(
                g, sel, compare(values.decode((x >> low) & 0xFFFF, f), values.decode((y >> low) & 0xFFFF, f))
            )

    return run


# -- cvt ------------------------------------------------------------------------------------------------

_TO_INTEGER = ("rni", "rzi", "rmi", "rpi")
_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_TYPES = (*WIDTH, "e2m3x2", "e3m2x2")


@op("cvt")
def cvt(d: Decoder) -> Step:
    types = [m for m in d.mods if m in _TYPES]
    if len(types) != 2 or "pack" in d.mods:
        raise d.fail()
    to, of = types
    if to.endswith("x2") or of.endswith("x2"):
        return _cvt_packed(d, to, of)
    ints = [not t.startswith(("f", "bf", "tf")) for t in (to, of)]
    if ints == [True, True]:
        return _cvt_int(d, to, of)
    if ints == [False, True]:
        return _cvt_from_int(d, to, of)
    if ints == [True, False]:
        return _cvt_to_int(d, to, of)
    return _cvt_float(d, to, of)


def _cvt_int(d: Decoder, to: str, of: str) -> Step:
    dt = dtype(to)
    if "sat" not in d.mods:
        return _emit(d, to, lambda a: a.astype(dt), of)
    info = np.iinfo(dt)
    limits = np.iinfo(dtype(of))
    low, high = max(int(info.min), int(limits.min)), min(int(info.max), int(limits.max))
    return _emit(d, to, lambda a: np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(dt), of)


def _cvt_from_int(d: Decoder, to: str, of: str) -> Step:
    mode, _, sat = _flags(d)

    def compute(a: Array) -> Array:
        if to == "f64":
            return values.int_to_f64(a, mode)
        odd = values.int_to_odd(a)
        if to == "f32":
            return values.finish_f32(values.round_f32(odd, mode), sat=sat)
        return values.encode(odd, FORMATS[to], mode).astype(np.uint16)

    return _emit(d, to, compute, of)


def _widen(t: str, ftz: bool) -> Callable[[Array], Array]:
    """Operand of a float type as f32 or f64 numbers, exactly."""
    if t in ("f16", "bf16"):
        return lambda a: values.decode(a, FORMATS[t])
    return values.flush if t == "f32" and ftz else lambda a: a


def _cvt_to_int(d: Decoder, to: str, of: str) -> Step:
    mode = next((m for m in d.mods if m in _TO_INTEGER), "")
    if not mode:
        raise d.fail("integer rounding modifier")
    widen = _widen(of, "ftz" in d.mods)
    width, signed = WIDTH[to], to[0] == "s"
    # The ISA gives NaN as zero, or as the lone top bit when a 64-bit type is involved.
    nan = 1 << (8 * width - 1) if of == "f64" or width == 8 else 0
    return _emit(d, to, lambda a: values.float_to_int(widen(a), mode, width, signed, nan).view(dtype(to)), of)


def _cvt_float(d: Decoder, to: str, of: str) -> Step:
    mode, ftz, sat = _flags(d)
    integral = next((m for m in d.mods if m in _TO_INTEGER), "")
    relu, satfinite = "relu" in d.mods, "satfinite" in d.mods
    widen = _widen(of, ftz)
    if "rna" in d.mods:
        mode = "rna"
    if "rs" in d.mods:
        raise d.fail("stochastic rounding")

    @values.quiet
    def compute(a: Array) -> Array:
        x = widen(a)
        if integral:
            x = _INTEGRAL[integral](x)
        if to == "f64":
            y = x.astype(np.float64)
            if sat:
                y = np.where(y > 0, np.minimum(y, 1.0), 0.0)
            return y
        if to == "f32":
            return values.finish_f32(
                values.round_f32(x, mode) if of == "f64" else x.astype(np.float32), ftz, sat
            )
        if to == "tf32":
            bits = values.encode(x, values.TF32, mode, relu, satfinite) << np.uint32(13)
            return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)
        if sat:
            x = np.where(x > 0, np.minimum(x, 1.0), 0.0).astype(x.dtype)
        if of == "f64":
            return values.encode(x, FORMATS[to], mode, relu, satfinite).astype(np.uint16)
        return values.narrow(x, FORMATS[to], mode, relu, satfinite).astype(np.uint16)

    return _emit(d, to, compute, of)


def _element(t: str) -> Format | None:
    return FORMATS.get(t.removesuffix("x2"))


def _cvt_packed(d: Decoder, to: str, of: str) -> Step:
    """Two values at once. Of two f32 sources the first becomes the upper half."""
    mode, _, _ = _flags(d)
    relu, satfinite = "relu" in d.mods, "satfinite" in d.mods
    if "rs" in d.mods:
        raise d.fail("stochastic rounding")
    if to == "ue8m0x2":
        if of not in ("f32", "bf16x2"):
            raise d.fail()
        return _cvt_scale(d, of, mode)
    if of == "ue8m0x2":
        return _emit(d, to, _scale_to_bf16, "b16")
    target = _element(to)
    if target is None:
        raise d.fail()
    bits = target.bits if target.bits in (4, 16) else 8
    width = {4: 1, 8: 2, 16: 4}[bits]
    small = target.bits < 16

    def pack(upper: Array, lower: Array) -> Array:
        hi, lo = (values.narrow(x, target, mode, relu, satfinite or small) for x in (upper, lower))
        return ((hi << np.uint32(bits)) | lo).astype(UINT[width])

    out = f"b{8 * width}"
    if of == "f32":
        return _emit(d, out, pack, "f32", "f32")
    source = _element(of)
    if source is None:
        raise d.fail()
    each = {4: 4, 6: 8, 8: 8, 16: 16}[source.bits]

    def repack(a: Array) -> Array:
        x = a.astype(np.uint32)
        return pack(
            values.decode(x >> np.uint32(each), source), values.decode(x & np.uint32((1 << each) - 1), source)
        )

    return _emit(d, out, repack, f"b{2 * each}")


def _cvt_scale(d: Decoder, of: str, mode: str) -> Step:
    """f32 -> ue8m0: the exponent alone; `.rp` rounds up, `.rz` down. Zero and below give 2^-127."""

    def scale(x: Array) -> Array:
        bits = np.abs(x).astype(np.float32).view(np.uint32)
        e = bits >> np.uint32(23)
        if mode == "rp":
            rest = bits & np.uint32(0x7FFFFF)
            # Between 2^-127 and 2^-126 lie subnormals: anything above 2^-127 rounds up to exponent field 1.
            e = e + np.where(e == 0, rest > np.uint32(0x400000), rest != 0)
        e = np.where(np.isinf(x), 254, np.minimum(e, 254))
        return np.where(np.isnan(x), 255, e).astype(np.uint32)

    if of == "f32":
        return _emit(d, "b16", lambda a, b: ((scale(a) << np.uint32(8)) | scale(b)).astype(np.uint16), of, of)

    def pair(a: Array) -> Array:
        hi, lo = values.decode(a >> np.uint32(16), BF16), values.decode(a & np.uint32(0xFFFF), BF16)
        return ((scale(hi) << np.uint32(8)) | scale(lo)).astype(np.uint16)

    return _emit(d, "b16", pair, "b32")


def _scale_to_bf16(a: Array) -> Array:
    x = a.astype(np.uint32)
    out = np.zeros(x.shape, np.uint32)
    for k in (0, 1):
        e = (x >> np.uint32(8 * k)) & np.uint32(0xFF)
        bits = np.where(e == 255, 0x7FFF, np.where(e == 0, 0x40, e << np.uint32(7))).astype(np.uint32)
        out |= bits << np.uint32(16 * k)
    return out
