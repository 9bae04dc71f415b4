"""Number formats and rounding, against exact rational arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from k3_audit.audit.emulator import approx, values
from k3_audit.audit.emulator.values import FORMATS

pytestmark = pytest.mark.unit

MODES = ("rn", "rz", "rm", "rp")
bits32 = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=50, deadline=None)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """NaN and infinity are values here."""
    with np.errstate(all="ignore"):
        yield


def f32(bits: int) -> np.ndarray:
    return np.array([bits], np.uint32).view(np.float32)


def rounded(x: Fraction, precision: int, emin: int, largest: Fraction, mode: str) -> Fraction | str:
    """A non-zero rational in a binary format with `precision` significant bits: the definition, nothing clever."""
    sign, magnitude = (-1, -x) if x < 0 else (1, x)
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()  # right, or one too high
    e = max(e - (magnitude < Fraction(2) ** e), emin)
    quantum = Fraction(2) ** (e - precision + 1)
    steps = magnitude / quantum
    low = steps.numerator // steps.denominator
    rest = steps - low
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1)
    else:
        up = rest > 0 and ((mode == "rp" and sign > 0) or (mode == "rm" and sign < 0))
    value = (low + up) * quantum
    if value > largest:
        to_infinity = mode == "rn" or (mode != "rz" and (mode == "rp") == (sign > 0))
        return ("+inf" if sign > 0 else "-inf") if to_infinity else sign * largest
    return sign * value


def check32(got: np.ndarray, exact: Fraction, mode: str) -> None:
    largest = Fraction(2) ** 127 * (2 - Fraction(1, 2**23))
    value = float(got[0])
    if exact == 0:
        assert value == 0
        return
    want = rounded(exact, 24, -126, largest, mode)
    if isinstance(want, str):
        assert value == float(want.replace("inf", "infinity"))
    else:
        assert np.isfinite(value) and Fraction(value) == want


@pytest.mark.parametrize("mode", MODES)
@FAST
@given(bits32, bits32, bits32)
@example(0x3F800001, 0x3F800001, 0x00000001)
@example(0x00800001, 0x3F000001, 0x80000001)
@example(0x4B800001, 0x3F800000, 0x33800000)
@example(0x7F7FFFFF, 0x3F800001, 0x7F7FFFFF)
def test_fma_rounds_once(mode: str, a: int, b: int, c: int) -> None:
    x, y, z = f32(a), f32(b), f32(c)
    got = values.fma_f32(x, y, z, mode)
    if not (np.isfinite(x[0]) and np.isfinite(y[0]) and np.isfinite(z[0])):
        with np.errstate(all="ignore"):
            want = x.astype(np.float64) * y.astype(np.float64) + z
        assert np.isnan(got[0]) if np.isnan(want[0]) else got[0] == want[0]
        return
    check32(got, Fraction(float(x[0])) * Fraction(float(y[0])) + Fraction(float(z[0])), mode)


@FAST
@given(st.integers(0, 2**23 - 1), st.integers(0, 2**23 - 1), st.integers(-60, 60), st.integers(-1, 1))
def test_fma_next_to_a_tie(a: int, b: int, shift: int, nudge: int) -> None:
    """The sum lies half-way between two f32 numbers, or a hair beside: where rounding twice goes wrong."""
    x = np.float32(1 + a * 2.0**-23)
    y = np.float32(1 + b * 2.0**-23)
    product = Fraction(float(x)) * Fraction(float(y))
    # c moves the product onto a half-way point of its binade, up to c's own rounding.
    quantum = Fraction(1, 2**23) * (2 if product >= 2 else 1)
    target = (product // quantum) * quantum + quantum / 2 + nudge * Fraction(1, 2**47)
    c = np.float32(float(target - product))
    scale = np.float32(2.0**shift)
    got = values.fma_f32(np.array([x * scale]), np.array([y]), np.array([c * scale]))
    exact = Fraction(float(x * scale)) * Fraction(float(y)) + Fraction(float(c * scale))
    check32(got, exact, "rn")


@pytest.mark.parametrize("mode", MODES)
def test_fma_rounds_once_over_many_exponents(mode: str) -> None:
    """Exponents close enough that the three operands meet, mantissas with long runs of zeros and ones."""
    rng = np.random.default_rng(4)
    n = 2000
    mantissa = rng.integers(0, 2**23, (3, n)) & ~((1 << rng.integers(0, 23, (3, n))) - 1)
    mantissa = np.where(rng.random((3, n)) < 0.3, ~mantissa & 0x7FFFFF, mantissa)
    e = rng.integers(40, 200, n)
    exponent = np.stack([e, 254 - e + rng.integers(-70, 30, n) // 2, 127 + rng.integers(-60, 60, n)])
    exponent[:, ::5] = np.clip(exponent[:, ::5] - 100, 0, 254)  # some subnormal results
    bits = (rng.integers(0, 2, (3, n)) << 31) | (np.clip(exponent, 0, 254) << 23) | mantissa
    a, b, c = bits.astype(np.uint32).view(np.float32)
    got = values.fma_f32(a, b, c, mode)
    for k in range(n):
        exact = Fraction(float(a[k])) * Fraction(float(b[k])) + Fraction(float(c[k]))
        check32(got[k : k + 1], exact, mode)


def test_a_double_rounding_is_caught() -> None:
    """fma in f64 and then to f32 gets this one wrong, so the test above has teeth."""
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-60)
    # a*b = 1 + 2^-11 + 2^-24 lies half-way; c makes it more than half, below the reach of f64.
    twice = np.float32(float(a) * float(b) + float(c))
    once = values.fma_f32(*(np.array([v]) for v in (a, b, c)))[0]
    assert once != twice
    check32(np.array([once]), Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), "rn")


@pytest.mark.parametrize("mode", MODES)
@FAST
@given(bits32, bits32)
@example(0x00000001, 0x80000001)
@example(0x3F800000, 0xBF800000)
def test_add_mul_div_round_once(mode: str, a: int, b: int) -> None:
    x, y = f32(a), f32(b)
    if not (np.isfinite(x[0]) and np.isfinite(y[0])):
        return
    fx, fy = Fraction(float(x[0])), Fraction(float(y[0]))
    check32(values.add_f32(x, y, mode), fx + fy, mode)
    check32(values.mul_f32(x, y, mode), fx * fy, mode)
    if fy:
        check32(values.div_f32(x, y, mode), fx / fy, mode)


def test_sign_of_zero_sums() -> None:
    one, minus = f32(0x3F800000), f32(0xBF800000)
    for mode in MODES:
        assert np.signbit(values.add_f32(one, minus, mode)[0]) == (mode == "rm")
        assert np.signbit(values.fma_f32(one, one, minus, mode)[0]) == (mode == "rm")
        assert np.signbit(values.add_f32(f32(0x80000000), f32(0x80000000), mode)[0])


@pytest.mark.parametrize("mode", MODES)
@FAST
@given(bits32)
def test_sqrt_rounds_once(mode: str, a: int) -> None:
    x = f32(a & 0x7FFFFFFF)
    if not np.isfinite(x[0]) or x[0] == 0:
        return
    got = values.sqrt_f32(x, mode)
    r, exact = Fraction(float(got[0])), Fraction(float(x[0]))
    below, above = (Fraction(float(np.nextafter(got, np.float32(s))[0])) for s in (-np.inf, np.inf))
    if mode == "rn":
        assert ((r + below) / 2) ** 2 <= exact <= ((r + above) / 2) ** 2
    elif mode == "rp":
        assert exact <= r * r and (r == 0 or below * below < exact)
    else:
        assert r * r <= exact < above * above


@pytest.mark.parametrize("mode", MODES)
@FAST
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_fma_f64_rounds_once(mode: str, a: float, b: float, c: float) -> None:
    got = values.fma_f64(np.array([a]), np.array([b]), np.array([c]), mode)[0]
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        assert got == 0
        return
    want = rounded(exact, 53, -1022, Fraction(2) ** 1023 * (2 - Fraction(1, 2**52)), mode)
    assert (
        got == float(want.replace("inf", "infinity"))
        if isinstance(want, str)
        else Fraction(float(got)) == want
    )


def test_ftz_flushes_inputs_and_results() -> None:
    tiny, half = f32(0x00400000), f32(0x3F000000)
    assert values.mul_f32(f32(0x00800000), half, ftz=True).view(np.uint32)[0] == 0
    assert values.mul_f32(f32(0x80800000), half, ftz=True).view(np.uint32)[0] == 0x80000000
    assert values.add_f32(tiny, tiny, ftz=True)[0] == 0
    assert values.add_f32(tiny, tiny)[0] == np.float32(2.0**-126)
    assert values.fma_f32(tiny, f32(0x7F000000), half, ftz=True)[0] == 0.5


def test_nan_is_canonical_and_saturation_clears_it() -> None:
    nan = f32(0x7FC00001)
    assert values.add_f32(nan, nan).view(np.uint32)[0] == 0x7FFFFFFF
    assert values.add_f32(nan, nan, sat=True).view(np.uint32)[0] == 0
    assert values.mul_f32(f32(0x40000000), f32(0x40000000), sat=True)[0] == 1


def test_min_max_of_nan_and_signed_zero() -> None:
    zero, minus, nan, one = f32(0), f32(0x80000000), f32(0x7FC00000), f32(0x3F800000)
    assert np.signbit(values.minmax_f32(zero, minus, largest=False)[0])
    assert not np.signbit(values.minmax_f32(minus, zero, largest=True)[0])
    assert values.minmax_f32(nan, one, largest=False)[0] == 1
    assert np.isnan(values.minmax_f32(nan, one, largest=False, nan=True)[0])
    assert values.minmax_f32(nan, nan, largest=True).view(np.uint32)[0] == 0x7FFFFFFF


# -- narrow formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e5m2", "e2m1", "e2m3", "e3m2"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(bits32)
def test_encode_rounds_once(name: str, mode: str, bits: int) -> None:
    f = FORMATS[name]
    x = f32(bits)
    if not np.isfinite(x[0]):
        return
    got = float(values.decode(values.encode(x, f, mode), f)[0])
    if x[0] == 0:
        assert got == 0 and np.signbit(got) == np.signbit(x[0])
        return
    want = rounded(Fraction(float(x[0])), f.mantissa + 1, f.emin, Fraction(f.maximum), mode)
    if isinstance(want, str):
        if f.infinity is None:
            assert abs(got) == f.maximum
        else:
            assert got == float(want.replace("inf", "infinity"))
    else:
        assert Fraction(got) == want


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_code_survives_a_round_trip(name: str) -> None:
    f = FORMATS[name]
    codes = (
        np.arange(1 << f.bits, dtype=np.uint32) if f.bits <= 16 else np.arange(0, 1 << f.bits, 7, np.uint32)
    )
    x = values.decode(codes, f)
    finite = np.isfinite(x)
    assert finite.sum() > codes.size // 2
    np.testing.assert_array_equal(values.encode(x[finite], f), codes[finite])


def test_short_cut_to_bf16_is_the_general_conversion() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(values.narrow(x, values.BF16), values.encode(x, values.BF16))


def test_numpy_agrees_on_f16() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(values.encode(x, values.F16).astype(np.uint16), want)


@pytest.mark.parametrize("name", ["f16", "bf16"])
@FAST
@given(st.integers(0, 65535), st.integers(0, 65535), st.integers(0, 65535))
def test_narrow_fma_rounds_once(name: str, a: int, b: int, c: int) -> None:
    f = FORMATS[name]
    x, y, z = (values.decode(np.array([v], np.uint16), f) for v in (a, b, c))
    if not np.isfinite([x[0], y[0], z[0]]).all():
        return
    bits = values.fma_narrow(*(np.array([v], np.uint16) for v in (a, b, c)), f)
    exact = Fraction(float(x[0])) * Fraction(float(y[0])) + Fraction(float(z[0]))
    got = float(values.decode(bits, f)[0])
    if exact == 0:
        assert got == 0
        return
    want = rounded(exact, f.mantissa + 1, f.emin, Fraction(f.maximum), "rn")
    assert got == float(want.replace("inf", "infinity")) if isinstance(want, str) else Fraction(got) == want


# -- integers ------------------------------------------------------------------------------------------------


@FAST
@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(MODES))
@example(2**53 + 1, "rn")
@example(2**60 + 2**36 + 1, "rn")
def test_integer_to_f32_rounds_once(v: int, mode: str) -> None:
    got = values.round_f32(values.int_to_odd(np.array([v], np.int64)), mode)
    check32(got, Fraction(v), mode)


@FAST
@given(bits32, st.sampled_from(["rni", "rzi", "rmi", "rpi"]), st.sampled_from([1, 2, 4, 8]), st.booleans())
@example(0x4F000000, "rzi", 4, True)
@example(0x5F000000, "rzi", 8, True)
@example(0x5F800000, "rzi", 8, False)
def test_float_to_integer_clamps(bits: int, mode: str, width: int, signed: bool) -> None:
    x = f32(bits)
    got = int(values.float_to_int(x, mode, width, signed, 123)[0])
    if np.isnan(x[0]):
        assert got == 123
        return
    low, high = (
        (-(1 << (8 * width - 1)), (1 << (8 * width - 1)) - 1) if signed else (0, (1 << (8 * width)) - 1)
    )
    if np.isinf(x[0]):
        want = high if x[0] > 0 else low
    else:
        exact = Fraction(float(x[0]))
        floor = exact.numerator // exact.denominator
        rest = exact - floor
        up = {
            "rmi": False,
            "rpi": rest > 0,
            "rzi": rest > 0 and exact < 0,
            "rni": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1),
        }[mode]
        want = min(max(floor + up, low), high)
    assert got == want & ((1 << (8 * width)) - 1)


# -- approximations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"])
def test_perturbed_approximations_stay_inside_the_documented_bound(op: str) -> None:
    rng = np.random.default_rng(2)
    x = (rng.uniform(0.51, 1.99, 5000) if op == "lg2" else rng.uniform(0.01, 6.0, 5000)).astype(np.float32)
    functions = {"rcp": lambda v: 1 / v, "rsqrt": lambda v: 1 / np.sqrt(v), "ex2": np.exp2, "lg2": np.log2}
    exact = functions.get(op, getattr(np, op, None))(x.astype(np.float64))
    plain = approx.Approximator().unary(op, x)
    np.testing.assert_array_equal(plain, exact.astype(np.float32))
    bound = approx.BOUNDS[op, "f32"]
    seen = 0.0
    for seed in range(4):
        moved = approx.Approximator(seed).unary(op, x)
        np.testing.assert_array_equal(moved, approx.Approximator(seed).unary(op, x))
        error = np.abs(moved.astype(np.float64) - exact)
        if bound.kind == "ulp":
            ulp = np.spacing(np.abs(plain)).astype(np.float64)
            used = np.abs(moved.astype(np.float64) - plain) / (bound.size * ulp)
        else:
            used = error / (bound.size * (np.abs(exact) if bound.kind == "rel" else 1.0))
        assert used.max() <= 1.0
        seen = max(seen, float(used.max()))
    assert seen > 0.5  # the perturbation is worth its name


def test_special_values_are_not_moved() -> None:
    x = np.array([0.0, np.inf, -np.inf, np.nan], np.float32)
    got = approx.Approximator(3).unary("ex2", x)
    assert got[0] == 1 and got[1] == np.inf and got[2] == 0 and np.isnan(got[3])
    assert approx.Approximator(3).unary("rcp", x)[0] == np.inf


def test_fraction_helper_agrees_with_struct() -> None:
    """The test's own reference rounding, checked against the C library's conversion f64 -> f32."""
    rng = np.random.default_rng(3)
    for v in rng.standard_normal(200) * 10.0 ** rng.integers(-44, 38, 200):
        want = struct.unpack("<f", struct.pack("<f", v))[0]
        got = rounded(Fraction(v), 24, -126, Fraction(2) ** 127 * (2 - Fraction(1, 2**23)), "rn")
        assert not isinstance(got, str) and float(got) == want
