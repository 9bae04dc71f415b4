"""The three kinds of barrier: named CTA barriers, the cluster barrier, and mbarrier objects.

PTX ISA, "Parallel Synchronization and Communication Instructions": bar/barrier, barrier.cluster, mbarrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import memory as mem
from .errors import Fault
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

NAMED = 16  # barriers 0..15 of each CTA
TX_LIMIT = (1 << 20) - 1  # "Tracking asynchronous operations by the mbarrier object": range of tx-count
COUNT_LIMIT = (1 << 20) - 1


@dataclass
class Wait:
    """Lanes that cannot go on. `keys` says per lane what it waits for; `resume` finishes the instruction."""

    kind: str
    lanes: Array
    keys: Array
    pc: int
    detail: Array | None = None
    resume: Any = None
    scope: str = ""


class CtaBarriers:
    """bar.sync, bar.red, bar.arrive."""

    def __init__(self, g: Grid) -> None:
        self.g = g
        self.arrived = np.zeros((NAMED, g.n // 32), np.int64)  # threads of each warp
        self.expected = np.zeros((NAMED, g.slots), np.int64)  # 0: every living thread of the CTA
        self.true = np.zeros((NAMED, g.slots), np.int64)  # arrivals with a true predicate, for bar.red

    def reached(self, barrier: int) -> tuple[Array, Array]:
        """(threads that have arrived, threads that are needed) per CTA slot.

        Where the barrier has a count, a warp counts as 32 threads however many of them exist.
        """
        g, count = self.g, self.expected[barrier]
        here = self.arrived[barrier].reshape(g.slots, -1)
        absent = 32 - np.bitwise_count(g.warp_alive).astype(np.int64).reshape(g.slots, -1)
        warps = np.where(here > 0, np.minimum(here + absent, 32), 0).sum(axis=1)
        return np.where(count > 0, warps, here.sum(axis=1)), np.where(count > 0, count, g.cta_alive)

    def arrive(
        self, lanes: Array, barrier: int, count: int, pc: int, wait: bool, value: Array | None, resume: Any
    ) -> Array:
        """Threads reach a barrier. Returns those that need not wait: it opened, or they only arrive."""
        g = self.g
        if count % 32:
            raise Fault(
                "barrier", f"thread count {count} is no multiple of the warp size", lane=int(lanes[0])
            )
        slots = np.flatnonzero(np.bincount(g.slot[lanes], minlength=g.slots))
        mixed = (self.reached(barrier)[0] > 0) & (self.expected[barrier] != count)
        if mixed[slots].any():
            lane = int(lanes[mixed[g.slot[lanes]]][0])
            raise Fault("barrier", f"barrier {barrier} has different thread counts in one phase", lane=lane)
        self.expected[barrier, slots] = count
        arriving = np.bincount(g.warp[lanes], minlength=g.n // 32)
        self.arrived[barrier] += arriving
        have, need = self.reached(barrier)
        over = have > need
        if over[slots].any():
            # More than one phase's worth of warps at once: they arrive one after the other.
            self.arrived[barrier] -= arriving
            warps = np.flatnonzero(arriving)
            if warps.size == 1:
                lane = int(lanes[0])
                raise Fault("barrier", f"more threads at barrier {barrier} than its count {count}", lane=lane)
            parts = [np.flatnonzero(g.warp[lanes] == w) for w in warps]
            through = [
                self.arrive(lanes[k], barrier, count, pc, wait, None if value is None else value[k], resume)
                for k in parts
            ]
            return np.sort(np.concatenate(through))
        if value is not None:
            np.add.at(self.true[barrier], g.slot[lanes], value)
        g.release(lanes, "cta")
        opens = have == need
        passing = opens[g.slot[lanes]]
        if wait:
            stay = lanes[~passing]
            g.wait(Wait("barrier", stay, g.slot[stay] * NAMED + barrier, pc, None, resume, "cta"))
        ready = slots[opens[slots]]
        if ready.size:
            go = lanes[passing]
            if wait and resume is not None:
                resume(g, go)
            self._open(barrier, ready)
            if wait:
                g.acquire(go, "cta")
        return lanes[passing] if wait else lanes

    def _open(self, barrier: int, slots: Array) -> None:
        """Let the waiting threads of these CTAs go, and begin the next phase."""
        self.g.wake("barrier", lambda w: np.isin(w.keys, slots * NAMED + barrier))
        self.arrived[barrier].reshape(self.g.slots, -1)[slots] = 0
        self.true[barrier, slots] = 0
        self.g.machine.progress += 1

    def recheck(self, slots: Array) -> None:
        """Threads have exited: barriers may be complete now."""
        for barrier in np.flatnonzero(self.arrived.any(axis=1)).tolist():
            have, need = self.reached(barrier)
            ready = slots[(have[slots] > 0) & (have[slots] >= need[slots])]
            if ready.size:
                self._open(barrier, ready)


class ClusterBarriers:
    """barrier.cluster.arrive and .wait."""

    def __init__(self, g: Grid) -> None:
        self.g = g
        n = g.slots // g.cluster_size
        self.phase = np.zeros(n, np.int64)
        self.arrived = np.zeros(n, np.int64)
        self.pending = np.full(g.n, -1, np.int64)  # per lane: the phase it arrived in and has not waited for

    def _cluster(self, lanes: Array) -> Array:
        return self.g.slot[lanes] // self.g.cluster_size

    def arrive(self, lanes: Array, release: bool) -> None:
        twice = self.pending[lanes] >= 0
        if twice.any():
            raise Fault("barrier", "barrier.cluster.arrive twice without a wait", lane=int(lanes[twice][0]))
        cluster = self._cluster(lanes)
        self.pending[lanes] = self.phase[cluster]
        if release:
            self.g.release(lanes, "cluster")
        self.arrived += np.bincount(cluster, minlength=self.arrived.size)
        self.g.machine.progress += 1
        self.recheck(np.unique(cluster))

    def recheck(self, clusters: Array) -> None:
        """Open the barriers whose living threads have all arrived."""
        g = self.g
        living = g.cta_alive.reshape(-1, g.cluster_size).sum(axis=1)
        # Threads that exited after their arrival count on neither side.
        gone = (self.pending >= 0) & ~g.alive
        if gone.any():
            self.arrived -= np.bincount(self._cluster(np.flatnonzero(gone)), minlength=self.arrived.size)
            self.pending[gone] = -1
        ready = clusters[(self.arrived[clusters] > 0) & (self.arrived[clusters] >= living[clusters])]
        if ready.size:
            self.arrived[ready] = 0
            self.phase[ready] += 1
            g.wake("cluster", lambda w: self.phase[w.keys] > self.pending[w.lanes])

    def wait(self, lanes: Array, pc: int, acquire: bool) -> Array:
        """Returns the lanes whose phase is complete; blocks the others."""
        never = self.pending[lanes] < 0
        if never.any():
            raise Fault("barrier", "barrier.cluster.wait without an arrive", lane=int(lanes[never][0]))
        cluster = self._cluster(lanes)
        over = self.phase[cluster] > self.pending[lanes]
        scope = "cluster" if acquire else ""
        self.g.wait(Wait("cluster", lanes[~over], cluster[~over], pc, None, self._done, scope))
        self._done(self.g, lanes[over])
        if acquire and over.any():
            self.g.acquire(lanes[over], "cluster")
        return lanes[over]

    def _done(self, g: Grid, lanes: Array) -> None:
        self.pending[lanes] = -1


@dataclass
class MBarrier:
    """`count` arrivals complete a phase; `pending` are missing in this one, and `tx` bytes."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0


