"""Norms, SiTU-GLU, rounding: against mpmath and PyTorch's own, with the mistakes that were made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference.activation import situ_glu
from k3_audit.reference.linear import linear
from k3_audit.reference.norm import l2_norm, rms_norm
from k3_audit.reference.rounding import EXACT, Rounding, nearest_bfloat16
from torch import Tensor

pytestmark = pytest.mark.unit

F64 = torch.float64
RELEASE = Rounding.release()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# RMSNorm and L2 norm.


@settings(deadline=None, max_examples=30)
@given(width=st.integers(1, 80), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]), seed=st.integers(0, 2**31))
def test_rms_norm_equals_pytorchs(width: int, scale: float, seed: int) -> None:
    x, w = scale * normal(seed, 3, width), normal(seed + 1, width)
    expected = torch.nn.functional.rms_norm(x, (width,), w, eps=1e-5)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), expected, rtol=1e-14, atol=0)


def test_rms_norm_rounds_twice_like_bfloat16_code(seed: int) -> None:
    x, w = normal(seed, 64, 256).bfloat16(), normal(seed + 1, 256).bfloat16()
    r = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    expected = w * (x.float() * r).bfloat16()
    got = rms_norm(x.float(), w.float(), 1e-5, RELEASE)
    assert torch.equal(got, expected.float())
    once = nearest_bfloat16(w.float() * (x.float() * r))
    assert not torch.equal(once, expected.float())


def check_l2_norm(l2: Callable[[Tensor], Tensor]) -> None:
    """A vector of norm 1e-3, where epsilon halves the sum under the root, and a unit one."""
    x = torch.full((128,), 1e-3 / math.sqrt(128), dtype=F64)
    torch.testing.assert_close(l2(x).norm().item(), 1 / math.sqrt(2), rtol=1e-12, atol=0)
    torch.testing.assert_close(l2(1000 * x).norm().item(), 1.0, rtol=1e-6, atol=0)


def test_l2_norm_adds_epsilon_to_the_sum() -> None:
    check_l2_norm(l2_norm)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * x.shape[-1] ** -0.5,
        lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
        lambda x: torch.nn.functional.normalize(x, dim=-1, eps=1e-12),
        lambda x: l2_norm(x, eps=1e-5),
    ],
    ids=["mean for sum", "epsilon outside", "no epsilon", "1e-5"],
)
def test_wrong_l2_norms_fail(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        check_l2_norm(wrong)


# SiTU-GLU.

GATE_POINTS = {-4: -0.054793, -1: -0.263475, 1: 0.716200, 2: 1.628126, 4: 2.991584, 8: 3.854817}


def situ(g: float, u: float, dtype: torch.dtype = F64) -> float:
    return situ_glu(torch.tensor(g, dtype=dtype), torch.tensor(u, dtype=dtype), 4.0, 25.0).item()


def exact_situ(g: float, u: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        g, u = mpmath.mpf(g), mpmath.mpf(u)
        sigmoid = 1 / (1 + mpmath.exp(-g))
        return 4 * mpmath.tanh(g / 4) * sigmoid * 25 * mpmath.tanh(u / 25)


@pytest.mark.parametrize(("g", "expected"), GATE_POINTS.items())
def test_situ_gate_factor_at_known_points(g: float, expected: float) -> None:
    tiny = 1e-9  # the up branch is the identity there
    assert round(situ(g, tiny) / tiny, 6) == expected


@settings(deadline=None, max_examples=80)
@given(g=st.floats(-60, 60), u=st.floats(-200, 200))
def test_situ_against_mpmath(g: float, u: float) -> None:
    assert situ(g, u) == pytest.approx(float(exact_situ(g, u)), rel=1e-14, abs=1e-300)


def test_situ_limits() -> None:
    assert situ(1e6, 1e6) == 100.0
    assert situ(-40.0, 1e6) == pytest.approx(-100 * math.exp(-40.0), rel=1e-12)
    g, u = 1e-3, -2e-3  # relative corrections to SiLU-GLU: -g^2/48 and -u^2/1875
    silu_glu = g / (1 + math.exp(-g)) * u
    assert situ(g, u) / silu_glu - 1 == pytest.approx(-(g**2) / 48 - u**2 / 1875, rel=1e-4)


def test_situ_is_not_symmetric_in_gate_and_up() -> None:
    """The vector that tells [gate | up] from [up | gate]."""
    assert situ(-3.0, 20.0) == pytest.approx(float(exact_situ(-3.0, 20.0)), rel=1e-14)
    assert abs(situ(20.0, -3.0) - situ(-3.0, 20.0)) > 1


# Rounding.


def check_nearest_bfloat16(round_to: Callable[[Tensor], Tensor]) -> None:
    """Just above and below a tie, on ties to either side, and at the ends of the range."""
    ulp = 2.0**-7
    cases = {
        1 + ulp / 2: 1.0,
        1 + 3 * ulp / 2: 1 + 2 * ulp,
        1 + ulp / 2 + 2**-40: 1 + ulp,
        -(1 + ulp / 2 + 2**-40): -(1 + ulp),
        1 + ulp / 2 - 2**-40: 1.0,
        0.0: 0.0,
        3.5e38: math.inf,
        2.0**-140: 0.0,
    }
    got = round_to(torch.tensor(list(cases), dtype=F64))
    assert got.tolist() == list(cases.values())


def test_nearest_bfloat16() -> None:
    check_nearest_bfloat16(nearest_bfloat16)
    assert nearest_bfloat16(torch.tensor(math.nan, dtype=F64)).isnan()


def test_rounding_through_float32_fails() -> None:
    with pytest.raises(AssertionError):
        check_nearest_bfloat16(lambda x: x.bfloat16().double())


@settings(deadline=None, max_examples=100)
@given(st.floats(-1e30, 1e30).filter(lambda x: x == 0 or abs(x) > 1e-30))
def test_nearest_bfloat16_is_the_nearest(x: float) -> None:
    y = nearest_bfloat16(torch.tensor(x, dtype=F64)).item()
    mantissa, exponent = math.frexp(x)
    assert y == math.ldexp(round(mantissa * 256), exponent - 8)  # Python rounds ties to even


def test_release_linear_equals_bfloat16_matmul(seed: int) -> None:
    x, w = normal(seed, 16, 64).bfloat16(), normal(seed + 1, 32, 64).bfloat16()
    exact = linear(x.double(), w.double())
    got = linear(x.double(), w.double(), RELEASE)
    assert torch.equal(got, nearest_bfloat16(exact)) and not torch.equal(got, exact)
    assert (got - (x @ w.mT).double()).abs().max() <= 2**-8 * exact.abs().max()


def test_exact_rounding_is_the_identity(seed: int) -> None:
    x = normal(seed, 8)
    assert EXACT.bf(x) is x
