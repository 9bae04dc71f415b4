"""Why a final state is forbidden: a candidate execution that ends in it, and the axioms that it breaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

from . import axioms
from .enumerator import Budget, BudgetExceeded, final_writes, forced_coherence, orders
from .events import ReadOf, evaluate
from .execution import Execution, Outcome, value_of
from .frames import Frame, frames
from .graph import Graph
from .program import COMPARISONS, Condition, Program
from .relation import Relation, bits, closure, is_acyclic, is_irreflexive


@dataclass(frozen=True)
class Forbidden:
    """A candidate execution, and for each axiom that it breaks the events that show it (a cycle, first to last)."""

    execution: Execution
    broken: dict[str, tuple[int, ...]]


def explain(
    program: Program, graphs: Iterator[Graph], wanted: Condition, steps: int = 50_000
) -> Forbidden | None:
    """The candidate execution that satisfies `wanted` and breaks the fewest axioms; None if there is no candidate at
    all (the values cannot arise) or none was found within `steps`."""
    best: Forbidden | None = None
    budget = Budget(steps)
    try:
        for graph in graphs:
            for frame in frames(graph):
                for found in _candidates(program, graph, frame, wanted, budget):
                    if best is None or len(found.broken) < len(best.broken):
                        best = found
                    if len(best.broken) == 1:
                        return best
    except BudgetExceeded:
        pass
    return best


def _candidates(
    program: Program, g: Graph, frame: Frame, wanted: Condition, budget: Budget
) -> Iterator[Forbidden]:
    threads = {t.name: i for i, t in enumerate(program.threads)}
    for chosen in product(*(_all_writes(g, r) for r in g.reads)):
        budget.step()
        rf = dict(zip(g.reads, chosen, strict=True))

        def value(read: ReadOf, rf: dict[int, int] = rf) -> int | None:
            return value_of(g, frame, rf, read)

        if not _branches_hold(g, value):
            continue
        registers = {
            v: evaluate(known, value)
            for v in program.observed
            if v.thread is not None
            and (known := g.paths[threads[v.thread]].registers.get(v.name, 0)) is not None
        }
        for closed in _synchronized(g, frame, rf):
            preserved = axioms.proxy_preserved_base_causality_order(g, axioms.base_causality_order(g, closed))
            causality = axioms.causality_order(preserved, axioms.observation_order(g, rf))
            for coherence in _coherence_candidates(g, causality):
                budget.step()
                memory = [v for v in program.observed if v.thread is None]
                finals = [final_writes(g, program.address(v.name).physical, coherence) for v in memory]
                for last in product(*finals):
                    state = dict(registers)
                    for v, w in zip(memory, last, strict=True):
                        state[v] = evaluate(g.events[w].value, value)
                    outcome = Outcome.of(state)
                    if outcome.satisfies(wanted):
                        x = Execution(g, frame, rf, closed, causality, coherence, outcome)
                        yield Forbidden(x, broken_axioms(x))


def _all_writes(g: Graph, read: int) -> list[int]:
    """All writes of the location, with those that program order alone does not rule out first."""
    likely = g.candidates[read]
    return likely + [w for w in g.writes if g.overlaps(read, w) and w not in likely]


def _branches_hold(g: Graph, value: Callable[[ReadOf], int | None]) -> bool:
    for path in g.paths:
        for c in path.constraints:
            a, b = evaluate(c.a, value), evaluate(c.b, value)
            if a is None or b is None or COMPARISONS[c.comparison](a, b) != c.truth:
                return False
    return True


def _synchronized(g: Graph, frame: Frame, rf: dict[int, int]) -> Iterator[Relation]:
    """Closed orders with every direction of the fence.sc pairs; without them where none is free of cycles."""
    rows = list(frame.order)
    for a, b in axioms.pattern_synchronization(g, axioms.observation_order(g, rf)):
        rows[a] |= 1 << b
    closed = closure(rows)
    found = False
    for order in orders(closed, g.fence_sc_pairs):
        found = True
        yield order
    if not found:
        yield closed


def _coherence_candidates(g: Graph, causality: Relation) -> Iterator[Relation]:
    """Coherence orders that obey Coherence, then those that only relate what is morally strong."""
    pairs = [(a, b) for a in g.writes for b in bits(g.morally_strong[a]) if a < b and b in g.writes]
    yield from orders(forced_coherence(g, causality), pairs)
    yield from orders(forced_coherence(g, [0] * g.n), pairs)


def broken_axioms(x: Execution) -> dict[str, tuple[int, ...]]:
    """The axioms that an execution breaks, each with the events that show it."""
    g, rf = x.graph, x.reads_from
    base = axioms.base_causality_order(g, x.order)
    out: dict[str, tuple[int, ...]] = {}
    if not axioms.no_thin_air(g, rf):
        out["No-Thin-Air"] = _cycle(_with_reads(rf, g.dependency))
    if not axioms.coherence(g, x.causality, x.coherence):
        out["Coherence"] = _against(x)
    if is_irreflexive(x.order) and not axioms.fence_sc(g, base):
        out["Fence-SC"] = tuple(i for pair in g.fence_sc_pairs for i in pair)
    if not axioms.atomicity(g, rf, x.coherence):
        out["Atomicity"] = _between(x)
    if not axioms.sc_per_location(g, rf, x.coherence):
        out["SC-per-Location"] = _cycle(axioms.same_location_order(g, rf, x.coherence))
    if not axioms.causality(g, rf, x.causality, x.coherence):
        out["Causality"] = _stale(x)
    if not axioms.phase_order(x.frame, base) and "Causality" not in out:
        out["barrier phases"] = tuple(next(((a, b) for a, b in x.frame.sequential if base[a] >> b & 1), ()))
    return out


def _with_reads(rf: Mapping[int, int], rows: Relation) -> Relation:
    out = list(rows)
    for r, w in rf.items():
        out[w] |= 1 << r
    return out


def _against(x: Execution) -> tuple[int, ...]:
    g = x.graph
    for a in g.writes:
        for b in g.writes:
            if a != b and g.overlaps(a, b) and x.causality[a] >> b & 1 and not x.coherence[a] >> b & 1:
                return (a, b)
    return ()


def _between(x: Execution) -> tuple[int, ...]:
    g = x.graph
    for r, own in g.rmw.items():
        read = x.reads_from[r]
        for w in bits(x.coherence[read] & g.morally_strong[own]):
            if w != own and x.coherence[w] >> own & 1:
                return (read, w, own)
    return ()


def _stale(x: Execution) -> tuple[int, ...]:
    """(write, read, what it returns), or (read, write) where a read returns what it precedes."""
    for r, w in x.reads_from.items():
        if x.causality[r] >> w & 1:
            return (r, w)
        for later in bits(x.coherence[w]):
            if x.causality[later] >> r & 1:
                return (later, r, w)
    return ()


def _cycle(rows: Relation) -> tuple[int, ...]:
    """A shortest cycle, first event repeated at the end; () if there is none."""
    if is_acyclic(rows):
        return ()
    cycles = [path for i in range(len(rows)) if (path := shortest_path(rows, i, i))]
    return min(cycles, key=len)


def shortest_path(rows: Relation, start: int, end: int) -> tuple[int, ...]:
    """Events from `start` to `end` by at least one edge; () if there is no way."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        i = queue.popleft()
        for j in bits(rows[i]):
            if j == end:
                path = [j, i]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return tuple(reversed(path))
            if j not in came and j != start:
                came[j] = i
                queue.append(j)
    return ()


def direct_order(x: Execution) -> Relation:
    """Immediate program order, the order within asynchronous operations and from issue to operation, and every
    synchronization: the steps that base causality order is made of."""
    g = x.graph
    rows = list(g.asynchronous_order)
    for order in g.sequence:
        for a, b in pairwise(order):
            rows[a] |= 1 << b
    for a, b, _ in x.synchronizes():
        rows[a] |= 1 << b
    for i, row in enumerate(g.issued_after):
        rows[i] |= row
    return rows
