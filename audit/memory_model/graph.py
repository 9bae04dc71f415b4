"""One choice of a path per thread: its events, numbered, and every relation that no choice of values can change.

Barriers and mbarriers add a second choice, a `Frame`: which arrivals complete which phase, and which phase each wait
has seen. Their sequential semantics (counts, transaction bytes, parity) decide which frames exist at all; that a
frame does not contradict causality is checked later, by the engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from .events import Event, Kind, Path, ReadOf, Value
from .program import Barrier, ClusterBarrier, ModelError, Place, Program, Proxy, Scope, Sem
from .relation import Relation, closure, compose, empty, mask

MAX_FRAMES = 20_000


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
            if event.thread < 0:
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

    def _phases_of_cluster(self) -> tuple[dict[object, list[int]], dict[object, list[int]]]:
        arrivals: dict[object, list[int]] = defaultdict(list)
        waits: dict[object, list[int]] = defaultdict(list)
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
        members = defaultdict(set)
        for t, thread in enumerate(self.program.threads):
            if any(isinstance(x, ClusterBarrier) for x in thread.body):
                members[_cluster(thread.place)].add(t)
        for (cluster, phase), _ in waits.items():
            if {self.events[a].thread for a in arrivals.get((cluster, phase), ())} != members[cluster]:
                return False
        return True

    def _releases_of_cluster_arrival(self, arrival: int) -> list[int]:
        if self.events[arrival].sem.releases:
            return [arrival]
        out = []
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

    # Frames.

    def frames(self) -> Iterator[Frame]:
        """Every way in which barriers and mbarriers may play out. None at all when a thread would wait for ever."""
        if not self.cluster_barriers_complete():
            return
        parts = [*self._barrier_choices(), *self._mbarrier_choices()]
        total = 1
        for part in parts:
            total *= len(part)
        if total > MAX_FRAMES:
            raise ModelError(
                f"barriers may play out in {total} ways: more than {MAX_FRAMES}; use fewer phases or threads"
            )
        for chosen in product(*parts):
            frame = Frame(self)
            for phases, seen in chosen:
                frame.phases |= phases
                frame.seen |= seen
            yield frame

    def _barrier_choices(self) -> list[list[tuple[dict[int, int], dict[int, int]]]]:
        arrivals: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i in self.of_kind(Kind.BARRIER_ARRIVE):
            arrivals[self.events[i].resource].append(i)
        out = []
        for resource, members in arrivals.items():
            count = self._participants(resource, members)
            order = self.program_order
            sums = _Counter(count, dict.fromkeys(members, (1, 0)))
            choices = []
            for phases, complete in sums.phases(members, self._before_in_thread):
                waits = {
                    i: phases[i]
                    for i in members
                    if i + 1 < self.n
                    and self.events[i + 1].kind == Kind.BARRIER_WAIT
                    and self.events[i + 1].thread == self.events[i].thread
                }
                blocked = {i for i in members if self._blocks(i)}
                if any(p >= complete for p in waits.values()) or any(phases[i] < complete for i in blocked):
                    continue
                # After a wait, the thread's next arrival belongs to a later phase.
                if any(
                    order[i] >> j & 1 and phases[j] <= phases[i] for i in waits for j in members if i != j
                ):
                    continue
                choices.append((phases | {i + 1: p for i, p in waits.items()}, {}))
            out.append(choices)
        return out

    def _blocks(self, arrival: int) -> bool:
        """True for the last event of a thread that never leaves its barrier."""
        e = self.events[arrival]
        return self.paths[e.thread].blocked and e.index == len(self.paths[e.thread].events) - 1

    def _participants(self, resource: tuple[object, ...], members: list[int]) -> int:
        counts = {self.events[i].count for i in members}
        if len(counts) > 1:
            raise ModelError(f"barrier {resource[5]} is used with different counts")
        (count,) = counts
        if count is not None:
            return count
        here = {self.events[i].thread for i in members}
        place = self.events[members[0]].place
        for t, thread in enumerate(self.program.threads):
            for x in thread.body:
                if isinstance(x, Barrier) and (x.instance, x.id) == resource[4:6]:
                    here |= {t} if thread.place.same(place, Scope.CTA) else set()
        return len(here)

    def _mbarrier_choices(self) -> list[list[tuple[dict[int, int], dict[int, int]]]]:
        updates: dict[str, list[int]] = defaultdict(list)
        for i in self.of_kind(Kind.MBARRIER_UPDATE):
            updates[self.events[i].address].append(i)
        waits: dict[str, list[int]] = defaultdict(list)
        for i in self.of_kind(Kind.MBARRIER_WAIT):
            waits[self.events[i].address].append(i)
        out = []
        for barrier in sorted({*updates, *waits}):
            members = updates[barrier]
            sums = _Counter(
                self._arrivals_expected(barrier),
                {i: (self.events[i].count or 0, self.events[i].tx) for i in members},
            )
            choices = []
            for phases, complete in sums.phases(members, self._before_in_thread):
                choices += self._observations(waits[barrier], phases, complete)
            out.append(choices)
        return out

    def _arrivals_expected(self, barrier: str) -> int:
        inits = [
            self.events[i] for i in self.of_kind(Kind.MBARRIER_INIT) if self.events[i].address == barrier
        ]
        if len(inits) + (barrier in self.program.mbarriers) != 1:
            raise ModelError(f"mbarrier {barrier} must be initialised exactly once")
        return inits[0].count or 0 if inits else self.program.mbarriers[barrier]

    def _before_in_thread(self, i: int, j: int) -> bool:
        return bool((self.program_order[i] | self.issued_after[i]) >> j & 1)

    def _observations(
        self, waits: list[int], phases: dict[int, int], complete: int
    ) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
        """Which number of completed phases each wait may have seen."""
        options = []
        for w in waits:
            least = max((p for i, p in phases.items() if self.program_order[i] >> w & 1), default=0)
            most = min((p for i, p in phases.items() if self._before_in_thread(w, i)), default=complete)
            options.append([(w, c) for c in range(least, min(most, complete) + 1)])
        for chosen in product(*options):
            yield phases, dict(chosen)

    # Values.

    def value_of_wait(self, wait: int, seen: int) -> int:
        """What test_wait.parity returns when `seen` phases had completed: 1 if the current one has other parity."""
        return int(seen % 2 != self.events[wait].parity % 2)


def _cluster(place: Place) -> tuple[object, ...]:
    alone = place.cta if place.cluster is None else None
    return (place.gpu, place.grid, place.cluster, alone)


@dataclass
class _Counter:
    """The counting rule of a barrier: a phase completes when its arrivals are in and its transactions balance."""

    count: int
    steps: Mapping[int, tuple[int, int]]  # event -> (arrivals, transaction bytes expected minus completed)

    def phases(self, members, before) -> list[tuple[dict[int, int], int]]:
        """All distinct assignments of events to phases, with the number of phases that complete.

        `before(i, j)`: event i must come before event j. An arrival beyond the expected count is an error of the
        program and ends that way.
        """
        if not members:
            return [({}, 0)]
        earlier = {j: [i for i in members if i != j and before(i, j)] for j in members}
        seen = set()
        results: dict[tuple[tuple[int, int], ...], int] = {}
        work: list[tuple[tuple[tuple[int, int], ...], int, int, int]] = [((), 0, self.count, 0)]
        while work:
            done, phase, pending, tx = work.pop()
            if (done, phase, pending, tx) in seen:
                continue
            seen.add((done, phase, pending, tx))
            if len(done) == len(members):
                results[done] = phase
                continue
            assigned = dict(done)
            for j in members:
                if j in assigned or any(i not in assigned for i in earlier[j]):
                    continue
                arrivals, delta = self.steps[j]
                left, bytes_left = pending - arrivals, tx + delta
                if left < 0:
                    continue
                now = tuple(sorted((*done, (j, phase))))
                if left == 0 and bytes_left == 0:
                    work.append((now, phase + 1, self.count, 0))
                else:
                    work.append((now, phase, left, bytes_left))
        return [(dict(done), complete) for done, complete in results.items()]


@dataclass
class Frame:
    """One way in which the barriers of a graph play out.

    `phases` maps each arrival or update, and each `bar.sync` wait, to the phase that it belongs to; `seen` maps each
    mbarrier wait to the number of phases that it has seen complete.
    """

    graph: Graph
    phases: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    @cached_property
    def order(self) -> Relation:
        """Base causality order so far, closed: the static part and what barriers and mbarriers synchronize."""
        rows = list(self.graph.static_order)
        for extra in (self.barriers, self.mbarriers):
            for i, row in enumerate(extra):
                rows[i] |= row
        return closure(rows)

    @cached_property
    def barriers(self) -> Relation:
        """§8.9.4: bar.{sync,arrive} synchronizes with bar.sync on the same barrier, phase by phase."""
        g = self.graph
        rows = empty(g.n)
        for w in g.of_kind(Kind.BARRIER_WAIT):
            for a in g.of_kind(Kind.BARRIER_ARRIVE):
                same = g.events[a].resource == g.events[w].resource
                if same and self.phases[a] == self.phases[w]:
                    rows[a] |= 1 << w
        return rows

    @cached_property
    def mbarriers(self) -> Relation:
        """A release pattern that contributes to a phase synchronizes with an acquire pattern whose wait has seen that
        phase complete, if the first operation of one and the last of the other are morally strong."""
        g = self.graph
        contributes, observes = empty(g.n), empty(g.n)
        for w, seen in self.seen.items():
            for u in g.of_kind(Kind.MBARRIER_UPDATE):
                if g.events[u].address == g.events[w].address and self.phases[u] == seen - 1:
                    contributes[u] |= 1 << w
        for i in g.of_kind(Kind.MBARRIER_WAIT):
            observes[i] = g.acquire_patterns[i]
        reached = compose(compose(g.release_patterns, contributes), observes)
        return [row & strong for row, strong in zip(reached, g.morally_strong, strict=True)]

    @cached_property
    def sequential(self) -> list[tuple[int, int]]:
        """Pairs (a, b) such that a may not precede b in base causality order: their phases say the opposite."""
        g = self.graph
        out = []
        stamps: dict[object, list[tuple[int, int, bool]]] = defaultdict(list)
        for i, phase in self.phases.items():
            e = g.events[i]
            stamps[e.resource or e.address].append((i, phase, False))
        for i, seen in self.seen.items():
            stamps[g.events[i].address].append((i, seen, True))
        for members in stamps.values():
            for a, at_a, _ in members:
                for b, at_b, _ in members:
                    if a != b and at_a > at_b:
                        out.append((a, b))
        return out

    def known(self, event: int) -> int | None:
        """The value of a read that the frame decides: that of an mbarrier wait."""
        return self.graph.value_of_wait(event, self.seen[event]) if event in self.seen else None


def evaluate(value: Value, of_read) -> int | None:
    """An expression under `of_read(ReadOf) -> int | None`; None where a read is not known yet."""
    from .events import apply

    if isinstance(value, int):
        return value
    if isinstance(value, ReadOf):
        return of_read(value)
    a, b = evaluate(value.a, of_read), evaluate(value.b, of_read)
    if a is None or b is None:
        return None
    result = apply(value.op, a, b)
    assert isinstance(result, int)
    return result
