"""The router: sigmoid scores, a bias that only selects, renormalised unbiased weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Config


@dataclass(frozen=True)
class Routing:
    """The chosen experts of each token, `experts [..., k]` int64, and their `weights [..., k]`.

    `selection [..., num_experts]` is what they were chosen by: score plus bias. The margin between its k-th
    and (k+1)-th largest says how safe the choice is.
    """

    experts: Tensor
    weights: Tensor
    selection: Tensor


def route(x: Tensor, gate: Tensor, bias: Tensor, config: Config, experts: Tensor | None = None) -> Routing:
    """Route normed, full-width `x [..., E]`; `gate [num_experts, E]`, `bias [num_experts]`.

    The logits are not rounded (the release computes them in float32). Ties go to the lower expert index.
    `experts` forces the choice (a comparison of two implementations needs the same one); weights still come
    from the scores.

    Raises ValueError if a score is NaN.
    """
    scores = torch.sigmoid(x @ gate.mT)
    selection = scores + bias
    if selection.isnan().any():
        token = selection.isnan().any(-1).flatten().nonzero()[0].item()
        raise ValueError(f"router: NaN score at token {token} of {selection[..., 0].numel()}")
    if experts is None:
        order = selection.sort(dim=-1, descending=True, stable=True).indices
        experts = order[..., : config.num_experts_per_token]
    chosen = scores.gather(-1, experts)
    # 1e-20 is the release's guard against a zero sum.
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return Routing(experts, weights, selection)
