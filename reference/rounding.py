"""Where the released BF16 code rounds.

The mathematics calls `rd.bf(x)` at each point where the release stores a BF16 value. By default that is the
identity, which gives the exact reference; `Rounding.release()` makes the same formulas emulate the release
in any working dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def nearest_bfloat16(x: Tensor) -> Tensor:
    """Round to the nearest BF16 value, ties to even; the result keeps `x`'s dtype.

    A float64 is first rounded to float32 *to odd*: rounding to nearest twice would go wrong just beside a
    tie, and PyTorch's own conversion does so (float64 passes through float32).
    """
    if x.dtype == torch.float64:
        return _float32_to_odd(x).bfloat16().to(x.dtype)
    return x.bfloat16().to(x.dtype)


def _float32_to_odd(x: Tensor) -> Tensor:
    """Truncate towards zero and, if anything was lost, set the last bit: no later tie can be mistaken."""
    nearest = x.float()
    wide = nearest.double()
    bits = nearest.view(torch.int32) - (wide.abs() > x.abs()).int()
    return (bits | (wide != x).int()).view(torch.float32)


@dataclass(frozen=True)
class Rounding:
    """The rounding that the mathematics applies at the release's BF16 points."""

    bf: Callable[[Tensor], Tensor] = lambda x: x

    @classmethod
    def release(cls) -> Rounding:
        """Round to BF16 wherever the release does."""
        return cls(bf=nearest_bfloat16)


EXACT = Rounding()
