"""The error bound of AttnRes + RMSNorm (K3 technical report, arXiv 2607.24653, block attention residuals).

    p    = stored(prefix + delta)
    s_j  = (row_j . c) / sqrt(mean(row_j^2) + eps)    row = bank_0 .. bank_{m-1}, p    c = res_norm * res_proj
    mix  = sum_j softmax(s)_j row_j
    out  = mix / sqrt(mean(mix^2) + eps) * norm_weight

The rounded prefix is the row, because that is what is stored and read again (the release does the same); the
bound of `mix` and `normed` is against exact mathematics from that stored row on. A reference that does not
round must be given the stored prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bounded import Bounded, dot, softmax_mean
from .bounds import FAILURE_PROBABILITY, PTX_RELATIVE_ERROR, U32, Summation, chain_gamma, compound, sum_gamma


@dataclass(frozen=True)
class AttnResArithmetic:
    """What an implementation does in between: the facts of its source that decide its error.

    `dot`: how the sums over the hidden dimension are formed; by default in sequence, the longest chain
    there is.
    `merges`: how often a weight of the softmax is rescaled after it was formed (0 for two passes, 1 where the
        mixture of the bank and the prefix are merged, up to the number of rows for one row at a time).
    `expanded_below`: None where the mean square of the mixture is summed from the mixture itself. Otherwise
    it is
        composed of three sums, (a m + e p)^2 = a^2 m.m + 2 a e m.p + e^2 p.p, as long as the result is at
        least this fraction of a^2 m.m + e^2 p.p, and summed directly below.
    `mix_stored`, `scaled_stored`: types that the mixture, and the mixture times the reciprocal root, are
    rounded to
        before they are used on. The release rounds both to BF16; None keeps FP32.
    """

    dot: Summation | None = None
    merges: int = 1
    expanded_below: float | None = None
    mix_stored: torch.dtype | None = None
    scaled_stored: torch.dtype | None = None


# Roundings that compose the expanded square from its three sums: 2 a e m.p takes three products (the factor
# 2 is exact), and two additions follow.
_EXPANSION_ROUNDINGS = 5


def attn_res_bound(
    bank: Tensor,
    prefix: Tensor | None,
    delta: Tensor | None,
    c: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    arithmetic: AttnResArithmetic | None = None,
    failure_probability: float = FAILURE_PROBABILITY,
    sums: int | None = None,
) -> dict[str, Bounded]:
    """Value and error bound of "prefix", "mix" and "normed", each [T, E], float64, on the device of `bank`.

    `bank` [T, m, E], m >= 0, and `prefix`, `delta` [T, E] in the stored type (BF16); one of `prefix` and
    `delta` may be None, where the block has just begun or where the prefix is already the updated one. `c`
    [E] FP32, the product of two BF16 weights, which FP32 holds exactly. `norm_weight` [E]. `eps` is inside
    both roots.

    "mix" and "normed" are bounded after rounding to the stored type. The bound fails with probability at
    most `failure_probability` (see :func:`bounds.probabilistic_lambda`); `sums` is the number of sums over
    E that share it, by default those of this call, so a caller that goes through a long prompt in pieces
    passes the total.

    Raises ValueError when shapes do not fit or both `prefix` and `delta` are missing.
    """
    how = arithmetic or AttnResArithmetic()
    stored = bank.dtype
    given = [x for x in (prefix, delta) if x is not None]
    if not given or bank.ndim != 3 or any(x.shape != (bank.shape[0], bank.shape[2]) for x in given):
        raise ValueError(
            "attn_res_bound needs bank [T, m, E] and prefix or delta [T, E]; "
            f"got bank {tuple(bank.shape)} and {[tuple(x.shape) for x in given]}"
        )
    if c.shape != bank.shape[2:] or norm_weight.shape != bank.shape[2:]:
        raise ValueError(
            f"c and norm_weight must be [{bank.shape[2]}]: {tuple(c.shape)}, {tuple(norm_weight.shape)}"
        )

    if len(given) == 2:
        total = Bounded.exact(given[0]) + Bounded.exact(given[1])
        updated = total.rounded(torch.float32).rounded(stored)
        p = (given[0].float() + given[1].float()).to(stored)
    else:
        p = given[0]
        updated = Bounded(p.to(torch.float64), torch.zeros_like(p, dtype=torch.float64))
    rows = torch.cat([bank, p.unsqueeze(1)], 1).to(torch.float64)
    tokens, count, width = rows.shape

    gamma = sum_gamma(
        how.dot or Summation.sequential(width), sums or tokens * (2 * count + 1), failure_probability
    )
    logits = _logits(rows, c, eps, gamma)
    weights, mix = softmax_mean(_log_weights(logits, how.merges), rows, _mixture_gamma(count, how.merges))
    return {
        "prefix": updated,
        "mix": mix.rounded(stored),
        "normed": _norm(weights, mix, logits.error, rows, norm_weight, eps, gamma, how, stored),
    }


def _reciprocal_rms(mean_square: Bounded, eps: Bounded) -> Bounded:
    """1 / sqrt(mean_square + eps): the constant 1 / width, the product with it and the sum are rounded."""
    radicand = (mean_square.approx(chain_gamma(2)) + eps).approx(U32)
    return radicand.rsqrt().approx(PTX_RELATIVE_ERROR["rsqrt.approx.f32"])


def _logits(rows: Tensor, c: Tensor, eps: float, gamma: float) -> Bounded:
    """s [T, R]."""
    exact = Bounded.exact(rows)
    r = _reciprocal_rms(exact.mean_square(gamma), Bounded.exact(eps).approx(U32))
    return (dot(exact, Bounded.exact(c), gamma) * r).approx(U32)


def _log_weights(logits: Bounded, merges: int) -> Bounded:
    """Logits with the error of exp(s_j - max) and of the rescalings added.

    Three roundings act on the argument: the difference, log2(e), their product. Where the maximum grows on
    the way, the arguments of the successive exponentials are all negative and add up to the final one, so
    they are charged once.
    """
    top = logits.value.amax(-1, keepdim=True)
    argument = top - logits.value + logits.error + logits.error.amax(-1, keepdim=True)
    exponentials = (1 + merges) * (PTX_RELATIVE_ERROR["ex2.approx.f32"] + U32)
    # (1 - x)^-1 - 1 >= -log(1 - x): a relative error x moves the logarithm by at most chain_gamma(1, x).
    return Bounded(logits.value, logits.error + chain_gamma(3) * argument + chain_gamma(1, exponentials))


def _mixture_gamma(count: int, merges: int) -> float:
    """Relative error of the weighted sum over `count` rows, the sum of the weights, and their quotient."""
    return compound(chain_gamma(2 * (count + merges + 1)), PTX_RELATIVE_ERROR["div.approx.f32"])


def _norm(
    weights: Tensor,
    mix: Bounded,
    logit_error: Tensor,
    rows: Tensor,
    norm_weight: Tensor,
    eps: float,
    gamma: float,
    how: AttnResArithmetic,
    stored: torch.dtype,
) -> Bounded:
    """normed [T, E]. The mixture may stay undivided, if `eps` is scaled by the square of the divisor."""
    if how.mix_stored is not None:
        mix = mix.rounded(how.mix_stored)
    mean_square = mix.mean_square(gamma)
    if how.expanded_below is not None:
        last = weights[:, -1:] * rows[:, -1]
        first = mix.value - last
        # The magnitudes that are added are those of the parts, with the weights that were computed.
        drift = (2 * logit_error.amax(-1, keepdim=True)).expm1() * (weights.unsqueeze(-1) * rows.abs()).sum(1)
        spread = (first.abs() + last.abs() + drift + mix.error).square().sum(-1)
        expanded = mix.mean_square(compound(gamma, chain_gamma(_EXPANSION_ROUNDINGS)), spread)
        # Half the threshold is further from it than rounding can carry the decision.
        direct = expanded.value + expanded.error < how.expanded_below / 2 * (first**2 + last**2).mean(-1)
        mean_square = Bounded(mean_square.value, torch.where(direct, mean_square.error, expanded.error))
    divisor_squared = chain_gamma(2 * (rows.shape[1] + how.merges + 1) + 2)
    r = _reciprocal_rms(mean_square, Bounded.exact(eps).approx(compound(U32, divisor_squared)))
    scaled = (mix * Bounded(r.value.unsqueeze(-1), r.error.unsqueeze(-1))).rounded(torch.float32)
    if how.scaled_stored is not None:
        scaled = scaled.rounded(how.scaled_stored)
    return (scaled * Bounded.exact(norm_weight)).rounded(torch.float32).rounded(stored)
