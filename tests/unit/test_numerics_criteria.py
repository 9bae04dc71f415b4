"""The six criteria on synthetic outputs: what passes, what fails, what is left open, and false alarms."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from k3_audit.audit.findings import Verdict
from k3_audit.audit.numerics import CRITERIA, Errors, Outcome, drift, judge, measure, poison_, ulp

pytestmark = pytest.mark.unit

torch.set_num_threads(1)

PASS, FAIL, OPEN = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE
T, H, E = 128, 2, 48
SPAN = float(T)


class Case:
    """A reference, the standard path (rounded twice) and an output rounded once, all right."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16):
        g = torch.Generator().manual_seed(seed)
        self.ref = torch.randn(
            T, H, E, generator=g
        ).double()  # FP32 numbers: torch rounds those to BF16 at once
        self.out = self.ref.to(dtype)
        noise = 1 + 2.0**-9 * torch.randn(T, H, E, generator=g, dtype=torch.float64)
        self.control = (self.ref * noise).to(dtype)
        self.bound = ulp(self.ref, dtype) / 2
        self.planted = {"scaled": (self.ref * 1.02).to(dtype)}

    def judge(self, out: torch.Tensor | None = None, **changes):
        out = self.out if out is None else out
        given = {
            "control": self.control,
            "bound": self.bound,
            "planted": self.planted,
            "variants": {"batch 1": out.clone()},
            "horizon": SPAN,
        }
        return judge(out, self.ref, **{**given, **changes})


@pytest.fixture
def case(seed) -> Case:
    return Case(seed)


def test_a_right_output_is_clean(case):
    judgement = case.judge(subject="attn_res normed", layer="12")
    assert judgement.verdict is Verdict.CLEAN, judgement.message
    assert tuple(c.name for c in judgement.criteria) == CRITERIA
    assert 0.9 < judgement["bound"].figures["ratio"] <= 1


def test_an_output_as_good_as_the_standard_path_is_clean(case):
    """Also bitwise the standard path itself, with a bound that allows its two roundings."""
    judgement = case.judge(case.control, bound=case.bound + 2.0**-9 * 6 * case.ref.abs() + 1e-9)
    assert judgement.verdict is Verdict.CLEAN, judgement.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_exact_output_is_clean_in_any_type(seed, dtype):
    case = Case(seed, dtype)
    judgement = case.judge()
    assert judgement.verdict is Verdict.CLEAN, judgement.message


@pytest.mark.parametrize(
    ("wrong", "criteria"),
    [
        ("unwritten", {"bound", "control", "integrity"}),
        ("zeros", {"bound", "control", "integrity"}),
        ("one row unwritten", {"bound", "control", "integrity"}),
        ("one element two ulp off", {"bound"}),
        ("noise of three times the standard path", {"bound", "control"}),
        ("last head permuted", {"bound", "control", "integrity"}),
    ],
)
def test_wrong_outputs_are_findings(case, wrong, criteria):
    out = case.out.clone()
    if wrong == "unwritten":
        poison_(out)
    elif wrong == "zeros":
        out.zero_()
    elif wrong == "one row unwritten":
        out[7] = poison_(torch.empty_like(out[7]))
    elif wrong == "one element two ulp off":
        out[3, 1, 5] = (case.ref[3, 1, 5] + 2 * ulp(case.ref[3, 1, 5], out.dtype)).to(out.dtype)
    elif wrong == "noise of three times the standard path":
        out = (case.ref + 3.5 * (case.control.double() - case.ref)).to(out.dtype)
    else:
        out[:, 1] = out[:, 1].flip(-1)
    judgement = case.judge(out, layer="3")
    assert judgement.verdict is Verdict.FINDING
    assert criteria <= {c.name for c in judgement.criteria if c.outcome is FAIL}


def test_a_failure_names_layer_head_position_and_element(case):
    out = case.out.clone()
    out[40, 1, 17] += 1
    judgement = case.judge(
        out, layer="57", positions=torch.arange(T) + 32000, subject="attn_res normed, sm_90a"
    )
    place = judgement["bound"].place
    assert (place.layer, place.head, place.position, place.element) == ("57", 1, 32040, 17)
    assert judgement.message.startswith(
        "attn_res normed, sm_90a: bound fail: layer 57, head 1, position 32040, element 17: the error is "
    )
    assert "\n" not in judgement.message


def test_control_looks_at_each_head_and_window(case):
    """One window of one head four times as wrong; over the whole tensor the RMS would not show it."""
    error = case.control.double() - case.ref
    error[8:10, 1] *= 4
    out = (case.ref + error).to(torch.float32)  # FP32 output: no rounding floor in the way
    judgement = judge(out, case.ref, control=case.control.float(), only=("control",), window=2)
    assert judgement["control"].outcome is FAIL
    assert judgement["control"].place.head == 1 and 8 <= judgement["control"].place.position <= 9
    whole = judge(out, case.ref, control=case.control.float(), only=("control",), window=T)["control"]
    assert whole.figures["rms_ratio"] < 2


