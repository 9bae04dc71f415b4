"""Asynchronous copies: cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async.

Each is put into the machine's queue when it is issued and carried out later: at the latest when somebody
waits for it, earlier only under a random schedule or when nothing else can run. Sources are read when the
copy is carried out, so that a buffer reused too early, or data read too early, shows. PTX ISA, "Data
Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Addr, Imm, Reg
from . import memory as mem
from .errors import Fault
from .ops_memory import Update, apply, elements, stack, update
from .program import WIDTH, Decoder, Step, op
from .values import UINT, Array

if TYPE_CHECKING:
    from .grid import Grid, Selection


class Batch:
    """What one instruction issued, for many lanes: `act(positions)` carries out those of `lanes[positions]`.

    `groups` says per lane to which commit group its part belongs; None for what no group covers.
    """

    def __init__(
        self, g: Grid, pc: int, lanes: Array, act: Callable[[Array], None], groups: Array | None
    ) -> None:
        self.grid, self.pc, self.lanes, self.act, self.groups = g, pc, lanes, act, groups
        self.left = np.ones(lanes.size, bool)
        self.done = False

    def complete(self, positions: Array | None = None) -> None:
        """Carry out what is left, or what is left of some positions."""
        todo = np.flatnonzero(self.left) if positions is None else positions[self.left[positions]]
        if not todo.size:
            return
        self.left[todo] = False
        self.done = not self.left.any()
        try:
            self.act(todo)
        except Fault as e:
            e.settle(self.lanes[todo])
            raise self.grid.machine.blame(self.grid, self.pc, e) from e
        self.grid.machine.progress += 1


class Groups:
    """The commit groups of every thread, for cp.async or for cp.async.bulk."""

    def __init__(self, n: int) -> None:
        self.commits = np.zeros(n, np.int64)
        self.batches: list[Batch] = []

    def issue(self, g: Grid, pc: int, lanes: Array, act: Callable[[Array], None]) -> None:
        self.batches = [b for b in self.batches if not b.done]
        batch = Batch(g, pc, lanes, act, self.commits[lanes])
        self.batches.append(batch)
        g.machine.issue(batch)

    def commit(self, lanes: Array) -> None:
        self.commits[lanes] += 1

    def finish(self, lanes: Array, keep: int | None) -> None:
        """Carry out all but the `keep` youngest groups of each lane; None: everything, committed or not."""
        limit = np.full(self.commits.size, -1)
        limit[lanes] = np.iinfo(np.int64).max if keep is None else self.commits[lanes] - keep
        for batch in self.batches:
            assert batch.groups is not None
            batch.complete(np.flatnonzero(batch.groups < limit[batch.lanes]))


@op("cp")
def copy(d: Decoder) -> Step:
    mods = d.mods
    if "tensor" in mods or "multimem" in mods:
        raise d.fail()
    if "bulk" in mods:
        if "prefetch" in mods:
            return lambda g, sel: None
        if "commit_group" in mods:
            return lambda g, sel: g.bulk.commit(g.lanes(sel))
        if "wait_group" in mods:
            return _wait_group(d, "bulk")
        return _bulk(d)
    if "commit_group" in mods:
        return lambda g, sel: g.cp_async.commit(g.lanes(sel))
    if "wait_group" in mods:
        return _wait_group(d, "cp_async")
    if "wait_all" in mods:
        return lambda g, sel: g.cp_async.finish(g.lanes(sel), None)
    if "mbarrier" in mods:
        return _copy_arrive(d)
    return _copy(d)


def _wait_group(d: Decoder, name: str) -> Step:
    """`.read` promises the reads of the source only, but a copy is carried out as one piece here."""
    n = d.operand(0)
    if not isinstance(n, Imm):
        raise d.fail()
    keep = int(n.value)
    return lambda g, sel: getattr(g, name).finish(g.lanes(sel), keep)


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
            _issue_copy(g, pc, lanes[where], pool, offset, to[where], count[where], n)

    return run


def _issue_copy(
    g: Grid, pc: int, lanes: Array, pool: Any, source: Array, target: Array, count: Array, n: int
) -> None:
    def act(positions: Array) -> None:
        data = np.zeros((positions.size, n), np.uint8)
        for size in np.unique(count[positions]).tolist():  # bytes beyond src-size are zero
            if size:
                rows = np.flatnonzero(count[positions] == size)
                at = source[positions[rows]][:, None] + np.arange(size)
                data[rows, :size] = pool.load(at.ravel(), 1).reshape(-1, size)
        at = target[positions][:, None] + np.arange(n)
        g.shared.store(at.ravel(), 1, data.ravel())
        if g.history is not None:
            g.history.overwritten(g.shared, at.ravel())

    g.cp_async.issue(g, pc, lanes, act)


def _copy_arrive(d: Decoder) -> Step:
    """cp.async.mbarrier.arrive{.noinc}: an arrival once all earlier cp.async of the thread are done."""
    address = d.address(0)
    noinc = "noinc" in d.mods
    pc = d.pc

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        at = g.mbarriers.offsets("shared::cta", sel, address(g, sel))
        if not noinc:
            for offset in at.tolist():
                g.mbarriers.expect_arrival(offset)
        earlier = list(g.cp_async.batches)

        def act(positions: Array) -> None:
            for batch in earlier:
                batch.complete(np.flatnonzero(np.isin(batch.lanes, lanes[positions])))
            g.mbarriers.arrive(at[positions], np.ones(positions.size, np.int64), None)

        g.machine.issue(Batch(g, pc, lanes, act, None))

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
        acts: list[Callable[[], None]] = []
        for i, lane in enumerate(lanes.tolist()):
            one = lanes[i : i + 1]
            nbytes = int(n[i])
            if nbytes % 16 or int(to[i]) % 16 or int(of[i]) % 16:
                raise Fault("misaligned", "bulk copies need addresses and sizes that are multiples of 16", i)
            a = _range(g, from_space, one, of[i : i + 1], nbytes)
            b = _range(g, space.get(to_space, to_space), one, to[i : i + 1], nbytes)
            at = None
            if bar is not None:
                at = int(g.mbarriers.offsets("shared::cluster", one, bar[i : i + 1])[0])
            targets = [(b, at)]
            if masks is not None and at is not None:
                inner, offset = b[1] % g.shared_stride, at % g.shared_stride
                base = int(g.base[lane])
                starts = [
                    (base + r) * g.shared_stride for r in range(g.cluster_size) if int(masks[i]) >> r & 1
                ]
                targets = [((g.shared, s + inner), s + offset) for s in starts]
            stale = g.history.stale_copy(g, lane, *a, nbytes) if g.history is not None else None
            acts.append(_act(g, a, targets, nbytes, reduce, width, stale))

        def act(positions: Array) -> None:
            for k in positions.tolist():
                acts[k]()

        if by_mbarrier:
            g.machine.issue(Batch(g, pc, lanes, act, None))
        else:
            g.bulk.issue(g, pc, lanes, act)

    return run


def _range(g: Grid, space: str, lane: Array, address: Array, nbytes: int) -> tuple[Any, int]:
    """(pool, byte offset) of a contiguous range; raises Fault where it leaves its buffer."""
    if space.startswith("shared"):
        return g.shared, int(g.shared_offset(lane, address, nbytes, space == "shared::cluster")[0])
    pool, _, offset = g.memory.locate(address.astype(np.uint64), nbytes)[0]
    return pool, int(offset[0])


def _act(
    g: Grid,
    source: tuple[Any, int],
    targets: list[Any],
    nbytes: int,
    reduce: Update | None,
    width: int,
    stale: tuple[Array, Array, Array] | None,
) -> Callable[[], None]:
    def act() -> None:
        pool, at = source
        ends = [(pool, at), *(where for where, _ in targets)]
        g.need_alive(np.array([offset for p, offset in ends if p is g.shared], np.int64))
        data = pool.read(at, nbytes)
        if stale is not None:
            where, old, shadow = stale
            if pool.shadow is not None and (shadow != mem.WRITTEN).any():
                place = pool.where(at + int(where[0]))
                raise Fault(
                    "uninitialized", f"bulk copy from {place}, written with no proxy fence before the copy"
                )
            data[where] = old
        for (to, offset), barrier in targets:
            if reduce is None:
                to.write(offset, data)
                if g.history is not None:
                    g.history.overwritten(to, np.arange(offset, offset + nbytes))
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

        def act(part: Array) -> None:
            g.need_alive(at[part])
            g.note(g.shared, lanes, part, at[part], width * n, released=True)
            if reduce is None:
                g.shared.store(at[part], width, x[part], n)
            else:
                apply(g.shared, at[part], width, reduce, x[part], x[part])
            g.mbarriers.add_tx(bar[part], np.full(part.size, -width * n))

        g.machine.issue(Batch(g, pc, lanes, act, None))

    return run
