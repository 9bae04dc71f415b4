"""What an error in the logits means for the model: divergence, changed choices, changed likelihood."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitErrors:
    """Figures of one stretch of positions. Divergences and likelihoods in nats.

    `kl_*`: KL(reference || output) per position: mean, 99th percentile, largest, and the row of the largest.
    `flips`: positions whose most likely token changed. `unexplained_flips`: those where the reference's
    margin exceeds what the predicted error can overturn; None without a prediction. `top20_overlap`: mean
    fraction of the reference's 20 most likely tokens that are among the output's. `nll_change`: mean change
    of the negative log-likelihood of the targets, output minus reference; None without targets.
    """

    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_worst_row: int
    flips: int
    unexplained_flips: int | None
    first_unexplained_row: int | None
    top20_overlap: float
    nll_change: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data; figures that were not asked for are left out."""
        return {k: v for k, v in asdict(self).items() if v is not None}


def measure_logits(
    out: Tensor,
    ref: Tensor,
    *,
    targets: Tensor | None = None,
    predicted_error: Tensor | float | None = None,
) -> LogitErrors:
    """Compare logits `out` with `ref`, both [T, V]; evaluated in float64.

    `targets` [T] int64: the next tokens of the text. `predicted_error`: absolute error bound of the logits,
    a number or a tensor that broadcasts to [T, V]; token i can overtake token j only if ref_j - ref_i <=
    error_i + error_j.

    Raises ValueError when shapes do not fit or `ref` is not finite.
    """
    if out.shape != ref.shape or out.ndim != 2 or out.numel() == 0:
        raise ValueError(
            f"logits are [T, V], not empty; got out {tuple(out.shape)} and ref {tuple(ref.shape)}"
        )
    if targets is not None and targets.shape != out.shape[:1]:
        raise ValueError(f"targets must be [{out.shape[0]}], not {tuple(targets.shape)}")
    out, ref = out.to(torch.float64), ref.to(torch.float64)
    if not ref.isfinite().all():
        raise ValueError("the reference logits are not finite: nothing can be compared with them")
    log_p, log_q = ref.log_softmax(-1), out.log_softmax(-1)
    # KL is not negative; what is below zero is float64's rounding. A NaN output diverges without bound.
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).nan_to_num(nan=torch.inf)

    broken = ~out.isfinite().all(-1)
    best, chosen = ref.argmax(-1), out.nan_to_num(nan=-torch.inf).argmax(-1)
    flipped = (best != chosen) | broken
    unexplained = None
    if predicted_error is not None:
        error = torch.as_tensor(predicted_error, dtype=torch.float64, device=ref.device).expand_as(ref)

        def at(x: Tensor, token: Tensor) -> Tensor:
            return x.gather(-1, token.unsqueeze(-1)).squeeze(-1)

        margin = at(ref, best) - at(ref, chosen)
        unexplained = flipped & (broken | (margin > at(error, best) + at(error, chosen)))

    k = min(20, ref.shape[-1])
    in_out = torch.zeros_like(ref, dtype=torch.bool).scatter_(
        -1, out.nan_to_num(nan=-torch.inf).topk(k).indices, True
    )
    overlap = in_out.gather(-1, ref.topk(k).indices).to(torch.float64).mean()
    nll = None
    if targets is not None:
        index = targets.to(ref.device, torch.int64).unsqueeze(-1)
        nll = (log_p.gather(-1, index) - log_q.gather(-1, index)).mean().item()
    return LogitErrors(
        positions=ref.shape[0],
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item() if kl.isfinite().all() else torch.inf,
        kl_max=kl.max().item(),
        kl_worst_row=int(kl.argmax()),
        flips=int(flipped.sum()),
        unexplained_flips=None if unexplained is None else int(unexplained.sum()),
        first_unexplained_row=None
        if unexplained is None or not unexplained.any()
        else int(unexplained.nonzero()[0]),
        top20_overlap=overlap.item(),
        nll_change=nll,
    )