def test_control_does_not_hold_the_standard_paths_luck_against_a_right_output(case):
    """One large element decides a cell; the standard path happens to have it exactly."""
    ref = case.ref.clone()
    ref[:, :, 0] = 1000 + 1.9 * torch.arange(T).view(T, 1)
    out = ref.to(torch.bfloat16)
    control = case.control.clone().double()
    control[:, :, 0] = ref[:, :, 0]
    judgement = judge(out, ref, control=control.float(), only=("control",))
    assert judgement["control"].outcome is PASS, judgement.message


def test_small_cells_cannot_say_anything_about_the_control(case):
    few = judge(
        case.out[:4, :1, :4], case.ref[:4, :1, :4], case.control[:4, :1, :4], window=1, only=("control",)
    )
    assert few["control"].outcome is OPEN and "larger windows" in few.message


def test_integrity_asks_for_masks_and_limits_the_direction(case):
    out = case.out.clone()
    out[5, 0, 9] = math.nan
    judgement = case.judge(out)
    assert judgement["integrity"].outcome is FAIL and judgement["integrity"].place.position == 5
    slight = (case.ref * (1 + 0.004 * torch.randn_like(case.ref).sign())).to(
        torch.bfloat16
    )  # defect about 9e-6
    assert case.judge(slight)["integrity"].outcome is FAIL
    without_bound = Case(0, torch.float32).judge(bound=None)
    assert without_bound["integrity"].outcome is OPEN and without_bound["bound"].outcome is OPEN


def test_a_bound_that_is_not_finite_is_inconclusive(case):
    bound = case.bound.clone()
    bound[0, 0, 0] = math.inf
    judgement = case.judge(bound=bound)
    assert judgement["bound"].outcome is OPEN and judgement.verdict is Verdict.INCONCLUSIVE
    assert "1 elements have no finite bound" in judgement.message


def test_teeth_refuse_a_case_on_which_a_wrong_output_passes(case):
    harmless = case.judge(planted={"no defect at all": case.out})
    assert harmless["teeth"].outcome is OPEN and "no defect at all" in harmless.message
    assert case.judge(planted=None)["teeth"].outcome is OPEN
    zero = torch.zeros_like(case.ref)
    all_zero = judge(
        zero.bfloat16(), zero, zero.bfloat16(), zero + 1e-6, planted={"one": zero.bfloat16() + 1}
    )
    assert all_zero["teeth"].outcome is OPEN and "zeros" in all_zero["teeth"].message
    assert "scaled by bound" in case.judge()["teeth"].message


def test_a_schedule_must_not_change_a_bit(case):
    other = case.out.clone()
    other[9, 1, 2] = -other[9, 1, 2]
    judgement = case.judge(
        variants={"eager": case.out.clone(), "split 4": other}, positions=torch.arange(T) * 10
    )
    assert judgement["schedule"].outcome is FAIL
    assert judgement["schedule"].message == (
        "head 1, position 90, element 2: split 4 gives other bits in 1 of 12288 elements"
    )
    assert case.judge(variants=None)["schedule"].outcome is OPEN
    with pytest.raises(ValueError, match=r"variant 'fp32' is torch\.float32"):
        case.judge(variants={"fp32": case.out.float()})


def test_minus_zero_and_zero_are_different_bits():
    zero = torch.zeros(2, 4)
    assert judge(zero, zero, variants={"other": -zero}, only=("schedule",)).verdict is Verdict.FINDING


def test_without_operands_nothing_is_called_clean(case):
    alone = judge(case.out, case.ref)
    assert alone.verdict is Verdict.INCONCLUSIVE
    assert {c.name for c in alone.criteria if c.outcome is OPEN} == set(CRITERIA) - {"integrity"}
    assert judge(case.out, case.ref, only=()).verdict is Verdict.INCONCLUSIVE


def test_only_the_named_criteria_are_asked(case):
    judgement = case.judge(only=("bound", "integrity"))
    assert [c.name for c in judgement.criteria] == ["bound", "integrity"]
    with pytest.raises(ValueError, match="no criterion is called 'speed'"):
        case.judge(only=("speed",))


def test_the_judgement_is_plain_data(case):
    for out in (case.out, poison_(torch.empty_like(case.out))):
        data = json.loads(json.dumps(case.judge(out, layer="1").to_dict(), allow_nan=False))
        assert data["verdict"] in ("clean", "finding") and len(data["criteria"]) == 6
    assert {"bound_ratio", "control_rms_ratio", "drift_growth_high"} <= case.judge().figures.keys()


