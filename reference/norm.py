"""Root-mean-square and L2 normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import EXACT, Rounding


def rms_norm(x: Tensor, weight: Tensor, eps: float, rd: Rounding = EXACT) -> Tensor:
    """`w * x / sqrt(mean(x^2) + eps)` over the last axis; `weight [n]`, `x [..., n]`.

    The release rounds twice, before and after the multiplication by the weight.
    """
    return rd.bf(weight * rd.bf(x * inverse_rms(x, eps)))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)`, shape `[..., 1]`."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)`: the SUM, so `eps` matters only for vectors of norm near 1e-3 and below.

    1e-6 is the value of the KDA kernels in flash-linear-attention, which the release calls.
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
