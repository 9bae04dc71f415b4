"""The ways in which barriers and mbarriers may play out: which arrivals complete which phase, and what waits see.

Their sequential semantics decide which ways exist at all: counts of arrivals, bytes of transactions, parity. That a
way does not contradict causality is for the engines to check (`axioms.phase_order`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from .events import Kind
from .graph import Graph
from .program import Barrier, ModelError, Scope
from .relation import Relation, closure, compose, empty

MAX_FRAMES = 20_000

Phases = dict[int, int]  # event -> phase
Choice = tuple[
    Phases, Phases
]  # phases of arrivals and updates; phases that each mbarrier wait has seen complete


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
        out: list[tuple[int, int]] = []
        stamps: dict[object, list[tuple[int, int]]] = defaultdict(list)
        for i, phase in (self.phases | self.seen).items():
            stamps[g.events[i].resource or g.events[i].address].append((i, phase))
        for members in stamps.values():
            out += [(a, b) for a, late in members for b, early in members if late > early]
        return out

    def known(self, wait: int) -> int:
        """What a test_wait.parity or try_wait.parity returns: 1 if the current phase has another parity than asked."""
        return int(self.seen[wait] % 2 != self.graph.events[wait].parity % 2)


def frames(g: Graph) -> Iterator[Frame]:
    """Every way in which the barriers of `g` may play out. None at all when some thread would wait for ever."""
    if not g.cluster_barriers_complete():
        return
    parts = [*_barriers(g), *_mbarriers(g)]
    if (total := prod(map(len, parts))) > MAX_FRAMES:
        raise ModelError(
            f"barriers may play out in {total} ways, more than {MAX_FRAMES}: use fewer phases or threads"
        )
    for chosen in product(*parts):
        frame = Frame(g)
        for phases, seen in chosen:
            frame.phases |= phases
            frame.seen |= seen
        yield frame


# CTA barriers.


def _barriers(g: Graph) -> Iterator[list[Choice]]:
    arrivals: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in g.of_kind(Kind.BARRIER_ARRIVE):
        arrivals[g.events[i].resource].append(i)
    for resource, members in arrivals.items():
        steps = dict.fromkeys(members, (1, 0))
        found = _phases(_participants(g, resource, members), steps, g.before_in_thread)
        yield [
            (phases | {_wait_of(g, i): phases[i] for i in members if _waits(g, i)}, {})
            for phases, complete in found
            if _may_block_so(g, members, phases, complete)
        ]


def _waits(g: Graph, arrival: int) -> bool:
    """True when the thread then waits: for bar.sync, unless it is stuck there."""
    path = g.paths[g.events[arrival].thread].events
    following = g.events[arrival].index + 1
    return following < len(path) and path[following].kind == Kind.BARRIER_WAIT


def _wait_of(g: Graph, arrival: int) -> int:
    return g.number[g.events[arrival].thread, g.events[arrival].index + 1]


def _stuck(g: Graph, arrival: int) -> bool:
    """True for the last event of a thread that never leaves its barrier."""
    e = g.events[arrival]
    return g.paths[e.thread].blocked and e.index == len(g.paths[e.thread].events) - 1


def _may_block_so(g: Graph, members: list[int], phases: Phases, complete: int) -> bool:
    """Whoever waits is in a phase that completes, whoever is stuck is not, and nobody arrives while waiting."""
    for i in members:
        if _waits(g, i):
            later = [j for j in members if g.program_order[i] >> j & 1]
            if phases[i] >= complete or any(phases[j] <= phases[i] for j in later):
                return False
        elif _stuck(g, i) and phases[i] < complete:
            return False
    return True


def _participants(g: Graph, resource: tuple[object, ...], members: list[int]) -> int:
    """Arrivals that complete a barrier: its count, or the number of threads of the CTA that name it."""
    instance, identity = resource[4:6]
    counts = {g.events[i].count for i in members}
    if len(counts) > 1:
        raise ModelError(f"barrier {identity} is used with different counts")
    (count,) = counts
    if count is not None:
        return count
    place = g.events[members[0]].place
    naming = {
        t
        for t, thread in enumerate(g.program.threads)
        for x in thread.body
        if isinstance(x, Barrier)
        and (x.instance, x.id) == (instance, identity)
        and thread.place.same(place, Scope.CTA)
    }
    return len(naming | {g.events[i].thread for i in members})


# Mbarriers.


def _mbarriers(g: Graph) -> Iterator[list[Choice]]:
    updates: dict[str, list[int]] = defaultdict(list)
    waits: dict[str, list[int]] = defaultdict(list)
    for i in g.of_kind(Kind.MBARRIER_UPDATE):
        updates[g.events[i].address].append(i)
    for i in g.of_kind(Kind.MBARRIER_WAIT):
        waits[g.events[i].address].append(i)
    for barrier in sorted({*updates, *waits}):
        steps = {i: (g.events[i].count or 0, g.events[i].tx) for i in updates[barrier]}
        found = _phases(_expected_arrivals(g, barrier), steps, g.before_in_thread)
        yield [
            (phases, seen)
            for phases, complete in found
            for seen in _observations(g, waits[barrier], phases, complete)
        ]


def _expected_arrivals(g: Graph, barrier: str) -> int:
    inits = [g.events[i].count for i in g.of_kind(Kind.MBARRIER_INIT) if g.events[i].address == barrier]
    counts = [*inits, *([g.program.mbarriers[barrier]] if barrier in g.program.mbarriers else [])]
    if len(counts) != 1:
        raise ModelError(f"mbarrier {barrier} must be initialised exactly once")
    return counts[0] or 0


def _observations(g: Graph, waits: list[int], phases: Phases, complete: int) -> Iterator[Phases]:
    """How many completed phases each wait may have seen, as far as its own thread decides."""
    options = []
    for w in waits:
        least = max((p for i, p in phases.items() if g.program_order[i] >> w & 1), default=0)
        most = min((p for i, p in phases.items() if g.before_in_thread(w, i)), default=complete)
        options.append([(w, c) for c in range(least, min(most, complete) + 1)])
    for chosen in product(*options):
        yield dict(chosen)


# Counting.


def _phases(
    count: int, steps: Mapping[int, tuple[int, int]], before: Callable[[int, int], bool]
) -> list[tuple[Phases, int]]:
    """All distinct assignments of events to phases, each with the number of phases that complete.

    A phase completes when `count` arrivals are in and the transactions balance. `steps` maps each event to its
    arrivals and to its transaction bytes, expected minus completed; `before(i, j)` says that i must come first. An
    arrival beyond the count is undefined: no way goes on from there.
    """
    if not steps:
        return [({}, 0)]
    earlier = {j: [i for i in steps if i != j and before(i, j)] for j in steps}
    known = set()
    results: dict[frozenset[tuple[int, int]], int] = {}
    work: list[tuple[frozenset[tuple[int, int]], int, int, int]] = [(frozenset(), 0, count, 0)]
    while work:
        state = work.pop()
        if state in known:
            continue
        known.add(state)
        done, phase, pending, balance = state
        if len(done) == len(steps):
            results[done] = phase
            continue
        assigned = {i for i, _ in done}
        for j, (arrivals, transaction) in steps.items():
            if j in assigned or not assigned.issuperset(earlier[j]):
                continue
            left, now = pending - arrivals, balance + transaction
            if left == 0 and now == 0:
                work.append((done | {(j, phase)}, phase + 1, count, 0))
            elif left >= 0:
                work.append((done | {(j, phase)}, phase, left, now))
    return [(dict(done), complete) for done, complete in results.items()]
