"""Barriers, fences, mbarriers and the grid dependency.

PTX ISA, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Addr, Operand, Reg
from .barriers import NAMED, Wait
from .errors import Fault
from .ops_warp import together
from .program import STOP, Decoder, Reader, Step, op
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

# -- CTA and warp barriers ------------------------------------------------------------------------------


@op("bar", "barrier")
def bar(d: Decoder) -> Step:
    if "cluster" in d.mods:
        return _cluster(d)
    if "warp" in d.mods:
        mask = d.src(0, "u32")

        def execute(g: Grid, sel: Selection) -> None:
            g.release(g.lanes(sel), "cta")
            g.acquire(g.lanes(sel), "cta")

        return together(d, mask, execute)
    kind = next(m for m in d.mods if m in ("sync", "arrive", "red"))
    pc = d.pc
    k = 1 if kind == "red" else 0
    reduction = next((m for m in d.mods if m in ("popc", "and", "or")), "")
    barrier = d.src(k, "u32")
    operands = d.ins.operands
    # bar.red p, a{, b}, q: the count is there when an operand stands between.
    n_fixed = 2 + k if kind == "red" else 1 + k
    count: Reader | None = d.src(k + 1, "u32") if len(operands) > n_fixed else None
    predicate = d.pred(len(operands) - 1) if kind == "red" else None
    write: Any = None
    if kind == "red":
        write = d.dst(0, "u32") if reduction == "popc" else d.dst_pred(0)

    def finish(g: Grid, lanes: Array) -> None:
        """Write the reduction's result for lanes that pass."""
        b = np.broadcast_to(barrier(g, lanes), lanes.shape).astype(np.int64)
        slots = g.slot[lanes]
        true = g.barriers.true[b, slots]
        total = np.stack([g.barriers.arrived[k].reshape(g.slots, -1).sum(axis=1) for k in range(NAMED)])[
            b, slots
        ]
        result = (
            true.astype(np.uint32)
            if reduction == "popc"
            else true == total
            if reduction == "and"
            else true > 0
        )
        write(g, lanes, result)

    def run(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        ids = np.broadcast_to(barrier(g, sel), lanes.shape)
        counts = (
            np.broadcast_to(count(g, sel), lanes.shape) if count is not None else np.zeros(lanes.size, int)
        )
        through = []
        for b, c in sorted({(int(i), int(n)) for i, n in zip(*_distinct(ids, counts), strict=True)}):
            if b >= NAMED:
                raise Fault("barrier", f"barrier {b}: there are {NAMED}")
            chosen = (ids == b) & (counts == c)
            value = predicate(g, lanes[chosen]).astype(np.int64) if predicate is not None else None
            if value is not None:
                value = np.broadcast_to(value, chosen.sum())
            resume = finish if kind == "red" else None
            through.append(g.barriers.arrive(lanes[chosen], b, c, pc, kind != "arrive", value, resume))
        passed = np.sort(np.concatenate(through))
        if passed.size == lanes.size:
            return None
        g.machine.go(g, passed, pc + 1)
        return STOP

    return run


def _distinct(ids: Array, counts: Array) -> tuple[Array, Array]:
    pairs = np.unique(np.stack([ids.astype(np.int64), counts.astype(np.int64)]), axis=1)
    return pairs[0], pairs[1]


def _cluster(d: Decoder) -> Step:
    pc = d.pc
    relaxed = "relaxed" in d.mods
    if "arrive" in d.mods:
        return lambda g, sel: g.cluster_barriers.arrive(g.lanes(sel), not relaxed)

    def wait(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        passed = g.cluster_barriers.wait(lanes, pc, not relaxed)
        if passed.size == lanes.size:
            return None
        g.machine.go(g, passed, pc + 1)
        return STOP

    return wait


# -- fences ---------------------------------------------------------------------------------------------


@op("fence", "membar")
def fence(d: Decoder) -> Step:
    """In the default memory model a no-op; in weak mode it publishes and refreshes at its scope."""
    if any(m.startswith("proxy") for m in d.mods):
        return _proxy_fence(d)
    if "mbarrier_init" in d.mods:

        def release_mbarriers(g: Grid, sel: Selection) -> None:
            if g.history is not None:
                g.history.release_mbarriers(g, g.lanes(sel))

        return release_mbarriers
    scope = {"gl": "gpu"}.get(d.mods[-1], d.scope("sys"))
    release, acquire = "acquire" not in d.mods, "release" not in d.mods

    def run(g: Grid, sel: Selection) -> None:
        lanes = g.lanes(sel)
        if release:
            g.release(lanes, scope)
        if acquire:
            g.acquire(lanes, scope)

    return run


def _proxy_fence(d: Decoder) -> Step:
    """fence.proxy.async orders generic writes before bulk copies, in weak mode. Other proxies do not occur."""
    if not any(m.startswith("async") for m in d.mods):
        return lambda g, sel: None
    shared = any("shared" in m for m in d.mods)
    pools = ("shared",) if shared else ("global",) if "global" in d.mods else ("shared", "global")

    def run(g: Grid, sel: Selection) -> None:
        if g.history is not None:
            g.history.fence_proxy(g, g.lanes(sel), pools)

    return run


# -- mbarrier -------------------------------------------------------------------------------------------


def space_of(d: Decoder) -> str:
    found = next((m for m in d.mods if m.startswith("shared")), "")
    return {"shared": "shared::cta"}.get(found, found)


@op("mbarrier")
def mbarrier(d: Decoder) -> Step:
    kind = d.mods[0]
    space = space_of(d)
    if kind == "init":
        address, count = d.address(0), d.src(1, "u32")

        def init(g: Grid, sel: Selection) -> None:
            at = g.mbarriers.offsets(space, sel, address(g, sel))
            g.mbarriers.init(sel, at, np.broadcast_to(count(g, sel), at.shape))

        return init
    if kind == "inval":
        address = d.address(0)
        return lambda g, sel: g.mbarriers.inval(g.mbarriers.offsets(space, sel, address(g, sel)))
    if kind in ("arrive", "arrive_drop"):
        return _arrive(d, space)
    if kind in ("expect_tx", "complete_tx"):
        return _transaction(d, space)
    if kind in ("test_wait", "try_wait"):
        return _wait(d, space)
    if kind == "pending_count":
        write, state = d.dst(0, "u32"), d.src(1, "b64")
        return lambda g, sel: write(g, sel, state(g, sel).astype(np.uint32))
    raise d.fail()


def _after_address(d: Decoder) -> tuple[Operand | None, int]:
    """(destination or None, index of the address operand)."""
    k = next(i for i, o in enumerate(d.ins.operands) if isinstance(o, Addr))
    return (d.ins.operands[0] if k else None), k


def _arrive(d: Decoder, space: str) -> Step:
    out, k = _after_address(d)
    address = d.address(k)
    write = d.dst(out if out is not None else Reg("_"), "b64")
    extra = d.src(k + 1, "u32") if len(d.ins.operands) > k + 1 else None
    expect = "expect_tx" in d.mods
    if expect and extra is None:
        raise d.fail("tx-count")
    release, scope, drop = "relaxed" not in d.mods, d.scope("cta"), d.mods[0] == "arrive_drop"

    def run(g: Grid, sel: Selection) -> None:
        at = g.mbarriers.offsets(space, sel, address(g, sel))
        amount = np.broadcast_to(extra(g, sel), at.shape) if extra is not None else None
        counts = amount if amount is not None and not expect else np.ones(at.size, np.uint32)
        if release:
            g.release(g.lanes(sel), scope)
        write(g, sel, g.mbarriers.arrive(at, counts.astype(np.int64), amount if expect else None, drop))

    return run


def _transaction(d: Decoder, space: str) -> Step:
    address, amount = d.address(0), d.src(1, "u32")
    sign = 1 if d.mods[0] == "expect_tx" else -1

    def run(g: Grid, sel: Selection) -> None:
        at = g.mbarriers.offsets(space, sel, address(g, sel))
        g.mbarriers.add_tx(at, sign * np.broadcast_to(amount(g, sel), at.shape).astype(np.int64))

    return run


def _wait(d: Decoder, space: str) -> Step:
    """test_wait answers at once. try_wait blocks until the phase completes, and answers true.

    Under a random schedule try_wait also gives up now and then, as the hardware may.
    """
    write, address = d.dst_pred(0), d.address(1)
    parity = d.src(2, "u32") if "parity" in d.mods else None
    state = None if parity is not None else d.src(2, "b64")
    blocking = d.mods[0] == "try_wait"
    scope = "" if "relaxed" in d.mods else d.scope("cta")
    pc = d.pc
    yes = np.array([True])

    def resume(g: Grid, lanes: Array) -> None:
        write(g, lanes, yes)

    def run(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        at = g.mbarriers.offsets(space, sel, address(g, sel))
        p = np.broadcast_to(parity(g, sel), at.shape) if parity is not None else None
        s = np.broadcast_to(state(g, sel), at.shape) if state is not None else None
        done, phases = g.mbarriers.test(at, s, p)
        if scope and done.any():
            g.acquire(lanes[done], scope)
        if done.all() or not blocking or g.machine.gives_up():
            write(g, sel, done)
            if not done.all():
                g.machine.advance()
            return None
        write(g, lanes[done], yes)
        left = ~done
        g.wait(Wait("mbarrier", lanes[left], at[left], pc, phases[left], resume, scope))
        g.machine.go(g, lanes[done], pc + 1)
        return STOP

    return run


# -- grid dependency ------------------------------------------------------------------------------------


@op("griddepcontrol")
def griddepcontrol(d: Decoder) -> Step:
    pc = d.pc
    if "launch_dependents" in d.mods:

        def trigger(g: Grid, sel: Selection) -> None:
            g.triggered[g.cta[np.unique(g.slot[sel])]] = True
            g.machine.start_ready()

        return trigger

    def wait(g: Grid, sel: Selection) -> Any:
        lanes = g.lanes(sel)
        if g.previous is None or g.previous.complete:
            g.acquire(lanes, "gpu")
            return None
        g.wait(Wait("griddep", lanes, np.full(lanes.size, g.previous.index), pc, None, None, "gpu"))
        return STOP

    return wait
