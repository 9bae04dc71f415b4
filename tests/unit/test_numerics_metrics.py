"""Error measures of tables and logits, against hand computation and mpmath."""

from __future__ import annotations

import json
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.audit.numerics import Errors, cosine_defect, measure, measure_logits, poison_

pytestmark = pytest.mark.unit

torch.set_num_threads(1)


def test_measures_by_hand():
    ref = torch.tensor([[1.0, -2.0], [4.0, 0.0]], dtype=torch.float64)
    out = torch.tensor([[1.0, -2.25], [3.0, 0.0]], dtype=torch.bfloat16)
    bound = torch.full_like(ref, 0.5)
    e = measure(out, ref, bound)
    assert e.windows == e.heads == 1 and e.count.item() == 4
    assert e.max_abs.item() == 1.0 and e.max_rel.item() == 0.25
    assert e.rms_abs.item() == pytest.approx(math.sqrt((0.25**2 + 1) / 4))
    assert e.rms_rel.item() == pytest.approx(math.sqrt((0.125**2 + 0.25**2) / 4))
    assert e.max_ulp.item() == 1 / 2.0**-5  # ulp of BF16 at 4 is 2^(2-7)
    assert e.rel_l2.item() == pytest.approx(math.sqrt(0.25**2 + 1) / math.sqrt(21))
    assert e.position_l2.item() == pytest.approx((0.25 / math.sqrt(5) + 1 / 4) / 2)
    assert e.bound_ratio.item() == 2.0 and (e.worst_position.item(), e.worst_element.item()) == (1, 0)
    assert e.floor_max.item() == 2.0**-6


def test_windows_heads_and_positions_keep_apart():
    ref = torch.ones(6, 2, 4, dtype=torch.float64)
    out = ref.float()
    out[4, 1, 3] = 1.5
    e = measure(out, ref, torch.ones_like(ref), window=2, positions=torch.tensor([10, 11, 20, 21, 30, 31]))
    assert e.max_abs.tolist() == [[0, 0], [0, 0], [0, 0.5]]
    assert (e.first.tolist(), e.last.tolist()) == ([10, 20, 30], [11, 21, 31])
    assert (e.worst_position[2, 1].item(), e.worst_element[2, 1].item()) == (30, 3)


def test_a_prompt_in_pieces_gives_the_table_of_the_whole(seed):
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(12, 3, 16, generator=g, dtype=torch.float64)
    out = ref.to(torch.bfloat16)
    bound = ref.abs() * 2.0**-8
    where = torch.arange(12) * 5
    pieces = [
        measure(out[i : i + 6], ref[i : i + 6], bound[i : i + 6], window=3, positions=where[i : i + 6])
        for i in (0, 6)
    ]
    whole, joined = measure(out, ref, bound, window=3, positions=where), Errors.join(pieces)
    assert whole.to_dict() == joined.to_dict()
    json.dumps(joined.to_dict(), allow_nan=False)


def test_masks_of_nan_and_infinity():
    inf, nan = math.inf, math.nan
    ref = torch.tensor([[1.0, nan, inf, -inf, inf, 2.0, nan]], dtype=torch.float64)
    out = torch.tensor([[1.0, nan, inf, -inf, -inf, nan, 3.0]])
    e = measure(out, ref)
    assert e.mask_mismatch.item() == 3 and e.count.item() == 2
    assert e.max_abs.item() == inf  # a NaN where the reference is finite
    assert e.worst_element.item() == 4
    assert measure(ref.float(), ref).mask_mismatch.item() == 0


def test_unwritten_elements_are_found():
    ref = torch.randn(3, 8, dtype=torch.float64)
    out = poison_(torch.empty(3, 8, dtype=torch.bfloat16))
    out[:2] = ref[:2].to(torch.bfloat16)
    e = measure(out, ref)
    assert e.unwritten.item() == 8 and (e.worst_position.item(), e.worst_element.item()) == (2, 0)


def test_an_error_where_the_bound_is_zero_or_missing():
    ref, out = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 4)
    out[0, 1] = 1.25
    assert measure(out, ref, torch.zeros_like(ref)).bound_ratio.item() == math.inf
    no_bound = torch.full_like(ref, math.inf)
    e = measure(out, ref, no_bound)
    assert e.bound_ratio.item() == 0 and e.unbounded.item() == 4
    assert measure(out, ref).bound_ratio.isnan().all()


