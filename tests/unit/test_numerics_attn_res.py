"""FP32 emulations of AttnRes + RMSNorm for the tests of audit/numerics, with planted defects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5  # rms_norm_eps of the released config
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

Sum = Callable[[Tensor], Tensor]


def sequential(x: Tensor) -> Tensor:
    """One FP32 accumulator over the last dimension."""
    total = torch.zeros_like(x[..., 0])
    for column in x.movedim(-1, 0):
        total = total + column
    return total


def pairwise(x: Tensor) -> Tensor:
    """A balanced binary tree over the last dimension."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = torch.cat([x[..., : x.shape[-1] - half] + x[..., half:], x[..., x.shape[-1] - half : half]], -1)
    return x[..., 0]


def threads_of_eight(x: Tensor) -> Tensor:
    """8 neighbours in sequence per thread, then a tree over the threads: a vectorised GPU kernel."""
    return pairwise(sequential(x.unflatten(-1, (-1, 8))))


def exact_exp2(x: Tensor) -> Tensor:
    return x.exp2()


def exact_rsqrt(x: Tensor) -> Tensor:
    return x.rsqrt()


@dataclass(frozen=True)
class Case:
    """Operands of one launch, in the types of the kernel, and the FP64 truth."""

    bank: Tensor
    prefix: Tensor
    delta: Tensor
    c: Tensor
    norm_weight: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.bank, self.prefix, self.delta, self.c, self.norm_weight

    def truth(self) -> dict[str, Tensor]:
        """Exact mathematics from the stored prefix on, in two lines, float64."""
        stored = (self.prefix.float() + self.delta.float()).to(BF16)
        rows = torch.cat([self.bank, stored.unsqueeze(1)], 1).to(F64)
        s = (rows @ self.c.to(F64)) / (rows.square().mean(-1) + EPS).sqrt()
        mix = (s.softmax(-1).unsqueeze(-1) * rows).sum(1)
        normed = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm_weight.to(F64)
        return {"prefix": self.prefix.to(F64) + self.delta.to(F64), "mix": mix, "normed": normed}


def realistic(seed: int, tokens: int = 64, bank_rows: int = 4, width: int = 512, scale: float = 1.0) -> Case:
    """Rows as in a trained model: small embedding, growing sums, outlier channels, logits 0.02 apart."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    outliers = torch.ones(width, dtype=F64)
    outliers[torch.randperm(width, generator=g)[: width // 128]] = 30.0
    sizes = scale * torch.tensor([0.02] + [1.5**j for j in range(bank_rows - 1)], dtype=F64)
    bank = normal(tokens, bank_rows, width) * sizes[:bank_rows, None] * outliers
    prefix = normal(tokens, width) * outliers * scale
    delta = normal(tokens, width) * outliers * scale * 0.3
    res_norm = (1 + 0.1 * normal(width)).to(BF16)
    res_proj = (normal(width) * 0.02 / width**0.5).to(BF16)
    return Case(
        bank.to(BF16),
        prefix.to(BF16),
        delta.to(BF16),
        res_norm.float() * res_proj.float(),
        (1 + 0.2 * normal(width)).to(BF16),
    )


def fused(
    case: Case,
    add: Sum = threads_of_eight,
    defect: str = "",
    exp2: Callable[[Tensor], Tensor] = exact_exp2,
    rsqrt: Callable[[Tensor], Tensor] = exact_rsqrt,
) -> dict[str, Tensor]:
    """The fused path: FP32 in registers, bank first, then the prefix; the undivided mixture is normed.

    `defect` plants one error: "softmax_bf16", "skip_row", "eps_outside", "c_bf16", "prefix_late".
    """
    c = case.c.to(BF16).float() if defect == "c_bf16" else case.c
    width = c.shape[0]
    summed = case.prefix.float() + case.delta.float()
    stored = summed.to(BF16)
    p = summed if defect == "prefix_late" else stored.float()
    bank = case.bank[:, :-1] if defect == "skip_row" else case.bank
    rows = torch.cat([bank.float(), p.unsqueeze(1)], 1)

    def reciprocal_rms(square: Tensor, eps: Tensor | float) -> Tensor:
        if defect == "eps_outside":
            return 1 / ((square * (1.0 / width)).sqrt() + eps)
        return rsqrt(square * (1.0 / width) + eps)

    s = add(rows * c) * reciprocal_rms(add(rows * rows), EPS)
    log2_e = 1.4426950408889634
    top = s[:, :-1].amax(-1, keepdim=True) if s.shape[1] > 1 else torch.full_like(s, -torch.inf)
    w = exp2((s[:, :-1] - top) * log2_e)
    both = torch.maximum(top, s[:, -1:])
    a, e = exp2((top - both) * log2_e), exp2((s[:, -1:] - both) * log2_e)
    m, mass = torch.zeros_like(p), torch.zeros_like(a)
    for j in range(w.shape[1]):
        m, mass = m + w[:, j : j + 1] * rows[:, j], mass + w[:, j : j + 1]
    mass = a * mass + e
    if defect == "softmax_bf16":
        weights = (torch.cat([a * w, e], 1) / mass).to(BF16).float()
        h, mass = (weights.unsqueeze(-1) * rows).sum(1), torch.ones_like(mass)
    else:
        h = a * m + e * p
    scale = reciprocal_rms(
        add(h * h).unsqueeze(-1), EPS * mass * mass if defect != "eps_outside" else EPS * mass
    )
    return {
        "prefix": stored,
        "mix": (h / mass).to(BF16),
        "normed": (h * scale * case.norm_weight.float()).to(BF16),
    }


def standard(case: Case) -> dict[str, Tensor]:
    """The unfused path, rounded where the release rounds: BF16 mixture, scaled mixture and product."""
    prefix = case.prefix + case.delta
    rows = torch.cat([case.bank, prefix.unsqueeze(1)], 1).float()
    s = (rows * case.c).sum(-1) * torch.rsqrt(rows.square().mean(-1) + EPS)
    mix = (s.softmax(-1).unsqueeze(-1) * rows).sum(1).to(BF16)
    x = mix.float()
    scaled = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(BF16)
    return {"prefix": prefix, "mix": mix, "normed": case.norm_weight * scaled}
