"""Engine 1: candidate executions, one by one.

For every choice of paths and barrier phases it lets each read return each write of its location in turn, then
orders the fence.sc pairs and the morally strong writes that causality leaves open, and keeps what satisfies the
axioms. A partial choice that already breaks an axiom is abandoned (see `axioms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from . import axioms
from .events import ReadOf, evaluate
from .execution import Behaviour, EarlyUse, Execution, Outcome, value_of
from .frames import Frame, frames
from .graph import Graph
from .program import COMPARISONS, Program, Variable
from .relation import Relation, add_edge, bits, empty, is_irreflexive


class BudgetExceeded(Exception):
    """More steps than allowed. The program is too large for enumeration."""


@dataclass
class Budget:
    """Counts the partial executions that were looked at."""

    limit: int | None = None
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.limit is not None and self.steps > self.limit:
            raise BudgetExceeded


def behaviour(program: Program, graphs: Iterator[Graph], budget: Budget) -> Behaviour:
    """What `program` may do."""
    found = Behaviour()
    for graph in graphs:
        for frame in frames(graph):
            _Search(program, graph, frame, found, budget).run()
    return found


@dataclass
class _Search:
    program: Program
    graph: Graph
    frame: Frame
    found: Behaviour
    budget: Budget
    reads_from: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        self.memory = [v for v in self.program.observed if v.thread is None]
        self.registers = [v for v in self.program.observed if v.thread is not None]
        self.names = {t.name: i for i, t in enumerate(self.program.threads)}
        base = axioms.base_causality_order(self.graph, self.frame.order)
        self.early = axioms.unpublished_mbarriers(self.graph, base)
        self.constraints = [c for p in self.graph.paths for c in p.constraints]
        if axioms.phase_order(self.frame, self.frame.order) and self._consistent():
            self._choose(0)

    # Values.

    def _value_of(self, read: ReadOf) -> int | None:
        return value_of(self.graph, self.frame, self.reads_from, read)

    def _consistent(self, decided: bool = False) -> bool:
        """False when a branch condition came out otherwise, or, if all should be `decided`, is still open."""
        for c in self.constraints:
            a, b = evaluate(c.a, self._value_of), evaluate(c.b, self._value_of)
            if a is None or b is None:
                if decided:
                    return False
            elif COMPARISONS[c.comparison](a, b) != c.truth:
                return False
        return True

    # Choices.

    def _choose(self, k: int) -> None:
        """Let the k-th read, and those after it, return each write in turn."""
        if k == len(self.graph.reads):
            self._complete()
            return
        if self._is_known():
            return
        read = self.graph.reads[k]
        for write in self.graph.candidates[read]:
            self.budget.step()
            self.reads_from[read] = write
            if self._consistent() and axioms.no_thin_air(self.graph, self.reads_from) and self._possible():
                self._choose(k + 1)
            del self.reads_from[read]

    def _registers(self) -> dict[Variable, int | None] | None:
        """Final values of the observed registers, None for one that is never loaded; None if some are still open."""
        out: dict[Variable, int | None] = {}
        for v in self.registers:
            value = self.graph.paths[self.names[v.thread or ""]].registers.get(v.name, 0)
            out[v] = None if value is None else evaluate(value, self._value_of)
            if value is not None and out[v] is None:
                return None
        return out

    def _is_known(self) -> bool:
        """True when whatever comes has an outcome that was found before, and nothing else of interest."""
        registers = None if self.memory or self.early else self._registers()
        return registers is not None and Outcome.of(registers) in self.found.executions

    def _closed(self) -> tuple[Relation, Relation]:
        """Observation order, and the closure of program order and synchronization, as far as known."""
        observation = axioms.observation_order(self.graph, self.reads_from)
        closed = list(self.frame.order)
        for first, last in axioms.pattern_synchronization(self.graph, observation):
            add_edge(closed, first, last)
        return observation, closed

    def _causality(self, observation: Relation, closed: Relation) -> tuple[Relation, Relation]:
        base = axioms.base_causality_order(self.graph, closed)
        preserved = axioms.proxy_preserved_base_causality_order(self.graph, base)
        return base, axioms.causality_order(preserved, observation)

    def _possible(self) -> bool:
        """False when what is chosen so far breaks an axiom whatever follows."""
        observation, closed = self._closed()
        if not is_irreflexive(closed):
            return False
        base, causality = self._causality(observation, closed)
        if not axioms.phase_order(self.frame, base):
            return False
        order = forced_coherence(self.graph, causality)
        return (
            is_irreflexive(order)
            and axioms.causality(self.graph, self.reads_from, causality, order)
            and axioms.atomicity(self.graph, self.reads_from, order)
        )

    def _complete(self) -> None:
        """All reads have a write: order fences, then writes."""
        registers = self._registers()
        if registers is None or self._is_known() or not self._consistent(decided=True):
            return
        observation, closed = self._closed()
        for ordered in orders(closed, self.graph.fence_sc_pairs):
            base, causality = self._causality(observation, ordered)
            if not axioms.phase_order(self.frame, base):
                continue
            for coherence in _coherence_orders(self.graph, causality):
                self.budget.step()
                if self._holds(base, causality, coherence):
                    self._record(registers, ordered, causality, coherence)
                    if not self.memory:
                        break

    def _holds(self, base: Relation, causality: Relation, coherence: Relation) -> bool:
        g, rf = self.graph, self.reads_from
        return (
            axioms.coherence(g, causality, coherence)
            and axioms.fence_sc(g, base)
            and axioms.causality(g, rf, causality, coherence)
            and axioms.atomicity(g, rf, coherence)
            and axioms.sc_per_location(g, rf, coherence)
        )

    def _record(
        self,
        registers: dict[Variable, int | None],
        closed: Relation,
        causality: Relation,
        coherence: Relation,
    ) -> None:
        base = axioms.base_causality_order(self.graph, closed)
        self.found.early |= {EarlyUse.of(self.graph, i, u) for i, u in self.early if not base[i] >> u & 1}
        finals = [
            final_writes(self.graph, self.program.address(v.name).physical, coherence) for v in self.memory
        ]
        for last in product(*finals):
            state = dict(registers)
            for v, w in zip(self.memory, last, strict=True):
                state[v] = evaluate(self.graph.events[w].value, self._value_of)
            outcome = Outcome.of(state)
            if outcome not in self.found.executions:
                self.found.executions[outcome] = Execution(
                    self.graph, self.frame, dict(self.reads_from), closed, causality, coherence, outcome
                )


def final_writes(g: Graph, location: str, coherence: Relation) -> list[int]:
    """The writes of a location that nothing follows in coherence order: any may be the final value."""
    return [w for w in g.writes if g.physical[w] == location and not coherence[w]]


def forced_coherence(g: Graph, causality: Relation) -> Relation:
    """The part of coherence order that causality order and the initial writes decide, closed."""
    order = empty(g.n)
    for a in g.writes:
        for b in g.writes:
            if a != b and g.overlaps(a, b) and (g.is_initial(a) or causality[a] >> b & 1):
                add_edge(order, a, b)
    return order


def orders(closed: Relation, open_pairs: list[tuple[int, int]]) -> Iterator[Relation]:
    """Every closed order that adds one direction of each open pair, without a cycle."""
    for k, (a, b) in enumerate(open_pairs):
        if not (closed[a] >> b & 1 or closed[b] >> a & 1):
            for first, second in ((a, b), (b, a)):
                order = list(closed)
                add_edge(order, first, second)
                yield from orders(order, open_pairs[k + 1 :])
            return
    if is_irreflexive(closed):
        yield closed


def _coherence_orders(g: Graph, causality: Relation) -> Iterator[Relation]:
    """Every smallest coherence order: what is forced, and one direction for each morally strong pair (§8.9.6)."""
    pairs = [(a, b) for a in g.writes for b in bits(g.morally_strong[a]) if a < b and g.overlaps(a, b)]
    yield from orders(forced_coherence(g, causality), [p for p in pairs if p[1] in g.writes])
