"""Unit roundoff, ulp, poison: against torch's own rounding and known bit patterns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from k3_audit.audit.numerics import as_bits, poison_, ulp, unit_roundoff, unwritten

pytestmark = pytest.mark.unit

STORED = (torch.bfloat16, torch.float16, torch.float32)


def test_unit_roundoff_is_two_to_the_minus_precision():
    assert [unit_roundoff(d) for d in STORED] == [2.0**-8, 2.0**-11, 2.0**-24]


@pytest.mark.parametrize("dtype", STORED)
@given(st.floats(min_value=-6e4, max_value=6e4, allow_nan=False, width=32))
def test_ulp_is_the_distance_to_the_next_number(dtype, x):
    stored = torch.tensor(x).to(dtype)
    up = (as_bits(stored.abs()) + 1).view(dtype)
    expected = up.double() - stored.abs().double()
    if up.isfinite():
        assert ulp(stored, dtype) == expected


@pytest.mark.parametrize("dtype", STORED)
@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_rounding_to_nearest_is_within_half_an_ulp(dtype, x):
    exact = torch.tensor(x, dtype=torch.float32)
    error = (exact.to(dtype).double() - exact.double()).abs()
    assert error <= ulp(exact, dtype) / 2


def test_ulp_at_the_edges():
    assert ulp(torch.tensor(0.0), torch.float32) == 2.0**-149
    assert ulp(torch.tensor(1e-40), torch.bfloat16) == 2.0**-133
    assert ulp(torch.tensor(65504.0), torch.float16) == 32
    assert ulp(torch.tensor(65520.0), torch.float16) == math.inf  # rounds to infinity
    assert ulp(torch.tensor(math.inf), torch.float32) == math.inf
    assert ulp(torch.tensor(math.nan), torch.float32).isnan()


@pytest.mark.parametrize("dtype", (*STORED, torch.float64))
def test_poison_is_a_signalling_nan_and_is_found_only_where_it_is_left(dtype):
    x = poison_(torch.empty(4, 5, dtype=dtype))
    quiet = {torch.bfloat16: 1 << 6, torch.float16: 1 << 9, torch.float32: 1 << 22, torch.float64: 1 << 51}[
        dtype
    ]
    assert x.isnan().all() and unwritten(x).all()
    assert not (as_bits(x) & quiet).any()
    x[1, 2] = 0.0
    x[3] = math.nan  # an ordinary NaN is a written value
    assert unwritten(x).tolist() == [[True] * 5, [True, True, False, True, True], [True] * 5, [False] * 5]


def test_bf16_poison_read_as_fp32_is_poison():
    assert unwritten(poison_(torch.empty(8, dtype=torch.bfloat16)).view(torch.float32)).all()


def test_a_type_that_kernels_do_not_store_is_refused():
    with pytest.raises(ValueError, match=r"int32 is not a stored type"):
        poison_(torch.empty(2, dtype=torch.int32))
