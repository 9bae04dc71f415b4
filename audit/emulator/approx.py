"""The approximate instructions, and how far the hardware may be from the value computed here.

The value is computed in f64 and rounded once to the result format. The hardware's own result is not
specified, only its maximum error; :data:`BOUNDS` is that error, from the PTX ISA, "Floating Point
Instructions" (div, rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh) and "Half Precision Floating Point
Instructions" (tanh, ex2). A caller that compares with hardware must add it to its error budget.
:class:`Approximator` can also move every result by a pseudo-random part of the bound, the same for the same
input, so that a test may show that its criteria hold for any conforming hardware and not for one rounding
only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .values import Array, Format, decode, encode, finish_f32, flush, quiet


@dataclass(frozen=True)
class Bound:
    """Maximum error: in `ulp` of the correctly rounded result, relative ("rel") or absolute ("abs")."""

    kind: str
    size: float

    def slack(self, exact: Array, ulp: Array) -> Array:
        """The bound as an absolute f64 error around `exact`, less the half ulp of the final rounding."""
        if self.kind == "ulp":
            return self.size * ulp
        full = self.size * np.abs(exact) if self.kind == "rel" else np.full(np.shape(exact), self.size)
        return np.maximum(full - 0.5 * ulp, 0.0)


BOUNDS: dict[tuple[str, str], Bound] = {
    ("rcp", "f32"): Bound("ulp", 1),
    ("sqrt", "f32"): Bound("rel", 2.0**-23),
    ("rsqrt", "f32"): Bound("rel", 2.0**-22.9),
    ("ex2", "f32"): Bound("ulp", 2),
    ("lg2", "f32"): Bound("abs", 2.0**-22),  # absolute in (0.5, 2); relative elsewhere, which is wider there
    ("sin", "f32"): Bound("abs", 2.0**-20.5),  # for |a| <= 2 pi; 2^-14.7 up to 100 pi, nothing beyond
    ("cos", "f32"): Bound("abs", 2.0**-20.5),
    ("tanh", "f32"): Bound("rel", 2.0**-11),
    ("div", "f32"): Bound("ulp", 2),  # div.full everywhere; div.approx for 2^-126 <= |b| <= 2^126
    ("ex2", "f16"): Bound("rel", 2.0**-9.9),
    ("ex2", "bf16"): Bound("rel", 2.0**-7),
    ("tanh", "f16"): Bound("abs", 2.0**-10.987),
    ("tanh", "bf16"): Bound("abs", 2.0**-8),
}

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@dataclass(frozen=True)
class Approximator:
    """Evaluates approximate instructions; with `seed`, moved inside their bounds."""

    seed: int | None = None

    @quiet
    def unary(self, op: str, x: Array, ftz: bool = False) -> Array:
        """`op` of an f32 array."""
        if ftz:
            x = flush(x)
        return finish_f32(self._round(op, _FUNCTIONS[op](x.astype(np.float64)), x.view(np.uint32)), ftz)

    @quiet
    def divide(self, a: Array, b: Array, ftz: bool, full: bool) -> Array:
        """`div.full.f32` or `div.approx.f32`."""
        if ftz:
            a, b = flush(a), flush(b)
        exact = a.astype(np.float64) / b.astype(np.float64)
        q = self._round("div", exact, a.view(np.uint32) ^ (b.view(np.uint32) * np.uint32(2654435761)))
        if not full:  # the ISA's rule for huge divisors, whose reciprocal underflows
            huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
            q = np.where(huge, np.where(np.isinf(a), np.float32(np.nan), np.copysign(np.float32(0), q)), q)
        return finish_f32(q, ftz)

    @quiet
    def half(self, op: str, bits: Array, f: Format, ftz: bool = False) -> Array:
        """`op` of bits of f16 or bf16; returns bits (uint32)."""
        x = decode(bits, f).astype(np.float64)
        if ftz:
            x = np.where(np.abs(x) < 2.0**f.emin, np.copysign(0.0, x), x)
        exact = _FUNCTIONS[op](x)
        if self.seed is not None:
            _, e = np.frexp(np.abs(exact))
            ulp = np.ldexp(1.0, np.maximum(e - 1, f.emin) - f.mantissa)
            exact = self._move(exact, BOUNDS[op, f.name].slack(exact, ulp), np.asarray(bits), op)
        out = encode(exact, f)
        if ftz:
            out = np.where(np.abs(decode(out, f)) < 2.0**f.emin, out & np.uint32(0x8000), out)
        return out.astype(np.uint32)

    def _round(self, op: str, exact: Array, key: Array) -> Array:
        if self.seed is not None:
            with_ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
            bound = BOUNDS[op, "f32"]
            slack = bound.slack(exact, with_ulp)
            if op == "lg2":  # relative outside (0.5, 2), where |log2| >= 1
                slack = slack * np.maximum(1.0, np.abs(exact))
            exact = self._move(exact, slack, key, op)
        return exact.astype(np.float32)

    def _move(self, exact: Array, slack: Array, key: Array, op: str) -> Array:
        """`exact` plus a hash of (seed, op, input) in [-slack, slack]; zeros, infinities and NaN stay."""
        salt = np.uint64((self.seed or 0) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        h = key.astype(np.uint64) ^ salt ^ np.uint64(int.from_bytes(op.encode(), "little"))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
        unit = (h >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
        # Values that the ISA's tables of special inputs fix, such as ex2(0) = 1, are exact.
        movable = np.isfinite(exact) & (exact != 0) & ~((op == "ex2") & (exact == 1.0))
        return np.where(movable, exact + unit * slack, exact)
