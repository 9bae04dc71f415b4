"""One choice of a path per thread: its events, numbered, and every relation that no choice of values can change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from .events import Event, Kind, Path, ReadOf
from .program import ClusterBarrier, Place, Program, Proxy, Scope, Sem
from .relation import Relation, empty, mask

ClusterPhase = tuple[tuple[object, ...], int]


class Graph:
    """Events and static relations. Names of relations are those of the ISA's chapter "Memory Consistency Model"."""

    def __init__(self, program: Program, paths: Sequence[Path]):
        self.program, self.paths = program, paths
        self.events: list[Event] = []
        self.number: dict[tuple[int, int], int] = {}  # (thread, index) -> event
        addresses = {e.address for p in paths for e in p.events if e.is_memory}
        self.locations = sorted({program.address(a).physical for a in addresses} | self._observed_locations())
        self.initial = {}
        for location in self.locations:
            self.initial[location] = len(self.events)
            value = program.memory.get(location, 0)
            self.events.append(Event(-1, 0, Kind.WRITE, None, Place(), address=location, value=value))
        grids = {t.place.grid for t in program.threads}
        self.sequence: list[list[int]] = []  # per thread, its events in program order
        for thread, path in enumerate(paths):
            self.sequence.append(self._add_thread(thread, path, with_ends=len(grids) > 1))
        self.n = len(self.events)

    def _observed_locations(self) -> set[str]:
        observed = (v for v in self.program.observed if v.thread is None)
        return {self.program.address(v.name).physical for v in observed}

    def _add_thread(self, thread: int, path: Path, with_ends: bool) -> list[int]:
        order = []
        place = self.program.threads[thread].place
        if with_ends:
            order.append(len(self.events))
            self.events.append(Event(thread, -1, Kind.START, None, place))
        for event in path.events:
            self.number[thread, event.index] = len(self.events)
            if event.operation is None:
                order.append(len(self.events))
            self.events.append(event)
        if with_ends and not path.blocked:
            order.append(len(self.events))
            self.events.append(Event(thread, len(path.events), Kind.END, None, place))
        return order

    # Sets.

    def of_kind(self, *kinds: Kind) -> list[int]:
        return [i for i, e in enumerate(self.events) if e.kind in kinds]

    @cached_property
    def reads(self) -> list[int]:
        return self.of_kind(Kind.READ)

    @cached_property
    def writes(self) -> list[int]:
        """Writes, those of initial values included."""
        return self.of_kind(Kind.WRITE)

    @cached_property
    def physical(self) -> list[str]:
        """Location of each event, "" for those that touch no memory."""
        return [self.program.address(e.address).physical if e.is_memory else "" for e in self.events]

    @cached_property
    def generic(self) -> list[str]:
        """Generic address of each event. The write of an initial value is seen through all of them."""
        return [self.program.address(e.address).generic if e.is_memory else "" for e in self.events]

    def is_initial(self, event: int) -> bool:
        return self.events[event].thread < 0

    def overlaps(self, a: int, b: int) -> bool:
        return bool(self.physical[a]) and self.physical[a] == self.physical[b]

    # Static relations.

    @cached_property
    def program_order(self) -> Relation:
        """§8.9.1. Asynchronous operations are no part of it."""
        rows = empty(self.n)
        for order in self.sequence:
            after = 0
            for i in reversed(order):
                rows[i] = after
                after |= 1 << i
        return rows

    @cached_property
    def issued_after(self) -> Relation:
        """§8.9.1.1: an asynchronous operation is ordered after the instructions that precede its own.

        Such an edge ends a path and is never continued: the completion of an operation covers that operation alone,
        not what its issuer did before.
        """
        rows = empty(self.n)
        for j, event in enumerate(self.events):
            if event.operation is not None:
                for i in self.sequence[event.thread]:
                    if self.events[i].index < event.issue and self.events[i].kind != Kind.END:
                        rows[i] |= 1 << j
        return rows

    @cached_property
    def asynchronous_order(self) -> Relation:
        """Source read, then destination write, then completion of one asynchronous operation."""
        rows = empty(self.n)
        parts: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, event in enumerate(self.events):
            if event.operation is not None:
                parts[event.thread, event.operation].append(i)
        for members in parts.values():
            for k, i in enumerate(members):
                rows[i] |= mask(members[k + 1 :])
        return rows

    @cached_property
    def completions(self) -> Relation:
        """From each asynchronous access to the events that observe or signal its completion."""
        rows = empty(self.n)
        for j, event in enumerate(self.events):
            for index in event.completes:
                rows[self.number[event.thread, index]] |= 1 << j
        return rows

    @cached_property
    def dependency(self) -> Relation:
        """Data and control dependencies, from a read to what depends on it through registers."""
        rows = empty(self.n)
        for j, event in enumerate(self.events):
            for read in event.depends:
                rows[self.resolve(read)] |= 1 << j
        return rows

    def resolve(self, read: ReadOf) -> int:
        return self.number[read.thread, read.index]

    @cached_property
    def rmw(self) -> dict[int, int]:
        """From the read of each atomic operation to its write."""
        return {
            self.number[e.thread, e.partner]: i for i, e in enumerate(self.events) if e.partner is not None
        }

    def is_strong(self, event: int) -> bool:
        """§8.4: a fence, or an access that is not weak."""
        e = self.events[event]
        return e.kind == Kind.FENCE or e.sem != Sem.WEAK

    @cached_property
    def morally_strong(self) -> Relation:
        """§8.7: same thread in program order, or both strong with scopes that include the other's thread; the same
        proxy; and, if both access memory, the same bytes through the same address."""
        rows = empty(self.n)
        ordered = self.program_order
        able = [
            i
            for i, e in enumerate(self.events)
            if e.thread >= 0
            and (e.is_memory or e.kind in (Kind.FENCE, Kind.MBARRIER_UPDATE, Kind.MBARRIER_WAIT))
        ]
        for i in able:
            for j in able:
                if i < j and self._morally_strong(i, j, ordered):
                    rows[i] |= 1 << j
                    rows[j] |= 1 << i
        return rows

    def _morally_strong(self, i: int, j: int, ordered: Relation) -> bool:
        a, b = self.events[i], self.events[j]
        if a.proxy != b.proxy:
            return False
        if Kind.FENCE not in (a.kind, b.kind):
            if a.is_memory != b.is_memory:
                return False
            if a.is_memory and self.generic[i] != self.generic[j]:
                return False
            if not a.is_memory and a.address != b.address:
                return False
        if ordered[i] >> j & 1 or ordered[j] >> i & 1:
            return True
        inclusive = a.place.same(b.place, a.scope) and a.place.same(b.place, b.scope)
        return self.is_strong(i) and self.is_strong(j) and inclusive

    def _same_address(self, i: int, j: int) -> bool:
        a, b = self.events[i], self.events[j]
        return a.kind == b.kind and a.proxy == b.proxy and self.generic[i] == self.generic[j]

    @cached_property
    def release_patterns(self) -> Relation:
        """§8.8: from the first operation of each release pattern to its write (or mbarrier update)."""
        rows = empty(self.n)
        order = self.program_order
        updates = self.of_kind(Kind.WRITE, Kind.MBARRIER_UPDATE)
        for w in updates:
            event = self.events[w]
            # Only an arrival can be the write behind a fence; expect_tx and complete_tx order nothing (§9.7.13.15).
            counts = event.kind == Kind.WRITE or bool(event.count)
            if event.thread < 0 or not (counts or event.sem.releases):
                continue
            if event.sem.releases:
                rows[w] |= 1 << w
            for first in range(self.n):
                if not order[first] >> w & 1 or not self.is_strong(w):
                    continue
                e = self.events[first]
                fence = e.kind == Kind.FENCE and e.sem.releases
                release = e.kind == Kind.WRITE and e.sem.releases and self._same_address(first, w)
                if fence or release:
                    rows[first] |= 1 << w
        return rows

    @cached_property
    def acquire_patterns(self) -> Relation:
        """§8.8: from the read (or mbarrier wait) of each acquire pattern to its last operation. The read of a
        reduction forms none."""
        rows = empty(self.n)
        order = self.program_order
        for r in self.of_kind(Kind.READ, Kind.MBARRIER_WAIT):
            event = self.events[r]
            if event.reduction or not self.is_strong(r):
                continue
            if event.sem.acquires:
                rows[r] |= 1 << r
            for last in range(self.n):
                if not order[r] >> last & 1:
                    continue
                e = self.events[last]
                fence = e.kind == Kind.FENCE and e.sem.acquires
                acquire = e.kind == Kind.READ and e.sem.acquires and not e.reduction
                if fence or (acquire and self._same_address(r, last)):
                    rows[r] |= 1 << last
        return rows

    @cached_property
    def fence_sc_pairs(self) -> list[tuple[int, int]]:
        """§8.9.3: the pairs that the Fence-SC order must relate."""
        fences = [i for i in self.of_kind(Kind.FENCE) if self.events[i].sem == Sem.SC]
        strong = self.morally_strong
        return [(a, b) for a in fences for b in fences if a < b and strong[a] >> b & 1]

    @cached_property
    def static_order(self) -> Relation:
        """What precedes what in base causality order whatever the reads return: program order, the parts of
        asynchronous operations, observed completions, cluster barriers and grid dependencies. Not closed."""
        rows = list(self.program_order)
        for extra in (self.asynchronous_order, self.completions, self.cluster_barriers, self.grids):
            for i, row in enumerate(extra):
                rows[i] |= row
        return rows

    @cached_property
    def cluster_barriers(self) -> Relation:
        """§8.9.4: barrier.cluster.arrive synchronizes with barrier.cluster.wait, phase by phase.

        A relaxed arrival is the write of a release pattern whose fence precedes it, and a relaxed wait the read of an
        acquire pattern whose fence follows; fence.mbarrier_init releases the initialisations before it.
        """
        rows = empty(self.n)
        arrivals, waits = self._phases_of_cluster()
        for phase, waiting in waits.items():
            for a in arrivals.get(phase, ()):
                firsts = self._releases_of_cluster_arrival(a)
                for w in waiting:
                    for last in self._acquires_of_cluster_wait(w):
                        for first in firsts:
                            if self.events[first].thread != self.events[last].thread or first < last:
                                rows[first] |= 1 << last
        return rows

    def _phases_of_cluster(self) -> tuple[dict[ClusterPhase, list[int]], dict[ClusterPhase, list[int]]]:
        """Arrivals and waits of each cluster and phase: the k-th of a thread belongs to phase k."""
        arrivals: dict[ClusterPhase, list[int]] = defaultdict(list)
        waits: dict[ClusterPhase, list[int]] = defaultdict(list)
        for order in self.sequence:
            counts: dict[Kind, int] = defaultdict(int)
            for i in order:
                e = self.events[i]
                if e.kind in (Kind.CLUSTER_ARRIVE, Kind.CLUSTER_WAIT):
                    where = arrivals if e.kind == Kind.CLUSTER_ARRIVE else waits
                    where[_cluster(e.place), counts[e.kind]].append(i)
                    counts[e.kind] += 1
        return arrivals, waits

    def cluster_barriers_complete(self) -> bool:
        """False when some thread waits for a phase that not all threads of its cluster, among those that use its
        barrier at all, arrive at."""
        arrivals, waits = self._phases_of_cluster()
        members: dict[object, set[int]] = defaultdict(set)
        for t, thread in enumerate(self.program.threads):
            if any(isinstance(x, ClusterBarrier) for x in thread.body):
                members[_cluster(thread.place)].add(t)
        for cluster, phase in waits:
            if {self.events[a].thread for a in arrivals.get((cluster, phase), ())} != members[cluster]:
                return False
        return True

    def _releases_of_cluster_arrival(self, arrival: int) -> list[int]:
        if self.events[arrival].sem.releases:
            return [arrival]
        out: list[int] = []
        pending: list[int] = []
        for i in self.sequence[self.events[arrival].thread]:
            e = self.events[i]
            if i == arrival:
                return out
            if e.kind == Kind.MBARRIER_INIT:
                pending.append(i)
            elif e.kind == Kind.INIT_FENCE:
                out += pending
            elif e.kind == Kind.FENCE and e.sem.releases and e.scope >= Scope.CLUSTER:
                out.append(i)
        return out

    def _acquires_of_cluster_wait(self, wait: int) -> list[int]:
        if self.events[wait].sem.acquires:
            return [wait]
        after = self.program_order[wait]
        return [
            i
            for i in self.of_kind(Kind.FENCE)
            if after >> i & 1 and self.events[i].sem.acquires and self.events[i].scope >= Scope.CLUSTER
        ]

    @cached_property
    def grids(self) -> Relation:
        """§8.9.4, API synchronization, and griddepcontrol.wait: completion of a grid precedes the start of the next
        one in its stream, or, for a programmatic launch, the wait of each thread that executes one."""
        rows = empty(self.n)
        ends = self.of_kind(Kind.END)
        for i in self.of_kind(Kind.START):
            if not self.events[i].place.pdl:
                for e in ends:
                    if self.events[e].place.grid < self.events[i].place.grid:
                        rows[e] |= 1 << i
        for i in self.of_kind(Kind.GRID_WAIT):
            for e in ends:
                if self.events[e].place.grid == self.events[i].place.grid - 1:
                    rows[e] |= 1 << i
        return rows

    @cached_property
    def candidates(self) -> dict[int, list[int]]:
        """For each read, the writes of its location that program order alone does not rule out (§8.10.6)."""
        out = {}
        order = self.program_order
        for r in self.reads:
            ok = []
            for w in self.writes:
                if not self.overlaps(r, w) or (order[r] >> w & 1 and self._plain(r, w)):
                    continue
                hidden = any(
                    order[v] >> r & 1 and (self.is_initial(w) or order[w] >> v & 1)
                    for v in self.writes
                    if v != w and self._plain(v, r) and (self.is_initial(w) or self._plain(w, v))
                )
                if not hidden:
                    ok.append(w)
            out[r] = ok
        return out

    @cached_property
    def plain(self) -> Relation:
        """Pairs of accesses for which base causality order needs no proxy fence: both generic at one address, or
        both through one proxy at one address in one thread block (§8.9.5)."""
        rows = empty(self.n)
        accesses = [i for i, e in enumerate(self.events) if e.is_memory and e.thread >= 0]
        for i in accesses:
            for j in accesses:
                a, b = self.events[i], self.events[j]
                if i == j or a.proxy != b.proxy or self.generic[i] != self.generic[j]:
                    continue
                if a.proxy == Proxy.GENERIC or a.place.same(b.place, Scope.CTA):
                    rows[i] |= 1 << j
        return rows

    def _plain(self, a: int, b: int) -> bool:
        """Both through the same proxy at the same generic address, in one thread."""
        x, y = self.events[a], self.events[b]
        return x.thread == y.thread and x.proxy == y.proxy and self.generic[a] == self.generic[b]

    @cached_property
    def mixed(self) -> bool:
        """True when some location is accessed through several proxies or addresses, or not generically."""
        accesses = [i for i, e in enumerate(self.events) if e.is_memory and e.thread >= 0]
        generic = all(self.events[i].proxy == Proxy.GENERIC for i in accesses)
        return not generic or any(self.generic[i] != self.physical[i] for i in accesses)

    def before_in_thread(self, i: int, j: int) -> bool:
        """Whether one thread's instructions put event i before event j."""
        return bool((self.program_order[i] | self.issued_after[i]) >> j & 1)


def _cluster(place: Place) -> tuple[object, ...]:
    alone = place.cta if place.cluster is None else None
    return (place.gpu, place.grid, place.cluster, alone)
