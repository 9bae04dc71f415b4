"""How far an output is from the reference: per head, per window of positions, small enough to keep.

A tensor of a long prompt does not fit in memory as float64, its errors do: :func:`measure` reduces one
piece of it to a table of windows x heads, and :meth:`Errors.join` puts the pieces together. The criteria
read tables only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .formats import ulp, unwritten

# Cosine defect that a BF16 output may have. One rounding of values whose leading digits are spread evenly
# over the binades leaves a relative L2 error of 2^-8 / sqrt(3 * 2.164), half of whose square is 1.2e-6
# (2.164 = 3 / (2 ln 2), the mean square of such a significand). 5e-6 leaves room for four roundings in a
# row; the release's AttnRes + RMSNorm has three.
COSINE_DEFECT_BF16 = 5e-6


@dataclass(frozen=True)
class Errors:
    """Error measures of one output against the reference. Tensors [W, H] on the CPU unless said otherwise.

    Measures are over the elements where the reference is finite; an output that is not finite there is
    infinitely wrong. `max_abs`, `rms_abs`: of |out - ref|. `max_rel`, `rms_rel`: of |out - ref| / |ref|,
    infinite where the reference is zero and the output is not. `max_ulp`: in ulp of the stored type at the
    reference.
    `rel_l2` = |out - ref|_2 / |ref|_2 of the cell; `position_l2`: mean over positions of the same of one
    position.
    `cosine_defect` = 1 - cos(out, ref); `cosine_limit`: what criterion 4 allows, for BF16 the larger of
    5e-6 and what correct rounding of these very elements may reach, else what follows from the bound (NaN
    without one).
    `bound_ratio`: largest |out - ref| / bound; NaN without a bound. `unbounded`: elements whose bound is
    not finite.
    `mask_mismatch`: elements where out and ref differ in being NaN, +Inf or -Inf. `unwritten`: poison left.
    `floor_max`, `floor_rms`: the error that correct rounding to the stored type may have (half an ulp), and
    its root mean square when spread evenly.
    `worst_position`, `worst_element`: the first element that is unwritten or differs in being NaN or Inf,
    else where `bound_ratio` is reached (`max_abs` without a bound).
    `first`, `last` [W]: positions of the window; `count`: elements of the cell where the reference is finite.
    """

    first: Tensor
    last: Tensor
    count: Tensor
    max_abs: Tensor
    rms_abs: Tensor
    max_rel: Tensor
    rms_rel: Tensor
    max_ulp: Tensor
    rel_l2: Tensor
    position_l2: Tensor
    cosine_defect: Tensor
    cosine_limit: Tensor
    bound_ratio: Tensor
    unbounded: Tensor
    mask_mismatch: Tensor
    unwritten: Tensor
    floor_max: Tensor
    floor_rms: Tensor
    worst_position: Tensor
    worst_element: Tensor

    @property
    def windows(self) -> int:
        return self.max_abs.shape[0]

    @property
    def heads(self) -> int:
        return self.max_abs.shape[1]

    @classmethod
    def join(cls, parts: Sequence[Errors]) -> Errors:
        """One table from those of successive pieces of the prompt."""
        return cls(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    def to_dict(self) -> dict[str, list]:
        """Nested lists, [W] or [W][H], as JSON holds them; what is not finite becomes "inf" or "nan"."""

        def plain(x: Any) -> Any:
            if isinstance(x, list):
                return [plain(y) for y in x]
            return x if math.isfinite(x) else str(x)

        return {f.name: plain(getattr(self, f.name).tolist()) for f in fields(self)}


def measure(
    out: Tensor,
    ref: Tensor,
    bound: Tensor | None = None,
    *,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Errors:
    """Compare `out` with `ref`, both [T, E] (one head) or [T, H, E], on one device.

    `out` is in the stored type, poisoned before the kernel ran; `ref` and `bound` (>= 0) are converted to
    float64 one window at a time. `window`: rows per window, by default all of them; `positions` [T]: token
    position of each row, by default 0 .. T-1.

    Raises ValueError when shapes do not fit or the tensor is empty.
    """
    shapes = {"out": out.shape, "ref": ref.shape, **({} if bound is None else {"bound": bound.shape})}
    if len(set(shapes.values())) != 1 or out.ndim not in (2, 3) or out.numel() == 0:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"measure compares tensors of one shape, [T, E] or [T, H, E], not empty; got {found}"
        )
    rows = out.shape[0]
    window = rows if window is None else window
    if window < 1:
        raise ValueError(f"a window has at least one row, not {window}")
    if positions is None:
        positions = torch.arange(rows)
    if positions.shape != (rows,):
        raise ValueError(f"positions must name each of the {rows} rows, not {tuple(positions.shape)}")
    if out.ndim == 2:
        out, ref = out.unsqueeze(1), ref.unsqueeze(1)
        bound = None if bound is None else bound.unsqueeze(1)
    pieces = [slice(i, min(i + window, rows)) for i in range(0, rows, window)]
    where = positions.to("cpu", torch.int64)
    if (where.diff() <= 0).any():
        raise ValueError("positions must increase from row to row")
    return Errors.join([_cell(out[s], ref[s], None if bound is None else bound[s], where[s]) for s in pieces])


def _cell(out: Tensor, ref: Tensor, bound: Tensor | None, positions: Tensor) -> Errors:
    """One window: [t, H, E] to a table of one row."""
    poison = unwritten(out)
    stored, out, ref = out.dtype, out.to(torch.float64), ref.to(torch.float64)
    judged, wrong = ref.isfinite(), ref.isfinite() & ~out.isfinite()
    mismatch = (out.isnan() != ref.isnan()) | (
        (out != ref) & (out.isinf() | ref.isinf()) & ~out.isnan() & ~ref.isnan()
    )

    clean_ref = torch.where(judged, ref, 0.0)
    clean_out = torch.where(judged & ~wrong, out, 0.0)
    error = torch.where(wrong, torch.inf, (clean_out - clean_ref).abs())
    spacing = torch.where(judged, ulp(ref, stored), 0.0)
    count = judged.sum((0, 2))

    def largest(x: Tensor) -> Tensor:
        return x.amax((0, 2))

    def rms(x: Tensor) -> Tensor:
        return (x.square().sum((0, 2)) / count.clamp(min=1)).sqrt()

    def l2(x: Tensor) -> Tensor:
        return x.square().sum((0, 2)).sqrt()

    relative = ratio_of(error, clean_ref.abs())
    ref_l2 = l2(clean_ref)
    position_l2 = ratio_of(error.square().sum(2).sqrt(), clean_ref.square().sum(2).sqrt())
    defect = torch.where(
        wrong.any(2).any(0), 1.0, cosine_defect(clean_out.movedim(1, 0), clean_ref.movedim(1, 0))
    )

    if bound is None:
        ratio, unbounded = error, torch.zeros_like(judged)
        limit = torch.full_like(ref_l2, torch.nan)
    else:
        allowed = bound.to(torch.float64)
        unbounded = judged & ~allowed.isfinite()
        ratio = torch.where(unbounded & ~wrong, 0.0, ratio_of(error, allowed))
        limit = _cosine_limit(l2(torch.where(judged, allowed, 0.0)), ref_l2)
    if stored == torch.bfloat16:
        limit = _cosine_limit(l2(spacing / 2), ref_l2).clamp(min=COSINE_DEFECT_BF16)

    heads = error.shape[1]
    spot = torch.where(poison | mismatch, torch.inf, ratio)
    worst = spot.movedim(1, 0).reshape(heads, -1).argmax(1).cpu()

    def row(x: Tensor) -> Tensor:
        return x.cpu().unsqueeze(0)

    return Errors(
        first=positions[:1],
        last=positions[-1:],
        count=row(count),
        max_abs=row(largest(error)),
        rms_abs=row(rms(error)),
        max_rel=row(largest(relative)),
        rms_rel=row(rms(relative)),
        max_ulp=row(largest(ratio_of(error, spacing))),
        rel_l2=row(ratio_of(l2(error), ref_l2)),
        position_l2=row(position_l2.mean(0)),
        cosine_defect=row(defect),
        cosine_limit=row(limit),
        bound_ratio=row(largest(ratio) if bound is not None else torch.full_like(ref_l2, torch.nan)),
        unbounded=row(unbounded.sum((0, 2))),
        mask_mismatch=row(mismatch.sum((0, 2))),
        unwritten=row(poison.sum((0, 2))),
        floor_max=row(largest(spacing / 2)),
        floor_rms=row(rms(spacing / 2) / 3**0.5),
        worst_position=positions[worst // error.shape[2]].unsqueeze(0),
        worst_element=(worst % error.shape[2]).unsqueeze(0),
    )


def ratio_of(error: Tensor, scale: Tensor) -> Tensor:
    """error / scale with 0 / 0 = 0 and x / 0 = inf; an infinite error stays infinite."""
    quotient = torch.where(error == 0, 0.0, error / torch.where(scale == 0, 1.0, scale))
    return torch.where((error > 0) & ((scale == 0) | error.isinf()), torch.inf, quotient)


def _cosine_limit(error_l2: Tensor, ref_l2: Tensor) -> Tensor:
    """Largest 1 - cos(out, ref) when |out - ref|_2 <= error_l2: the sine is at most the ratio r."""
    r = ratio_of(error_l2, ref_l2).clamp(max=1.0)
    # 1 - sqrt(1 - r^2) without cancellation
    return r.square() / (1 + (1 - r.square()).sqrt())


def cosine_defect(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos(x, y) over all dimensions but the first: [H, ...] to [H].

    As half the square of |x/|x| - y/|y||, which does not cancel where the two are close. 0 for two zero
    vectors and 1 where only one is zero, or either is not finite.
    """
    x, y = x.reshape(x.shape[0], -1).to(torch.float64), y.reshape(y.shape[0], -1).to(torch.float64)
    nx, ny = _norm(x), _norm(y)
    difference = x / torch.where(nx == 0, 1.0, nx) - y / torch.where(ny == 0, 1.0, ny)
    defect = difference.square().sum(1) / 2
    defect = torch.where((nx == 0).squeeze(1) != (ny == 0).squeeze(1), 1.0, defect)
    return torch.where(defect.isfinite(), defect, 1.0)


def _norm(x: Tensor) -> Tensor:
    """|x|_2 of each row, [H, 1], scaled so that squares neither overflow nor vanish."""
    top = x.abs().amax(1, keepdim=True)
    return top * (x / torch.where(top == 0, 1.0, top)).square().sum(1, keepdim=True).sqrt()
