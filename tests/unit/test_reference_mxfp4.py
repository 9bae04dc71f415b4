"""MXFP4: known bytes, exactness, and the writer's rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_audit.reference.mxfp4 import MAGNITUDES, decode, encode
from torch import Tensor

pytestmark = pytest.mark.unit

U8 = torch.uint8


def check_decode(decoder: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Byte 0x{high}{low}: the low nibble is the even column. Two groups, with scales 1/2 and 4."""
    packed = torch.zeros(1, 32, dtype=U8)
    packed[0, :4] = torch.tensor([0x21, 0x7F, 0x9A, 0x03])
    packed[0, 16] = 0xE5
    values = decoder(packed, torch.tensor([[126, 129]], dtype=U8))[0].tolist()
    assert [2 * v for v in values[:8]] == [0.5, 1.0, -6.0, 6.0, -1.0, -0.5, 1.5, 0.0]
    assert values[32:34] == [12.0, -16.0]
    assert set(values[8:32] + values[34:]) == {0.0}


def test_decode_known_bytes() -> None:
    check_decode(decode)


def test_a_nibble_swap_fails() -> None:
    with pytest.raises(AssertionError):
        check_decode(lambda packed, scale: decode(packed << 4 | packed >> 4, scale))


def test_scales_off_by_one_group_fail() -> None:
    with pytest.raises(AssertionError):
        check_decode(lambda packed, scale: decode(packed, scale.flip(-1)))


def test_every_code_and_scale_is_exact_in_every_dtype() -> None:
    codes = torch.arange(256, dtype=U8).repeat(254, 1)
    scales = torch.arange(1, 255, dtype=U8)[:, None].expand(-1, 16)
    exact = decode(codes, scales)
    keep = exact.abs() < 2.0**128  # 2^127 times more than 1.5 leaves the range of float32 and bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decode(codes, scales, dtype).double()[keep], exact[keep])


def test_end_scales() -> None:
    ones = torch.full((1, 16), 0x22, dtype=U8)
    assert decode(ones, torch.tensor([[0]], dtype=U8))[0, 0].item() == 2.0**-127
    assert decode(ones, torch.tensor([[255]], dtype=U8)).isnan().all()


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        decode(torch.zeros(2, 16, dtype=U8), torch.zeros(2, 2, dtype=U8))
    with pytest.raises(ValueError, match="multiple of 32"):
        encode(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="not finite"):
        encode(torch.full((1, 32), math.inf))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 3), groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_decoded_values_survive_encoding(rows: int, groups: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (rows, 16 * groups), generator=g, dtype=U8)
    scale = torch.randint(100, 150, (rows, groups), generator=g, dtype=U8)
    values = decode(packed, scale)
    again = decode(*encode(values))
    assert torch.equal(again, values) and torch.equal(again.signbit(), values.signbit())


def test_bytes_survive_where_a_group_reaches_the_top_binade() -> None:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (4, 64), generator=g, dtype=U8)
    packed[:, ::16] = 0x67  # a 6 and a 4 in each group
    scale = torch.randint(100, 150, (4, 4), generator=g, dtype=U8)
    got = encode(decode(packed, scale))
    assert torch.equal(got[0], packed) and torch.equal(got[1], scale)


def test_encode_takes_the_nearest_value_and_the_even_code_on_a_tie() -> None:
    tail = [4.0] + [0.0] * 18  # fixes the scale at 1
    inputs = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, 0.26, 0.74, -0.25, -2.51, 5.01]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.5, 0.5, -0.0, -3.0, 6.0]
    packed, scale = encode(torch.tensor([inputs + tail], dtype=torch.float64))
    assert scale.item() == 127
    assert decode(packed, scale)[0, :13].tolist() == expected


@settings(deadline=None, max_examples=40)
@given(exponent=st.integers(-60, 60), seed=st.integers(0, 2**31))
def test_encoding_error_is_at_most_half_a_step(exponent: int, seed: int) -> None:
    x = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scale = encode(x)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    grid = torch.tensor(MAGNITUDES, dtype=torch.float64)
    best = (x.abs()[..., None] / unit[..., None] - grid).abs().amin(-1) * unit
    assert torch.equal((decode(packed, scale) - x).abs(), best)
