"""Linear layers: no bias, weight stored `[out, in]`."""

from __future__ import annotations

from torch import Tensor

from .rounding import EXACT, Rounding


def linear(x: Tensor, weight: Tensor, rd: Rounding = EXACT) -> Tensor:
    """`W x` for `x [..., in]`, `weight [out, in]`; rounded once, after the accumulation."""
    return rd.bf(x @ weight.mT)
