"""The bound of AttnRes + RMSNorm: emulations in FP32 keep it, planted defects do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.audit.findings import Verdict
from k3_audit.audit.numerics import (
    PTX_RELATIVE_ERROR,
    AttnResArithmetic,
    Judgement,
    Outcome,
    Summation,
    attn_res_bound,
    judge,
)
from k3_audit.reference.attn_res import Residual, attn_res
from torch import Tensor

pytestmark = pytest.mark.unit

torch.set_num_threads(1)

EPS = 1e-5  # rms_norm_eps of the released config
DEFECTS = ("softmax_bf16", "skip_row", "eps_outside", "c_bf16", "prefix_late")
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
    exp2: Callable[[Tensor], Tensor] = torch.exp2,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    expanded_below: float | None = None,
) -> dict[str, Tensor]:
    """The fused path: FP32 in registers, bank first, then the prefix; the undivided mixture is normed.

    `defect` plants one of DEFECTS; `expanded_below`: see AttnResArithmetic.
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


# The bound holds.

WIDTH = 512
ORDERS = {
    "sequential": (sequential, Summation.sequential(WIDTH)),
    "pairwise": (pairwise, Summation.pairwise(WIDTH)),
    "threads of eight": (threads_of_eight, Summation.lanes(WIDTH, WIDTH // 8)),
}
FUSED = AttnResArithmetic(dot=Summation.lanes(WIDTH, WIDTH // 8))
RELEASE = AttnResArithmetic(mix_stored=BF16, scaled_stored=BF16)


def _ratios(out: dict[str, Tensor], case: Case, how: AttnResArithmetic) -> dict[str, float]:
    """Largest error over bound of each output, against the two-line truth."""
    bounds, truth = attn_res_bound(*case.operands, EPS, arithmetic=how), case.truth()
    return {k: ((out[k].to(F64) - truth[k]).abs() / bounds[k].error).max().item() for k in out}


def _holds(ratios: dict[str, float]) -> bool:
    return max(ratios.values()) <= 1


def test_the_value_is_the_formula(seed):
    case = realistic(seed)
    truth = case.truth()
    for name, bounded in attn_res_bound(*case.operands, EPS).items():
        torch.testing.assert_close(bounded.value, truth[name], rtol=1e-12, atol=1e-12)


def test_the_value_is_the_references_when_that_is_given_the_stored_prefix(seed):
    """The reference does not round the prefix; the comparison injects the one that is stored."""
    case = realistic(seed, tokens=4)
    stored = (case.prefix.float() + case.delta.float()).to(BF16).to(F64)
    bank = Residual(tuple(case.bank.to(F64).unbind(1)))
    step = attn_res(
        bank, stored, torch.ones_like(case.c, dtype=F64), case.c.to(F64), case.norm_weight.to(F64), EPS
    )
    value = attn_res_bound(*case.operands, EPS)
    torch.testing.assert_close(value["mix"].value, step.mixed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value["normed"].value, step.normed, rtol=1e-12, atol=1e-12)


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_the_value_is_the_formula_in_mpmath(seed):
    """Spot truth in 40 digits: one token, three rows, four columns."""
    case = realistic(seed, tokens=1, bank_rows=2, width=128)
    case = Case(*(x[..., :4].contiguous() for x in case.operands))
    value = attn_res_bound(*case.operands, EPS)
    with mpmath.workdps(40):
        p = (case.prefix.float() + case.delta.float()).to(BF16)
        rows = [[mpmath.mpf(v) for v in r] for r in torch.cat([case.bank[0], p]).tolist()]
        c, w, eps = case.c.tolist(), case.norm_weight.tolist(), mpmath.mpf(EPS)
        s = [mpmath.fdot(r, c) / mpmath.sqrt(mpmath.fdot(r, r) / 4 + eps) for r in rows]
        pi = [mpmath.exp(x) / mpmath.fsum(mpmath.exp(y) for y in s) for x in s]
        mix = [mpmath.fdot(pi, column) for column in zip(*rows, strict=True)]
        root = mpmath.sqrt(mpmath.fdot(mix, mix) / 4 + eps)
        for i in range(4):
            assert value["mix"].value[0, i].item() == pytest.approx(float(mix[i]), rel=1e-13, abs=1e-15)
            assert value["normed"].value[0, i].item() == pytest.approx(
                float(mix[i] / root * w[i]), rel=1e-13, abs=1e-15
            )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_fused_emulation_keeps_the_bound_in_every_order(order, scale, seed):
    add, summation = ORDERS[order]
    case = realistic(seed, tokens=16, scale=scale)
    ratios = _ratios(fused(case, add), case, AttnResArithmetic(dot=summation))
    assert _holds(ratios), ratios
    assert min(ratios.values()) > 0.9  # half an ulp is reached: the bound is no looser than it must be


def test_release_rounding_keeps_its_own_bound_and_not_that_of_one_rounding(seed):
    case = realistic(seed)
    assert _holds(_ratios(standard(case), case, RELEASE))
    assert _ratios(standard(case), case, FUSED)["normed"] > 1


def _adversarial(kind: str, seed: int) -> Case:
    case = realistic(seed, tokens=8)
    g = torch.Generator().manual_seed(seed)
    bank, prefix, delta, c, w = case.operands
    if kind == "rows that cancel":
        bank = (-prefix.float()).to(BF16).unsqueeze(1).repeat(1, 4, 1)
        bank[:, :2] *= -1
        delta = torch.zeros_like(delta)
    if kind == "zero rows":
        bank, prefix, delta = bank * 0, prefix * 0, delta * 0
    if kind == "one row is not zero":
        bank, prefix = bank * 0, prefix * 0
    if kind == "constant rows":
        bank = torch.full_like(bank, 1.1)
        prefix, delta = torch.full_like(prefix, 1.3), torch.full_like(delta, 0.7)
    if kind == "wide range":
        bank = bank * torch.exp2(torch.randint(-30, 12, bank.shape, generator=g).to(BF16))
    if kind == "subnormal rows":
        bank, prefix, delta = bank * 1e-39, prefix * 1e-39, delta * 1e-39
    if kind == "peaked softmax":
        c = c * 2000
    if kind == "prefix cancels delta":
        delta = (-prefix.float() * (1 + 2.0**-7)).to(BF16)
    return Case(bank, prefix, delta, c, w)


ADVERSARIAL = (
    "rows that cancel",
    "zero rows",
    "one row is not zero",
    "constant rows",
    "wide range",
    "subnormal rows",
    "peaked softmax",
    "prefix cancels delta",
)


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_adversarial_operands_keep_the_bound(kind, seed):
    case = _adversarial(kind, seed)
    for add, summation in ORDERS.values():
        ratios = _ratios(fused(case, add), case, AttnResArithmetic(dot=summation))
        assert _holds(ratios), ratios
    assert _holds(_ratios(standard(case), case, RELEASE))


def test_approximate_instructions_at_their_limit_keep_the_bound(seed):
    """ex2 and rsqrt off by as much as the PTX ISA allows, in random directions."""
    g = torch.Generator().manual_seed(seed)

    def limit(exact: Callable[[Tensor], Tensor], instruction: str) -> Callable[[Tensor], Tensor]:
        def approximate(x: Tensor) -> Tensor:
            sign = torch.randint(0, 2, x.shape, generator=g) * 2 - 1
            return (exact(x.to(F64)) * (1 + sign * PTX_RELATIVE_ERROR[instruction] * 0.8)).float()

        return approximate

    for scale in (1e-3, 1.0):
        case = realistic(seed, scale=scale)
        exp2, rsqrt = limit(torch.exp2, "ex2.approx.f32"), limit(torch.rsqrt, "rsqrt.approx.f32")
        assert _holds(_ratios(fused(case, exp2=exp2, rsqrt=rsqrt), case, FUSED))


def test_the_expanded_square_keeps_its_bound_and_needs_it(seed):
    """mean square from m.m, m.p and p.p, as the fused kernel forms it before it knows the mixture."""
    below = 2.0**-8
    how = AttnResArithmetic(dot=FUSED.dot, expanded_below=below)
    for kind in (None, *ADVERSARIAL):
        case = _adversarial(kind, seed) if kind else realistic(seed)
        ratios = _ratios(fused(case, expanded_below=below), case, how)
        assert _holds(ratios), (kind, ratios)
    # Rows of which a tenth is left: expanded, the bound is wider; a direct sum keeps the narrow one.
    case = realistic(seed, tokens=16)
    opposed = Case(
        (-0.8 * case.prefix.float()).to(BF16).unsqueeze(1),
        case.prefix,
        case.delta * 0,
        case.c,
        case.norm_weight,
    )
    wide, narrow = (
        attn_res_bound(*opposed.operands, EPS, arithmetic=a)["normed"].error for a in (how, FUSED)
    )
    assert (wide > narrow).all()
    assert _holds(_ratios(fused(opposed, expanded_below=below), opposed, how))


@pytest.mark.parametrize("bank_rows", [0, 1, 8])
def test_every_number_of_bank_rows(bank_rows, seed):
    case = realistic(seed, tokens=8, bank_rows=bank_rows)
    assert _holds(_ratios(fused(case), case, FUSED))


def test_a_block_that_has_just_begun_and_an_injected_prefix(seed):
    """Without a prefix the delta is stored; without a delta the prefix is the row as it stands, and exact."""
    case = realistic(seed, tokens=4)
    begun = attn_res_bound(case.bank, None, case.delta, case.c, case.norm_weight, EPS)
    given_ = attn_res_bound(case.bank, case.delta, None, case.c, case.norm_weight, EPS)
    for name in ("prefix", "mix", "normed"):
        assert torch.equal(begun[name].error, given_[name].error)
        assert begun[name].error.shape == case.delta.shape
    assert not begun["prefix"].error.any()


def test_rows_near_overflow_have_no_bound():
    case = realistic(0, tokens=2)
    huge = Case((case.bank.float() * 1e19).to(BF16), *case.operands[1:])
    assert not attn_res_bound(*huge.operands, EPS)["normed"].error.isfinite().any()


def test_what_does_not_fit_is_named():
    case = realistic(0, tokens=2)
    with pytest.raises(ValueError, match=r"bank \[T, m, E\].*got bank \(2, 512\)"):
        attn_res_bound(case.bank[:, 0], case.prefix, None, case.c, case.norm_weight, EPS)
    with pytest.raises(ValueError, match=r"must be \[512\]: \(4,\)"):
        attn_res_bound(case.bank, case.prefix, None, case.c[:4], case.norm_weight, EPS)


# The bound sees defects, and the criteria together raise no false alarm.

# eps decides where the mean square is not far above it: an embedding of standard deviation 0.006 has 3.6e-5.
SCALE = {"eps_outside": 0.006}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_planted_defect_exceeds_the_bound(defect, seed):
    case = realistic(seed, tokens=16, scale=SCALE.get(defect, 1.0))
    assert _ratios(fused(case, defect=defect), case, FUSED)["normed"] > 1.1


def test_eps_outside_the_root_is_out_of_sight_where_rows_are_large(seed):
    """Honest limit: at a mean square of 1, eps moves the result by 5e-6, below what FP32 sums resolve."""
    case = realistic(seed, scale=100.0)
    assert _holds(_ratios(fused(case, defect="eps_outside"), case, FUSED))


def _judge(case: Case, out: Tensor, **given_: object) -> Judgement:
    bound = attn_res_bound(*case.operands, EPS, arithmetic=FUSED)["normed"].error
    planted = {name: fused(case, defect=name)["normed"] for name in DEFECTS}
    asked = {"planted": planted, "variants": {"batch 1": out}, "horizon": len(out), **given_}
    return judge(
        out, case.truth()["normed"], standard(case)["normed"], bound, subject="attn_res normed", **asked
    )


def test_a_clean_fused_path_raises_no_alarm_on_twenty_seeds():
    for seed in range(20):
        case = realistic(seed, tokens=256, width=128, scale=0.006)
        judgement = _judge(case, fused(case)["normed"])
        assert judgement.verdict is Verdict.CLEAN, (seed, judgement.message)


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_planted_defect_is_a_finding(defect, seed):
    case = realistic(seed, scale=0.006)
    judgement = _judge(case, fused(case, defect=defect)["normed"], layer="12")
    assert judgement.verdict is Verdict.FINDING
    assert judgement.message.startswith("attn_res normed: bound fail: layer 12, head 0, position ")


def test_the_prefix_is_held_to_its_one_rounding(seed):
    case = realistic(seed)
    bound, truth = attn_res_bound(*case.operands, EPS)["prefix"], case.truth()["prefix"]
    right = judge(fused(case)["prefix"], truth, bound=bound.error, only=("bound", "integrity"))
    assert right.verdict is Verdict.CLEAN
    cut = (case.prefix.float() + case.delta.float()).view(torch.int32) & ~0xFFFF  # rounded towards zero
    wrong = judge(cut.view(F32).to(BF16), truth, bound=bound.error, only=("bound", "integrity"))
    assert wrong["bound"].outcome is Outcome.FAIL
