"""Instructions across the lanes of a warp.

PTX ISA, "Data Movement": shfl.sync; "Parallel Synchronization and Communication": vote, match, redux, elect,
activemask, bar.warp.sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Pair, Reg
from . import values
from .errors import Fault
from .program import STOP, Decoder, Reader, Step, Writer, dtype, op
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

UNDEFINED = np.uint32(0x7FBADBAD)  # what reading a lane gives that does not take part


def together(d: Decoder, mask: Reader, execute: Callable[[Grid, Selection], None]) -> Step:
    """Run `execute` once all living lanes of the membermask are here."""
    pc = d.pc

    def run(g: Grid, sel: Selection) -> Any:
        ready = g.converge(sel, pc, mask)
        if ready is None:
            execute(g, sel)
            return None
        if ready.size:
            try:
                execute(g, ready)
            except Fault as e:
                e.settle(ready)
                raise
            g.machine.go(g, ready, pc + 1)
        return STOP

    return run


def warp_table(g: Grid, lanes: Array, x: Array, fill: Array) -> tuple[Array, Array, Array]:
    """(warps, row of each lane in them, values [warps, 32]) with `fill` for lanes that are absent."""
    warps, row = np.unique(g.warp[lanes], return_inverse=True)
    table = np.full((warps.size, 32), fill, x.dtype)
    table[row, g.laneid[lanes]] = x
    return warps, row, table


def _both(d: Decoder, k: int, type_: str) -> tuple[Writer, Writer]:
    """Writers of `d|p`; a missing predicate is dropped."""
    o = d.operand(k)
    value, predicate = (o.first, o.second) if isinstance(o, Pair) else (o, Reg("_"))
    return d.dst(value, type_), d.dst_pred(predicate)


def _spread(g: Grid, sel: Selection, x: Array) -> Array:
    return np.broadcast_to(x, g.lanes(sel).shape)


@op("shfl")
def shfl(d: Decoder) -> Step:
    if "sync" not in d.mods:
        raise d.fail("shfl without .sync")
    mode = next(m for m in d.mods if m in ("up", "down", "bfly", "idx"))
    write, write_p = _both(d, 0, "b32")
    a, b, c, mask = d.src(1, "b32"), d.src(2, "u32"), d.src(3, "u32"), d.src(4, "u32")

    def execute(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        lane = g.laneid[sel].astype(np.int64)
        n = b(g, sel).astype(np.int64) & 31
        clamp = c(g, sel).astype(np.int64)
        segment, limit = (clamp >> 8) & 31, clamp & 31
        last = (lane & segment) | (limit & ~segment & 31)
        if mode == "up":
            source = lane - n
            valid = source >= last
        else:
            start = lane & segment
            source = {"down": lane + n, "bfly": lane ^ n, "idx": start | (n & ~segment & 31)}[mode]
            valid = source <= last
        source = np.where(valid, source, lane)
        at = g.warp[sel] * 32 + source
        # The source must be a living lane of the membermask; otherwise the result is undefined.
        taking_part = g.alive[at] & ((mask(g, sel) >> source.astype(np.uint32)) & np.uint32(1)).astype(bool)
        x = _spread(g, lanes, a(g, at))
        write(g, sel, np.where(taking_part, x, UNDEFINED))
        write_p(g, sel, valid)

    return together(d, mask, execute)


@op("vote")
def vote(d: Decoder) -> Step:
    if "sync" not in d.mods:
        raise d.fail("vote without .sync")
    kind = d.mods[1]
    mask = d.src(2, "u32")
    p = d.pred(1)
    ballot = kind == "ballot"
    write: Writer = d.dst(0, "b32") if ballot else d.dst_pred(0)

    def execute(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        m = _spread(g, sel, mask(g, sel))
        _, row, table = warp_table(g, lanes, _spread(g, sel, p(g, sel)), np.array(False))
        bits = np.packbits(table, axis=1, bitorder="little").view(np.uint32).ravel()[row] & m
        living = m & g.warp_alive[g.warp[lanes]]
        if ballot:
            write(g, sel, bits)
        elif kind == "all":
            write(g, sel, bits == living)
        elif kind == "any":
            write(g, sel, bits != 0)
        else:
            write(g, sel, (bits == living) | (bits == 0))

    return together(d, mask, execute)


@op("activemask")
def activemask(d: Decoder) -> Step:
    write = d.dst(0, "b32")

    def run(g: Grid, sel: Selection) -> None:
        flags = np.zeros(g.n, bool)
        flags[sel] = g.alive[sel]
        write(g, sel, g.warp_bits(flags)[g.warp[sel]])

    return run


@op("elect")
def elect(d: Decoder) -> Step:
    mask = d.src(1, "u32")
    write, write_p = _both(d, 0, "b32")

    def execute(g: Grid, sel: Selection) -> None:
        m = _spread(g, sel, mask(g, sel)) & g.warp_alive[g.warp[sel]]
        lowest = np.bitwise_count((m & (~m + np.uint32(1))) - np.uint32(1)).astype(np.uint32)
        write(g, sel, lowest)
        write_p(g, sel, g.laneid[sel] == lowest)

    return together(d, mask, execute)


@op("match")
def match(d: Decoder) -> Step:
    everyone = "all" in d.mods
    a, mask = d.src(1, d.type), d.src(2, "u32")
    write, write_p = _both(d, 0, "b32")

    def execute(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        x = _spread(g, sel, a(g, sel))
        m = _spread(g, sel, mask(g, sel)) & g.warp_alive[g.warp[lanes]]
        _, row, table = warp_table(g, lanes, x, x.dtype.type(0))
        equal = table[row] == x[:, None]
        bits = np.packbits(equal, axis=1, bitorder="little").view(np.uint32).ravel() & m
        if everyone:
            same = bits == m
            write(g, sel, np.where(same, bits, np.uint32(0)))
            write_p(g, sel, same)
        else:
            write(g, sel, bits)

    return together(d, mask, execute)


@op("redux")
def redux(d: Decoder) -> Step:
    t = d.type
    name = next(m for m in d.mods if m in ("add", "min", "max", "and", "or", "xor"))
    absolute, nan = "abs" in d.mods, "NaN" in d.mods
    a, mask = d.src(1, t), d.src(2, "u32")
    write = d.dst(0, t)
    reduce: dict[str, Any] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    neutral = _neutral(name, t)

    def execute(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        x = _spread(g, sel, a(g, sel))
        m = _spread(g, sel, mask(g, sel))
        _, row, table = warp_table(g, lanes, x, neutral)
        chosen = table[row]
        inside = (m[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0
        present = np.zeros((table.shape[0], 32), bool)
        present[row, g.laneid[lanes]] = True
        inside &= present[row]
        if t == "f32":
            out = chosen[:, 0]
            v = np.where(inside, np.abs(chosen) if absolute else chosen, np.float32(np.nan))
            out = v[:, 0]
            for k in range(1, 32):
                out = values.minmax(out, v[:, k], name == "max", False)
            if nan:
                out = np.where((np.isnan(chosen) & inside).any(axis=1), np.float32(np.nan), out)
            write(g, sel, values.finish_f32(out))
        else:
            write(g, sel, reduce[name].reduce(np.where(inside, chosen, neutral), axis=1, dtype=x.dtype))

    return together(d, mask, execute)


def _neutral(name: str, t: str) -> Any:
    dt = dtype(t)
    if dt.kind == "f":
        return dt.type(np.nan)
    if name in ("min", "max"):
        info = np.iinfo(dt)
        return dt.type(info.max if name == "min" else info.min)
    return dt.type(-1 if dt.kind == "i" else np.iinfo(dt).max) if name == "and" else dt.type(0)
