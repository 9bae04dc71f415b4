"""Integer, logic, comparison and selection instructions.

PTX ISA, "Integer Arithmetic Instructions", "Comparison and Selection Instructions", "Logic and Shift
Instructions", and the register moves of "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Imm, Pair, Reg, Vec
from . import ops_arith
from .program import WIDTH, Decoder, Reader, Step, Writer, dtype, immediate, op
from .values import SINT, UINT, Array

if TYPE_CHECKING:
    from .grid import Grid, Selection


def emit(write: Writer, compute: Callable[..., Array], *sources: Reader) -> Step:
    """A step that writes `compute` of its sources."""
    if len(sources) == 2:
        a, b = sources

        def two(g: Grid, sel: Selection) -> None:
            write(g, sel, compute(a(g, sel), b(g, sel)))

        return two

    def run(g: Grid, sel: Selection) -> None:
        write(g, sel, compute(*[s(g, sel) for s in sources]))

    return run


def is_float(type_: str) -> bool:
    return type_.startswith(("f", "bf", "tf"))


def same(d: Decoder, compute: Callable[..., Array], n: int) -> Step:
    """Destination and `n` sources of the instruction's type."""
    return emit(d.dst(0, d.type), compute, *[d.src(k + 1, d.type) for k in range(n)])


# -- addition, multiplication ---------------------------------------------------------------------------


def _saturating(sign: int) -> Callable[[Array, Array], Array]:
    def compute(a: Array, b: Array) -> Array:
        wide = a.astype(np.int64) + sign * b.astype(np.int64)
        return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)

    return compute


@op("add", "sub")
def add(d: Decoder) -> Step:
    if is_float(d.type):
        return ops_arith.add(d)
    sign = 1 if d.ins.opcode == "add" else -1
    if "sat" in d.mods:
        return same(d, _saturating(sign), 2)
    if "x2" in d.type:
        return same(d, _halves(np.add if sign > 0 else np.subtract, np.dtype(np.uint16)), 2)
    return same(d, np.add if sign > 0 else np.subtract, 2)


def _halves(f: Callable[[Array, Array], Array], part: np.dtype[Any]) -> Callable[[Array, Array], Array]:
    """Apply `f` to both 16-bit halves of 32-bit values."""

    def compute(a: Array, b: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        x, y = (np.ascontiguousarray(v, dtype=np.uint32).view(part) for v in (a, b))
        return f(x, y).astype(part).view(np.uint32)

    return compute


def high(a: Array, b: Array) -> Array:
    """Upper half of the product of two integers of the same type."""
    w = a.dtype.itemsize
    signed = a.dtype.kind == "i"
    if w < 8:
        wide = (SINT if signed else UINT)[2 * w]
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(8 * w)).astype(a.dtype)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(np.uint64), b.view(np.uint64)
    xl, xh, yl, yh = x & mask, x >> half, y & mask, y >> half
    middle = xh * yl + ((xl * yl) >> half)
    other = xl * yh + (middle & mask)
    out = xh * yh + (middle >> half) + (other >> half)
    if signed:
        out = out - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return out.view(a.dtype)


def wide(a: Array, b: Array) -> Array:
    """Product in twice the width."""
    to = (SINT if a.dtype.kind == "i" else UINT)[2 * a.dtype.itemsize]
    return a.astype(to) * b.astype(to)


@op("mul", "mad")
def mul(d: Decoder) -> Step:
    if is_float(d.type):
        return ops_arith.mul(d) if d.ins.opcode == "mul" else ops_arith.fma(d)
    product = wide if "wide" in d.mods else high if "hi" in d.mods else np.multiply
    t = d.type
    out = f"{t[0]}{16 * WIDTH[t]}" if "wide" in d.mods else t
    a, b = d.src(1, t), d.src(2, t)
    if d.ins.opcode == "mul":
        return emit(d.dst(0, out), product, a, b)
    if "sat" in d.mods:

        def saturating(x: Array, y: Array, z: Array) -> Array:
            return np.clip(product(x, y).astype(np.int64) + z, -(2**31), 2**31 - 1).astype(np.int32)

        return emit(d.dst(0, out), saturating, a, b, d.src(3, out))
    return emit(d.dst(0, out), lambda x, y, z: product(x, y) + z, a, b, d.src(3, out))


