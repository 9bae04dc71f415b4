"""Branches, calls and the end of threads. PTX ISA, "Control Flow Instructions" and "Miscellaneous"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Reg, Symbol, Vec
from .errors import Fault
from .program import STOP, Decoder, Step, op

if TYPE_CHECKING:
    from .grid import Grid, Selection


@op("bra")
def bra(d: Decoder) -> Step:
    pc = d.pc
    target = d.operand(0)
    assert isinstance(target, Symbol)
    to = d.program.first[d.function_index] + d.function.labels[target.name]
    if d.ins.pred is None:

        def always(g: Grid, sel: Selection) -> Any:
            g.machine.jump(g, g.lanes(sel), to, pc)
            return STOP

        return always
    name, negated = d.ins.pred
    guard = d.pred(Reg(name))

    def branch(g: Grid, sel: Selection) -> Any:
        p = guard(g, sel)
        if negated:
            p = ~p
        if not p.any():
            return None
        lanes = g.lanes(sel)
        if p.all():
            g.machine.jump(g, lanes, to, pc)
            return STOP
        g.machine.jump(g, lanes[p], to, pc)
        g.machine.go(g, lanes[~p], pc + 1)
        return STOP

    return branch


@op("brx")
def brx(d: Decoder) -> Step:
    pc = d.pc
    first = d.program.first[d.function_index]
    table = d.operand(1)
    assert isinstance(table, Symbol)
    targets = [first + d.function.labels[t] for t in d.function.branch_targets[table.name]]
    index = d.src(0, "u32")

    def run(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        i = np.broadcast_to(index(g, sel), lanes.shape)
        bad = i >= len(targets)
        if bad.any():
            raise Fault(
                "undefined", f"brx.idx index outside 0..{len(targets) - 1}", int(np.flatnonzero(bad)[0])
            )
        for k in np.unique(i).tolist():
            g.machine.jump(g, lanes[i == k], targets[k], pc)
        return STOP

    return run


@op("call")
def call(d: Decoder) -> Step:
    pc = d.pc
    results, target, arguments = d.ins.operands[:3]
    if not isinstance(target, Symbol) or target.name not in d.program.function_index:
        raise d.fail("the function has no body here" if isinstance(target, Symbol) else "indirect call")
    assert isinstance(results, Vec) and isinstance(arguments, Vec)
    k = d.program.function_index[target.name]
    callee = d.program.functions[k]
    entry = d.program.first[k]
    own, other = d.program.local[d.function_index], d.program.local[k]
    copies = _copies(d, arguments, callee.params, own, other)

    def run(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        _copy(g, lanes, copies)
        g.returns[k][lanes] = pc
        g.machine.go(g, lanes, entry)
        return STOP

    d.program.return_copies[pc] = [(b, a, n) for a, b, n in _copies(d, results, callee.returns, own, other)]
    return run


def _copies(
    d: Decoder, names: Vec, formal: list[Any], own: dict[str, int], other: dict[str, int]
) -> list[Any]:
    """(offset in the caller's frame, offset in the callee's, bytes) of each parameter."""
    if len(names.items) != len(formal):
        raise d.fail("number of parameters")
    out = []
    for o, v in zip(names.items, formal, strict=True):
        if not isinstance(o, Symbol) or o.name not in own:
            raise d.fail("a parameter that is not a .param variable")
        out.append((own[o.name], other[v.name], v.size))
    return out


def _copy(g: Grid, lanes: Any, copies: list[tuple[int, int, int]]) -> None:
    pool, size = g.local, g.program.local_size
    assert pool.shadow is not None
    for source, target, n in copies:
        at = lanes[:, None] * size + np.arange(n)
        pool.data[at + target] = pool.data[at + source]
        pool.shadow[at + target] = pool.shadow[at + source]


@op("ret")
def ret(d: Decoder) -> Step:
    if d.function.is_entry:
        return leave(d)
    k = d.function_index
    back = d.program.return_copies

    def run(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        sites = g.returns[k][lanes]
        for site in np.unique(sites).tolist():
            here = lanes[sites == site]
            _copy(g, here, back[site])
            g.machine.go(g, here, site + 1)
        return STOP

    return run


@op("exit")
def leave(d: Decoder) -> Step:
    def run(g: Grid, sel: Selection) -> Any:
        g.exit(g.lanes(sel))
        return STOP

    return run


@op("trap")
def trap(d: Decoder) -> Step:
    def run(g: Grid, sel: Selection) -> Any:
        raise Fault("trap", "the program executed trap")

    return run


@op("nanosleep")
def nanosleep(d: Decoder) -> Step:
    pc = d.pc

    def run(g: Grid, sel: Selection) -> Any:
        g.machine.give_way(g, g.lanes(sel), pc + 1)
        return STOP

    return run


@op("pmevent", "setmaxnreg", "prefetch", "prefetchu", "applypriority")
def nothing(d: Decoder) -> Step:
    """Hints without an effect on values."""
    return lambda g, sel: None
