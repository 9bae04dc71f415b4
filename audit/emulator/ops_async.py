"""Asynchronous copies: cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async.

Each is put into the machine's queue when it is issued and carried out later: at the latest when somebody waits
for it, earlier only under a random schedule or when nothing else can run. Sources are read when the copy is
carried out, so that a buffer reused too early, or data read too early, shows.
PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Addr, Imm, Reg
from .errors import Fault
from .ops_memory import Update, apply, elements, stack, update
from .program import WIDTH, Decoder, Step, op
from .values import UINT, Array

if TYPE_CHECKING:
    from .grid import AsyncCopies, Grid, Selection


@dataclass
class Operation:
    """One asynchronous operation. `act` carries it out, once; `lane` and `pc` are who issued it."""

    grid: Grid
    lane: int
    pc: int
    act: Callable[[], None]
    done: bool = False

    def complete(self) -> None:
        if self.done:
            return
        self.done = True
        try:
            self.act()
        except Fault as e:
            raise self.grid.machine.blame(self.grid, self.lane, self.pc, e) from e
        self.grid.machine.progress += 1


@op("cp")
def copy(d: Decoder) -> Step:
    mods = d.mods
    if "tensor" in mods or "multimem" in mods:
        raise d.fail()
    if "bulk" in mods:
        if "prefetch" in mods:
            return lambda g, sel: None
        if "commit_group" in mods:
            return lambda g, sel: _commit(g, sel, g.copies)
        if "wait_group" in mods:
            return _wait_group(d, "copies")
        return _bulk(d)
    if "commit_group" in mods:
        return lambda g, sel: _commit(g, sel, g.cp_async)
    if "wait_group" in mods:
        return _wait_group(d, "cp_async")
    if "wait_all" in mods:
        return lambda g, sel: _finish(g, sel, g.cp_async, 0, everything=True)
    if "mbarrier" in mods:
        return _copy_arrive(d)
    return _copy(d)


# -- groups ------------------------------------------------------------------------------------------------


def _of(table: dict[int, AsyncCopies], lane: int) -> AsyncCopies:
    from .grid import AsyncCopies

    found = table.get(lane)
    if found is None:
        found = table[lane] = AsyncCopies()
    return found


def _commit(g: Grid, sel: Selection, table: dict[int, AsyncCopies]) -> None:
    for lane in g.lanes(sel).tolist():
        c = _of(table, lane)
        c.groups.append(c.open)
        c.open = []


def _finish(
    g: Grid, sel: Selection, table: dict[int, AsyncCopies], keep: int, everything: bool = False
) -> None:
    """Carry out all but the `keep` youngest groups of each lane."""
    for lane in g.lanes(sel).tolist():
        c = table.get(lane)
        if c is None:
            continue
        last = len(c.groups) - keep
        for group in c.groups[: max(last, 0)]:
            for operation in group:
                operation.complete()
        del c.groups[: max(last, 0)]
        if everything:
            for operation in c.open:
                operation.complete()
            c.open = []


def _wait_group(d: Decoder, table: str) -> Step:
    """`.read` promises the reads of the source only, but a copy is carried out as one piece here."""
    n = d.operand(0)
    if not isinstance(n, Imm):
        raise d.fail()
    keep = int(n.value)
    return lambda g, sel: _finish(g, sel, getattr(g, table), keep)


# -- cp.async ------------------------------------------------------------------------------------------------


def _copy(d: Decoder) -> Step:
    """cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size | ignore-src}"""
    target, source, size = d.address(0), d.address(1), d.operand(2)
    if not isinstance(size, Imm):
        raise d.fail("cp-size")
    n = int(size.value)
    rest = list(d.ins.operands[3:])
    if "L2::cache_hint" in d.mods and rest:
        rest.pop()
    last = rest[0] if rest else None
    ignoring = isinstance(last, Reg) and d.function.registers.get(last.name) == "pred"
    ignore = d.pred(last) if last is not None and ignoring else None
    valid = d.src(last, "u32") if last is not None and not ignoring else None
    pc = d.pc

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        to = g.resolve("shared::cta", sel, target(g, sel), n)[0][2]
        parts = g.resolve("global", sel, source(g, sel), n)
        count = np.full(lanes.size, n)
        if valid is not None:
            count = np.broadcast_to(valid(g, sel), lanes.shape).astype(np.int64)
        if ignore is not None:
            count = np.where(np.broadcast_to(ignore(g, sel), lanes.shape), 0, count)
        for pool, where, offset in parts:
            for lane, a, b, c in zip(lanes[where], offset, to[where], count[where], strict=True):

                def act(pool: Any = pool, a: int = int(a), b: int = int(b), c: int = int(c)) -> None:
                    data = np.zeros(n, np.uint8)
                    data[:c] = pool.read(a, c)
                    g.shared.write(b, data)

                operation = Operation(g, int(lane), pc, act)
                _of(g.cp_async, int(lane)).open.append(operation)
                g.machine.issue(operation)

    return run


def _copy_arrive(d: Decoder) -> Step:
    """cp.async.mbarrier.arrive{.noinc}: an arrival once all earlier cp.async of the thread are done."""
    address = d.address(0)
    noinc = "noinc" in d.mods
    pc = d.pc

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        at = g.mbarriers.offsets("shared::cta", sel, address(g, sel))
        for lane, offset in zip(lanes.tolist(), at.tolist(), strict=True):
            if not noinc:
                g.mbarriers.expect_arrival(offset)
            c = _of(g.cp_async, lane)
            earlier = [o for group in c.groups for o in group] + c.open

            def act(earlier: list[Operation] = earlier, offset: int = offset) -> None:
                for operation in earlier:
                    operation.complete()
                g.mbarriers.arrive(np.array([offset]), np.ones(1, np.int64), None)

            g.machine.issue(Operation(g, lane, pc, act))

    return run


# -- cp.async.bulk -------------------------------------------------------------------------------------------


def _bulk(d: Decoder) -> Step:
    """Copies and reductions of contiguous bytes between global and shared memory."""
    if "mask" in "".join(d.mods) or "bytemask" in d.mods or "cp_mask" in d.mods:
        raise d.fail(".cp_mask")
    spaces = [m for m in d.mods if m == "global" or m.startswith("shared")][:2]
    to_space, from_space = spaces
    target, source, size = d.address(0), d.address(1), d.src(2, "u32")
    by_mbarrier = "mbarrier::complete_tx::bytes" in d.mods
    barrier = d.address(3) if by_mbarrier else None
    multicast = d.src(4, "u16") if "multicast::cluster" in d.mods else None
    reduce: Update | None = None
    width = 1
    if "reduce" in d.mods:
        t = d.type
        width = WIDTH[t]
        reduce = update(
            next(m for m in d.mods if m in ("add", "min", "max", "and", "or", "xor", "inc", "dec")), t, True
        )
    pc = d.pc
    space = {"shared": "shared::cluster"}

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        to, of = target(g, sel), source(g, sel)
        n = np.broadcast_to(size(g, sel), lanes.shape).astype(np.int64)
        bar = barrier(g, sel) if barrier is not None else None
        masks = np.broadcast_to(multicast(g, sel), lanes.shape) if multicast is not None else None
        for i, lane in enumerate(lanes.tolist()):
            one = lanes[i : i + 1]
            nbytes = int(n[i])
            if nbytes % 16 or int(to[i]) % 16 or int(of[i]) % 16:
                raise Fault("misaligned", "bulk copies need addresses and sizes that are multiples of 16", i)
            if nbytes == 0:
                continue
            a = _range(g, from_space, one, of[i : i + 1], nbytes)
            b = _range(g, space.get(to_space, to_space), one, to[i : i + 1], nbytes)
            at = None
            if bar is not None:
                at = int(g.mbarriers.offsets("shared::cluster", one, bar[i : i + 1])[0])
            targets = [(b, at)]
            if masks is not None:
                base = int(g.base[lane])
                inner = b[1] % g.shared_stride
                offset = at % g.shared_stride if at is not None else 0
                ranks = [r for r in range(g.cluster_size) if int(masks[i]) >> r & 1]
                targets = [
                    ((g.shared, (base + r) * g.shared_stride + inner), (base + r) * g.shared_stride + offset)
                    for r in ranks
                ]
            act = _act(g, a, targets, nbytes, reduce, width)
            operation = Operation(g, lane, pc, act)
            if not by_mbarrier:
                _of(g.copies, lane).open.append(operation)
            g.machine.issue(operation)

    return run


def _range(g: Grid, space: str, lane: Array, address: Array, nbytes: int) -> tuple[Any, int]:
    """(pool, byte offset) of a contiguous range; raises Fault where it leaves its buffer."""
    if space.startswith("shared"):
        return g.shared, int(g.shared_offset(lane, address, nbytes, space == "shared::cluster")[0])
    pool, _, offset = g.memory.locate(address.astype(np.uint64), nbytes)[0]
    return pool, int(offset[0])


def _act(
    g: Grid, source: tuple[Any, int], targets: list[Any], nbytes: int, reduce: Update | None, width: int
) -> Callable[[], None]:
    def act() -> None:
        pool, at = source
        data = pool.read(at, nbytes)
        for (to, offset), barrier in targets:
            if reduce is None:
                to.write(offset, data)
            else:
                items = data.view(UINT[width])
                apply(to, offset + width * np.arange(items.size), width, reduce, items, items)
            if barrier is not None:
                g.mbarriers.add_tx(np.array([barrier]), np.array([-nbytes]))

    return act


# -- st.async, red.async -------------------------------------------------------------------------------------


def store_async(d: Decoder) -> Step:
    """st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar]"""
    return _remote(d, None)


def reduce_async(d: Decoder) -> Step:
    name = next(m for m in d.mods if m in ("add", "min", "max", "and", "or", "xor", "inc", "dec"))
    return _remote(d, update(name, d.type, False))


def _remote(d: Decoder, reduce: Update | None) -> Step:
    if "mbarrier::complete_tx::bytes" not in d.mods or len(d.ins.operands) != 3:
        raise d.fail("only the mbarrier form")
    t, n = d.type, elements(d)
    width = WIDTH[t]
    address, barrier = d.address(0), d.address(2)
    if not isinstance(d.operand(2), Addr):
        raise d.fail()
    sources = [d.src(o, f"b{8 * width}") for o in d.items(1, n)]
    pc = d.pc

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        at = g.resolve("shared::cluster", sel, address(g, sel), width * n)[0][2]
        bar = g.mbarriers.offsets("shared::cluster", sel, barrier(g, sel))
        wrong = at // g.shared_stride != bar // g.shared_stride
        if wrong.any():
            raise Fault("undefined", "data and mbarrier lie in different CTAs", int(np.flatnonzero(wrong)[0]))
        x = np.array(stack(g, sel, sources))
        x = np.broadcast_to(x, (lanes.size, n) if n > 1 else lanes.shape)

        for part in g.machine.batches(g, lanes):

            def act(part: Array = part) -> None:
                if reduce is None:
                    g.shared.store(at[part], width, x[part], n)
                else:
                    apply(g.shared, at[part], width, reduce, x[part], x[part])
                g.mbarriers.add_tx(bar[part], np.full(part.size, -width * n))

            g.machine.issue(Operation(g, int(lanes[part[0]]), pc, act))

    return run