@op("mul24", "mad24")
def mul24(d: Decoder) -> Step:
    t = d.type

    def product(x: Array, y: Array) -> Array:
        x64, y64 = (
            ((v.astype(np.int64) << 40) >> 40) if t[0] == "s" else v.astype(np.int64) & 0xFFFFFF
            for v in (x, y)
        )
        full = x64 * y64
        return ((full >> 16) if "hi" in d.mods else full).astype(np.uint32).view(dtype(t))

    if d.ins.opcode == "mul24":
        return same(d, product, 2)
    return same(d, lambda x, y, z: product(x, y) + z, 3)


@op("addc", "subc", "madc")
def carry(d: Decoder) -> Step:
    raise d.fail("the carry flag is not kept")


@op("div", "rem")
def div(d: Decoder) -> Step:
    if is_float(d.type):
        return ops_arith.div(d)
    remainder = d.ins.opcode == "rem"

    def compute(a: Array, b: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        zero = b == 0
        safe = np.where(zero, b.dtype.type(1), b)
        minus = (safe == -1) if b.dtype.kind == "i" else zero
        q = a // np.where(minus, b.dtype.type(1), safe)
        if a.dtype.kind == "i":  # numpy rounds down, PTX towards zero; dividing the lowest number by -1 wraps
            q = q + ((a != q * safe) & ((a < 0) != (safe < 0)) & ~minus)
            q = np.where(minus, -a, q)
        # Division by zero gives an unspecified value that depends on the machine; all ones here.
        return np.where(zero, ~a.dtype.type(0), a - q * safe if remainder else q)

    return same(d, compute, 2)


@op("sad")
def sad(d: Decoder) -> Step:
    return same(d, lambda a, b, c: c + np.where(a < b, b - a, a - b), 3)


@op("abs", "neg")
def sign(d: Decoder) -> Step:
    if is_float(d.type):
        return ops_arith.sign(d)
    return same(d, np.abs if d.ins.opcode == "abs" else np.negative, 1)


@op("min", "max")
def minmax(d: Decoder) -> Step:
    if is_float(d.type):
        return ops_arith.minmax(d)
    f = np.minimum if d.ins.opcode == "min" else np.maximum
    if "x2" in d.type:
        return same(d, _halves(f, np.dtype(np.int16 if d.type[0] == "s" else np.uint16)), 2)
    if "relu" in d.mods:
        return same(d, lambda a, b: np.maximum(f(a, b), 0), 2)
    return same(d, f, 2)


@op("dp4a", "dp2a")
def dot(d: Decoder) -> Step:
    ta, tb = d.mods[-2], d.mods[-1]
    signed = "s" in (ta[0], tb[0])
    out = "s32" if signed else "u32"
    four = d.ins.opcode == "dp4a"
    shift = 2 if "hi" in d.mods else 0

    def compute(a: Array, b: Array, c: Array) -> Array:
        a, b, c = np.broadcast_arrays(a, b, c)
        total = c.astype(np.int64)
        for i in range(4 if four else 2):
            x = _field(a, 8 if four else 16, i, ta[0] == "s")
            total = total + x * _field(b, 8, i if four else i + shift, tb[0] == "s")
        return total.astype(np.uint32).view(dtype(out))

    return emit(d.dst(0, out), compute, d.src(1, "b32"), d.src(2, "b32"), d.src(3, out))


def _field(x: Array, bits: int, i: int, signed: bool) -> Array:
    v = (x.astype(np.int64) >> (bits * i)) & ((1 << bits) - 1)
    return v - ((v >> (bits - 1)) << bits) if signed else v


# -- bits -----------------------------------------------------------------------------------------------


@op("popc", "clz", "brev", "bfind")
def bits(d: Decoder) -> Step:
    t = d.type
    width = 8 * WIDTH[t]
    name = d.ins.opcode

    def table(a: Array) -> Array:
        """Bits of each value, shape [lanes, width], most significant first."""
        raw = np.ascontiguousarray(a).view(UINT[WIDTH[t]]).byteswap().view(np.uint8)
        return np.unpackbits(raw.reshape(-1, WIDTH[t]), axis=1)

    def compute(a: Array) -> Array:
        if name == "popc":
            return np.bitwise_count(a.view(UINT[WIDTH[t]])).astype(np.uint32)
        if name == "brev":
            flipped = np.packbits(table(a)[:, ::-1], axis=1)
            return flipped.view(UINT[WIDTH[t]]).byteswap().ravel()
        if name == "bfind" and t[0] == "s":
            a = np.where(a < 0, ~a, a)
        b = table(a)
        zeros = np.where(b.any(axis=1), b.argmax(axis=1), width).astype(np.uint32)
        if name == "clz":
            return zeros
        found = zeros < width
        position = zeros if "shiftamt" in d.mods else np.uint32(width - 1) - zeros
        return np.where(found, position, np.uint32(0xFFFFFFFF)).astype(np.uint32)

    return emit(d.dst(0, t if name == "brev" else "u32"), compute, d.src(1, t))


@op("bfe")
def bfe(d: Decoder) -> Step:
    t = d.type
    width = 8 * WIDTH[t]

    def compute(a: Array, b: Array, c: Array) -> Array:
        pos, length = (v & np.uint32(0xFF) for v in (b, c))
        a, pos, length = np.broadcast_arrays(a, pos, length)
        u = a.view(UINT[WIDTH[t]]).astype(np.uint64)
        low = np.where(pos < width, u >> np.minimum(pos, 63).astype(np.uint64), np.uint64(0))
        keep = np.where(
            length >= 64,
            np.uint64(2**64 - 1),
            (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1),
        )
        out = low & keep
        if t[0] == "s":
            top = np.minimum(pos.astype(np.int64) + length - 1, width - 1)
            negative = ((u >> np.maximum(top, 0).astype(np.uint64)) & np.uint64(1) != 0) & (length > 0)
            available = np.clip(width - pos.astype(np.int64), 0, None)
            filled = np.minimum(length, available).astype(np.uint64)
            ones = np.where(
                filled >= 64, np.uint64(0), np.uint64(2**64 - 1) << np.minimum(filled, np.uint64(63))
            )
            out = np.where(negative, out | ones, out)
        return out.astype(UINT[WIDTH[t]]).view(dtype(t))

    return emit(d.dst(0, t), compute, d.src(1, t), d.src(2, "u32"), d.src(3, "u32"))


@op("bfi")
def bfi(d: Decoder) -> Step:
    t = d.type
    width = 8 * WIDTH[t]

    def compute(a: Array, b: Array, c: Array, e: Array) -> Array:
        pos, length = (np.uint64(0) + (v & np.uint32(0xFF)) for v in (c, e))
        keep = np.where(
            length >= 64,
            np.uint64(2**64 - 1),
            (np.uint64(1) << np.minimum(length, np.uint64(63))) - np.uint64(1),
        )
        at = np.minimum(pos, np.uint64(63))
        mask = np.where(pos < width, keep << at, np.uint64(0))
        out = (b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << at) & mask)
        return out.astype(UINT[WIDTH[t]])

    return emit(d.dst(0, t), compute, d.src(1, t), d.src(2, t), d.src(3, "u32"), d.src(4, "u32"))


