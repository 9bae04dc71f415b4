"""What engines return: a final state, and an execution that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from . import axioms
from .events import Kind, ReadOf, evaluate
from .frames import Frame
from .graph import Graph
from .program import Condition, Instruction, Variable, holds
from .relation import Relation, pairs


@dataclass(frozen=True)
class Outcome:
    """Values of the observed variables, sorted. A register that a blocked thread never loaded is None."""

    values: tuple[tuple[Variable, int | None], ...]

    @classmethod
    def of(cls, state: Mapping[Variable, int | None]) -> Outcome:
        return cls(tuple(sorted(state.items(), key=lambda item: (item[0].thread or "~", item[0].name))))

    @property
    def state(self) -> dict[Variable, int]:
        """The values that exist."""
        return {k: v for k, v in self.values if v is not None}

    @property
    def blocked(self) -> bool:
        """True when a thread waits for ever, so that some register was never loaded."""
        return any(v is None for _, v in self.values)

    def satisfies(self, condition: Condition) -> bool:
        """The truth of a condition. A comparison with a register that was never loaded makes it false."""
        try:
            return holds(condition, self.state)
        except KeyError:
            return False

    def __str__(self) -> str:
        return ", ".join(f"{k}={'-' if v is None else v}" for k, v in self.values)


@dataclass(frozen=True)
class Execution:
    """One execution: which write each read returns, and the orders that were chosen.

    `order` is the closure of program order and all synchronization, with the Fence-SC order; `coherence` is closed.
    """

    graph: Graph
    frame: Frame
    reads_from: Mapping[int, int]
    order: Relation
    causality: Relation
    coherence: Relation
    outcome: Outcome

    def value(self, read: ReadOf) -> int | None:
        """What a read returns; None where reads feed each other."""
        return value_of(self.graph, self.frame, self.reads_from, read)

    def synchronizes(self) -> Iterator[tuple[int, int, str]]:
        """The edges of §8.9.4, and the completions of asynchronous operations, each with what makes it."""
        g = self.graph
        observation = axioms.observation_order(g, self.reads_from)
        for a, b in dict.fromkeys(axioms.pattern_synchronization(g, observation)):
            yield a, b, "release to acquire"
        for a, b in g.fence_sc_pairs:
            yield (a, b, "fence.sc") if self.order[a] >> b & 1 else (b, a, "fence.sc")
        for relation, why in (
            (self.frame.barriers, "barrier"),
            (self.frame.mbarriers, "mbarrier phase"),
            (g.cluster_barriers, "cluster barrier"),
            (g.grids, "grid completion"),
            (g.completions, "completion"),
        ):
            yield from ((a, b, why) for a, b in pairs(relation))


@dataclass(frozen=True)
class EarlyUse:
    """An mbarrier instruction that nothing orders after the initialisation of its object."""

    thread: int
    use: Instruction | None
    init_thread: int
    init: Instruction | None

    @classmethod
    def of(cls, g: Graph, init: int, use: int) -> EarlyUse:
        a, b = g.events[init], g.events[use]
        return cls(b.thread, b.source, a.thread, a.source)


@dataclass
class Behaviour:
    """What an engine finds: every allowed outcome with one execution that shows it, and every use of an mbarrier
    that may come before its initialisation, in any execution."""

    executions: dict[Outcome, Execution] = field(default_factory=dict)
    early: set[EarlyUse] = field(default_factory=set)


def value_of(
    g: Graph,
    frame: Frame,
    reads_from: Mapping[int, int],
    read: ReadOf,
    pending: frozenset[int] = frozenset(),
) -> int | None:
    """What a read returns, as far as `reads_from` decides it; None where it does not, or where reads feed each
    other."""
    event = g.resolve(read)
    if g.events[event].kind == Kind.MBARRIER_WAIT:
        return frame.known(event)
    if event not in reads_from or event in pending:
        return None
    value = g.events[reads_from[event]].value
    return evaluate(value, lambda r: value_of(g, frame, reads_from, r, pending | {event}))


def sort_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda o: tuple((v is None, v or 0) for _, v in o.values))