class MBarriers:
    """The mbarrier objects in all CTAs' shared memory, by byte offset in the pool."""

    def __init__(self, g: Grid) -> None:
        self.g = g
        self.objects: dict[int, MBarrier] = {}

    def offsets(self, space: str, sel: Selection, address: Array) -> Array:
        """Pool offsets of 8-byte mbarrier addresses. Raises Fault for an address outside shared memory."""
        out = np.empty(address.size, np.int64)
        for pool, where, offset in self.g.resolve(space or "", sel, address, 8):
            if pool is not self.g.shared:
                raise Fault(
                    "mbarrier", f"an mbarrier must lie in shared memory, not {pool.where(int(offset[0]))}"
                )
            out[where] = offset
        if self.g.history is not None:
            unseen = self.g.history.unseen_mbarrier(self.g, self.g.lanes(sel), out)
            if unseen is not None:
                place = self.g.shared_place(int(out[unseen]))
                text = f"the initialisation of the mbarrier at {place} has not become visible to this thread"
                raise Fault("mbarrier", text, unseen)
        return out

    def init(self, sel: Selection, offsets: Array, counts: Array) -> None:
        shadow = self.g.shared.shadow
        assert shadow is not None
        self.g.note(self.g.shared, sel, slice(None), offsets, 8, mbarrier=True)
        for i, (offset, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=True)):
            if not 1 <= count <= COUNT_LIMIT:
                raise Fault("mbarrier", f"count {count} is outside 1..{COUNT_LIMIT}", i)
            if offset in self.objects:
                raise Fault("mbarrier", "init of a live mbarrier object: inval it first", i)
            self.objects[offset] = MBarrier(count, count)
            shadow[offset : offset + 8] = mem.MBARRIER
        self.g.machine.progress += 1

    def inval(self, offsets: Array) -> None:
        shadow = self.g.shared.shadow
        assert shadow is not None
        for i, offset in enumerate(offsets.tolist()):
            self._get(offset, i)
            del self.objects[offset]
            shadow[offset : offset + 8] = mem.UNWRITTEN

    def forget(self, slot: int) -> None:
        """A CTA has ended."""
        first = slot * self.g.shared_stride
        for offset in [o for o in self.objects if first <= o < first + self.g.shared_stride]:
            del self.objects[offset]

    def _get(self, offset: int, position: int = 0) -> MBarrier:
        found = self.objects.get(offset)
        if found is None:
            raise Fault(
                "mbarrier", f"no mbarrier has been initialised at {self.g.shared_place(offset)}", position
            )
        return found

    def _each(self, offsets: Array, act: Callable[[MBarrier, Array, int], None]) -> None:
        for offset in np.unique(offsets).tolist():
            position = np.flatnonzero(offsets == offset)
            act(self._get(offset, int(position[0])), position, offset)

    def arrive(self, offsets: Array, counts: Array, tx: Array | None, drop: bool = False) -> Array:
        """Arrivals in lane order. Returns the state tokens [lanes]."""
        tokens = np.zeros(offsets.size, np.uint64)
        completed = False

        def act(b: MBarrier, position: Array, offset: int) -> None:
            nonlocal completed
            # Lanes are taken together as long as they stay within the phase.
            whole = counts[position].sum() <= b.pending
            for part in [position] if whole else [position[i : i + 1] for i in range(position.size)]:
                arrivals = int(counts[part].sum())
                if tx is not None:
                    self._add_tx(b, int(tx[part].astype(np.int64).sum()), int(part[0]))
                if arrivals > b.pending:
                    where = self.g.shared_place(offset)
                    raise Fault(
                        "mbarrier", f"more arrivals than the count {b.count} at {where}", int(part[0])
                    )
                tokens[part] = (b.phase << 32) | b.pending
                b.pending -= arrivals
                if drop:
                    b.count -= arrivals
                completed |= self._complete(b)

        self._each(offsets, act)
        if completed:
            self._wake()
        self.g.machine.progress += 1
        return tokens

    def expect_arrival(self, offset: int) -> None:
        """One more arrival in this phase (cp.async.mbarrier.arrive without .noinc)."""
        self._get(offset).pending += 1

    def add_tx(self, offsets: Array, amount: Array) -> None:
        """expect_tx (positive) or complete_tx (negative)."""
        completed = False

        def act(b: MBarrier, position: Array, offset: int) -> None:
            nonlocal completed
            self._add_tx(b, int(amount[position].sum()), int(position[0]))
            completed |= self._complete(b)

        self._each(offsets, act)
        if completed:
            self._wake()
        self.g.machine.progress += 1

    @staticmethod
    def _add_tx(b: MBarrier, amount: int, position: int) -> None:
        b.tx += amount
        if abs(b.tx) > TX_LIMIT:
            raise Fault("mbarrier", f"tx-count {b.tx} is outside the range of {TX_LIMIT}", position)

    @staticmethod
    def _complete(b: MBarrier) -> bool:
        if b.pending or b.tx:
            return False
        b.phase += 1
        b.pending = b.count
        return True

    def _wake(self) -> None:
        self.g.wake("mbarrier", lambda w: self._phases(w.keys) > w.detail)

    def _phases(self, offsets: Array) -> Array:
        """Current phase of the mbarrier at each offset."""
        unique, first, inverse = np.unique(offsets, return_index=True, return_inverse=True)
        pairs = zip(unique.tolist(), first.tolist(), strict=True)
        return np.array([self._get(o, k).phase for o, k in pairs], np.int64)[inverse]

    def test(self, offsets: Array, state: Array | None, parity: Array | None) -> tuple[Array, Array]:
        """(is the phase complete, the current phase), per lane.

        Raises Fault for a state that is older than the phase before the current one.
        """
        phases = self._phases(offsets)
        if parity is not None:
            return (phases & 1) != parity.astype(np.int64), phases
        assert state is not None
        waited = (state >> np.uint64(32)).astype(np.int64)
        old = waited < phases - 1
        if old.any():
            raise Fault("mbarrier", "wait for a phase before the preceding one", int(np.flatnonzero(old)[0]))
        return phases > waited, phases