@pytest.mark.parametrize(
    ("out", "positions", "words"),
    [
        (torch.ones(2, 3), None, r"one shape.*out \(2, 3\), ref \(2, 4\)"),
        (torch.ones(2, 4), torch.tensor([5, 5]), "must increase"),
        (torch.ones(2, 4), torch.tensor([5]), "each of the 2 rows"),
    ],
)
def test_what_does_not_fit_is_named(out, positions, words):
    with pytest.raises(ValueError, match=words):
        measure(out, torch.ones(2, 4), positions=positions)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(min_value=-12, max_value=0))
def test_cosine_defect_does_not_cancel(seed, exponent):
    """Down to 1e-24, where 1 - cos in float64 would be zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 8, generator=g, dtype=torch.float64)
    y = x + 10**exponent * torch.randn(1, 8, generator=g, dtype=torch.float64)
    with mpmath.workdps(60):
        a, b = x[0].tolist(), y[0].tolist()
        truth = 1 - mpmath.fdot(a, b) / mpmath.sqrt(mpmath.fdot(a, a) * mpmath.fdot(b, b))
    assert cosine_defect(x, y).item() == pytest.approx(float(truth), rel=1e-2)


def test_cosine_defect_of_zero_huge_and_opposite_vectors():
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1e300, 1e300], [1.0, 0.0], [math.nan, 1.0]])
    x = x.double()
    x[2] = 1e300
    y = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [1.0, 1.0]]).double()
    assert cosine_defect(x, y).tolist() == [0, 1, pytest.approx(0, abs=1e-15), 2, 1]


# Logits.


def test_logits_by_hand():
    ref = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.1, -3.0]], dtype=torch.float64)
    out = torch.tensor([[2.0, 1.0, 0.0], [0.1, 0.0, -3.0]])
    m = measure_logits(out, ref, targets=torch.tensor([0, 1]), predicted_error=0.06)
    with mpmath.workdps(30):
        p = [mpmath.exp(v) for v in (0.0, 0.1, -3.0)]
        total = mpmath.fsum(p)
        p = [v / total for v in p]
        kl = p[0] * mpmath.log(p[0] / p[1]) + p[1] * mpmath.log(p[1] / p[0])
    assert m.kl_max == pytest.approx(float(kl), rel=1e-6) and m.kl_worst_row == 1
    assert m.kl_mean == pytest.approx(float(kl) / 2, rel=1e-6)
    assert (m.flips, m.unexplained_flips) == (1, 0)  # the margin of 0.1 is within twice 0.06
    assert m.nll_change == pytest.approx(0.05, rel=1e-5)
    assert m.top20_overlap == 1.0
    assert measure_logits(out, ref, predicted_error=0.04).unexplained_flips == 1
    assert measure_logits(out, ref, predicted_error=0.04).first_unexplained_row == 1


def test_equal_logits_differ_in_nothing(seed):
    ref = torch.randn(7, 100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    m = measure_logits(ref, ref, targets=torch.zeros(7, dtype=torch.int64), predicted_error=0.0)
    assert (m.kl_max, m.flips, m.unexplained_flips, m.top20_overlap, m.nll_change) == (0, 0, 0, 1, 0)


def test_a_shift_of_all_logits_changes_nothing_but_top20_sees_a_permutation(seed):
    ref = torch.randn(4, 60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert measure_logits(ref + 3, ref).kl_max < 1e-12
    assert measure_logits(-ref, ref).top20_overlap == 0
    assert measure_logits(torch.zeros_like(ref), ref).kl_mean > 0.1


def test_logits_that_are_not_finite():
    ref = torch.randn(3, 30, dtype=torch.float64)
    out = ref.clone()
    out[1, 4] = math.nan
    m = measure_logits(out, ref, predicted_error=1e9)
    assert m.kl_max == math.inf and m.kl_worst_row == 1 and (m.flips, m.unexplained_flips) == (1, 1)
    assert set(measure_logits(ref, ref).to_dict()).isdisjoint({"nll_change", "unexplained_flips"})
    with pytest.raises(ValueError, match="reference logits are not finite"):
        measure_logits(ref, out)
