"""MXFP4: 4-bit floats (E2M1) in groups of 32 with a shared power-of-two scale (E8M0).

OCP Microscaling Formats 1.0. In the checkpoint a byte holds two columns, the even one in the low nibble; a
nibble is a sign bit and a 3-bit code of the magnitude; a scale byte `e` means `2^(e - 127)`, 255 NaN.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from .config import MXFP4_GROUP

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the 3-bit codes 0 .. 7."""

_VALUES = (*MAGNITUDES, *(-m for m in MAGNITUDES))
_SCALES = (*(2.0 ** (e - 127) for e in range(255)), math.nan)
_LARGEST_EXPONENT = 2  # of 6 = 1.5 * 2^2
_MIDPOINTS = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
_TO_EVEN_BELOW, _TO_EVEN_ABOVE = _MIDPOINTS[0::2], _MIDPOINTS[1::2]


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values `[..., n]` in `dtype` of `packed [..., n/2]` and `scale [..., n/32]`, both uint8.

    Exact in float64 and float32, and in bfloat16 for every scale in use. Raises ValueError if the shapes do
    not fit.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * MXFP4_GROUP:
        raise ValueError(f"MXFP4: packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit")
    values = torch.tensor(_VALUES, dtype=dtype, device=packed.device)
    scales = torch.tensor(_SCALES, dtype=torch.float64, device=packed.device).to(dtype)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    grouped = values[codes.int()].unflatten(-1, (-1, MXFP4_GROUP))
    return (grouped * scales[scale.int()][..., None]).flatten(-2)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x [..., n]` to `(packed, scale)`: the nearest value in the OCP scale, ties to even codes.

    The scale of a group is `2^(floor(log2(max |x|)) - 2)`, so a maximum between 6 and 8 times the scale
    saturates to 6. `encode(decode(p, s))` keeps the values, not always the bytes. Raises ValueError if `n`
    is no multiple of 32 or a value is not finite.
    """
    if x.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"MXFP4: {x.shape[-1]} columns are no multiple of {MXFP4_GROUP}")
    if not x.isfinite().all():
        raise ValueError("MXFP4: cannot quantise a value that is not finite")
    groups = x.double().unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1)
    exponent = torch.where(largest > 0, largest.frexp().exponent - 1 - _LARGEST_EXPONENT, 0).clamp(-127, 127)
    scaled = groups.abs() / torch.exp2(exponent.double())[..., None]
    # A value's code is the number of midpoints below it; one that lies on a midpoint goes to the even code.
    below, above = (scaled.new_tensor(points) for points in (_TO_EVEN_BELOW, _TO_EVEN_ABOVE))
    magnitude = torch.bucketize(scaled, below) + torch.bucketize(scaled, above, right=True)
    codes = (magnitude + 8 * groups.signbit()).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)
