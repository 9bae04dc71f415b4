"""The bound of a sum, against sums in FP32 in several orders; error propagation, against mpmath."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from k3_audit.audit.numerics import (
    U32,
    Bounded,
    Summation,
    chain_gamma,
    compound,
    dot,
    probabilistic_lambda,
    softmax_mean,
    sum_gamma,
)

pytestmark = pytest.mark.unit
mpmath.mp.dps = 40


# Sums.


def test_lambda_solves_its_own_equation():
    """Put back into Higham and Mary's probability, the union bound gives what was asked for."""
    lam = probabilistic_lambda(terms=7168, outputs=1000, failure_probability=1e-6)
    failure = 1000 * 7168 * 2 * math.exp(-((lam * (1 - U32)) ** 2) / 2)
    assert failure == pytest.approx(1e-6, rel=1e-9)
    assert 7 < lam < 8


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0])
def test_a_failure_probability_is_a_probability(p):
    with pytest.raises(ValueError, match="between 0 and 1"):
        probabilistic_lambda(10, 1, p)


def test_the_smaller_bound_is_used():
    """Short chains have the certain bound, long ones the probabilistic one."""
    short, long = Summation.lanes(7168, 896), Summation.sequential(7168)
    assert short.chain == 18
    assert sum_gamma(short, 100) == chain_gamma(18) == pytest.approx(18 * U32, rel=1e-5)
    assert sum_gamma(long, 100) < chain_gamma(7168) / 10


def test_chain_gamma_diverges_where_it_says_nothing():
    assert chain_gamma(2**24) == math.inf


def _fma(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (total.double() + x.double() * y.double()).float()


def _sums(x: torch.Tensor, y: torch.Tensor) -> dict[Summation, torch.Tensor]:
    """FP32 sums of products over the last dimension (a power of two) in three orders."""
    n = x.shape[-1]
    sequential = torch.zeros_like(x[..., 0])
    for i in range(n):
        sequential = _fma(sequential, x[..., i], y[..., i])
    tree = x * y
    while tree.shape[-1] > 1:
        tree = tree[..., ::2] + tree[..., 1::2]
    lanes = torch.zeros_like(x[..., : n // 8])
    for i in range(8):
        lanes = _fma(lanes, x[..., i::8], y[..., i::8])
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return {
        Summation.sequential(n): sequential,
        Summation.pairwise(n): tree[..., 0],
        Summation.lanes(n, n // 8): lanes[..., 0],
    }


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancelling"])
@pytest.mark.parametrize("n", [256, 4096])
def test_fp32_sums_keep_their_bound_in_every_order(kind, n, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 50, n, generator=g)
    if kind == "positive":
        x, y = x.abs(), y.abs()
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-20, 20, x.shape, generator=g).float())
    if kind == "cancelling":
        x[:, n // 2 :], y[:, n // 2 :] = -x[:, : n // 2], y[:, : n // 2]
    exact = (x.double() * y.double()).sum(-1)
    magnitude = (x.double() * y.double()).abs().sum(-1)
    for order, computed in _sums(x, y).items():
        error = (computed.double() - exact).abs() / magnitude
        assert error.max() <= sum_gamma(order, outputs=50)
        assert error.max() > 0  # the emulation does round


def test_the_probabilistic_bound_needs_its_assumption():
    """One value summed 7168 times in sequence rounds the same way each time: not independent, mean not zero.

    The certain bound holds and the probabilistic one does not: the limit that docs/numerics.md states.
    """
    n, value = 7168, np.float32(1.9545905)
    total = float(np.cumsum(np.full(n, value))[-1])  # numpy accumulates in the type of the array
    error = abs(total - n * float(value)) / (n * float(value))
    assert sum_gamma(Summation.sequential(n), outputs=1) < error < chain_gamma(n)


# Error propagation: `value` equals the truth, `error` covers every perturbation and is reached by one.

moderate = st.floats(min_value=-50, max_value=50).filter(lambda x: abs(x) > 1e-3)
small = st.floats(min_value=1e-9, max_value=0.3)
corner = st.sampled_from([-1.0, -0.3, 0.0, 0.7, 1.0])


def _bounded(value: float, error: float) -> Bounded:
    return Bounded(torch.tensor(value, dtype=torch.float64), torch.tensor(error, dtype=torch.float64))


def _check(result: Bounded, truth: mpmath.mpf, perturbed: mpmath.mpf) -> None:
    """`result` at `truth`, and its error covers the way to `perturbed`, up to float64's own rounding."""
    scale = abs(truth) + 1
    assert abs(mpmath.mpf(result.value.item()) - truth) <= 1e-13 * scale
    assert abs(perturbed - truth) <= mpmath.mpf(result.error.item()) * (1 + mpmath.mpf(1e-12)) + 1e-13 * scale


@given(moderate, moderate, small, small, corner, corner)
def test_sums_and_products_cover_their_operands(x, y, ex, ey, i, j):
    a, b = _bounded(x, ex), _bounded(y, ey)
    xm, ym = mpmath.mpf(x), mpmath.mpf(y)
    xp, yp = xm + mpmath.mpf(i) * ex, ym + mpmath.mpf(j) * ey
    _check(a + b, xm + ym, xp + yp)
    _check(a * b, xm * ym, xp * yp)


@given(st.floats(min_value=-20, max_value=20), small, corner)
def test_exp_covers_its_operand(x, e, i):
    _check(_bounded(x, e).exp(), mpmath.exp(x), mpmath.exp(mpmath.mpf(x) + mpmath.mpf(i) * e))


@given(st.floats(min_value=1e-8, max_value=1e8), st.floats(min_value=1e-9, max_value=0.9), corner)
def test_rsqrt_covers_its_operand_and_is_tight(x, fraction, i):
    e = x * fraction
    result = _bounded(x, e).rsqrt()
    truth = 1 / mpmath.sqrt(x)
    worst = 1 / mpmath.sqrt(mpmath.mpf(x) - mpmath.mpf(e)) - truth
    scale = 1 + 1 / mpmath.sqrt(x)
    assert abs(1 / mpmath.sqrt(mpmath.mpf(x) + mpmath.mpf(i) * e) - truth) <= worst * (1 + mpmath.mpf(1e-12))
    assert abs(mpmath.mpf(result.error.item()) - worst) <= 1e-9 * worst + 1e-15 * scale


def test_a_root_that_may_leave_its_domain_has_no_bound():
    assert _bounded(1e-5, 2e-5).rsqrt().error == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(moderate, small, corner)
def test_rounding_is_covered_and_overflow_has_no_bound(dtype, x, e, i):
    computed = torch.tensor(x + i * e, dtype=torch.float32)
    assume(abs(computed.double().item() - x) <= e)
    rounded = computed.to(dtype).double()
    assert (rounded - x).abs() <= _bounded(x, e).rounded(dtype).error
    assert _bounded(3.4e38, 1e36).rounded(dtype).error == math.inf


@given(moderate, small, st.floats(min_value=-1, max_value=1), corner)
def test_an_approximate_instruction_is_covered(x, e, part, i):
    result = _bounded(x, e).approx(1e-3)
    assert abs((x + i * e) * (1 + part * 1e-3) - x) <= result.error * (1 + 1e-12)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**31), st.floats(min_value=1e-7, max_value=0.2))
def test_dot_and_mean_square_cover_their_operands(n, seed, size):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, n, generator=g, dtype=torch.float64)
    ex, ey = size * torch.rand(2, n, generator=g, dtype=torch.float64)
    gamma = 1e-3
    signs = torch.randint(0, 2, (4, n), generator=g).double() * 2 - 1
    xp, yp, sum_error = x + ex * signs[0], y + ey * signs[1], 1 + gamma * signs[2]
    _check(
        dot(Bounded(x, ex), Bounded(y, ey), gamma),
        mpmath.fdot(x.tolist(), y.tolist()),
        mpmath.fdot((xp * sum_error).tolist(), yp.tolist()),
    )
    _check(
        Bounded(x, ex).mean_square(gamma),
        mpmath.fdot(x.tolist(), x.tolist()) / n,
        mpmath.fdot((xp * sum_error).tolist(), xp.tolist()) / n,
    )