def test_no_false_alarm_on_twenty_seeds():
    for seed in range(20):
        judgement = Case(1000 + seed).judge(only=("bound", "control", "drift", "integrity"))
        assert judgement.verdict is Verdict.CLEAN, (seed, judgement.message)


# Drift, on tables whose per-position error is given.


_ONE = measure(torch.ones(1, 1), torch.ones(1, 1))


def _table(error: np.ndarray, step: int = 1000) -> Errors:
    """A table of what drift reads: windows `step` apart, mean error per position [W] or [W, H]."""
    error = torch.as_tensor(error, dtype=torch.float64).reshape(len(error), -1)
    where = torch.arange(len(error)) * step
    return replace(_ONE, first=where, last=where, position_l2=error, max_abs=error)


def _noise(seed: int, n: int, scale=1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).normal(size=n)


def test_drift_of_the_output_alone_fails(seed):
    n = 48
    level = 1e-3 * (1 + 0.02 * _noise(seed, n))
    grows = level * np.linspace(1, 3, n)
    result = drift(_table(grows), _table(level), "7", horizon=48_000)
    assert result.outcome is FAIL
    assert result.figures["growth_low"] < 2 < result.figures["growth_high"] * 1.1
    assert result.message.startswith("layer 7, head 0: over 48000 positions the error outgrows")


def test_drift_that_the_standard_path_shares_passes(seed):
    n = 48
    shared = 1e-3 * np.linspace(1, 5, n) * (1 + 0.02 * _noise(seed, n))
    assert drift(_table(shared * 0.9), _table(shared), horizon=48_000).outcome is PASS


def test_drift_in_one_head_of_many_is_found(seed):
    n = 48
    level = 1e-3 * (1 + 0.02 * np.random.default_rng(seed).normal(size=(n, 8)))
    grows = level.copy()
    grows[:, 5] *= np.linspace(1, 4, n)
    result = drift(_table(grows), _table(level), horizon=48_000)
    assert result.outcome is FAIL and result.place.head == 5


def test_a_step_in_the_error_does_not_pass(seed):
    """A fault that sets in at some position, as an overflowing index does. One step looks like slow noise,
    so the drift may stay open; a larger step is seen by the control in the windows behind it."""
    n = 64
    level = 1e-3 * (1 + 0.02 * _noise(seed, n))
    step = level * np.where(np.arange(n) < 32, 1, 1.9)
    assert drift(_table(step), _table(level), horizon=64_000 * 2).outcome is not PASS


def test_one_wild_window_is_not_drift(seed):
    n = 48
    level = 1e-3 * (1 + 0.02 * _noise(seed, n))
    wild = level.copy()
    wild[-2] *= 50
    assert drift(_table(wild), _table(level), horizon=48_000).outcome is PASS


def test_too_few_positions_and_too_far_a_horizon_are_inconclusive(seed):
    n = 48
    level, own = 1e-3 * (1 + 0.1 * _noise(seed, n)), 1e-3 * (1 + 0.1 * _noise(seed + 1, n))
    short = drift(_table(own[:6]), _table(level[:6]), horizon=6000)
    assert short.outcome is OPEN and "6 windows of positions are too few" in short.message
    assert drift(_table(own), _table(level), horizon=48_000).outcome is PASS
    assert drift(_table(own, 1), _table(level, 1)).outcome is OPEN  # 48 positions say nothing about 1M


def test_drift_against_an_exact_standard_path():
    zero, some = np.zeros(48), np.full(48, 1e-3)
    assert drift(_table(zero), _table(zero)).outcome is PASS
    assert drift(_table(some), _table(zero)).outcome is OPEN


@pytest.mark.parametrize("kind", ["even", "growing variance", "heavy tails", "correlated"])
def test_the_interval_keeps_its_confidence(kind, seed):
    """No drift, noise of four kinds, failure probability 2 %, half of it on the failing side.

    150 trials give 1.5 false alarms on average, and more than 8 with probability 3e-5. A far horizon takes the margin
    of the criterion away.
    """
    n, false = 48, 0
    rng = np.random.default_rng(seed)
    for _ in range(150):
        noise = rng.normal(size=n)
        if kind == "growing variance":
            noise *= np.linspace(0.2, 2, n)
        if kind == "heavy tails":
            noise = rng.standard_t(2, size=n)
        if kind == "correlated":
            for i in range(1, n):
                noise[i] = 0.4 * noise[i - 1] + math.sqrt(1 - 0.4**2) * noise[i]
        own = 1e-3 * (1 + 0.01 * np.clip(noise, -50, 50))
        level = np.full(n, 1e-3)
        false += drift(_table(own), _table(level), horizon=1e12, failure_probability=0.02).outcome is FAIL
    assert false <= 8
