"""A number and how far the computed one may be from it: forward error propagation in float64.

A kernel's bound is its own formula, evaluated on :class:`Bounded` operands: exact operations carry the
error of their operands along, `rounded` and `approx` add that of one rounding or of one approximate
instruction at the place where the kernel has it. The error terms hold to all orders, not only to the first.

float64's own rounding is not charged: each formula charges at least one FP32 rounding, 2^29 times as large,
per operation that float64 performs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import ulp


@dataclass(frozen=True)
class Bounded:
    """`value`: exact mathematics on exact operands. `error`: any computed number is at most this far off.

    Both float64, of shapes that broadcast. Where no bound can be given (overflow, a root that may leave its
    domain) `error` is infinite or NaN.
    """

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, x: Tensor | float) -> Bounded:
        """An operand that the kernel holds exactly."""
        value = torch.as_tensor(x, dtype=torch.float64)
        return cls(value, torch.zeros((), dtype=torch.float64, device=value.device))

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value that the computed number can have."""
        return self.value.abs() + self.error

    def __add__(self, other: Bounded) -> Bounded:
        return Bounded(self.value + other.value, self.error + other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Bounded(self.value * other.value, error)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """Round to nearest in `dtype`: half the spacing at the largest magnitude; infinite on overflow."""
        return Bounded(self.value, self.error + ulp(self.magnitude, dtype) / 2)

    def approx(self, relative: float) -> Bounded:
        """The computed number times (1 + d), |d| <= `relative`."""
        return Bounded(self.value, self.error + relative * self.magnitude)

    def exp(self) -> Bounded:
        """e^x: |e^(x+d) - e^x| <= e^x (e^|d| - 1)."""
        value = self.value.exp()
        return Bounded(value, value * self.error.expm1())

    def rsqrt(self) -> Bounded:
        """1 / sqrt(x), x > 0: worst at x - error. Infinite where that is not positive.

        1/sqrt(x-e) - 1/sqrt(x) = e / (sqrt(x-e) sqrt(x) (sqrt(x) + sqrt(x-e))), which does not cancel.
        """
        value = self.value.rsqrt()
        low = (self.value - self.error).clamp(min=0).sqrt()
        high = self.value.sqrt()
        error = torch.where(low > 0, self.error / (low * high * (low + high)), torch.inf)
        return Bounded(value, error)

    def mean_square(self, gamma: float, spread: Tensor | None = None) -> Bounded:
        """Mean of squares over the last dimension; `gamma` is the relative error of their sum.

        `spread` is the sum of the magnitudes that are really added, if these are not the squares themselves.
        """
        n = self.value.shape[-1]
        magnitudes = self.magnitude.square().sum(-1) if spread is None else spread
        carried = (2 * self.value.abs() * self.error + self.error.square()).sum(-1)
        error = _infinite_on_overflow(carried + gamma * magnitudes, magnitudes)
        return Bounded(self.value.square().mean(-1), error / n)


def dot(x: Bounded, y: Bounded, gamma: float) -> Bounded:
    """Inner product over the last dimension; `gamma` from :func:`bounds.sum_gamma`."""
    product = x * y
    magnitudes = (x.magnitude * y.magnitude).sum(-1)
    carried = product.error.expand_as(product.value).sum(-1)
    return Bounded(product.value.sum(-1), _infinite_on_overflow(carried + gamma * magnitudes, magnitudes))


def _infinite_on_overflow(error: Tensor, magnitudes: Tensor) -> Tensor:
    """`error`, or infinity where an FP32 sum of these magnitudes may overflow."""
    return torch.where(magnitudes < torch.finfo(torch.float32).max / 2, error, torch.inf)


def softmax_mean(logits: Bounded, rows: Tensor, gamma: float) -> tuple[Tensor, Bounded]:
    """Weights softmax(logits) [..., R] and the mean of `rows` [..., R, E] under them, [..., E].

    `logits.error` bounds the error of each logarithm of an unnormalised weight: that of the logit, of the
    exponential and of any rescaling. `gamma` is the relative error of forming the weighted sum and of
    dividing it.

    With weights w_j e^(d_j) in place of w_j the mean moves by sum_j w_j (e^(d_j) - 1)(r_j - mean) / sum_j
    w_j e^(d_j): the sum over j of w_j (r_j - mean) is zero, so rows that are alike contribute little, as
    they should.
    """
    weights = logits.value.softmax(-1)
    mean = (weights.unsqueeze(-1) * rows).sum(-2)
    e = logits.error.expand_as(weights)
    # Weights and products below the smallest normal number may be flushed to zero; the largest weight is 1.
    tiny = torch.finfo(torch.float32).smallest_normal
    moved = weights * e.expm1() + tiny
    moved = (moved.unsqueeze(-1) * (rows - mean.unsqueeze(-2)).abs()).sum(-2)
    magnitudes = ((weights * e.exp()).unsqueeze(-1) * rows.abs()).sum(-2)
    least_sum = (weights * (-e).exp()).sum(-1, keepdim=True)
    return weights, Bounded(mean, (moved + gamma * magnitudes + rows.shape[-2] * tiny) / least_sum)
