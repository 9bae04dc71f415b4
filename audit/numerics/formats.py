"""Facts about floating-point formats: unit roundoff, ulp, and the poison that marks memory as unwritten."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A poison value is a signalling NaN: sign 0, exponent all ones, quiet bit 0, payload not 0. No arithmetic
# returns one (IEEE 754-2019, 6.2: operations return quiet NaNs), so its bits survive only where nobody
# wrote, or where unwritten memory was copied. The 16-bit patterns repeated give the wider ones of the same
# exponent width, so that a BF16 buffer read as FP32 is still poison.
_POISON = {
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float32: (torch.int32, 0x7FA57FA5),
    torch.float64: (torch.int64, 0x7FF57FA57FA57FA5),
}


def _bits(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    if dtype not in _POISON:
        raise ValueError(
            f"{dtype} is not a stored type that we know; use one of {', '.join(map(str, _POISON))}"
        )
    return _POISON[dtype]


def as_bits(x: Tensor) -> Tensor:
    """The bits of `x` as integers of its width: equal for two NaNs only if their payloads are."""
    return x.contiguous().view(_bits(x.dtype)[0])


def poison_(x: Tensor) -> Tensor:
    """Fill the contiguous tensor `x` with the poison of its dtype, in place, and return it."""
    integer, pattern = _bits(x.dtype)
    x.view(integer).fill_(pattern)
    return x


def unwritten(x: Tensor) -> Tensor:
    """Boolean mask, shape of `x`: True where the poison is still there."""
    return as_bits(x) == _bits(x.dtype)[1]


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = 2^-p of a format with p significant bits: 2^-8 for BF16, 2^-24 for FP32.

    Rounding to nearest satisfies fl(x) = x(1 + d), |d| <= u, barring underflow and overflow (Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd ed., Theorem 2.2).
    """
    return torch.finfo(dtype).eps / 2


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of the numbers of `dtype` at |x|, float64, shape of `x`.

    2^(floor(log2 |x|) - p + 1), and the spacing of subnormals below the smallest normal number. Infinite for
    |x| that round to infinity; NaN for NaN.
    """
    info = torch.finfo(dtype)
    magnitude = x.abs().to(torch.float64)
    lowest = math.frexp(info.smallest_normal)[1] - 1
    digits = 1 - math.frexp(info.eps)[1]
    exponent = torch.frexp(magnitude).exponent.to(torch.int64) - 1
    exponent = torch.where(magnitude == 0, lowest, exponent).clamp(min=lowest) - digits
    spacing = _power_of_two(exponent)
    overflow = magnitude >= info.max + 0.5 * (info.max * info.eps / (2 - info.eps))
    spacing = torch.where(overflow, torch.inf, spacing)
    return torch.where(magnitude.isnan(), magnitude, spacing)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent exactly, float64; `exponent` int64, clamped to the normal numbers of float64."""
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)
