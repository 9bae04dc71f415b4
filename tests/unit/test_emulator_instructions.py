"""Every arithmetic, logic and conversion instruction against a scalar definition in Python."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from emulator_support import assemble_all, elementwise, entry
from k3_audit.audit import emulator
from k3_audit.audit.emulator import Unsupported, values

pytestmark = pytest.mark.unit

N = 400


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """NaN and infinity are values here."""
    with np.errstate(all="ignore"):
        yield


def integers(width: int, seed: int) -> np.ndarray:
    """Random words of `width` bytes with the corner cases first."""
    rng = np.random.default_rng(seed)
    bits = 8 * width
    corners = [0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 31, 32, 33, 0x80, 0x7F, 0xAA]
    raw = rng.integers(0, 2**64, N, dtype=np.uint64, endpoint=False)
    raw[: len(corners)] = rng.permutation(np.array(corners, np.uint64))
    small = rng.random(N) < 0.2
    raw[small] &= np.uint64(0xFF)
    return (raw & np.uint64((1 << bits) - 1)).astype(f"u{width}")


def signed(v: int, bits: int) -> int:
    return v - (1 << bits) if v >> (bits - 1) & 1 else v


def check(
    line: str, inputs: list[np.ndarray], out: str, want: Callable[..., int | bool], arch: str = "sm_90a"
) -> None:
    (got,) = elementwise(line, inputs, [out], arch)
    mask = 1 if out == "pred" else (1 << int(out[1:])) - 1
    for k in range(inputs[0].size):
        operands = [int(x[k]) for x in inputs]
        expected = int(want(*operands)) & mask
        assert int(got[k]) == expected, (
            f"{line} of {[hex(o) for o in operands]}: {int(got[k]):#x}, want {expected:#x}"
        )


WIDTHS = {16: 2, 32: 4, 64: 8}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("add.s{}", lambda a, b, n: a + b),
        ("sub.s{}", lambda a, b, n: a - b),
        ("mul.lo.s{}", lambda a, b, n: a * b),
        ("mul.hi.s{}", lambda a, b, n: signed(a, n) * signed(b, n) >> n),
        ("mul.hi.u{}", lambda a, b, n: a * b >> n),
        ("min.s{}", lambda a, b, n: min(signed(a, n), signed(b, n))),
        ("max.s{}", lambda a, b, n: max(signed(a, n), signed(b, n))),
        ("min.u{}", lambda a, b, n: min(a, b)),
        ("max.u{}", lambda a, b, n: max(a, b)),
        ("and.b{}", lambda a, b, n: a & b),
        ("or.b{}", lambda a, b, n: a | b),
        ("xor.b{}", lambda a, b, n: a ^ b),
        ("div.u{}", lambda a, b, n: a // b if b else -1),
        ("rem.u{}", lambda a, b, n: a % b if b else -1),
        ("div.s{}", lambda a, b, n: int(Fraction(signed(a, n), signed(b, n))) if b else -1),
        (
            "rem.s{}",
            lambda a, b, n: _rem(a, b, n),
        ),
    ],
)
def test_two_operands(name: str, f: Callable[[int, int, int], int], bits: int) -> None:
    w = WIDTHS[bits]
    check(
        f"{name.format(bits)} d0, a0, a1;",
        [integers(w, 1), integers(w, 2)],
        f"b{bits}",
        lambda a, b: int(f(a, b, bits)),
    )


def _rem(a: int, b: int, n: int) -> int:
    if not b:
        return -1
    x, y = signed(a, n), signed(b, n)
    return x - y * int(Fraction(x, y))


@pytest.mark.parametrize("bits", WIDTHS)
def test_one_operand(bits: int) -> None:
    x = [integers(WIDTHS[bits], 3)]
    check(f"not.b{bits} d0, a0;", x, f"b{bits}", lambda a: ~a)
    check(f"cnot.b{bits} d0, a0;", x, f"b{bits}", lambda a: a == 0)
    check(f"neg.s{bits} d0, a0;", x, f"b{bits}", lambda a: -a)
    check(f"abs.s{bits} d0, a0;", x, f"b{bits}", lambda a: abs(signed(a, bits)))
    if bits >= 32:
        check(f"popc.b{bits} d0, a0;", x, "b32", lambda a: a.bit_count())
        check(f"clz.b{bits} d0, a0;", x, "b32", lambda a: bits - a.bit_length())
        check(f"brev.b{bits} d0, a0;", x, f"b{bits}", lambda a: int(f"{a:0{bits}b}"[::-1], 2))
        check(f"bfind.u{bits} d0, a0;", x, "b32", lambda a: a.bit_length() - 1)
        check(
            f"bfind.s{bits} d0, a0;",
            x,
            "b32",
            lambda a: (~signed(a, bits) if signed(a, bits) < 0 else a).bit_length() - 1,
        )
        check(
            f"bfind.shiftamt.u{bits} d0, a0;", x, "b32", lambda a: bits - a.bit_length() if a else 0xFFFFFFFF
        )


@pytest.mark.parametrize("bits", [16, 32])
def test_wide_multiplication(bits: int) -> None:
    w = WIDTHS[bits]
    x = [integers(w, 4), integers(w, 5), integers(2 * w, 6)]
    out = f"b{2 * bits}"
    check(f"mul.wide.u{bits} d0, a0, a1;", x[:2], out, lambda a, b: a * b)
    check(f"mul.wide.s{bits} d0, a0, a1;", x[:2], out, lambda a, b: signed(a, bits) * signed(b, bits))
    check(f"mad.wide.s{bits} d0, a0, a1, a2;", x, out, lambda a, b, c: signed(a, bits) * signed(b, bits) + c)


@pytest.mark.parametrize("bits", [32, 64])
def test_mad(bits: int) -> None:
    x = [integers(WIDTHS[bits], k) for k in (7, 8, 9)]
    check(f"mad.lo.s{bits} d0, a0, a1, a2;", x, f"b{bits}", lambda a, b, c: a * b + c)
    check(f"mad.hi.u{bits} d0, a0, a1, a2;", x, f"b{bits}", lambda a, b, c: (a * b >> bits) + c)


def test_saturating_and_other_32_bit_arithmetic() -> None:
    x = [integers(4, k) for k in (10, 11, 12)]

    def clamp(v: int) -> int:
        return max(-(2**31), min(2**31 - 1, v))

    check("add.sat.s32 d0, a0, a1;", x[:2], "b32", lambda a, b: clamp(signed(a, 32) + signed(b, 32)))
    check("sub.sat.s32 d0, a0, a1;", x[:2], "b32", lambda a, b: clamp(signed(a, 32) - signed(b, 32)))
    check(
        "mad.hi.sat.s32 d0, a0, a1, a2;",
        x,
        "b32",
        lambda a, b, c: clamp((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32)),
    )
    check("sad.u32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: c + abs(a - b))
    check("sad.s32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: c + abs(signed(a, 32) - signed(b, 32)))
    check("mul24.lo.u32 d0, a0, a1;", x[:2], "b32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))
    check(
        "mul24.hi.s32 d0, a0, a1;",
        x[:2],
        "b32",
        lambda a, b: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24) >> 16,
    )

    def dot(a: int, b: int, c: int) -> int:
        return c + sum(signed(a >> 8 * i & 255, 8) * (b >> 8 * i & 255) for i in range(4))

    check("dp4a.s32.u32 d0, a0, a1, a2;", x, "b32", dot)
    check(
        "dp2a.hi.u32.u32 d0, a0, a1, a2;",
        x,
        "b32",
        lambda a, b, c: c + sum((a >> 16 * i & 0xFFFF) * (b >> 8 * (i + 2) & 255) for i in range(2)),
    )
    check(
        "add.u16x2 d0, a0, a1;",
        x[:2],
        "b32",
        lambda a, b: (((a >> 16) + (b >> 16)) & 0xFFFF) << 16 | ((a + b) & 0xFFFF),
    )
    check(
        "max.s16x2 d0, a0, a1;",
        x[:2],
        "b32",
        lambda a, b: (
            (max(signed(a >> 16, 16), signed(b >> 16, 16)) & 0xFFFF) << 16
            | (max(signed(a & 0xFFFF, 16), signed(b & 0xFFFF, 16)) & 0xFFFF)
        ),
    )


@pytest.mark.parametrize("bits", WIDTHS)
def test_shifts_clamp(bits: int) -> None:
    x, n = integers(WIDTHS[bits], 13), integers(4, 14)
    n[::3] %= 70
    check(f"shl.b{bits} d0, a0, a1;", [x, n], f"b{bits}", lambda a, b: a << min(b, 200))
    check(f"shr.u{bits} d0, a0, a1;", [x, n], f"b{bits}", lambda a, b: a >> min(b, 200))
    check(f"shr.s{bits} d0, a0, a1;", [x, n], f"b{bits}", lambda a, b: signed(a, bits) >> min(b, 200))
    for k in (0, 5, bits - 1, bits, bits + 9):
        check(f"shl.b{bits} d0, a0, {k};", [x], f"b{bits}", lambda a, k=k: a << k)
        check(f"shr.u{bits} d0, a0, {k};", [x], f"b{bits}", lambda a, k=k: a >> k)
        check(f"shr.s{bits} d0, a0, {k};", [x], f"b{bits}", lambda a, k=k: signed(a, bits) >> k)


def test_funnel_shift() -> None:
    x = [integers(4, k) for k in (15, 16, 17)]

    def both(a: int, b: int) -> int:
        return b << 32 | a

    check("shf.l.wrap.b32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: both(a, b) << (c & 31) >> 32)
    check("shf.r.wrap.b32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: both(a, b) >> (c & 31))
    check("shf.l.clamp.b32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: both(a, b) << min(c, 32) >> 32)
    check("shf.r.clamp.b32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: both(a, b) >> min(c, 32))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    w = WIDTHS[bits]
    x, y, pos, length = integers(w, 18), integers(w, 19), integers(4, 20) % 80, integers(4, 21) % 80

    def field(a: int, p: int, n: int) -> int:
        return (a >> p) & ((1 << n) - 1)

    def signed_field(a: int, p: int, n: int) -> int:
        if n == 0:
            return 0
        sign = a >> min(p + n - 1, bits - 1) & 1
        return sum((a >> p + i & 1 if p + i < bits and i < n else sign) << i for i in range(bits))

    check(f"bfe.u{bits} d0, a0, a1, a2;", [x, pos, length], f"b{bits}", field)
    check(f"bfe.s{bits} d0, a0, a1, a2;", [x, pos, length], f"b{bits}", signed_field)

    def insert(a: int, b: int, p: int, n: int) -> int:
        mask = ((1 << n) - 1) << p
        return (b & ~mask) | (a << p & mask)

    check(f"bfi.b{bits} d0, a0, a1, a2, a3;", [x, y, pos, length], f"b{bits}", insert)


def test_byte_permutation_and_three_input_logic() -> None:
    x = [integers(4, k) for k in (22, 23, 24)]

    def prmt(a: int, b: int, c: int) -> int:
        both, out = b << 32 | a, 0
        for i in range(4):
            s = c >> 4 * i & 15
            byte = both >> 8 * (s & 7) & 255
            out |= (255 * (byte >> 7) if s & 8 else byte) << 8 * i
        return out

    check("prmt.b32 d0, a0, a1, a2;", x, "b32", prmt)

    def f4e(a: int, b: int, c: int) -> int:
        both = b << 32 | a
        return sum((both >> 8 * ((c & 3) + i) & 255) << 8 * i for i in range(4))

    check("prmt.b32.f4e d0, a0, a1, a2;", x, "b32", f4e)
    for lut in (0x00, 0x80, 0x96, 0xE8, 0xCA, 0xFF):

        def lop(a: int, b: int, c: int, lut: int = lut) -> int:
            return sum(
                (lut >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)
            )

        check(f"lop3.b32 d0, a0, a1, a2, {lut};", x, "b32", lop)
    check("bmsk.clamp.b32 d0, a0, a1;", [x[0] % 40, x[1] % 40], "b32", lambda p, n: ((1 << n) - 1) << p)


# -- comparison and selection ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "f"), [("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")]
)
def test_setp(name: str, f: str) -> None:
    def compare(a: float, b: float) -> bool:
        return bool(eval(f"a {f} b", {"a": a, "b": b}))

    a, b = integers(4, 25), integers(4, 26)
    b[::3] = a[::3]
    check(f"setp.{name}.s32 d0, a0, a1;", [a, b], "pred", lambda x, y: compare(signed(x, 32), signed(y, 32)))
    check(f"setp.{name}.u32 d0, a0, a1;", [a, b], "pred", compare)
    a[:9] = [0x7FC00000, 0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x3F800000, 0x7FC00000]
    b[:9] = [0x3F800000, 0x80000000, 0, 0x7F800000, 0x7F800000, 2, 0, 0x7FC00000, 0x7FC00000]

    def floats(x: int, y: int) -> tuple[float, float]:
        return (struct.unpack("<f", struct.pack("<I", x))[0], struct.unpack("<f", struct.pack("<I", y))[0])

    def unordered(x: float, y: float) -> bool:
        return math.isnan(x) or math.isnan(y)

    check(
        f"setp.{name}.f32 d0, a0, a1;",
        [a, b],
        "pred",
        lambda x, y: compare(*floats(x, y)) and not unordered(*floats(x, y)),
    )
    check(
        f"setp.{name}u.f32 d0, a0, a1;",
        [a, b],
        "pred",
        lambda x, y: compare(*floats(x, y)) or unordered(*floats(x, y)),
    )


def test_predicates_combine() -> None:
    a, b, c = integers(4, 27), integers(4, 28), integers(4, 29)
    lines = """.reg .pred p0, p1, p2, p3;
    setp.gt.u32 p0, a2, 1000;
    setp.lt.and.s32 p1|p2, a0, a1, !p0;
    setp.lt.xor.s32 p3, a0, a1, p0;
    selp.u32 d0, 1, 0, p1; selp.u32 d1, 1, 0, p2; selp.u32 d2, 1, 0, p3;
    set.lt.u32.s32 d3, a0, a1; set.lt.f32.s32 d4, a0, a1;"""
    got = elementwise(lines, [a, b, c], ["b32"] * 5)
    less, p0 = a.view(np.int32) < b.view(np.int32), c > 1000
    np.testing.assert_array_equal(got[0], less & ~p0)
    np.testing.assert_array_equal(got[1], ~less & ~p0)
    np.testing.assert_array_equal(got[2], less ^ p0)
    np.testing.assert_array_equal(got[3], np.where(less, 0xFFFFFFFF, 0))
    np.testing.assert_array_equal(got[4].view(np.float32), less.astype(np.float32))


def test_selection() -> None:
    x = [integers(4, k) for k in (30, 31, 32)]
    check("slct.b32.s32 d0, a0, a1, a2;", x, "b32", lambda a, b, c: a if signed(c, 32) >= 0 else b)
    check(
        "slct.ftz.b32.f32 d0, a0, a1, a2;",
        x,
        "b32",
        lambda a, b, c: (
            b if (c & 0x7FFFFFFF) > 0x7F800000 or (c >> 31 and (c & 0x7FFFFFFF) >= 0x00800000) else a
        ),
    )


def test_moves_pack_and_unpack() -> None:
    a, b = integers(4, 33), integers(4, 34)
    lines = """.reg .b16 l, h, l2, h2; .reg .b64 w; .reg .b32 u, v;
    mov.b64 w, {a0, a1}; mov.b64 {u, v}, w; mov.b32 {l, h}, u; mov.b32 d0, {h, l};
    mov.b64 {l, h, l2, h2}, w; mov.b64 d1, {h2, l2, h, l};"""
    rotated, flipped = elementwise(lines, [a, b], ["b32", "b64"])
    np.testing.assert_array_equal(rotated, (a << 16) | (a >> 16))
    want = [
        int.from_bytes(
            struct.pack("<4H", *reversed(struct.unpack("<4H", struct.pack("<2I", x, y)))), "little"
        )
        for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(flipped, np.array(want, np.uint64))


def test_immediates() -> None:
    x = integers(4, 35)
    got = elementwise(
        "mov.b32 d0, 0f3F800000; add.f32 d1, 0f3FC00000, 0f3F000000; mov.b64 d2, 0d4000000000000000; "
        "add.s32 d3, a0, -1; mov.b32 d4, 0xFFFFFFFF; mov.f32 d5, 0.1; and.b32 d6, a0, 0b1011;",
        [x],
        ["b32", "b32", "b64", "b32", "b32", "b32", "b32"],
    )
    assert set(got[0].tolist()) == {0x3F800000} and set(got[1].view(np.float32).tolist()) == {2.0}
    assert set(got[2].view(np.float64).tolist()) == {2.0}
    np.testing.assert_array_equal(got[3], x - np.uint32(1))
    assert set(got[4].tolist()) == {0xFFFFFFFF}
    assert got[5].view(np.float32)[0] == np.float32(0.1)
    np.testing.assert_array_equal(got[6], x & 11)


# -- floats ------------------------------------------------------------------------------------------------


def floats32(seed: int) -> np.ndarray:
    x = integers(4, seed)
    rng = np.random.default_rng(seed)
    plain = rng.random(N) < 0.6
    x[plain] = (
        (rng.standard_normal(N) * 10.0 ** rng.integers(-5, 5, N)).astype(np.float32).view(np.uint32)[plain]
    )
    return x


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, np.ascontiguousarray(want).view(got.dtype))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("ftz", [False, True])
def test_f32_instructions_use_the_tested_arithmetic(mode: str, ftz: bool) -> None:
    a, b, c = floats32(40), floats32(41), floats32(42)
    x, y, z = (v.view(np.float32) for v in (a, b, c))
    f = ".ftz" if ftz else ""
    lines = (
        f"add.{mode}{f}.f32 d0, a0, a1; sub.{mode}{f}.f32 d1, a0, a1; mul.{mode}{f}.f32 d2, a0, a1; "
        f"fma.{mode}{f}.f32 d3, a0, a1, a2; div.{mode}{f}.f32 d4, a0, a1; rcp.{mode}{f}.f32 d5, a0; "
        f"sqrt.{mode}{f}.f32 d6, a0; fma.{mode}{f}.sat.f32 d7, a0, a1, a2;"
    )
    got = elementwise(lines, [a, b, c], ["b32"] * 8)
    want = [
        values.add_f32(x, y, mode, ftz),
        values.add_f32(x, -y, mode, ftz),
        values.mul_f32(x, y, mode, ftz),
        values.fma_f32(x, y, z, mode, ftz),
        values.div_f32(x, y, mode, ftz),
        values.div_f32(np.ones_like(x), x, mode, ftz),
        values.sqrt_f32(x, mode, ftz),
        values.fma_f32(x, y, z, mode, ftz, sat=True),
    ]
    for g, w in zip(got, want, strict=True):
        same_bits(g, w)


def test_f64_instructions() -> None:
    rng = np.random.default_rng(43)
    x, y, z = rng.standard_normal((3, N))
    lines = (
        "add.rn.f64 d0, a0, a1; mul.rz.f64 d1, a0, a1; fma.rn.f64 d2, a0, a1, a2; div.rn.f64 d3, a0, a1; "
        "abs.f64 d4, a0; sqrt.rn.f64 d5, d4; rcp.rn.f64 d6, a0; neg.f64 d7, a0; max.f64 d8, a0, a1;"
    )
    got = elementwise(lines, [v.view(np.uint64) for v in (x, y, z)], ["b64"] * 9)
    want = [x + y, values.mul_f64(x, y, "rz"), values.fma_f64(x, y, z), x / y, np.abs(x)]
    want += [np.sqrt(np.abs(x)), 1 / x, -x, np.maximum(x, y)]
    for g, w in zip(got, want, strict=True):
        same_bits(g, w)
    assert (want[1] != x * y).any()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit_arithmetic(name: str) -> None:
    f = values.FORMATS[name]
    rng = np.random.default_rng(44)
    a, b, c = (rng.integers(0, 2**16, N).astype(np.uint16) for _ in range(3))
    one, minus_zero = values.encode(np.ones(1), f), np.full(1, 0x8000, np.uint16)
    lines = (
        f"add.rn.{name} d0, a0, a1; mul.rn.{name} d1, a0, a1; fma.rn.{name} d2, a0, a1, a2; neg.{name} d3, a0; "
        f"max.{name} d4, a0, a1; fma.rn.relu.{name} d5, a0, a1, a2; sub.rn.{name} d6, a0, a1;"
    )
    got = elementwise(lines, [a, b, c], ["b16"] * 7)
    same_bits(got[0], values.fma_narrow(a, one, b, f).astype(np.uint16))
    same_bits(got[1], values.fma_narrow(a, b, minus_zero, f).astype(np.uint16))
    same_bits(got[2], values.fma_narrow(a, b, c, f).astype(np.uint16))
    same_bits(got[3], a ^ np.uint16(0x8000))
    x, y = values.decode(a, f), values.decode(b, f)
    both = ~np.isnan(x) & ~np.isnan(y)
    np.testing.assert_array_equal(values.decode(got[4], f)[both], np.maximum(x, y)[both])
    plain = values.decode(got[2], f)
    np.testing.assert_array_equal(
        values.decode(got[5], f), np.where(np.isnan(plain), plain, np.maximum(plain, 0))
    )
    same_bits(got[6], values.fma_narrow(a, one, b ^ np.uint16(0x8000), f).astype(np.uint16))


def test_packed_16_bit_arithmetic_is_two_scalars() -> None:
    rng = np.random.default_rng(45)
    a, b, c = (rng.integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    lines = """.reg .b16 al, ah, bl, bh, cl, ch, rl, rh;
    mov.b32 {al, ah}, a0; mov.b32 {bl, bh}, a1; mov.b32 {cl, ch}, a2;
    fma.rn.bf16 rl, al, bl, cl; fma.rn.bf16 rh, ah, bh, ch; mov.b32 d0, {rl, rh};
    fma.rn.bf16x2 d1, a0, a1, a2; mul.rn.bf16x2 d2, a0, a1;
    mul.rn.bf16 rl, al, bl; mul.rn.bf16 rh, ah, bh; mov.b32 d3, {rl, rh};
    add.rn.f16x2 d4, a0, a1; add.rn.f16 rl, al, bl; add.rn.f16 rh, ah, bh; mov.b32 d5, {rl, rh};"""
    got = elementwise(lines, [a, b, c], ["b32"] * 6)
    for k in (0, 2, 4):
        np.testing.assert_array_equal(got[k], got[k + 1])


def test_f32x2_and_mixed_precision_need_blackwell() -> None:
    rng = np.random.default_rng(46)
    a, b, c = (rng.standard_normal((N, 2)).astype(np.float32) for _ in range(3))
    words = [v.view(np.uint64).ravel() for v in (a, b, c)]
    lines = "fma.rn.f32x2 d0, a0, a1, a2; add.rn.ftz.f32x2 d1, a0, a1; mul.rz.f32x2 d2, a0, a1;"
    got = elementwise(lines, words, ["b64"] * 3, arch="sm_100a")
    same_bits(got[0], values.fma_f32(a.ravel(), b.ravel(), c.ravel()))
    same_bits(got[1], (a + b).ravel())
    same_bits(got[2], values.mul_f32(a.ravel(), b.ravel(), "rz"))
    h = rng.integers(0, 2**16, N).astype(np.uint16) & np.uint16(0xBFFF)
    z = c[:, 0].copy()
    mixed = "fma.rn.f32.bf16 d0, a0, a0, a1; add.rn.f32.bf16 d1, a0, a1;"
    got = elementwise(mixed, [h, z.view(np.uint32)], ["b32"] * 2, arch="sm_100a")
    x = values.from_bf16(h)
    same_bits(got[0], values.fma_f32(x, x, z))
    same_bits(got[1], values.add_f32(x, z))
    hopper = entry(".reg .b64 a; fma.rn.f32x2 a, a, a, a; ret;", remember=False)
    with pytest.raises(Unsupported, match="sm_100"):
        emulator.run(hopper, [], (1, 1, 1), (1, 1, 1))


def test_signs_minima_and_tests_of_floats() -> None:
    a, b = floats32(47), floats32(48)
    a[:3], b[:3] = [0, 0x80000000, 0x7FC00000], [0x80000000, 0, 0x3F800000]
    lines = (
        "neg.f32 d0, a0; abs.f32 d1, a0; min.f32 d2, a0, a1; max.NaN.f32 d3, a0, a1; neg.ftz.f32 d4, a0; "
        "copysign.f32 d5, a0, a1; max.xorsign.abs.f32 d6, a0, a1;"
    )
    got = elementwise(lines, [a, b], ["b32"] * 7)
    x, y = a.view(np.float32), b.view(np.float32)
    same_bits(got[0], a ^ np.uint32(1 << 31))
    same_bits(got[1], a & np.uint32(0x7FFFFFFF))
    same_bits(got[2], values.minmax_f32(x, y, False))
    same_bits(got[3], values.minmax_f32(x, y, True, nan=True))
    same_bits(got[4], values.flush(x).view(np.uint32) ^ np.uint32(1 << 31))
    same_bits(got[5], (b & np.uint32(0x7FFFFFFF)) | (a & np.uint32(1 << 31)))
    largest = np.abs(values.minmax_f32(np.abs(x), np.abs(y), True))
    both = ~np.isnan(x) & ~np.isnan(y)
    want = np.where(np.signbit(x) != np.signbit(y), -largest, largest)
    np.testing.assert_array_equal(got[6].view(np.float32)[both], want[both])
    tests = {"finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan}
    for name, f in tests.items():
        (p,) = elementwise(f"testp.{name}.f32 d0, a0;", [a], ["pred"])
        np.testing.assert_array_equal(p, f(x))


def test_approximations_are_near() -> None:
    rng = np.random.default_rng(49)
    x = rng.uniform(0.1, 3, N).astype(np.float32)
    y = rng.uniform(0.1, 3, N).astype(np.float32)
    names = [
        "rcp.approx",
        "rsqrt.approx",
        "sqrt.approx",
        "ex2.approx",
        "lg2.approx",
        "sin.approx",
        "cos.approx",
        "tanh.approx",
    ]
    lines = "".join(f"{n}.f32 d{k}, a0; " for k, n in enumerate(names))
    lines += "div.full.f32 d8, a0, a1; div.approx.ftz.f32 d9, a0, a1;"
    got = [
        g.view(np.float32) for g in elementwise(lines, [x.view(np.uint32), y.view(np.uint32)], ["b32"] * 10)
    ]
    d = x.astype(np.float64)
    exact = [
        1 / d,
        1 / np.sqrt(d),
        np.sqrt(d),
        np.exp2(d),
        np.log2(d),
        np.sin(d),
        np.cos(d),
        np.tanh(d),
        d / y,
        d / y,
    ]
    for g, e in zip(got, exact, strict=True):
        np.testing.assert_allclose(g, e, rtol=2.0**-23, atol=1e-9)
    moved = elementwise("ex2.approx.f32 d0, a0;", [x.view(np.uint32)], ["b32"], approx_seed=1)[0].view(
        np.float32
    )
    assert (moved != got[3]).any()
    np.testing.assert_allclose(moved, np.exp2(d), rtol=2.0**-21)


# -- conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("of", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversions(to: str, of: str) -> None:
    width, bits = int(of[1:]) // 8, int(to[1:])
    x = integers(max(width, 2), 50)
    x[20:60] &= x.dtype.type((1 << 8 * width) - 1)

    def value(a: int) -> int:
        a &= (1 << 8 * width) - 1
        return signed(a, 8 * width) if of[0] == "s" else a

    out = f"b{max(bits, 16)}"

    def extended(v: int) -> int:
        v &= (1 << bits) - 1
        return signed(v, bits) if to[0] == "s" else v

    check(f"cvt.{to}.{of} d0, a0;", [x], out, lambda a: extended(value(a)))
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    least, most = (
        (-(1 << 8 * width - 1), (1 << 8 * width - 1) - 1) if of[0] == "s" else (0, (1 << 8 * width) - 1)
    )
    if least < low or most > high:  # .sat is legal only where it can matter
        check(f"cvt.sat.{to}.{of} d0, a0;", [x], out, lambda a: extended(max(low, min(high, value(a)))))


def test_float_integer_conversions() -> None:
    a = floats32(51)
    x = a.view(np.float32)
    lines = (
        "cvt.rni.s32.f32 d0, a0; cvt.rzi.u32.f32 d1, a0; cvt.rpi.s64.f32 d2, a0; cvt.rmi.ftz.s32.f32 d3, a0; "
        "cvt.rzi.s16.f32 d4, a0;"
    )
    got = elementwise(lines, [a], ["b32", "b32", "b64", "b32", "b16"])
    same_bits(got[0], values.float_to_int(x, "rni", 4, True, 0))
    same_bits(got[1], values.float_to_int(x, "rzi", 4, False, 0))
    same_bits(got[2], values.float_to_int(x, "rpi", 8, True, 1 << 63))
    same_bits(got[3], values.float_to_int(values.flush(x), "rmi", 4, True, 0))
    same_bits(got[4], values.float_to_int(x, "rzi", 2, True, 0))
    i = integers(8, 52)
    got = elementwise(
        "cvt.rn.f32.s64 d0, a0; cvt.rz.f32.u64 d1, a0; cvt.rn.f64.u64 d2, a0;", [i], ["b32", "b32", "b64"]
    )
    same_bits(got[0], i.view(np.int64).astype(np.float32))
    same_bits(got[1], values.round_f32(values.int_to_odd(i), "rz"))
    same_bits(got[2], i.astype(np.float64))


def test_float_conversions() -> None:
    a = floats32(53)
    x = a.view(np.float32)
    lines = (
        "cvt.rn.bf16.f32 d0, a0; cvt.rz.bf16.f32 d1, a0; cvt.rn.f16.f32 d2, a0; cvt.f64.f32 d3, a0; "
        "cvt.rn.relu.bf16.f32 d4, a0; cvt.rni.f32.f32 d5, a0; cvt.rna.tf32.f32 d6, a0; "
        "cvt.rn.satfinite.f16.f32 d7, a0; cvt.sat.f32.f32 d8, a0;"
    )
    got = elementwise(lines, [a], ["b16", "b16", "b16", "b64", "b16", "b32", "b32", "b16", "b32"])
    same_bits(got[0], values.encode(x, values.BF16).astype(np.uint16))
    same_bits(got[1], values.encode(x, values.BF16, "rz").astype(np.uint16))
    same_bits(got[2], values.encode(x, values.F16).astype(np.uint16))
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[3].view(np.float64)[number], wide[number])
    same_bits(got[4], values.encode(x, values.BF16, relu=True).astype(np.uint16))
    np.testing.assert_array_equal(got[5].view(np.float32)[number], np.rint(x)[number])
    finite = np.isfinite(x)
    np.testing.assert_array_equal(
        got[6][finite], (values.encode(x, values.TF32, "rna") << np.uint32(13))[finite]
    )
    same_bits(got[7], values.encode(x, values.F16, satfinite=True).astype(np.uint16))
    np.testing.assert_array_equal(got[8].view(np.float32)[number], np.clip(x, 0, 1)[number])
    h = integers(2, 54)
    back = elementwise("cvt.f32.bf16 d0, a0; cvt.f32.f16 d1, a0;", [h], ["b32", "b32"])
    b = values.from_bf16(h)
    np.testing.assert_array_equal(back[0].view(np.float32)[~np.isnan(b)], b[~np.isnan(b)])
    d = np.random.default_rng(55).standard_normal(N) * 1e3
    narrow = elementwise("cvt.rn.f32.f64 d0, a0; cvt.rz.f32.f64 d1, a0;", [d.view(np.uint64)], ["b32", "b32"])
    same_bits(narrow[0], d.astype(np.float32))
    same_bits(narrow[1], values.round_f32(d, "rz"))


def test_packed_conversions_put_the_first_source_high() -> None:
    a, b = floats32(56), floats32(57)
    x, y = a.view(np.float32), b.view(np.float32)
    lines = """cvt.rn.bf16x2.f32 d0, a0, a1; cvt.rn.relu.f16x2.f32 d1, a0, a1;
    cvt.rn.satfinite.e4m3x2.f32 d2, a0, a1; cvt.rn.satfinite.e5m2x2.f32 d3, a0, a1;
    cvt.rn.f16x2.e4m3x2 d4, d2; cvt.rn.satfinite.e4m3x2.f16x2 d5, d4;"""
    got = elementwise(lines, [a, b], ["b32", "b32", "b16", "b16", "b32", "b16"])
    high, low = values.encode(x, values.BF16), values.encode(y, values.BF16)
    same_bits(got[0], (high << np.uint32(16)) | low)
    high, low = (values.encode(v, values.F16, relu=True) for v in (x, y))
    same_bits(got[1], (high << np.uint32(16)) | low)
    for k, f in ((2, values.E4M3), (3, values.E5M2)):
        high, low = (values.encode(v, f, satfinite=True) for v in (x, y))
        same_bits(got[k], ((high << np.uint32(8)) | low).astype(np.uint16))
    same_bits(got[5], got[2])  # exact both ways


def test_block_scale_formats() -> None:
    a, b = floats32(58), floats32(59)
    lines = """.reg .b8 e; cvt.rn.satfinite.e2m1x2.f32 e, a0, a1; cvt.rn.f16x2.e2m1x2 d0, e;
    cvt.rp.satfinite.ue8m0x2.f32 d1, a0, a1; cvt.rn.bf16x2.ue8m0x2 d2, d1;"""
    got = elementwise(lines, [a, b], ["b32", "b16", "b32"], arch="sm_100a")
    x, y = a.view(np.float32), b.view(np.float32)
    number = ~np.isnan(x) & ~np.isnan(y)
    for half, v in ((got[0] >> np.uint32(16), x), (got[0] & np.uint32(0xFFFF), y)):
        want = values.decode(values.encode(v, values.E2M1), values.E2M1)
        np.testing.assert_array_equal(values.decode(half, values.F16)[number], want[number])
    normal = np.isfinite(x) & (np.abs(x) >= 2.0**-126) & (np.abs(x) <= 2.0**127)
    up = 2.0 ** np.ceil(np.log2(np.abs(x[normal].astype(np.float64))))
    np.testing.assert_array_equal(values.from_bf16((got[2] >> np.uint32(16)).astype(np.uint16))[normal], up)


# -- what is not known is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "wgmma.fence.sync.aligned;",
        "add.cc.u32 r, r, r; addc.u32 r, r, r;",
        "tcgen05.wait::ld.sync.aligned;",
        "add.surprising.u32 r, r, r;",
        "ld.mmio.relaxed.sys.global.u32 r, [w];",
        "cvt.rs.relu.bf16x2.f32 r, r, r, r;",
        "multimem.red.relaxed.sys.global.add.u32 [w], r;",
    ],
)
def test_unknown_instructions_raise(line: str) -> None:
    text = entry(f".reg .b32 r; .reg .b64 w; {line} ret;", remember=False)
    with pytest.raises(Unsupported, match="not emulated"):
        emulator.run(text, [], (1, 1, 1), (32, 1, 1))


def test_the_assembler_accepts_these_kernels(tmp_path: Path) -> None:
    """Last in the file: every snippet above is PTX that ptxas takes, not PTX of our own invention."""
    assert assemble_all(tmp_path) == []
