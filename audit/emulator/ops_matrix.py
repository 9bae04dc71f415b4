"""Warp-level matrix instructions: ldmatrix, stmatrix, mma.sync of 16-bit floats with f32 accumulation.

PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions". wgmma and tcgen05 are not emulated.

The order and precision of the sums inside one mma are not specified by the ISA. Here the products, which are
exact, are added in f64 in the order of k, then the accumulator is added, and the result is rounded once to
f32. A caller that compares with hardware must allow n units of rounding for a chain of n products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import values
from .errors import Fault
from .ops_warp import together
from .program import Decoder, Reader, Step, op
from .values import FORMATS, Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

_ALL = np.full(1, 0xFFFFFFFF, np.uint32)


def _whole_warps(g: Grid, lanes: Array) -> None:
    if lanes.size % 32 or not g.alive[lanes].all():
        raise Fault("undefined", "an .aligned matrix instruction without all 32 lanes of the warp")


def _aligned(d: Decoder, execute: Step) -> Step:
    """All 32 lanes of the warp together."""

    def checked(g: Grid, sel: Selection) -> None:
        _whole_warps(g, g.lanes(sel))
        execute(g, sel)

    return together(d, lambda g, lanes: _ALL, checked)


def _matrices(d: Decoder) -> int:
    if "m8n8" not in d.mods or "b16" not in d.mods:
        raise d.fail()
    return next(int(m[1]) for m in d.mods if m in ("x1", "x2", "x4"))


@op("ldmatrix")
def ldmatrix(d: Decoder) -> Step:
    n = _matrices(d)
    transposed = "trans" in d.mods
    address, space = d.address(1), d.space()
    writers = [d.dst(o, "b32") for o in d.items(0, n)]

    def execute(g: Grid, sel: Selection) -> None:
        first = g.warp[sel] * 32
        lane = g.laneid[sel].astype(np.int64)
        out = []
        for m in range(n):
            if not transposed:
                at = address(g, first + 8 * m + lane // 4)
                out.append(g.load(space, sel, at + (4 * (lane % 4)).astype(at.dtype), 4))
                continue
            halves = []
            for e in range(2):
                at = address(g, first + 8 * m + 2 * (lane % 4) + e)
                halves.append(
                    g.load(space, sel, at + (2 * (lane // 4)).astype(at.dtype), 2).astype(np.uint32)
                )
            out.append(halves[0] | (halves[1] << np.uint32(16)))
        for write, x in zip(writers, out, strict=True):
            write(g, sel, x)

    return _aligned(d, execute)


@op("stmatrix")
def stmatrix(d: Decoder) -> Step:
    n = _matrices(d)
    transposed = "trans" in d.mods
    address, space = d.address(0), d.space()
    sources = [d.src(o, "b32") for o in d.items(1, n)]

    def execute(g: Grid, sel: Selection) -> None:
        first = g.warp[sel] * 32
        lane = g.laneid[sel].astype(np.int64)
        for m, source in enumerate(sources):
            x = source(g, sel)
            if not transposed:
                at = address(g, first + 8 * m + lane // 4)
                g.store(space, sel, at + (4 * (lane % 4)).astype(at.dtype), 4, x)
                continue
            for e in range(2):
                at = address(g, first + 8 * m + 2 * (lane % 4) + e)
                half = (x >> np.uint32(16 * e)).astype(np.uint16)
                g.store(space, sel, at + (2 * (lane // 4)).astype(at.dtype), 2, half)

    return _aligned(d, execute)


def _fragment(g: Grid, sel: Selection, registers: list[Reader], name: str) -> Array:
    """Packed 16-bit registers of whole warps -> f64 [warps, 32 lanes, registers, 2]."""
    f = FORMATS[name]
    columns = [np.broadcast_to(r(g, sel), g.lanes(sel).shape) for r in registers]
    x = np.stack(columns, axis=-1)
    pair = np.stack([values.decode(x & np.uint32(0xFFFF), f), values.decode(x >> np.uint32(16), f)], axis=-1)
    return pair.astype(np.float64).reshape(-1, 32, len(registers), 2)


@op("mma")
def mma(d: Decoder) -> Step:
    shape = next((m for m in d.mods if m in ("m16n8k8", "m16n8k16")), "")
    types = d.mods[-4:]
    if (
        not shape
        or types[0] != "f32"
        or types[3] != "f32"
        or types[1] not in ("f16", "bf16")
        or "row" not in d.mods
    ):
        raise d.fail()
    k = 16 if shape == "m16n8k16" else 8
    outs = [d.dst(o, "f32") for o in d.items(0, 4)]
    a = [d.src(o, "b32") for o in d.items(1, k // 4)]
    b = [d.src(o, "b32") for o in d.items(2, k // 8)]
    c = [d.src(o, "f32") for o in d.items(3, 4)]
    group, inside = np.arange(32) // 4, np.arange(32) % 4

    def execute(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        fa, fb = _fragment(g, sel, a, types[1]), _fragment(g, sel, b, types[2])
        warps = lanes.size // 32
        left, right = np.zeros((warps, 16, k)), np.zeros((warps, k, 8))
        for r in range(len(a)):
            for h in range(2):
                left[:, group + 8 * (r % 2), inside * 2 + h + 8 * (r // 2)] = fa[:, :, r, h]
        for r in range(len(b)):
            for h in range(2):
                right[:, inside * 2 + h + 8 * r, group] = fb[:, :, r, h]
        total = np.zeros((warps, 16, 8))
        for i in range(k):
            total = total + left[:, :, i, None] * right[:, i, None, :]
        results = []
        for i in range(4):
            old = np.broadcast_to(c[i](g, sel), lanes.shape).astype(np.float64).reshape(warps, 32)
            new = total[:, group + 8 * (i // 2), inside * 2 + i % 2] + old
            results.append(values.finish_f32(new.astype(np.float32).ravel()))
        for write, x in zip(outs, results, strict=True):
            write(g, sel, x)

    return _aligned(d, execute)
