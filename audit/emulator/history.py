"""Weak mode: writes that other CTAs may not have seen yet.

Memory always holds the newest bytes. Beside it stands a record of each recent write with the bytes that it
replaced, and a read by another CTA may be answered with the replaced bytes. That is a behaviour which the PTX
memory model allows exactly when nothing orders the write before the read, so the record is *binding* (must be
seen) as soon as both halves of some ordering exist:

- the writer's side has been published: a release or fence at a scope that holds both threads, by the writer
  or by a thread that the writer had synchronised with before (barrier or release, in its CTA or cluster);
- the reader's side has looked since: an acquire, fence or barrier after the write, with the same rule.

Both are kept as one time per thread and scope, which forgets who synchronised with whom: a binding record may
not be bound by the model (some allowed behaviours are never shown), but a stale answer always is allowed.
PTX ISA, "Memory Consistency Model": Scopes, Release and Acquire Patterns, Causality Order, Coherence.
Every record is revealed to each CTA after a random time, so polls end and reads of one location never go back
in time.

Bulk copies read through the async proxy. For them a write through the generic proxy binds, also inside one CTA,
only with a proxy fence: by its writer after the write, or by the thread that issues the copy, before it does.
(Where on the path the fence must stand is not spelled out in the ISA; the reading that accepts both is taken.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .memory import Pool
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid

WIDE = ("gpu", "sys")
NEVER = -1


@dataclass(eq=False)
class Record:
    """One store instruction: byte offsets (ascending) in `pool`, who wrote each, and what stood there.

    `released` marks bytes that are published to the cluster whatever their writer does later: those of st.async,
    whose complete-tx is a release at cluster scope, and mbarrier objects after fence.mbarrier_init.
    """

    pool: Pool
    grid: Grid
    time: int
    offsets: Array
    lanes: Array
    old: Array
    old_shadow: Array | None
    released: Array
    proxied: Array  # a proxy fence by the writer has followed
    mbarrier: bool
    reveal: dict[tuple[int, int], int]  # (grid, CTA slot) of a reader -> time


class History:
    """`delay` is the mean number of executed instructions until a write is revealed to a CTA."""

    def __init__(self, rng: np.random.Generator, now: Callable[[], int], delay: int = 2000) -> None:
        self.rng = rng
        self.now = now
        self.delay = delay
        self.records: list[Record] = []
        self.stale_reads = 0

    def add(
        self,
        g: Grid,
        lanes: Array,
        pool: Pool,
        offset: Array,
        size: int,
        released: bool = False,
        mbarrier: bool = False,
    ) -> None:
        """Note a write of `size` bytes at each offset that is about to happen."""
        bytes_ = (offset[:, None] + np.arange(size)).ravel()
        order = np.argsort(bytes_, kind="stable")
        bytes_ = bytes_[order]
        shadow = None if pool.shadow is None else pool.shadow[bytes_].copy()
        who = np.repeat(lanes, size)[order]
        old, done = pool.data[bytes_].copy(), np.full(bytes_.size, released)
        proxied = np.zeros(bytes_.size, bool)
        self.records.append(
            Record(pool, g, self.now(), bytes_, who, old, shadow, done, proxied, mbarrier, {})
        )

    def stale(
        self, g: Grid, lanes: Array, pool: Pool, offset: Array, size: int
    ) -> tuple[Array, Array] | None:
        """What a read sees where that is not the newest: (bytes [lanes, size], shadow or None), else None."""
        low, high = int(offset.min()), int(offset.max()) + size
        now = self.now()
        data: Array | None = None
        shadow: Array | None = None
        settled = np.zeros((lanes.size, size), bool)  # the newest write that this lane sees has been found
        for record in reversed(self.records):
            if record.pool is not pool or record.offsets[-1] < low or record.offsets[0] >= high:
                continue
            wanted = offset[:, None] + np.arange(size)
            # With two writers of one byte in one instruction the later lane's bytes stand in memory.
            at = np.searchsorted(record.offsets, wanted, side="right") - 1
            hit = (at >= 0) & (record.offsets[at] == wanted) & ~settled
            if not hit.any():
                continue
            hidden = hit & self._hidden(record, g, lanes, record.lanes[at], record.released[at], now)
            settled |= hit & ~hidden
            if hidden.any():
                if data is None:
                    data = pool.data[wanted].copy()
                    shadow = None if pool.shadow is None else pool.shadow[wanted].copy()
                data[hidden] = record.old[at[hidden]]
                if shadow is not None and record.old_shadow is not None:
                    shadow[hidden] = record.old_shadow[at[hidden]]
        if data is None:
            return None
        self.stale_reads += 1
        return data, shadow

    def _hidden(
        self, record: Record, g: Grid, readers: Array, writers: Array, released: Array, now: int
    ) -> Array:
        """Shape of `writers`, [lanes, size]: may this read miss this write?"""
        w, t = record.grid, record.time
        slot = g.slot[readers]
        unrevealed = np.zeros(readers.size, bool)
        for s in np.unique(slot).tolist():
            unrevealed[slot == s] = now < self._reveal(record, g.index, s)
        same_cta = np.zeros(writers.shape, bool)
        bound = (w.published["gpu"][writers] > t) & (g.seen["gpu"][readers] >= t)[:, None]
        if w is g:
            same_cta = g.slot[writers] == slot[:, None]
            near = g.base[writers] == g.base[readers][:, None]
            published = released | (w.published["cluster"][writers] > t)
            bound |= near & published & (g.seen["cluster"][readers] >= t)[:, None]
        return unrevealed[:, None] & ~same_cta & ~bound

    def _reveal(self, record: Record, grid: int, slot: int) -> int:
        key = (grid, slot)
        if key not in record.reveal:
            record.reveal[key] = record.time + int(self.rng.exponential(self.delay))
        return record.reveal[key]

    def stale_copy(
        self, g: Grid, lane: int, pool: Pool, start: int, size: int
    ) -> tuple[Array, Array, Array] | None:
        """What a bulk copy that `lane` issues now may find in its source instead of the newest bytes:
        (positions, bytes, shadow). Each write without a proxy fence is missed or seen as a whole, by chance."""
        data, shadow = pool.data[start : start + size].copy(), np.ones(size, np.uint8)
        changed, settled = np.zeros(size, bool), np.zeros(size, bool)
        for record in reversed(self.records):
            if record.pool is not pool or record.grid.complete:
                continue
            first, last = np.searchsorted(record.offsets, (start, start + size))
            if first == last:
                continue
            at = record.offsets[first:last] - start
            if g.proxy_fenced[lane] > record.time or self.rng.random() < 0.5:
                settled[at] = True
                continue
            missed = ~record.proxied[first:last] & ~settled[at]
            data[at[missed]] = record.old[first:last][missed]
            if record.old_shadow is not None:
                shadow[at[missed]] = record.old_shadow[first:last][missed]
            changed[at[missed]] = True
            settled[at[record.proxied[first:last]]] = True
        where = np.flatnonzero(changed)
        return (where, data[where], shadow[where]) if where.size else None

    def overwritten(self, pool: Pool, offsets: Array) -> None:
        """An asynchronous copy has written these bytes: no older write there is of interest any more."""
        for record in self.records:
            if record.pool is pool and (gone := np.isin(record.offsets, offsets)).any():
                for name in ("offsets", "lanes", "old", "released", "proxied"):
                    setattr(record, name, getattr(record, name)[~gone])
                if record.old_shadow is not None:
                    record.old_shadow = record.old_shadow[~gone]
        self.records = [r for r in self.records if r.offsets.size]

    def reveal_all(self) -> bool:
        """Make every write seen. True when there was one to reveal."""
        some = bool(self.records)
        self.records.clear()
        return some

    def prune(self) -> None:
        """Drop records that are older than any delay that matters."""
        horizon = self.now() - 20 * self.delay
        if self.records and self.records[0].time < horizon:
            self.records = [r for r in self.records if r.time >= horizon]

    # -- ordering ---------------------------------------------------------------------------------------

    def release(self, g: Grid, lanes: Array, scope: str) -> None:
        """A release or fence by `lanes`: what they and their synchronised neighbours wrote is published."""
        now = self.now() + 1
        slots = np.unique(g.slot[lanes])
        if scope != "cta":
            mates = np.flatnonzero(np.isin(g.slot, slots))
            for level in ("cluster", "gpu") if scope in WIDE else ("cluster",):
                mark = g.published[level]
                mark[mates] = np.maximum(mark[mates], g.pooled[mates])
                mark[lanes] = now
            if scope in WIDE:
                cluster = np.flatnonzero(np.isin(g.base, np.unique(g.base[lanes])))
                gpu = g.published["gpu"]
                gpu[cluster] = np.maximum(gpu[cluster], g.published["cluster"][cluster])
        g.pooled[lanes] = now

    def release_mbarriers(self, g: Grid, lanes: Array) -> None:
        """fence.mbarrier_init.release.cluster by `lanes`: their initialisations, and nothing else, are published."""
        for record in self.records:
            if record.mbarrier and record.grid is g:
                record.released |= np.isin(record.lanes, lanes)

    def fence_proxy(self, g: Grid, lanes: Array, pools: tuple[str, ...]) -> None:
        """fence.proxy.async by `lanes`, for the named pools ("shared", "global")."""
        g.proxy_fenced[lanes] = self.now() + 1
        for record in self.records:
            if record.grid is g and ("shared" if record.pool is g.shared else "global") in pools:
                record.proxied |= np.isin(record.lanes, lanes)

    def acquire(self, g: Grid, lanes: Array, scope: str) -> None:
        """An acquire or fence by `lanes`: they see what had been published before."""
        now = self.now()
        key = g.slot if scope == "cta" else g.base
        mates = np.flatnonzero(np.isin(key, np.unique(key[lanes])))
        for level in ("cluster", "gpu"):
            seen = g.seen[level]
            if scope in WIDE or (scope == "cluster" and level == "cluster"):
                seen[lanes] = now
                continue
            best = np.full(int(key.max()) + 1, NEVER)
            np.maximum.at(best, key[mates], seen[mates])
            seen[lanes] = np.maximum(seen[lanes], best[key[lanes]])

    def finish(self, g: Grid) -> None:
        """A grid has completed: all that it wrote is published."""
        for level in g.published:
            g.published[level][:] = self.now() + 1