@op("bmsk")
def bmsk(d: Decoder) -> Step:
    clamp = "clamp" in d.mods

    def compute(a: Array, b: Array) -> Array:
        pos, length = (
            v.astype(np.uint64) if clamp else (v & np.uint32(31)).astype(np.uint64) for v in (a, b)
        )
        pos, length = np.minimum(pos, np.uint64(32)), np.minimum(length, np.uint64(32))
        return ((((np.uint64(1) << length) - np.uint64(1)) << pos) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return emit(d.dst(0, "b32"), compute, d.src(1, "u32"), d.src(2, "u32"))


@op("prmt")
def prmt(d: Decoder) -> Step:
    mode = d.mods[-1] if d.mods[-1] in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16") else ""

    def select(c: Array) -> Array:
        """Selectors [lanes, 4] of 4 bits, low byte first."""
        c = c.astype(np.int64)
        i = np.arange(4)
        if not mode:
            return (c[:, None] >> (4 * i)) & 0xF
        s = (c & 3)[:, None]
        if mode == "f4e":
            return s + i
        if mode == "b4e":
            return (s - i) & 7
        if mode == "rc8":
            return np.repeat(s, 4, axis=1)
        if mode == "ecl":
            return np.maximum(s, i)
        if mode == "ecr":
            return np.minimum(s, i)
        return np.where(s & 1, np.array([2, 3, 2, 3]), np.array([0, 1, 0, 1]))

    def compute(a: Array, b: Array, c: Array) -> Array:
        a, b, c = np.broadcast_arrays(a, b, c)
        both = np.stack([a, b], axis=1).view(np.uint8)
        s = select(c)
        byte = np.take_along_axis(both, s & 7, axis=1)
        if not mode:
            signs = np.where(byte & 0x80, 0xFF, 0).astype(np.uint8)
            byte = np.where(s & 8, signs, byte)
        return np.ascontiguousarray(byte).view(np.uint32).ravel()

    return emit(d.dst(0, "b32"), compute, d.src(1, "b32"), d.src(2, "b32"), d.src(3, "b32"))


@op("lop3")
def lop3(d: Decoder) -> Step:
    boolean = d.mods[0] in ("or", "and")
    table = d.operand(4)
    if not isinstance(table, Imm):
        raise d.fail("immLut")
    lut = int(table.value)

    def compute(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for i in range(8):
            if lut >> i & 1:
                out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return out

    sources = [d.src(k, "b32") for k in (1, 2, 3)]
    o = d.operand(0)
    if not boolean:
        return emit(d.dst(0, "b32"), compute, *sources)
    first, second = (o.first, o.second) if isinstance(o, Pair) else (Reg("_"), o)
    write, p, q = d.dst(first, "b32"), d.dst_pred(second), d.pred(5)
    use_and = d.mods[0] == "and"

    def run(g: Grid, sel: Selection) -> None:
        out = compute(*[s(g, sel) for s in sources])
        other = q(g, sel)
        write(g, sel, out)
        p(g, sel, (out != 0) & other if use_and else (out != 0) | other)

    return run


@op("shf")
def shf(d: Decoder) -> Step:
    clamp, left = "clamp" in d.mods, "l" in d.mods

    def compute(a: Array, b: Array, c: Array) -> Array:
        n = (np.minimum(c, np.uint32(32)) if clamp else c & np.uint32(31)).astype(np.uint64)
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        out = (both << n) >> np.uint64(32) if left else both >> n
        return out.astype(np.uint32)

    return emit(d.dst(0, "b32"), compute, d.src(1, "b32"), d.src(2, "b32"), d.src(3, "u32"))


@op("shl", "shr")
def shift(d: Decoder) -> Step:
    t = d.type
    width = 8 * WIDTH[t]
    left = d.ins.opcode == "shl"
    dt = dtype(t)
    amount = d.operand(2)
    if isinstance(amount, Imm):  # the common case: no clamping at run time
        n = int(immediate(amount, "u32")[0])
        a = d.src(1, t)
        write = d.dst(0, t)
        if n >= width:
            last = dt.type(width - 1)
            if not left and t[0] == "s":
                return emit(write, lambda x: x >> last, a)
            return emit(write, np.zeros_like, a)
        by = dt.type(n)
        return emit(write, (lambda x: x << by) if left else (lambda x: x >> by), a)

    def compute(a: Array, b: Array) -> Array:
        n = np.minimum(b, np.uint32(width - 1)).astype(dt)
        out = a << n if left else a >> n
        if not left and t[0] == "s":
            return out
        return np.where(b >= width, dt.type(0), out)

    return emit(d.dst(0, t), compute, d.src(1, t), d.src(2, "u32"))


_LOGIC: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@op("and", "or", "xor", "not", "cnot")
def logic(d: Decoder) -> Step:
    name = d.ins.opcode
    if d.mods[-1] == "pred":
        if name == "not":
            return emit(d.dst_pred(0), np.logical_not, d.pred(1))
        return emit(d.dst_pred(0), _LOGIC[name], d.pred(1), d.pred(2))
    if name == "not":
        return same(d, np.bitwise_not, 1)
    if name == "cnot":
        return same(d, lambda a: (a == 0).astype(a.dtype), 1)
    return same(d, _LOGIC[name], 2)


# -- comparison and selection ---------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, floating: bool) -> Callable[[Array, Array], Array]:
    """A `.cmp` modifier as a function. For floats plain names are false on NaN, those ending in `u` true."""
    if not floating:
        return _COMPARE[name]

    def ordered(a: Array, b: Array) -> Array:
        return ~(np.isnan(a) | np.isnan(b))

    if name == "num":
        return ordered
    if name == "nan":
        return lambda a, b: ~ordered(a, b)
    if name.endswith("u"):
        inner = _COMPARE[name[:-1]]
        return lambda a, b: inner(a, b) | ~ordered(a, b)
    if name == "ne":
        return lambda a, b: (a != b) & ordered(a, b)
    return _COMPARE[name]


@op("setp", "set")
def setp(d: Decoder) -> Step:
    name = d.mods[0]
    combine = next((m for m in d.mods[1:] if m in _LOGIC), "")
    t = d.type
    if "x2" in t:
        return ops_arith.setp_packed(d, comparison(name, True), combine)
    a, b, floating = ops_arith.comparable(d, t, 1)
    compare = comparison(name, floating)
    c = d.pred(3) if combine else None
    if d.ins.opcode == "set":
        out = d.mods[-2]
        if out not in ("u32", "s32", "f32"):
            raise d.fail()
        write = d.dst(0, out)
        yes = immediate(Imm(1.0, "1.0"), "f32") if out == "f32" else np.full(1, -1, np.int32).view(dtype(out))

        def run_set(g: Grid, sel: Selection) -> None:
            p = compare(a(g, sel), b(g, sel))
            if c is not None:
                p = _LOGIC[combine](p, c(g, sel))
            write(g, sel, np.where(p, yes, yes.dtype.type(0)))

        return run_set
    o = d.operand(0)
    first, second = (o.first, o.second) if isinstance(o, Pair) else (o, Reg("_"))
    p_out, q_out = d.dst_pred(first), d.dst_pred(second)
    if c is None and not isinstance(o, Pair):
        return emit(p_out, compare, a, b)

    def run(g: Grid, sel: Selection) -> None:
        p = compare(a(g, sel), b(g, sel))
        q = ~p
        if c is not None:
            other = c(g, sel)
            p, q = _LOGIC[combine](p, other), _LOGIC[combine](q, other)
        p_out(g, sel, p)
        q_out(g, sel, q)

    return run


@op("selp")
def selp(d: Decoder) -> Step:
    t = d.type
    bits_ = f"b{8 * WIDTH[t]}"
    a, b = d.src(1, t), d.src(2, t)
    u = UINT[WIDTH[t]]
    return emit(d.dst(0, bits_), lambda x, y, p: np.where(p, x.view(u), y.view(u)), a, b, d.pred(3))


@op("slct")
def slct(d: Decoder) -> Step:
    t, cond = d.mods[-2], d.mods[-1]
    u = UINT[WIDTH[t]]
    ftz = "ftz" in d.mods

    def compute(a: Array, b: Array, c: Array) -> Array:
        choose = c >= 0  # false for NaN
        if ftz:  # a negative subnormal counts as -0
            choose = choose | (np.abs(c) < np.float32(2.0**-126))
        return np.where(choose, a.view(u), b.view(u))

    return emit(d.dst(0, f"b{8 * WIDTH[t]}"), compute, d.src(1, t), d.src(2, t), d.src(3, cond))


# -- moves ----------------------------------------------------------------------------------------------


@op("mov")
def mov(d: Decoder) -> Step:
    if d.mods[-1] == "pred":
        return emit(d.dst_pred(0), lambda p: p, d.pred(1))
    t = d.type
    to, of = d.operand(0), d.operand(1)
    if isinstance(of, Vec):  # pack, first element lowest
        n = len(of.items)
        part = f"b{8 * WIDTH[t] // n}"
        readers = [d.src(x, part) for x in of.items]
        whole = UINT[WIDTH[t]]
        shift_ = WIDTH[t] * 8 // n

        def pack(*xs: Array) -> Array:
            out = xs[0].astype(whole)
            for i, x in enumerate(xs[1:], 1):
                out = out | (x.astype(whole) << whole.type(shift_ * i))
            return out

        return emit(d.dst(0, t), pack, *readers)
    if isinstance(to, Vec):
        n = len(to.items)
        part = f"b{8 * WIDTH[t] // n}"
        writers = [d.dst(x, part) for x in to.items]
        source = d.src(1, f"b{8 * WIDTH[t]}")
        whole, small = UINT[WIDTH[t]], UINT[WIDTH[part]]

        def unpack(g: Grid, sel: Selection) -> None:
            x = source(g, sel).copy()  # a destination may be the source
            for i, write in enumerate(writers):
                write(g, sel, (x >> whole.type(8 * small.itemsize * i)).astype(small))

        return unpack
    return emit(d.dst(0, t), lambda x: x, d.src(1, t))


@op("isspacep")
def isspacep(d: Decoder) -> Step:
    from . import memory as mem

    space = d.mods[0]

    def run(g: Grid, sel: Selection) -> None:
        x = address(g, sel)
        shared = (x >= mem.SHARED_WINDOW) & (x < mem.LOCAL_WINDOW)
        if space == "global":
            p = (x < mem.SHARED_WINDOW) | (x >= mem.WINDOW_END)
        elif space.startswith("shared"):
            own = ((x >> np.uint64(mem.RANK_SHIFT)) & np.uint64(0xFF)).astype(np.uint32) == g.rank[sel]
            p = shared & (own if space != "shared::cluster" else True)
        elif space == "local":
            p = (x >= mem.LOCAL_WINDOW) & (x < mem.PARAM_WINDOW)
        else:
            p = (x >= mem.PARAM_WINDOW) & (x < mem.WINDOW_END)
        write(g, sel, p)

    write, address = d.dst_pred(0), d.src(1, "u64")
    if space not in ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry"):
        raise d.fail(space)
    return run
