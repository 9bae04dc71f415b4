"""The six criteria that an output must meet against the float64 reference, and the judgement over them.

    1 bound      every element within the bound derived from the operands
    2 control    max and RMS error at most twice those of the standard path, per head and window of positions
    3 drift      the error does not grow faster with position than the standard path's
    4 integrity  direction kept (cosine defect), NaN and Inf where the reference has them, all written
    5 teeth      an output never written, an output of zeros and each planted defect fail on this case
    6 schedule   another batch, split, launch or rank gives the same bits

Each is one function from small tables to a :class:`Criterion`. What cannot be decided is *inconclusive*,
never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from ..findings import Verdict
from .bounds import FAILURE_PROBABILITY
from .formats import as_bits, poison_
from .metrics import Errors, measure, ratio_of

CRITERIA = ("bound", "control", "drift", "integrity", "teeth", "schedule")

# An output may be twice as wrong as the standard path, which is the accuracy that users of the model have
# today.
CONTROL_FACTOR = 2.0

# max_position_embeddings of the released config: no token position lies further from another.
CONTEXT = 1_048_576

# Windows that a prompt is cut into when the caller does not say: enough for the drift's confidence interval
# (see `drift`), few enough that each window holds many positions.
DEFAULT_WINDOWS = 64


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Place:
    """Where in the model an error lies. Negative: not known to that depth."""

    layer: str = ""
    head: int = -1
    position: int = -1
    element: int = -1

    def __str__(self) -> str:
        parts = [f"layer {self.layer}"] if self.layer else []
        numbers = {"head": self.head, "position": self.position, "element": self.element}
        return ", ".join([*parts, *(f"{k} {v}" for k, v in numbers.items() if v >= 0)])


@dataclass(frozen=True)
class Criterion:
    """One criterion's outcome; `figures` are the numbers behind it, `place` the worst spot."""

    name: str
    outcome: Outcome
    message: str
    figures: Mapping[str, float] = field(default_factory=dict)
    place: Place = Place()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and TOML: numbers that are not finite become "inf", "-inf" or "nan"."""
        return {
            "name": self.name,
            "outcome": str(self.outcome),
            "message": self.message,
            "figures": {k: v if math.isfinite(v) else str(v) for k, v in self.figures.items()},
            "place": {k: v for k, v in vars(self.place).items() if v not in ("", -1)},
        }


@dataclass(frozen=True)
class Judgement:
    """The criteria that were asked of one output. Asking fewer than six is visible here."""

    subject: str
    criteria: tuple[Criterion, ...]

    def __getitem__(self, name: str) -> Criterion:
        return {c.name: c for c in self.criteria}[name]

    @property
    def verdict(self) -> Verdict:
        """*finding* if a criterion fails, else *inconclusive* if one is, else *clean*."""
        outcomes = {c.outcome for c in self.criteria}
        if Outcome.FAIL in outcomes:
            return Verdict.FINDING
        return Verdict.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes or not outcomes else Verdict.CLEAN

    @property
    def message(self) -> str:
        """One line: what fails first, else what is open, else what was shown."""
        for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
            told = [c for c in self.criteria if c.outcome is outcome]
            if told:
                more = f" (and {', '.join(c.name for c in told[1:])})" if told[1:] else ""
                return f"{self.subject}: {told[0].name} {outcome}: {told[0].message}{more}"
        if not self.criteria:
            return f"{self.subject}: inconclusive: no criterion was asked"
        return f"{self.subject}: {', '.join(c.name for c in self.criteria)} hold"

    @property
    def figures(self) -> dict[str, float]:
        """All figures, named criterion_figure, as an evidence record takes them."""
        return {f"{c.name}_{k}": v for c in self.criteria for k, v in c.figures.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "verdict": str(self.verdict),
            "message": self.message,
            "criteria": [c.to_dict() for c in self.criteria],
        }


def _worst(table: Tensor) -> tuple[int, int]:
    """Window and head of the largest entry; NaN counts as largest."""
    index = int(table.nan_to_num(nan=torch.inf).argmax())
    return index // table.shape[1], index % table.shape[1]


def _place(errors: Errors, window: int, head: int, layer: str) -> Place:
    position, element = errors.worst_position[window, head], errors.worst_element[window, head]
    return Place(layer, head, int(position), int(element))


def within_bound(errors: Errors, layer: str = "") -> Criterion:
    """1: no element exceeds its bound. Inconclusive where the bound is not finite, or none was given."""
    w, h = _worst(errors.bound_ratio)
    ratio, place = errors.bound_ratio[w, h].item(), _place(errors, w, h, layer)
    unbounded = int(errors.unbounded.sum())
    figures = {"ratio": ratio, "unbounded": unbounded, "max_ulp": errors.max_ulp.max().item()}
    if math.isnan(ratio):
        return Criterion("bound", Outcome.INCONCLUSIVE, "no bound was given", {"max_ulp": figures["max_ulp"]})
    if ratio > 1:
        message = f"{place}: the error is {ratio:.6g} times the bound derived from the operands"
        return Criterion("bound", Outcome.FAIL, message, figures, place)
    if unbounded:
        message = (
            f"{unbounded} elements have no finite bound: an intermediate may overflow or leave its domain"
        )
        return Criterion("bound", Outcome.INCONCLUSIVE, message, figures, place)
    message = f"the largest error is {ratio:.6g} of its bound, at {place}"
    return Criterion("bound", Outcome.PASS, message, figures, place)


def against_control(
    errors: Errors,
    control: Errors | None,
    layer: str = "",
    *,
    factor: float = CONTROL_FACTOR,
    failure_probability: float = FAILURE_PROBABILITY,
) -> Criterion:
    """2: max and RMS error at most `factor` times the standard path's, in every cell of head and window.

    The standard path is credited with at least the error that correct rounding to the stored type may have,
    so that its luck in a cell is not held against an output that is rounded correctly.

    The ratio of two RMS errors of equal quality scatters. Were all n errors of a cell independent and
    normal, its square would follow F(n, n); n must be so large that this exceeds factor^2 in any cell at
    most with `failure_probability`, else the cells are too small to tell and the criterion is inconclusive.
    """
    if control is None:
        return Criterion("control", Outcome.INCONCLUSIVE, "the standard path's output was not given")
    if control.max_abs.shape != errors.max_abs.shape:
        raise ValueError(
            f"control has {control.windows} windows x {control.heads} heads, "
            f"the output {errors.windows} x {errors.heads}"
        )
    if not control.max_abs.isfinite().all():
        return Criterion(
            "control", Outcome.INCONCLUSIVE, "the standard path is not finite where the reference is"
        )
    tables = {
        "max": ratio_of(errors.max_abs, torch.maximum(control.max_abs, errors.floor_max)),
        "rms": ratio_of(errors.rms_abs, torch.maximum(control.rms_abs, errors.floor_rms)),
    }
    figures = {f"{name}_ratio": table.max().item() for name, table in tables.items()}
    worst = max(tables, key=lambda name: figures[f"{name}_ratio"])
    ratio = figures[f"{worst}_ratio"]
    w, h = _worst(tables[worst])
    window = f"positions {int(errors.first[w])} to {int(errors.last[w])}"
    smallest = max(1, int(errors.count.min()))
    luck = float(stats.f.sf(factor**2, smallest, smallest)) * errors.max_abs.numel()
    if luck > failure_probability:
        message = (
            f"a window of one head has only {smallest} elements: two outputs of equal quality may differ "
            f"by more than {factor:g}; use larger windows"
        )
        return Criterion("control", Outcome.INCONCLUSIVE, message, figures)
    place = _place(errors, w, h, layer)
    what = f"{worst.upper() if worst == 'rms' else worst} error is {ratio:.3g} times the standard path's"
    if ratio > factor:
        message = f"{place}: the {what} over {window}; at most {factor:g} is allowed"
        return Criterion("control", Outcome.FAIL, message, figures, place)
    return Criterion("control", Outcome.PASS, f"the worst {what}, head {h}, {window}", figures, place)


def drift(
    errors: Errors,
    control: Errors | None,
    layer: str = "",
    *,
    horizon: float = CONTEXT,
    failure_probability: float = FAILURE_PROBABILITY,
) -> Criterion:
    """3: per head, the slope over position of (error of the output) - (error of the standard path).

    Error: relative L2 error per position, averaged over the window, in units of the standard path's mean.
    The difference of the two is taken window by window: both read the same text, so that hard and easy
    passages cancel.

    The slope is Theil and Sen's, the median slope over all pairs of windows, with the confidence interval
    that inverts Kendall's rank test (Sen, J. Am. Stat. Assoc. 63, 1968; `scipy.stats.theilslopes`). Errors
    scatter more in some passages than in others and have outliers; a rank test asks neither for equal
    variances nor for normal ones, and up to 29 % of the windows may be arbitrarily wrong without moving the
    slope without limit. Neighbouring windows of a recurrent layer are correlated; for residuals with
    lag-one correlation r > 0 the interval is widened by sqrt((1 + r) / (1 - r)), the AR(1) correction
    (Bayley and Hammersley, J. R. Stat. Soc. Suppl. 8, 1946). Its confidence is 1 - `failure_probability`,
    shared by the heads.

    The interval is carried on to `horizon` positions. Pass: even its upper end adds no more than one mean
    error of the standard path, the same factor of two that criterion 2 allows. Fail: not so, and its lower
    end is above zero. Otherwise the prompt is too short or too noisy to tell: inconclusive. Growth is taken
    to go on linearly.
    """
    if control is None:
        return Criterion("drift", Outcome.INCONCLUSIVE, "the standard path's output was not given")
    if not (errors.position_l2.isfinite().all() and control.position_l2.isfinite().all()):
        return Criterion("drift", Outcome.INCONCLUSIVE, "an error is not finite: it has no slope")
    n, heads = errors.windows, errors.heads
    quantile = float(stats.norm.isf(failure_probability / heads / 2))
    position = ((errors.first + errors.last) / 2).to(torch.float64).numpy()
    if (errors.first.diff() <= 0).any():
        raise ValueError("the windows are not in order of position")
    pairs, deviation = _kendall(n)
    if quantile * deviation >= pairs:
        message = (
            f"{n} windows of positions are too few for a slope at confidence 1 - {failure_probability:g}"
        )
        return Criterion("drift", Outcome.INCONCLUSIVE, message, {"windows": n})

    level = control.position_l2.mean(0)
    limits = torch.zeros(heads, 3, dtype=torch.float64)  # per head: lower end, slope, upper end
    for head in range(heads):
        own, standard = errors.position_l2[:, head], control.position_l2[:, head]
        if level[head] > 0:
            extra = ((own - standard) / level[head]).numpy()
            limits[head] = torch.tensor(_slope(position, extra, quantile), dtype=torch.float64)
        elif own.any():
            message = (
                f"head {head}: the standard path is exact and the output is not; criterion 2 judges that"
            )
            return Criterion("drift", Outcome.INCONCLUSIVE, message, {"windows": n})
    low, slope, high = (limits * horizon).T
    harmless = high <= CONTROL_FACTOR - 1
    failing = ~harmless & (low > 0)
    head = int(torch.where(failing, low, -torch.inf).argmax() if failing.any() else high.argmax())
    figures = {
        "windows": n,
        "horizon": horizon,
        "growth_low": low[head].item(),
        "growth": slope[head].item(),
        "growth_high": high[head].item(),
    }
    place = Place(layer, head)
    outcome, end = Outcome.INCONCLUSIVE, "too short a prompt to tell; measure more positions"
    if failing.any():
        outcome, end = Outcome.FAIL, f"more than one is allowed, and even {low[head]:.3g} is growth"
    elif harmless.all():
        outcome, end = Outcome.PASS, "at most one is allowed"
    message = (
        f"{place}: over {horizon:g} positions the error outgrows the standard path's by {low[head]:.3g} to "
        f"{high[head]:.3g} times its mean; {end}"
    )
    return Criterion("drift", outcome, message, figures, place)


def _kendall(n: int) -> tuple[float, float]:
    """Pairs of n windows, and the standard deviation by chance of concordant minus discordant ones."""
    return n * (n - 1) / 2, math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _slope(x: Any, y: Any, quantile: float) -> tuple[float, float, float]:
    """Theil-Sen slope of y over x: lower end, slope, upper end. No ends with too few independent points."""
    centre = stats.theilslopes(y, x)
    residual = y - centre.slope * x
    residual -= residual.mean()
    energy = float((residual**2).sum())
    correlation = float((residual[1:] * residual[:-1]).sum()) / energy if energy > 0 else 0.0
    correlation = min(max(correlation, 0.0), 1 - 1 / len(x))
    wide = quantile * math.sqrt((1 + correlation) / (1 - correlation))
    pairs, deviation = _kendall(len(x))
    if wide * deviation >= pairs:
        return -math.inf, float(centre.slope), math.inf
    interval = stats.theilslopes(y, x, alpha=2 * float(stats.norm.sf(wide)))
    return float(interval.low_slope), float(interval.slope), float(interval.high_slope)


def integrity(errors: Errors, layer: str = "") -> Criterion:
    """4: cosine defect within its limit per head, masks of NaN and Inf equal, no poison left.

    The defect is the mean over windows: that of one small window scatters too much to be held to a limit.
    """
    excess = ratio_of(errors.cosine_defect.mean(0), errors.cosine_limit.mean(0))
    head = int(excess.nan_to_num(nan=torch.inf).argmax())
    defect, limit = errors.cosine_defect[:, head].mean().item(), errors.cosine_limit[:, head].mean().item()
    figures = {
        "cosine_defect": defect,
        "cosine_limit": limit,
        "unwritten": int(errors.unwritten.sum()),
        "mask_mismatch": int(errors.mask_mismatch.sum()),
    }
    for table, what in (
        (errors.unwritten, "were never written"),
        (errors.mask_mismatch, "differ in NaN or Inf"),
    ):
        if table.any():
            w, h = _worst(table.to(torch.float64))
            place = _place(errors, w, h, layer)
            message = f"{place}: {int(table.sum())} elements {what}, {int(table[w, h])} of them around here"
            return Criterion("integrity", Outcome.FAIL, message, figures, place)
    if math.isnan(limit):
        message = "the direction has no limit without a bound"
        return Criterion("integrity", Outcome.INCONCLUSIVE, message, figures)
    told = f"cosine defect is {defect:.3g}, at most {limit:.3g} is allowed"
    if defect > limit:
        w = int(errors.cosine_defect[:, head].argmax())
        place = _place(errors, w, head, layer)
        return Criterion("integrity", Outcome.FAIL, f"{place}: the {told}", figures, place)
    return Criterion(
        "integrity", Outcome.PASS, f"all is written, and the {told}", figures, Place(layer, head)
    )


def teeth(seen_by: Mapping[str, Sequence[str]]) -> Criterion:
    """5: `seen_by` maps each wrong output to the criteria that fail on it. None may be without.

    A case on which a wrong output passes shows nothing about a right one: it does not count, so it is
    inconclusive, not failed. So is a case without planted defects beside "unwritten" and "zeros".
    """
    figures = {"outputs": len(seen_by), "caught": sum(1 for names in seen_by.values() if names)}
    missed = [name for name, names in seen_by.items() if not names]
    if missed:
        message = f"the case does not count, for these wrong outputs pass it: {', '.join(missed)}"
        return Criterion("teeth", Outcome.INCONCLUSIVE, message, figures)
    if not set(seen_by) - {"unwritten", "zeros"}:
        return Criterion(
            "teeth", Outcome.INCONCLUSIVE, "no planted defect was given to try the case on", figures
        )
    told = "; ".join(f"{name} by {', '.join(names)}" for name, names in seen_by.items())
    return Criterion("teeth", Outcome.PASS, f"all wrong outputs are caught: {told}", figures)


def same_bits(
    out: Tensor,
    variants: Mapping[str, Tensor] | None,
    layer: str = "",
    *,
    positions: Tensor | None = None,
) -> Criterion:
    """6: each variant, a run under another schedule, is bitwise equal to `out` ([T, E] or [T, H, E])."""
    if not variants:
        return Criterion("schedule", Outcome.INCONCLUSIVE, "no run under another schedule was given")
    figures = {"variants": len(variants), "different": 0}
    first: tuple[str, int, Place] | None = None
    for name, variant in variants.items():
        if variant.shape != out.shape or variant.dtype != out.dtype:
            raise ValueError(
                f"variant {name!r} is {variant.dtype} {tuple(variant.shape)}, "
                f"the output {out.dtype} {tuple(out.shape)}"
            )
        different = (as_bits(variant.to(out.device)) != as_bits(out)).nonzero()
        figures["different"] += len(different)
        if len(different) and first is None:
            at = different[0].tolist()
            position = at[0] if positions is None else int(positions[at[0]])
            first = (name, len(different), Place(layer, at[1] if len(at) == 3 else 0, position, at[-1]))
    if first is not None:
        name, count, place = first
        message = f"{place}: {name} gives other bits in {count} of {out.numel()} elements"
        return Criterion("schedule", Outcome.FAIL, message, figures, place)
    return Criterion("schedule", Outcome.PASS, f"{', '.join(variants)}: the same bits", figures)


def compare(
    errors: Errors,
    control: Errors | None,
    *,
    layer: str = "",
    horizon: float = CONTEXT,
    failure_probability: float = FAILURE_PROBABILITY,
) -> tuple[Criterion, ...]:
    """Criteria 1 to 4 from tables: what a comparison with the reference alone can say."""
    return (
        within_bound(errors, layer),
        against_control(errors, control, layer, failure_probability=failure_probability),
        drift(errors, control, layer, horizon=horizon, failure_probability=failure_probability),
        integrity(errors, layer),
    )


def failed(criteria: Sequence[Criterion]) -> list[str]:
    """Names of the criteria that fail: what :func:`teeth` asks of each wrong output."""
    return [c.name for c in criteria if c.outcome is Outcome.FAIL]


def judge(
    out: Tensor,
    ref: Tensor,
    control: Tensor | None = None,
    bound: Tensor | None = None,
    *,
    subject: str = "output",
    layer: str = "",
    positions: Tensor | None = None,
    window: int | None = None,
    planted: Mapping[str, Tensor] | None = None,
    variants: Mapping[str, Tensor] | None = None,
    horizon: float = CONTEXT,
    failure_probability: float = FAILURE_PROBABILITY,
    only: Sequence[str] = CRITERIA,
) -> Judgement:
    """Judge one output in memory. All tensors have one shape, [T, E] or [T, H, E].

    `out` was poisoned before the kernel ran (:func:`formats.poison_`). `ref`: float64 mathematics.
    `control`: the standard path. `bound`: absolute, for example `attn_res_bound(...)["normed"].error`.
    `positions`, `window`: see :func:`metrics.measure`; by default 64 windows. `planted`: outputs with one
    planted defect each. `variants`: runs that differ in schedule only. `horizon`: see :func:`drift`.
    `only`: the criteria to ask; the judgement shows which.

    For a prompt that does not fit in memory, join the tables of :func:`metrics.measure` and make the
    Judgement from :func:`compare`, :func:`teeth` over :func:`failed`, and :func:`same_bits`.

    Raises ValueError when shapes do not fit or `only` names no criterion that exists.
    """
    if unknown := [name for name in only if name not in CRITERIA]:
        raise ValueError(f"no criterion is called {unknown[0]!r}; there are {', '.join(CRITERIA)}")
    if window is None and out.ndim:
        window = max(1, math.ceil(out.shape[0] / DEFAULT_WINDOWS))

    def table(x: Tensor) -> Errors:
        return measure(x, ref, bound, window=window, positions=positions)

    control_errors = None if control is None else table(control)

    def against_reference(x: Tensor) -> tuple[Criterion, ...]:
        criteria = compare(
            table(x), control_errors, layer=layer, horizon=horizon, failure_probability=failure_probability
        )
        return tuple(c for c in criteria if c.name in only)

    criteria = against_reference(out)
    if "teeth" in only:
        wrong = {
            "unwritten": poison_(torch.empty_like(out)),
            "zeros": torch.zeros_like(out),
            **(planted or {}),
        }
        criteria += (teeth({name: failed(against_reference(x)) for name, x in wrong.items()}),)
    if "schedule" in only:
        criteria += (same_bits(out, variants, layer, positions=positions),)
    return Judgement(subject, criteria)
