"""AttnRes: attention over earlier block sums takes the place of the residual stream (arXiv 2607.24653).

Per token there is a `prefix` (the running sum of sublayer outputs in the current block) and a `bank` of the
prefixes of the blocks before it; row 0 is the token embedding. A sublayer reads a softmax mixture of all
these rows. Nothing of this is carried from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .norm import inverse_rms, rms_norm
from .rounding import EXACT, Rounding


def mix(rows: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float, rd: Rounding = EXACT) -> Tensor:
    """Mixture of `rows`, each `[..., E]`, by a softmax over one logit per row.

    A logit is the row's RMSNorm, without weight, times `norm * proj` (`norm [E]`, `proj [1, E]` or `[E]`).
    The mixture sums the raw rows. Logits and weights are never rounded. A single row is returned as it is.
    """
    if len(rows) == 1:
        return rows[0]
    direction = norm * proj.reshape(-1)
    logits = torch.stack([(row @ direction) * inverse_rms(row, eps).squeeze(-1) for row in rows], dim=-1)
    weights = logits.softmax(-1)
    mixed = torch.zeros_like(rows[-1])
    for j, row in enumerate(rows):
        mixed = mixed + weights[..., j, None] * row
    return rd.bf(mixed)


@dataclass(frozen=True)
class Residual:
    """The block residual state of some tokens: bank rows and prefix, each `[..., E]`; None: no prefix yet."""

    bank: tuple[Tensor, ...] = ()
    prefix: Tensor | None = None


@dataclass(frozen=True)
class MixStep:
    """One AttnRes step: everything that it read and everything that it made.

    `prefix = before + delta` (`= delta` where `before` is None) is the last row of the mixture, after the
    bank rows. `mixed` is the mixture and `normed` its RMSNorm, the next sublayer's input. `write`: the step
    closes the block.
    """

    bank: tuple[Tensor, ...]
    before: Tensor | None
    delta: Tensor
    prefix: Tensor
    mixed: Tensor
    normed: Tensor
    write: bool

    @property
    def after(self) -> Residual:
        """The state that the step leaves. Closing a block banks the raw prefix, never the mixture."""
        if self.write:
            return Residual((*self.bank, self.prefix), None)
        return Residual(self.bank, self.prefix)


def attn_res(
    residual: Residual,
    delta: Tensor,
    norm: Tensor,
    proj: Tensor,
    next_norm: Tensor,
    eps: float,
    rd: Rounding = EXACT,
    write: bool = False,
) -> MixStep:
    """Add the last sublayer's output `delta [..., E]` to the prefix, mix, and norm for the next sublayer.

    `norm`, `proj` are the mixture's weights and `next_norm` that of the following RMSNorm. With `write` the
    prefix is banked after the mixture has read it. In the release the rounded prefix is the row.
    """
    before = residual.prefix
    prefix = delta if before is None else rd.bf(before + delta)
    mixed = mix([*residual.bank, prefix], norm, proj, eps, rd)
    return MixStep(
        bank=residual.bank,
        before=before,
        delta=delta,
        prefix=prefix,
        mixed=mixed,
        normed=rms_norm(mixed, next_norm, eps, rd),
        write=write,
    )
