"""AttnRes on a real prompt: what each of its steps reads at chosen positions, and what it should make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from k3_audit.audit.numerics import AttnResArithmetic, Judgement, Summation, attn_res_bound, judge, poison_
from k3_audit.fused_backend import standard
from k3_audit.fused_backend.executor import AttnRes
from k3_audit.reference.attn_res import Residual, attn_res
from k3_audit.reference.config import Config
from k3_audit.reference.model import Observation
from k3_audit.reference.tensors import PREFIX, layer_prefix
from torch import Tensor

BANK_ROWS = 8
GROUP = 8  # tokens of one launch
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

# How the kernel sums over the 7168 columns (fused_backend/kernels/attn_res.py): 8 columns of a thread in two chains
# (4 roundings, and 1 to join them), 5 levels over the warp, then 14 slots in sequence and 1 level over the lanes in
# the longest of its rounds.
KERNEL = AttnResArithmetic(dot=Summation(7168, 4 + 1 + 5 + 14 + 1), merges=1, expanded_below=2.0**-8)


@dataclass(frozen=True)
class Windows:
    """Positions to look at: `count` windows of `width` consecutive positions, spread evenly over `length`."""

    length: int
    count: int
    width: int = GROUP

    @property
    def starts(self) -> list[int]:
        """First position of each window; the first window is not at the very beginning, the last is at the end."""
        return [(i + 1) * self.length // self.count - self.width for i in range(self.count)]

    @property
    def positions(self) -> list[int]:
        return [start + i for start in self.starts for i in range(self.width)]


@dataclass
class Mix:
    """Operands of one AttnRes step at N positions, in the types that the kernel reads.

    `bank [N, m, E]`, `before [N, E]` (None where the block has just begun), `delta [N, E]`, all BF16; weights `[E]`.
    """

    name: str
    bank: Tensor
    before: Tensor | None
    delta: Tensor
    write: bool
    res_norm: Tensor
    res_proj: Tensor
    norm: Tensor
    eps: float

    @property
    def scalars(self) -> dict[str, int]:
        rows = self.bank.shape[1]
        return {
            "bank_rows": rows,
            "bank_write": rows if self.write else -1,
            "has_prefix": int(self.before is not None),
        }

    @property
    def stored(self) -> Tensor:
        """The updated prefix as it is stored, BF16: the last row of the mixture."""
        return self.delta if self.before is None else (self.before.float() + self.delta.float()).to(BF16)

    def reference(self) -> Tensor:
        """The normed mixture in fp64, from the stored prefix on."""
        bank = Residual(tuple(row.to(F64) for row in self.bank.unbind(1)))
        weights = (w.to(F64) for w in (self.res_norm, self.res_proj, self.norm))
        return attn_res(bank, self.stored.to(F64), *weights, self.eps).normed

    def bound(self, arithmetic: AttnResArithmetic, sums: int) -> Tensor:
        """Largest error that `arithmetic` may make in each element of the normed mixture."""
        c = self.res_norm.float() * self.res_proj.float()
        bounds = attn_res_bound(
            self.bank, self.before, self.delta, c, self.norm, self.eps, arithmetic=arithmetic, sums=sums
        )
        return bounds["normed"].error

    def run(self, op: AttnRes, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
        """(normed `[N, E]`, updated prefix `[N, E]`, bank `[N, 8, E]`) by `op`, `group` positions a launch."""
        outs, prefixes, banks = [], [], []
        for first in range(0, len(self.delta), group):
            part = slice(first, first + group)
            delta = self.delta[part].contiguous()
            tokens, hidden = delta.shape
            bank = poison_(torch.empty(tokens, BANK_ROWS, hidden, dtype=BF16, device=delta.device))
            bank[:, : self.bank.shape[1]] = self.bank[part]
            prefix = poison_(torch.empty_like(delta)) if self.before is None else self.before[part].clone()
            out = poison_(torch.empty_like(delta))
            op(delta, prefix, bank, self.res_norm, self.res_proj, self.norm, **self.scalars, out=out)
            outs.append(out)
            prefixes.append(prefix)
            banks.append(bank)
        return torch.cat(outs), torch.cat(prefixes), torch.cat(banks)

    def planted(self) -> dict[str, Tensor]:
        """The normed mixture with one defect each, otherwise in fp32 and rounded once."""
        if self.bank.shape[1] == 0:
            return {"sum for mean": self._formula(scale=self.delta.shape[1])}
        return {
            "softmax rounded to BF16": self._formula(weights=lambda w: w.to(BF16).float()),
            "one bank row skipped": self._formula(bank=self.bank[:, :-1]),
        }

    def _formula(
        self,
        bank: Tensor | None = None,
        weights: Callable[[Tensor], Tensor] = lambda w: w,
        scale: float = 1.0,
    ) -> Tensor:
        rows = torch.cat([self.bank if bank is None else bank, self.stored[:, None]], 1).float()
        c = self.res_norm.float() * self.res_proj.float()
        s = (rows @ c) * torch.rsqrt(rows.square().mean(-1) + self.eps)
        h = (weights(s.softmax(1))[..., None] * rows).sum(1)
        r = torch.rsqrt(scale * h.square().mean(-1, keepdim=True) + self.eps)
        return (h * r * self.norm.float()).to(BF16)


class Capture:
    """Observer of the reference that keeps the operands of every AttnRes step at `positions`, rounded to BF16.

    `normed[site]` keeps the fp64 result too, for the sites named in `keep`.
    """

    def __init__(self, positions: Sequence[int], keep: Sequence[str] = ("ffn", "output")):
        self.positions = torch.tensor(positions)
        self.keep = keep
        self._parts: dict[tuple[int, str], list[tuple]] = {}

    def __call__(self, seen: Observation) -> None:
        step = seen.step
        tokens = len(step.delta)
        inside = self.positions[(self.positions >= seen.first) & (self.positions < seen.first + tokens)]
        if not len(inside):
            return
        index = (inside - seen.first).to(step.delta.device)
        bank = [row[index].to(BF16) for row in step.bank]
        before = None if step.before is None else step.before[index].to(BF16)
        normed = step.normed[index] if seen.site in self.keep else None
        part = (bank, before, step.delta[index].to(BF16), step.write, normed)
        self._parts.setdefault((seen.layer, seen.site), []).append(part)

    def normed(self, layer: int, site: str) -> Tensor:
        """fp64 result of one step, `[N, E]`."""
        return torch.cat([part[4] for part in self._parts[layer, site]])

    def mixes(self, config: Config, tensors: dict[str, Tensor]) -> Iterator[Mix]:
        """The steps in the order of the model."""
        for (layer, site), parts in self._parts.items():
            delta = torch.cat([p[2] for p in parts])
            tokens, hidden = delta.shape
            rows = [torch.cat(row) for row in zip(*(p[0] for p in parts), strict=True)]
            bank = torch.stack(rows, 1) if rows else delta.new_empty(tokens, 0, hidden)
            before = None if parts[0][1] is None else torch.cat([p[1] for p in parts])
            owner, res, norm = {
                "attention": (layer_prefix(layer), "self_attention_res", "input_layernorm"),
                "ffn": (layer_prefix(layer), "mlp_res", "post_attention_layernorm"),
                "output": (f"{PREFIX}model.", "output_attn_res", "norm"),
            }[site]
            weights = [tensors[f"{owner}{w}.weight"].flatten() for w in (f"{res}_norm", f"{res}_proj", norm)]
            weights = [w.to(delta.device, BF16) for w in weights]
            name = "output" if site == "output" else f"{layer} {site}"
            yield Mix(name, bank, before, delta, parts[0][3], *weights, config.rms_norm_eps)


def judge_mix(
    mix: Mix,
    op: AttnRes,
    variants: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]],
    positions: Tensor,
    *,
    subject: str,
    sums: int,
    width: int = GROUP,
    only: Sequence[str] | None = None,
) -> tuple[Judgement, list[str]]:
    """The six criteria of one step, and what is wrong with the state that it leaves (exact, so no tolerance).

    `variants` are further runs of the same operands under another schedule.
    """
    out, prefix, bank = mix.run(op)
    control, stored, _ = mix.run(standard.attn_res_norm)
    others = {name: run() for name, run in variants.items()}
    judgement = judge(
        out,
        mix.reference(),
        control,
        mix.bound(KERNEL, sums),
        subject=subject,
        layer=mix.name,
        positions=positions,
        window=width,
        planted=mix.planted(),
        variants={name: got[0] for name, got in others.items()},
        horizon=float(positions[-1] + 1),
        **({} if only is None else {"only": only}),
    )
    wrong = []
    if not torch.equal(bits(prefix), bits(stored)):
        wrong.append(f"{mix.name}: the prefix is not the rounded sum of prefix and delta")
    rows = mix.bank.shape[1]
    expected = poison_(torch.empty_like(bank))
    expected[:, :rows] = mix.bank
    if mix.write:
        expected[:, rows] = stored
    if not torch.equal(bits(bank), bits(expected)):
        wrong.append(f"{mix.name}: bank rows other than row {rows if mix.write else 'none'} were written")
    for name, got in others.items():
        if not (torch.equal(bits(got[1]), bits(prefix)) and torch.equal(bits(got[2]), bits(bank))):
            wrong.append(f"{mix.name}: {name} leaves another prefix or bank")
    return judgement, wrong


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)
