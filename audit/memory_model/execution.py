"""What engines return: a final state, and an execution that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .graph import Frame, Graph
from .program import Variable
from .relation import Relation


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


def sort_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda o: tuple((v is None, v or 0) for _, v in o.values))