def test_a_sum_that_may_overflow_has_no_bound():
    big = Bounded.exact(torch.full((8,), 1e19))
    assert big.mean_square(1e-6).error == dot(big, big, 1e-6).error == math.inf


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(0, 2**31), st.floats(min_value=1e-8, max_value=0.5))
def test_softmax_mean_covers_every_corner_of_its_logits(rows, seed, size):
    g = torch.Generator().manual_seed(seed)
    s = 3 * torch.randn(rows, generator=g, dtype=torch.float64)
    e = size * torch.rand(rows, generator=g, dtype=torch.float64)
    r = torch.randn(rows, 1, generator=g, dtype=torch.float64) * 10
    _, result = softmax_mean(Bounded(s, e), r, gamma=0.0)
    truth = _mpmath_mean(s, r)
    largest = mpmath.mpf(0)
    for bits in range(2**rows):
        signs = torch.tensor([1.0 if bits >> j & 1 else -1.0 for j in range(rows)], dtype=torch.float64)
        perturbed = _mpmath_mean(s + signs * e, r)
        _check(Bounded(result.value[0], result.error[0]), truth, perturbed)
        largest = max(largest, abs(perturbed - truth))
    if size < 1e-3:  # tight to first order: not more than the sum over rows, which a corner reaches
        assert result.error[0].item() <= float(largest) * 1.01 + 1e-13


def _mpmath_mean(s: torch.Tensor, r: torch.Tensor) -> mpmath.mpf:
    weights = [mpmath.exp(x) for x in s.tolist()]
    return mpmath.fdot(weights, r[:, 0].tolist()) / mpmath.fsum(weights)


def test_rows_that_are_alike_do_not_suffer_from_wrong_weights():
    s = Bounded(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.1, 0.1], dtype=torch.float64))
    alike = softmax_mean(s, torch.full((2, 3), 7.0, dtype=torch.float64), gamma=0.0)[1]
    assert alike.error.max() < 1e-15


def test_relative_errors_compound():
    assert compound(0.1, 0.1) == pytest.approx(0.21)
