"""Engine 2: the axioms as constraints for an SMT solver (z3).

Written from the same sections of the ISA as `axioms`, but as one formula over all executions at once instead of a
test of one execution. Only the events, the static relations and the counting of barriers (`graph`) are shared with
engine 1; agreement of the two on every litmus test is part of the test suite.

Relations are Boolean variables that must hold where the definitions say so and may hold elsewhere. That suffices:
every axiom forbids edges, so the solver never gains by adding one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .events import Apply, Kind, ReadOf, Value
from .execution import Behaviour, EarlyUse, Execution, Outcome
from .frames import Frame, frames
from .graph import Graph
from .program import ModelError, Program, Proxy, Scope, Variable
from .relation import Relation, bits, closure, empty, pairs

try:
    import z3
except ImportError:  # pragma: no cover - depends on the installation
    z3 = None

_WORD = 64
_TIMEOUT_MS = 60_000


def available() -> bool:
    return z3 is not None


def behaviour(program: Program, graphs: Iterable[Graph]) -> Behaviour:
    """What `program` may do. Raises ModelError without z3 or on a timeout."""
    if z3 is None:
        raise ModelError("the solver needs z3 (pip install z3-solver), or use --engine enumerate")
    found = Behaviour()
    for graph in graphs:
        for frame in frames(graph):
            encoding = _Encoding(program, graph, frame)
            found.early |= set(encoding.early_uses())
            for execution in encoding.solve(found.executions):
                found.executions[execution.outcome] = execution
    return found


class _Encoding:
    """One frame of one graph. Python's True and False stand for what is known before solving."""

    def __init__(self, program: Program, graph: Graph, frame: Frame):
        self.program, self.g, self.frame = program, graph, frame
        self.n = graph.n
        self.solver = z3.Solver()
        self.solver.set("timeout", _TIMEOUT_MS)
        self._reads_from()
        self._values()
        self._observation()
        self._order()
        self._causality()
        self._coherence()
        self._axioms()
        self._final_state()

    # Helpers.

    def _add(self, *clauses: Any) -> None:
        for clause in clauses:
            if clause is False:
                self.solver.add(z3.BoolVal(False))
            elif clause is not True:
                self.solver.add(clause)

    def _matrix(self, name: str, possible: Relation, certain: Relation | None = None) -> list[dict[int, Any]]:
        """Rows of Booleans: absent where impossible, True where certain."""
        rows: list[dict[int, Any]] = []
        for i, row in enumerate(possible):
            sure = certain[i] if certain else 0
            rows.append({j: True if sure >> j & 1 else z3.Bool(f"{name}_{i}_{j}") for j in bits(row)})
        return rows

    # Reads and values.

    def _reads_from(self) -> None:
        self.rf: dict[int, dict[int, Any]] = {}
        for r in self.g.reads:
            options = {w: z3.Bool(f"rf_{r}_{w}") for w in self.g.candidates[r]}
            self.rf[r] = options
            self.solver.add(z3.PbEq([(b, 1) for b in options.values()], 1) if options else z3.BoolVal(False))

    def _values(self) -> None:
        self.value = {r: z3.BitVec(f"value_{r}", _WORD) for r in self.g.reads}
        for r, options in self.rf.items():
            for w, chosen in options.items():
                self._add(z3.Implies(chosen, self.value[r] == self._expression(self.g.events[w].value)))
        for path in self.g.paths:
            for c in path.constraints:
                holds = _compare(c.comparison, self._expression(c.a), self._expression(c.b))
                self._add(holds if c.truth else z3.Not(holds))

    def _expression(self, value: Value) -> Any:
        if isinstance(value, int):
            return z3.BitVecVal(value, _WORD)
        if isinstance(value, ReadOf):
            event = self.g.resolve(value)
            if self.g.events[event].kind == Kind.MBARRIER_WAIT:
                return z3.BitVecVal(self.frame.known(event), _WORD)
            return self.value[event]
        assert isinstance(value, Apply)
        return _arithmetic(value.op, self._expression(value.a), self._expression(value.b))

    # Derived relations.

    def _observation(self) -> None:
        """§8.9.2."""
        strong = self.g.morally_strong
        direct = empty(self.n)
        for r, options in self.rf.items():
            for w in options:
                if strong[w] >> r & 1:
                    direct[w] |= 1 << r
        through = empty(self.n)
        for r, w in self.g.rmw.items():
            through[r] = 1 << w
        possible = closure([d | t for d, t in zip(direct, through, strict=True)])
        reads = sum(1 << r for r in self.g.reads)
        rows = [row & reads if self.g.events[i].kind == Kind.WRITE else 0 for i, row in enumerate(possible)]
        self.possible_observation = rows
        self.obs = self._matrix("obs", rows)
        for w, r in pairs(direct):
            self._add(z3.Implies(self.rf[r][w], self.obs[w][r]))
        for row in self.obs:
            for middle, seen in row.items():
                if middle in self.g.rmw:
                    for r, later in self.obs[self.g.rmw[middle]].items():
                        self._add(z3.Implies(z3.And(seen, later), row[r]))

    def _order(self) -> None:
        """Program order and synchronization, closed (§8.9.4, §8.9.5)."""
        g = self.g
        condition: dict[tuple[int, int], list[Any]] = {}
        for first, w in pairs(g.release_patterns):
            for r, seen in self.obs[w].items():
                for last in bits(g.acquire_patterns[r]):
                    if g.morally_strong[first] >> last & 1:
                        condition.setdefault((first, last), []).append(seen)
        edges = list(self.frame.order)
        for a, b in condition:
            edges[a] |= 1 << b
        for a, b in g.fence_sc_pairs:
            edges[a] |= 1 << b
            edges[b] |= 1 << a
        self.order = self._matrix("order", closure(edges), self.frame.order)
        for (a, b), seen in condition.items():
            for s in seen:
                self._add(z3.Implies(s, self.order[a][b]) if self.order[a][b] is not True else True)
        for a, b in g.fence_sc_pairs:
            self._add(_any([self.order[a][b], self.order[b][a]]))
        self._transitive(self.order)
        self._irreflexive(self.order)

    def _transitive(self, rows: list[dict[int, Any]]) -> None:
        for row in rows:
            for k, first in row.items():
                for j, second in rows[k].items():
                    if row[j] is not True:
                        self._add(z3.Implies(_all([first, second]), row[j]))

    def _irreflexive(self, rows: list[dict[int, Any]]) -> None:
        for i, row in enumerate(rows):
            if i in row:
                self._add(False if row[i] is True else z3.Not(row[i]))

    def _before(self, i: int, j: int) -> Any:
        """Base causality order from i to j, including what an asynchronous operation inherits (§8.9.1.1)."""
        terms = [self.order[i].get(j, False)]
        if self.g.events[j].operation is not None:
            issued = [k for k in range(self.n) if self.g.issued_after[k] >> j & 1]
            terms += [True if k == i else self.order[i].get(k, False) for k in issued]
        return _any(terms)

    def _causality(self) -> None:
        """Proxy-preserved base causality order, then causality order (§8.9.5)."""
        g = self.g
        accesses = [i for i, e in enumerate(g.events) if e.is_memory and e.thread >= 0]
        preserved: dict[tuple[int, int], Any] = {}
        for x in accesses:
            for y in accesses:
                if x != y and g.overlaps(x, y) and (term := self._preserved(x, y)) is not False:
                    preserved[x, y] = term
        self.preserved = preserved
        self.cause: dict[tuple[int, int], Any] = {}
        terms: dict[tuple[int, int], list[Any]] = {k: [v] for k, v in preserved.items()}
        for w, row in enumerate(self.obs):
            for r, seen in row.items():
                for (x, y), term in preserved.items():
                    if x == r:
                        terms.setdefault((w, y), []).append(_all([seen, term]))
        self.cause = {k: _any(v) for k, v in terms.items()}

    def _preserved(self, x: int, y: int) -> Any:
        """Whether the order from x to y survives their proxies and addresses."""
        a, b = self.g.events[x], self.g.events[y]
        same_address = self.g.generic[x] == self.g.generic[y]
        block = a.place.same(b.place, Scope.CTA)
        if same_address and a.proxy == b.proxy and (a.proxy == Proxy.GENERIC or block):
            return self._before(x, y)
        leaving = [(x, True)] if a.proxy == Proxy.GENERIC else self._leaving(x)
        entering = [(y, True)] if b.proxy == Proxy.GENERIC else self._entering(y)
        alias = [f for f in self.g.of_kind(Kind.PROXY_FENCE) if self.g.events[f].proxy == Proxy.ALIAS]
        ways = []
        for out, left in leaving:
            for into, entered in entering:
                if same_address:
                    ways.append(_all([left, entered, self._before(out, into)]))
                for f in alias:
                    ways.append(_all([left, entered, self._before(out, f), self._before(f, into)]))
        return _any(ways)

    def _fences_of(self, access: int) -> list[int]:
        e = self.g.events[access]
        return [
            f
            for f in self.g.of_kind(Kind.PROXY_FENCE)
            if self.g.events[f].proxy == e.proxy and self.g.events[f].place.same(e.place, Scope.CTA)
        ]

    def _leaving(self, x: int) -> list[tuple[int, Any]]:
        ends = [*self._fences_of(x), *bits(self.g.completions[x])]
        return [(f, self._before(x, f)) for f in ends]

    def _entering(self, y: int) -> list[tuple[int, Any]]:
        return [(f, self._before(f, y)) for f in self._fences_of(y)]

    def _coherence(self) -> None:
        """§8.9.6."""
        g = self.g
        possible, certain = empty(self.n), empty(self.n)
        for a in g.writes:
            for b in g.writes:
                if a != b and g.overlaps(a, b):
                    certain[a] |= (1 << b) if g.is_initial(a) else 0
                    if not g.is_initial(b):
                        possible[a] |= 1 << b
        self.co = self._matrix("co", closure(possible), certain)
        self._transitive(self.co)
        self._irreflexive(self.co)
        for a, b in pairs(possible):
            if a < b and g.morally_strong[a] >> b & 1:
                self._add(_any([self.co[a][b], self.co[b][a]]))

    # Axioms.

    def _axioms(self) -> None:
        g = self.g
        for a in g.writes:
            for b in self.co[a]:
                if a != b and (a, b) in self.cause and self.co[a][b] is not True:
                    self._add(_implies(self.cause[a, b], self.co[a][b]))  # Coherence, §8.10.1
        self.after_read: dict[int, dict[int, Any]] = {}
        for r, options in self.rf.items():
            later: dict[int, list[Any]] = {}
            for w, chosen in options.items():
                self._add(_not(_all([chosen, self.cause.get((r, w), False)])))  # Causality, §8.10.6, 1
                for v, follows in self.co[w].items():
                    later.setdefault(v, []).append(_all([chosen, follows]))
            self.after_read[r] = {v: _any(terms) for v, terms in later.items()}
            for v, term in self.after_read[r].items():
                self._add(_not(_all([term, self.cause.get((v, r), False)])))  # Causality, §8.10.6, 2
        for r, own in g.rmw.items():
            for v, term in self.after_read[r].items():  # Atomicity, §8.10.3
                if v != own and g.morally_strong[own] >> v & 1:
                    self._add(_not(_all([term, self.co[v].get(own, False)])))
        self._no_thin_air()
        self._sc_per_location()
        for a, b in self.frame.sequential:
            self._add(_not(self._before(a, b)))
        for i in range(self.n):
            self._add(_not(self._before(i, i)))

    def _no_thin_air(self) -> None:
        """§8.10.4: ranks that grow along dependencies and reads."""
        rank = [z3.Int(f"rank_{i}") for i in range(self.n)]
        for a, b in pairs(self.g.dependency):
            self._add(rank[a] < rank[b])
        for r, options in self.rf.items():
            for w, chosen in options.items():
                self._add(z3.Implies(chosen, rank[w] < rank[r]))

    def _sc_per_location(self) -> None:
        """§8.10.5: ranks that grow along program order and morally strong communication."""
        g = self.g
        rank = [z3.Int(f"place_{i}") for i in range(self.n)]
        for i in range(self.n):
            for j in bits(g.program_order[i] & g.plain[i]):
                self._add(rank[i] < rank[j])
        for r, options in self.rf.items():
            for w, chosen in options.items():
                if g.morally_strong[w] >> r & 1:
                    self._add(z3.Implies(chosen, rank[w] < rank[r]))
            for v, term in self.after_read[r].items():
                if g.morally_strong[r] >> v & 1:
                    self._add(_implies(term, rank[r] < rank[v]))
        for a in g.writes:
            for b, term in self.co[a].items():
                if g.morally_strong[a] >> b & 1:
                    self._add(_implies(term, rank[a] < rank[b]))

    # Final state and solutions.

    def _final_state(self) -> None:
        self.final: dict[Variable, Any] = {}
        threads = {t.name: i for i, t in enumerate(self.program.threads)}
        for v in self.program.observed:
            if v.thread is not None:
                value = self.g.paths[threads[v.thread]].registers.get(v.name, 0)
                self.final[v] = None if value is None else self._expression(value)
            else:
                self.final[v] = self._last(v.name, self.program.address(v.name).physical)

    def _last(self, name: str, location: str) -> Any:
        value = z3.BitVec(f"final_{name}", _WORD)
        options = []
        for w in self.g.writes:
            if self.g.physical[w] == location:
                is_last = _all([_not(term) for v, term in self.co[w].items()])
                options.append(_all([is_last, value == self._expression(self.g.events[w].value)]))
        self._add(_any(options))
        return value

    def early_uses(self) -> Iterator[EarlyUse]:
        """Uses of an mbarrier that some execution does not order after its initialisation."""
        for i in self.g.of_kind(Kind.MBARRIER_INIT):
            for u in self.g.of_kind(Kind.MBARRIER_UPDATE, Kind.MBARRIER_WAIT):
                if self.g.events[u].address == self.g.events[i].address:
                    self.solver.push()
                    self._add(_not(self._before(i, u)))
                    if self._satisfiable():
                        yield EarlyUse.of(self.g, i, u)
                    self.solver.pop()

    def _satisfiable(self) -> bool:
        answer = self.solver.check()
        if answer == z3.unknown:
            raise ModelError(f"the solver gave up: {self.solver.reason_unknown()}")
        return bool(answer == z3.sat)

    def solve(self, known: dict[Outcome, Execution]) -> Iterator[Execution]:
        """Executions with outcomes that are not known yet, one for each."""
        for outcome in known:
            self._exclude(outcome)
        while self._satisfiable():
            execution = self._execution(self.solver.model())
            yield execution
            self._exclude(execution.outcome)

    def _exclude(self, outcome: Outcome) -> None:
        same = []
        for v, value in outcome.values:
            final = self.final[v]
            if (final is None) != (value is None):
                return
            if final is not None:
                same.append(final == z3.BitVecVal(value, _WORD))
        self._add(z3.Not(z3.And(same)) if same else False)

    def _execution(self, model: Any) -> Execution:
        from . import axioms

        def true(term: Any) -> bool:
            return term is True or (term is not False and z3.is_true(model.eval(term, model_completion=True)))

        state = {
            v: None if term is None else model.eval(term, model_completion=True).as_signed_long()
            for v, term in self.final.items()
        }
        reads_from = {r: next(w for w, b in options.items() if true(b)) for r, options in self.rf.items()}
        # Variables may hold more than they must; the picture shows what the definitions give.
        observation = axioms.observation_order(self.g, reads_from)
        edges = list(self.frame.order)
        for a, b in axioms.pattern_synchronization(self.g, observation):
            edges[a] |= 1 << b
        for a, b in self.g.fence_sc_pairs:
            first, second = (a, b) if true(self.order[a][b]) else (b, a)
            edges[first] |= 1 << second
        order = closure(edges)
        base = axioms.base_causality_order(self.g, order)
        preserved = axioms.proxy_preserved_base_causality_order(self.g, base)
        causality = axioms.causality_order(preserved, observation)
        coherence = empty(self.n)
        for a, row in enumerate(self.co):
            for b, term in row.items():
                coherence[a] |= true(term) << b
        return Execution(self.g, self.frame, reads_from, order, causality, coherence, Outcome.of(state))


def _compare(comparison: str, a: Any, b: Any) -> Any:
    return {
        "eq": lambda: a == b,
        "ne": lambda: a != b,
        "lt": lambda: a < b,
        "le": lambda: a <= b,
        "gt": lambda: a > b,
        "ge": lambda: a >= b,
    }[comparison]()


def _arithmetic(op: str, a: Any, b: Any) -> Any:
    return {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: z3.If(b == 0, z3.BitVecVal(-1, _WORD), a / b),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "min": lambda: z3.If(a < b, a, b),
        "max": lambda: z3.If(a < b, b, a),
    }[op]()


def _all(terms: list[Any]) -> Any:
    kept = [t for t in terms if t is not True]
    if any(t is False for t in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else z3.And(kept)


def _any(terms: list[Any]) -> Any:
    kept = [t for t in terms if t is not False]
    if any(t is True for t in kept):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else z3.Or(kept)


def _not(term: Any) -> Any:
    return not term if isinstance(term, bool) else z3.Not(term)


def _implies(a: Any, b: Any) -> Any:
    if a is True:
        return b
    return True if a is False else z3.Implies(a, b)
