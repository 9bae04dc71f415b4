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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .memory import MBARRIER, WRITTEN, Pool
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid

WIDE = ("gpu", "sys")
NEVER = -1
LONGEST = 5  # no write stays unseen for longer than this many mean delays


@dataclass(eq=False)
class Record:
    """One store instruction: byte offsets (ascending), who wrote each, and what stood there.

    `released` marks bytes that are published to the cluster whatever their writer does later: those of
    st.async, whose complete-tx is a release at cluster scope, and mbarrier objects after fence.mbarrier_init.
    `proxied` marks bytes whose writer has executed a proxy fence since. `reveal` is the time when the write
    becomes visible to a reader's (grid, CTA slot) at the latest.
    """

    grid: Grid
    time: int
    offsets: Array
    lanes: Array
    old: Array
    old_shadow: Array | None
    released: Array
    proxied: Array
    reveal: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first, self.last = int(self.offsets[0]), int(self.offsets[-1])

    def forget(self, gone: Array) -> None:
        """Drop the bytes where `gone`."""
        for name in ("offsets", "lanes", "old", "old_shadow", "released", "proxied"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, values[~gone])


class History:
    """`delay` is the mean number of executed instructions until a write is revealed to a CTA."""

    def __init__(self, rng: np.random.Generator, now: Callable[[], int], delay: int = 2000) -> None:
        self.rng = rng
        self.now = now
        self.delay = delay
        self.records: dict[Pool, list[Record]] = {}
        self.mbarriers: list[Record] = []  # initialisations, in the pool of shared memory
        self.stale_reads = 0

    def add(
        self,
        g: Grid,
        lanes: Array,
        pool: Pool,
        offset: Array,
        size: int,
        *,
        released: bool = False,
        mbarrier: bool = False,
    ) -> None:
        """Note a write of `size` bytes at each offset that is about to happen."""
        at = (offset[:, None] + np.arange(size)).ravel()
        order = np.argsort(at, kind="stable")
        at = at[order]
        record = Record(
            g,
            self.now(),
            at,
            np.repeat(lanes, size)[order],
            pool.data[at].copy(),
            None if pool.shadow is None else pool.shadow[at].copy(),
            np.full(at.size, released),
            np.zeros(at.size, bool),
        )
        (self.mbarriers if mbarrier else self.records.setdefault(pool, [])).append(record)

    # -- reading ----------------------------------------------------------------------------------------

    def stale(
        self, g: Grid, lanes: Array, pool: Pool, offset: Array, size: int
    ) -> tuple[Array, Array] | None:
        """What a read sees where that is not the newest: (bytes, shadow), both [lanes, size]; else None."""
        found = self._look(self.records.get(pool, ()), g, lanes, pool, offset, size)
        self.stale_reads += found is not None
        return found

    def unseen_mbarrier(self, g: Grid, lanes: Array, offset: Array) -> int | None:
        """Position of a lane that may not have seen the initialisation of the mbarrier at its offset."""
        found = self._look(self.mbarriers, g, lanes, g.shared, offset, 8)
        if found is None:
            return None
        return int(np.flatnonzero((found[1] != MBARRIER).any(axis=1))[0])

    def _look(
        self, records: Sequence[Record], g: Grid, lanes: Array, pool: Pool, offset: Array, size: int
    ) -> tuple[Array, Array] | None:
        if not records:
            return None
        low, high = int(offset.min()), int(offset.max()) + size
        now = self.now()
        slots = np.unique(g.slot[lanes]).tolist()
        near = [r for r in records if r.first < high and r.last >= low]
        # Only what stands after the oldest write that somebody may miss can matter.
        oldest = next((k for k, r in enumerate(near) if self._late(r, g, slots, now)), len(near))
        wanted = offset[:, None] + np.arange(size)
        settled = np.zeros(wanted.shape, bool)  # the newest write that this lane sees has been found
        found: tuple[Array, Array] | None = None
        for record in reversed(near[oldest:]):
            # With two writers of one byte in one instruction the later lane's bytes stand in memory.
            at = np.searchsorted(record.offsets, wanted, side="right") - 1
            hit = (at >= 0) & (record.offsets[at] == wanted) & ~settled
            if not hit.any():
                continue
            hidden = hit & self._hidden(record, g, lanes, record.lanes[at], record.released[at], now)
            settled |= hit & ~hidden
            if hidden.any():
                if found is None:
                    written = np.full(wanted.shape, WRITTEN, np.uint8)
                    found = pool.data[wanted], written if pool.shadow is None else pool.shadow[wanted]
                found[0][hidden] = record.old[at[hidden]]
                if record.old_shadow is not None:
                    found[1][hidden] = record.old_shadow[at[hidden]]
        return found

    def _hidden(
        self, record: Record, g: Grid, readers: Array, writers: Array, released: Array, now: int
    ) -> Array:
        """Shape of `writers`, [lanes, size]: may this read miss this write?"""
        w, t = record.grid, record.time
        slot = g.slot[readers]
        unrevealed = np.zeros(readers.size, bool)
        for s in np.unique(slot).tolist():
            unrevealed[slot == s] = now < self._reveal(record, g.index, s)
        visible = (w.published["gpu"][writers] > t) & (g.seen["gpu"][readers] >= t)[:, None]
        if w is g:
            visible |= g.slot[writers] == slot[:, None]
            near = g.base[writers] == g.base[readers][:, None]
            published = released | (w.published["cluster"][writers] > t)
            visible |= near & published & (g.seen["cluster"][readers] >= t)[:, None]
        return unrevealed[:, None] & ~visible

    def _late(self, record: Record, g: Grid, slots: list[int], now: int) -> bool:
        return any(now < self._reveal(record, g.index, s) for s in slots)

    def _reveal(self, record: Record, grid: int, slot: int) -> int:
        key = (grid, slot)
        if key not in record.reveal:
            record.reveal[key] = record.time + int(min(self.rng.exponential(), LONGEST) * self.delay)
        return record.reveal[key]

    def stale_copy(
        self, g: Grid, lane: int, pool: Pool, start: int, size: int
    ) -> tuple[Array, Array, Array] | None:
        """What a bulk copy that `lane` issues now may find in its source instead of the newest bytes:
        (positions, bytes, shadow). Each write without a proxy fence is missed or seen as a whole, by chance."""
        data, shadow = np.zeros(size, np.uint8), np.full(size, WRITTEN, np.uint8)
        changed, settled = np.zeros(size, bool), np.zeros(size, bool)
        for record in reversed(self.records.get(pool, ())):
            first, last = np.searchsorted(record.offsets, (start, start + size))
            if first == last:
                continue
            at = record.offsets[first:last] - start
            bound = record.grid.complete or g.proxy_fenced[lane] > record.time or self.rng.random() < 0.5
            fenced = record.proxied[first:last] | bound
            missed = ~fenced & ~settled[at]
            data[at[missed]] = record.old[first:last][missed]
            if record.old_shadow is not None:
                shadow[at[missed]] = record.old_shadow[first:last][missed]
            changed[at[missed]] = True
            settled[at[fenced]] = True
        where = np.flatnonzero(changed)
        return (where, data[where], shadow[where]) if where.size else None

    # -- the end of records -----------------------------------------------------------------------------

    def overwritten(self, pool: Pool, offsets: Array) -> None:
        """An asynchronous copy has written these bytes: no older write there is of interest any more."""
        records = self.records.get(pool, [])
        low, high = int(offsets.min()), int(offsets.max())
        for record in records:
            if record.first <= high and record.last >= low:
                record.forget(np.isin(record.offsets, offsets))
        self.records[pool] = [r for r in records if r.offsets.size]

    def reveal_all(self) -> bool:
        """Make every write seen. True when there was one to reveal."""
        some = bool(self.mbarriers) or any(self.records.values())
        self.records.clear()
        self.mbarriers.clear()
        return some

    def prune(self) -> None:
        """Drop records that everybody has seen."""
        horizon = self.now() - LONGEST * self.delay
        for records in (self.mbarriers, *self.records.values()):
            if records and records[0].time < horizon:
                records[:] = [r for r in records if r.time >= horizon]

    # -- ordering ---------------------------------------------------------------------------------------

    def release(self, g: Grid, lanes: Array, scope: str) -> None:
        """A release or fence by `lanes`: what they and their synchronised neighbours wrote is published."""
        now = self.now() + 1
        if scope != "cta":
            mates = np.flatnonzero(np.isin(g.slot, np.unique(g.slot[lanes])))
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
        """fence.mbarrier_init.release.cluster by `lanes`: their initialisations alone are published."""
        for record in self.mbarriers:
            if record.grid is g:
                record.released |= np.isin(record.lanes, lanes)

    def fence_proxy(self, g: Grid, lanes: Array, pools: tuple[str, ...]) -> None:
        """fence.proxy.async by `lanes`, for the named pools ("shared", "global")."""
        g.proxy_fenced[lanes] = self.now() + 1
        for pool, records in self.records.items():
            if ("shared" if pool is g.shared else "global") in pools:
                for record in records:
                    if record.grid is g:
                        record.proxied |= np.isin(record.lanes, lanes)

    def acquire(self, g: Grid, lanes: Array, scope: str) -> None:
        """An acquire or fence by `lanes`: they see what had been published before."""
        now = self.now()
        key = g.slot if scope == "cta" else g.base
        for level in ("cluster", "gpu"):
            seen = g.seen[level]
            if scope in WIDE or (scope == "cluster" and level == "cluster"):
                seen[lanes] = now
            else:  # what a neighbour has seen, and nothing newer
                best = np.full(g.slots, NEVER)
                np.maximum.at(best, key, seen)
                seen[lanes] = np.maximum(seen[lanes], best[key[lanes]])

    def finish(self, g: Grid) -> None:
        """A grid has completed: all that it wrote is published."""
        for level in g.published:
            g.published[level][:] = self.now() + 1
