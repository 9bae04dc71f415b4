"""The verdict on one program: all allowed outcomes, and an execution that shows the one that was asked about."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from k3_audit.audit.findings import Verdict

from . import axioms, enumerator
from .draw import event_text
from .events import Unfolded, unfold
from .execution import Behaviour, EarlyUse, Execution, Outcome, sort_outcomes
from .explain import Forbidden, explain
from .graph import Graph
from .litmus import instruction_text
from .program import Instruction, Logic, ModelError, Program, Quantifier

UNROLL = 2  # backward branches per label, for loops that are not mere spinning
MAX_THREADS = 16
STEPS = 400_000  # partial executions before enumeration gives up


class Engine(StrEnum):
    AUTO = "auto"  # enumeration, then the solver if that is too much
    ENUMERATE = "enumerate"
    SOLVE = "solve"


class EnginesDisagree(AssertionError):
    """The two engines see different outcomes of one program: one of them is wrong."""


@dataclass(frozen=True)
class Bounds:
    """What a verdict covers. `truncated` names the threads with a loop that was cut after `unroll` rounds."""

    threads: int
    events: int
    unroll: int
    truncated: tuple[str, ...]

    def __str__(self) -> str:
        loops = (
            f"; loops of {', '.join(self.truncated)} cut after {self.unroll} rounds" if self.truncated else ""
        )
        return f"{self.threads} threads, at most {self.events} events{loops}"


@dataclass
class Result:
    """`allowed`: some execution ends in a state that satisfies the condition. `holds`: the quantified condition is
    true. `races` are those of one execution per outcome; `faults` are uses of an mbarrier that some execution does
    not order after its initialisation. `witness` shows an execution that satisfies the condition (or, for `forall`,
    violates it), if there is one.
    """

    program: Program
    bounds: Bounds
    engine: str
    outcomes: list[Outcome]
    executions: dict[Outcome, Execution]
    allowed: bool
    holds: bool
    witness: Execution | None
    seconds: float
    races: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def completes(self) -> bool:
        """False when no execution ends: every one waits for something that never comes."""
        return bool(self.outcomes)

    @property
    def expected(self) -> bool | None:
        """What the note of the program says: it may begin with `allowed:` or `forbidden:`."""
        word = self.program.note.split(":")[0].strip().lower()
        return {"allowed": True, "forbidden": False}.get(word)

    @property
    def verdict(self) -> Verdict:
        """Against the stated expectation; without one, `~exists` and `forall` are properties that must hold, and
        `exists` is a question, to which either answer is clean."""
        if self.faults:
            return Verdict.FINDING
        if not self.completes:
            return Verdict.INCONCLUSIVE
        if self.expected is not None:
            agrees = self.allowed == self.expected
        else:
            agrees = self.holds or self.program.quantifier == Quantifier.EXISTS
        if agrees and not self.allowed and self.bounds.truncated:
            return Verdict.INCONCLUSIVE
        return Verdict.CLEAN if agrees else Verdict.FINDING


def check(program: Program, engine: Engine = Engine.AUTO, unroll: int = UNROLL, steps: int = STEPS) -> Result:
    """All allowed outcomes of a program, and whether its condition is among them.

    Raises ModelError for a program that the model does not take or that is too large.
    """
    started = time.perf_counter()
    if len(program.threads) > MAX_THREADS:
        raise ModelError(f"{len(program.threads)} threads: at most {MAX_THREADS} are a small program")
    unfolded = [unfold(program, t, unroll) for t in range(len(program.threads))]
    behaviour, used = _run(program, unfolded, engine, steps)
    bounds = Bounds(
        len(program.threads),
        sum(max((len(p.events) for p in u.paths), default=0) for u in unfolded),
        unroll,
        tuple(t.name for t, u in zip(program.threads, unfolded, strict=True) if u.truncated),
    )
    result = _judge(program, bounds, used, behaviour)
    result.seconds = time.perf_counter() - started
    return result


def graphs(program: Program, unfolded: list[Unfolded]) -> Iterator[Graph]:
    """One graph for each choice of a path per thread."""
    for paths in product(*(u.paths for u in unfolded)):
        yield Graph(program, paths)


def _run(program: Program, unfolded: list[Unfolded], engine: Engine, steps: int) -> tuple[Behaviour, str]:
    if engine != Engine.SOLVE:
        try:
            budget = enumerator.Budget(steps)
            return enumerator.behaviour(program, graphs(program, unfolded), budget), Engine.ENUMERATE
        except enumerator.BudgetExceeded:
            if engine == Engine.ENUMERATE:
                raise ModelError(
                    f"more than {steps} partial executions: use the solver (--engine solve)"
                ) from None
    from . import solver

    return solver.behaviour(program, graphs(program, unfolded)), Engine.SOLVE


def _judge(program: Program, bounds: Bounds, engine: str, found: Behaviour) -> Result:
    kept = {
        o: e for o, e in found.executions.items() if program.filter is None or o.satisfies(program.filter)
    }
    condition = program.condition
    satisfying = [o for o in kept if condition is not None and o.satisfies(condition)]
    universal = program.quantifier == Quantifier.FORALL
    violating = [o for o in kept if condition is not None and not o.blocked and not o.satisfies(condition)]
    allowed = bool(satisfying)
    truth = {
        Quantifier.EXISTS: allowed,
        Quantifier.NOT_EXISTS: not allowed,
        Quantifier.FORALL: not violating,
    }[program.quantifier]
    shown = sort_outcomes(violating if universal else satisfying)
    witness = kept[shown[0]] if shown else None
    outcomes, faults = sort_outcomes(kept), sorted(_fault(program, e) for e in found.early)
    return Result(program, bounds, engine, outcomes, kept, allowed, truth, witness, 0.0, _races(kept), faults)


def why_forbidden(result: Result) -> Forbidden | None:
    """For a result without a witness: an execution that ends as the condition says, and the axioms it breaks."""
    condition = result.program.condition
    if condition is None or result.witness is not None:
        return None
    if result.program.quantifier == Quantifier.FORALL:
        condition = Logic("not", (condition,))
    unfolded = [unfold(result.program, t, result.bounds.unroll) for t in range(result.bounds.threads)]
    return explain(result.program, graphs(result.program, unfolded), condition)


def _races(executions: dict[Outcome, Execution]) -> list[str]:
    """The data races in these executions."""
    found = {
        tuple(sorted((event_text(x.graph, a), event_text(x.graph, b))))
        for x in executions.values()
        for a, b in axioms.data_races(x.graph, x.causality)
    }
    return [" / ".join(pair) for pair in sorted(found)]


def _fault(program: Program, early: EarlyUse) -> str:
    def text(thread: int, instruction: Instruction | None) -> str:
        return f"{program.threads[thread].name} {instruction_text(instruction) if instruction else ''}"

    return f"{text(early.thread, early.use)} may come before {text(early.init_thread, early.init)}"
