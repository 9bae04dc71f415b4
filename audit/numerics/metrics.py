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

# Elements that are converted to float64 at a time: 128 MiB in each intermediate tensor.
_PIECE = 2**24


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

    `out` is in the stored type, poisoned before the kernel ran; all are converted to float64 piece by
    piece. `window`: rows per window, by default all of them; `positions` [T]: token position of each row,
    by default 0 .. T-1.

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
    where = positions.to("cpu", torch.int64)
    if (where.diff() <= 0).any():
        raise ValueError("positions must increase from row to row")
    # Whole windows as many at a time as fit into _PIECE elements, then the shorter rest.
    step = window * max(1, _PIECE // (window * out[0].numel()))
    whole = rows - rows % window
    cuts = [(i, min(i + step, whole), window) for i in range(0, whole, step)]
    if whole < rows:
        cuts.append((whole, rows, rows - whole))

    def cut(x: Tensor, start: int, stop: int, size: int) -> Tensor:
        return x[start:stop].reshape((stop - start) // size, size, -1, x.shape[-1])

    return Errors.join(
        [
            _table(
                cut(out, *c),
                cut(ref, *c),
                None if bound is None else cut(bound, *c),
                where[c[0] : c[1]].view(-1, c[2]),
            )
            for c in cuts
        ]
    )


def _table(out: Tensor, ref: Tensor, bound: Tensor | None, positions: Tensor) -> Errors:
    """[W, t, H, E], and `positions` [W, t], to a table."""
    poison = unwritten(out)
    stored, out, ref = out.dtype, out.to(torch.float64), ref.to(torch.float64)
    judged, wrong = ref.isfinite(), ref.isfinite() & ~out.isfinite()
    infinite = (out.isinf() | ref.isinf()) & ~out.isnan() & ~ref.isnan()
    mismatch = (out.isnan() != ref.isnan()) | (infinite & (out != ref))

    clean_ref = torch.where(judged, ref, 0.0)
    clean_out = torch.where(judged & ~wrong, out, 0.0)
    error = torch.where(wrong, torch.inf, (clean_out - clean_ref).abs())
    half_ulp = torch.where(judged, ulp(ref, stored) / 2, 0.0)
    count = judged.sum((1, 3))

    def largest(x: Tensor) -> Tensor:
        return x.amax((1, 3))

    def rms(x: Tensor) -> Tensor:
        return (x.square().sum((1, 3)) / count.clamp(min=1)).sqrt()

    def l2(x: Tensor) -> Tensor:
        return x.square().sum((1, 3)).sqrt()

    def by_cell(x: Tensor) -> Tensor:
        return x.movedim(2, 1).flatten(2)

    relative = ratio_of(error, clean_ref.abs())
    ref_l2 = l2(clean_ref)
    position_l2 = ratio_of(error.square().sum(3).sqrt(), clean_ref.square().sum(3).sqrt())
    defect = torch.where(wrong.sum((1, 3)) > 0, 1.0, cosine_defect(by_cell(clean_out), by_cell(clean_ref)))

    if bound is None:
        ratio, unbounded = error, torch.zeros_like(judged)
        limit = torch.full_like(ref_l2, torch.nan)
    else:
        allowed = bound.to(torch.float64)
        unbounded = judged & ~allowed.isfinite()
        ratio = torch.where(unbounded & ~wrong, 0.0, ratio_of(error, allowed))
        limit = _cosine_limit(l2(torch.where(judged, allowed, 0.0)), ref_l2)
    if stored == torch.bfloat16:
        limit = _cosine_limit(l2(half_ulp), ref_l2).clamp(min=COSINE_DEFECT_BF16)

    spot = by_cell(torch.where(poison | mismatch, torch.inf, ratio)).argmax(-1).cpu()
    width = error.shape[3]
    table = {
        "count": count,
        "max_abs": largest(error),
        "rms_abs": rms(error),
        "max_rel": largest(relative),
        "rms_rel": rms(relative),
        "max_ulp": largest(ratio_of(error, 2 * half_ulp)),
        "rel_l2": ratio_of(l2(error), ref_l2),
        "position_l2": position_l2.mean(1),
        "cosine_defect": defect,
        "cosine_limit": limit,
        "bound_ratio": largest(ratio) if bound is not None else torch.full_like(ref_l2, torch.nan),
        "unbounded": unbounded.sum((1, 3)),
        "mask_mismatch": mismatch.sum((1, 3)),
        "unwritten": poison.sum((1, 3)),
        "floor_max": largest(half_ulp),
        "floor_rms": rms(half_ulp) / 3**0.5,
    }
    return Errors(
        first=positions[:, 0],
        last=positions[:, -1],
        worst_position=positions.gather(1, spot // width),
        worst_element=spot % width,
        **{name: x.cpu() for name, x in table.items()},
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
    """1 - cos(x, y) over the last dimension, float64.

    As half the square of |x/|x| - y/|y||, which does not cancel where the two are close. 0 for two zero
    vectors and 1 where only one is zero, or either is not finite.
    """
    x, y = x.to(torch.float64), y.to(torch.float64)
    nx, ny = _norm(x), _norm(y)
    difference = x / torch.where(nx == 0, 1.0, nx) - y / torch.where(ny == 0, 1.0, ny)
    defect = difference.square().sum(-1) / 2
    defect = torch.where((nx == 0).squeeze(-1) != (ny == 0).squeeze(-1), 1.0, defect)
    return torch.where(defect.isfinite(), defect, 1.0)


def _norm(x: Tensor) -> Tensor:
    """|x|_2 over the last dimension, which is kept; scaled so that squares neither overflow nor vanish."""
    top = x.abs().amax(-1, keepdim=True)
    return top * (x / torch.where(top == 0, 1.0, top)).square().sum(-1, keepdim=True).sqrt()
