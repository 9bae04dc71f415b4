"""SiTU-GLU: the gated activation of every feed-forward, bounded on both branches."""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import EXACT, Rounding


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float, rd: Rounding = EXACT) -> Tensor:
    """`[b1 tanh(g/b1) sigmoid(g)] * [b2 tanh(u/b2)]`, elementwise.

    The sigmoid takes the uncapped gate. Bounded by `beta * linear_beta` (100 in the release); for small
    arguments it is SiLU-GLU, `g sigmoid(g) u`. One rounding, at the end.
    """
    capped_gate = beta * torch.tanh(gate / beta)
    capped_up = linear_beta * torch.tanh(up / linear_beta)
    return rd.bf(capped_gate * torch.sigmoid(gate) * capped_up)
