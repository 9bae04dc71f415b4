"""Unit error terms: what one sum, and what one approximate instruction, may be off by. No magic constants.

A bound is evaluated in float64 from the operands of the very run that it judges. Two facts enter: how the
hardware rounds (unit roundoff, and the table of the PTX ISA for approximate instructions), and through how
many roundings a term of a sum passes (the kernel's order of summation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .formats import unit_roundoff

U32 = unit_roundoff(torch.float32)

# Probability, per judged tensor, that a right kernel breaks a bound or a statistical criterion by bad luck.
FAILURE_PROBABILITY = 1e-6

# Largest relative error of approximate fp32 instructions, from the PTX ISA 9.1, "Floating Point
# Instructions", one section each. An error of k ulp is a relative error of at most k 2^-23. `ex2` is stated
# as 2 ulp from the correctly rounded result, which is itself half an ulp off.
PTX_RELATIVE_ERROR = {
    "ex2.approx.f32": 2.5 * 2.0**-23,
    "rsqrt.approx.f32": 2.0**-22.9,
    "rcp.approx.f32": 2.0**-23,
    "div.approx.f32": 2.0 * 2.0**-23,
    "div.full.f32": 2.0 * 2.0**-23,
    "tanh.approx.f32": 2.0**-11,
}


@dataclass(frozen=True)
class Summation:
    """How a sum of products is formed.

    `terms` is the number of products; `chain` is the largest number of roundings that any product passes
    through on its way into the result, its own rounding included (a fused multiply-add has one rounding for
    both).
    """

    terms: int
    chain: int

    def __post_init__(self) -> None:
        if self.terms < 1 or self.chain < 1:
            raise ValueError(
                f"a sum has at least one term and one rounding, not {self.terms} and {self.chain}"
            )

    @classmethod
    def sequential(cls, terms: int) -> Summation:
        """One accumulator, one term after the other."""
        return cls(terms, terms)

    @classmethod
    def pairwise(cls, terms: int) -> Summation:
        """A balanced binary tree over the products."""
        return cls(terms, 1 + math.ceil(math.log2(terms)))

    @classmethod
    def lanes(cls, terms: int, lanes: int) -> Summation:
        """`lanes` threads add ceil(terms / lanes) products each, in sequence; a binary tree joins them."""
        return cls(terms, math.ceil(terms / lanes) + math.ceil(math.log2(lanes)))


def chain_gamma(chain: int, u: float = U32) -> float:
    """gamma_n = nu / (1 - nu): |prod (1 + d_i)^(+-1) - 1| for n roundings, with certainty.

    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., Lemma 3.1. This is the bound inside one
    chain of MMA instructions, where the rounding of the tensor core is not specified and must not be taken
    as random; `u` is then the unit roundoff measured for that instruction. Infinite when nu >= 1.
    """
    return chain * u / (1 - chain * u) if chain * u < 1 else math.inf


def probabilistic_lambda(terms: int, outputs: int, failure_probability: float, u: float = U32) -> float:
    """The lambda for which all of `outputs` sums keep their bound, but for `failure_probability`.

    Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41
    (2019): let the rounding errors d_i be independent with mean zero and |d_i| <= u. Then n of them satisfy
    |prod (1 + d_i)^(+-1) - 1| <= exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1 with probability at least 1 -
    2 exp(-lambda^2 (1 - u)^2 / 2) (Theorem 2.4, by Hoeffding's inequality), and an inner product of n
    terms, in whatever order, keeps it for all its terms with probability at least 1 - 2n exp(...) (Theorem
    3.1: a union bound). One more union bound over the outputs, solved for lambda:

        lambda = sqrt(2 ln(2 terms outputs / failure_probability)) / (1 - u)

    Raises ValueError unless 0 < failure_probability < 1.
    """
    if not 0 < failure_probability < 1:
        raise ValueError(f"a failure probability lies between 0 and 1, not {failure_probability}")
    return math.sqrt(2 * math.log(2 * terms * outputs / failure_probability)) / (1 - u)


def sum_gamma(
    summation: Summation,
    outputs: int,
    failure_probability: float = FAILURE_PROBABILITY,
    u: float = U32,
) -> float:
    """g such that |fl(x.y) - x.y| <= g |x|.|y| for all of `outputs` such sums, but for `failure_probability`.

    The smaller of the certain and the probabilistic bound. Both hold, so no probability is spent where the
    certain one is smaller: chains up to about lambda^2, some 60 roundings, hence most GPU reductions.
    """
    lam = probabilistic_lambda(summation.terms, outputs, failure_probability, u)
    n = summation.chain
    return min(chain_gamma(n, u), math.expm1(lam * math.sqrt(n) * u + n * u * u / (1 - u)))


def compound(*gammas: float) -> float:
    """Relative error of one factor after another: (1 + g1)(1 + g2)... - 1."""
    return math.prod(1 + g for g in gammas) - 1
