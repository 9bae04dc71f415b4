"""The order of events in a program, and what two programs have in common there.

An *event* is an instruction that bears on memory order. The event graph holds the paths of a function reduced to its
events; it is built alike for PTX and for SASS. Predicates are followed: `@P0 fence` and `@P0 store` under one value of
P0 both happen or neither does, so each block is unfolded by the predicates that decide events and branches later on.

Two programs are compared pair by pair. Project every execution onto two events X and Y: the sequence over {X, Y} that
remains is what a reordering changes (words of a trace agree iff their projections on all dependent pairs do;
Mazurkiewicz 1977). Of these sequences :class:`Order` holds which letters may stand first, last and next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

_MOST_FACTS = 6  # predicates whose value is remembered along one path
_MOST_COPIES = 8  # unfolded size allowed, per block and event of the function


@dataclass(slots=True)
class Step:
    """Something that happens inside a block: an event (`event` >= 0, perhaps under `pred`), or a new value of the
    predicates in `defines`; `copy_of` says that the first of them equals another one, or its negation."""

    event: int = -1
    pred: tuple[str, bool] | None = None
    defines: tuple[str, ...] = ()
    copy_of: tuple[str, bool] | None = None


@dataclass(slots=True)
class Flow:
    """A basic block: its steps, then where it goes: `taken` if `pred` holds (always, if None), else `following`."""

    steps: list[Step] = field(default_factory=list)
    pred: tuple[str, bool] | None = None
    taken: tuple[int, ...] = ()
    following: tuple[int, ...] = ()


@dataclass
class EventGraph:
    """`event[n]` is the event of node n, -1 for none; node 0 is the entry, node 1 the exit. `correlated` is False when
    the function has too many predicates to follow: then some paths in the graph cannot be taken."""

    event: list[int]
    successors: list[list[int]]
    place: dict[int, int] = field(default_factory=dict)  # event -> index of its block
    correlated: bool = True

    @cached_property
    def order(self) -> list[int]:
        """Reachable nodes in reverse post-order."""
        return _reverse_postorder(self.successors)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """Of reachable nodes, reachable predecessors."""
        out: list[list[int]] = [[] for _ in self.successors]
        for n in self.order:
            for s in self.successors[n]:
                out[s].append(n)
        return out


def unfold(blocks: list[Flow], exit_block: int) -> EventGraph:
    """Event graph of a function given as blocks; block 0 is the entry."""
    watched = _watched(blocks)
    live = _live(blocks, exit_block, watched) if watched else [frozenset[str]()] * len(blocks)
    budget = _MOST_COPIES * (len(blocks) + sum(len(b.steps) for b in blocks)) + 1000
    graph = _unfold(blocks, exit_block, watched, live, budget)
    if graph is None:
        graph = _unfold(blocks, exit_block, watched, [frozenset[str]()] * len(blocks), 1 << 62)
        assert graph is not None
        graph.correlated = False
    _shorten(graph)
    graph.place = {s.event: n for n, b in enumerate(blocks) for s in b.steps if s.event >= 0}
    return graph


def _shorten(graph: EventGraph) -> None:
    """Take out nodes without an event that lead to one node only."""
    target = list(range(len(graph.event)))
    for n, out in enumerate(graph.successors):
        if n > 1 and graph.event[n] < 0 and len(out) == 1 and out[0] != n:
            target[n] = out[0]

    def final(n: int) -> int:
        path = []
        while target[n] != n and len(path) <= len(target):
            path.append(n)
            n = target[n]
        for m in path:
            target[m] = n
        return n

    for n, out in enumerate(graph.successors):
        graph.successors[n] = list(dict.fromkeys(final(s) for s in out))


def _watched(blocks: list[Flow]) -> frozenset[str]:
    """Predicates that decide more than one event or branch."""
    uses: dict[str, int] = {}
    for b in blocks:
        for pred in (*(s.pred for s in b.steps if s.event >= 0), b.pred):
            if pred is not None:
                uses[pred[0]] = uses.get(pred[0], 0) + 1
    # A copy is as interesting as what it is copied from, and the other way round.
    copies = [(s.copy_of[0], s.defines[0]) for b in blocks for s in b.steps if s.copy_of]
    for source, target in copies:
        uses[source] = uses.get(source, 0) + uses.get(target, 0)
    for source, target in reversed(copies):
        uses[target] = max(uses.get(target, 0), uses[source])
    return frozenset(p for p, n in uses.items() if n > 1)


def _live(blocks: list[Flow], exit_block: int, watched: frozenset[str]) -> list[frozenset[str]]:
    """Per block the watched predicates whose value on entry still decides something."""
    need: list[frozenset[str]] = []
    kill: list[frozenset[str]] = []
    for b in blocks:
        n: set[str] = set()
        k: set[str] = set()
        if b.pred and b.pred[0] in watched:
            n.add(b.pred[0])
        for s in reversed(b.steps):
            for d in s.defines:
                if s.pred is None:
                    k.add(d)
                if d in n and s.copy_of and s.copy_of[0] in watched:
                    n.add(s.copy_of[0])
                n.discard(d)
            if s.event >= 0 and s.pred and s.pred[0] in watched:
                n.add(s.pred[0])
        need.append(frozenset(n))
        kill.append(frozenset(k))
    live = list(need)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for i, b in enumerate(blocks):
        for s in {*b.taken, *b.following}:
            if s != exit_block:
                predecessors[s].append(i)
    work = list(range(len(blocks)))
    queued = set(work)
    while work:
        i = work.pop()
        queued.discard(i)
        b = blocks[i]
        out = frozenset[str]().union(*(live[s] for s in (*b.taken, *b.following) if s != exit_block))
        new = need[i] | (out - kill[i])
        if new != live[i]:
            live[i] = new
            for p in predecessors[i]:
                if p not in queued:
                    queued.add(p)
                    work.append(p)
    return live


_Facts = tuple[tuple[str, bool], ...]


def _unfold(
    blocks: list[Flow], exit_block: int, watched: frozenset[str], live: list[frozenset[str]], budget: int
) -> EventGraph | None:
    event = [-1, -1]
    successors: list[list[int]] = [[], []]
    heads: dict[tuple[int, _Facts], int] = {}
    work: list[tuple[int, _Facts]] = []

    def node(e: int) -> int:
        event.append(e)
        successors.append([])
        return len(event) - 1

    def head(block: int, facts: dict[str, bool]) -> int:
        if block == exit_block:
            return 1
        kept = sorted((p, v) for p, v in facts.items() if p in live[block])
        key = (block, tuple(kept[:_MOST_FACTS]))
        if key not in heads:
            heads[key] = node(-1)
            work.append(key)
        return heads[key]

    if not blocks:
        successors[0].append(1)
        return EventGraph(event, successors)
    successors[0].append(head(0, {}))
    while work:
        block, known = work.pop()
        b = blocks[block]
        # Each state is (last node, facts); a test of an unknown watched predicate splits it.
        states: list[tuple[int, dict[str, bool]]] = [(heads[block, known], dict(known))]
        for s in b.steps:
            after: list[tuple[int, dict[str, bool]]] = []
            for last, facts in states:
                if s.event < 0:
                    copied = s.copy_of if s.pred is None and s.defines[0] in watched else None
                    for value, f in _test(copied, facts, watched) if copied else ((None, facts),):
                        f = {p: v for p, v in f.items() if p not in s.defines}
                        if value is not None:
                            f[s.defines[0]] = value
                        after.append((last, f))
                    continue
                for happens, f in _test(s.pred, facts, watched):
                    if happens is not False:
                        n = node(s.event)
                        successors[last].append(n)
                        if happens is None:  # a predicate that nothing else depends on: it may be skipped
                            skip = node(-1)
                            successors[last].append(skip)
                            successors[n].append(skip)
                            n = skip
                        after.append((n, f))
                    else:
                        after.append((last, f))
            states = _merge(after, successors, node)
        for last, facts in states:
            for holds, f in _test(b.pred, facts, watched):
                targets = [*b.taken, *b.following] if holds is None else b.taken if holds else b.following
                for t in dict.fromkeys(targets):
                    h = head(t, f)
                    if h not in successors[last]:
                        successors[last].append(h)
        if len(event) > budget:
            return None
    return EventGraph(event, successors)


def _test(
    pred: tuple[str, bool] | None, facts: dict[str, bool], watched: frozenset[str]
) -> Iterable[tuple[bool | None, dict[str, bool]]]:
    """Outcomes of a test: (True, facts) or (False, facts); (None, facts) for either, not remembered."""
    if pred is None:
        yield True, facts
    elif pred[0] in facts:
        yield facts[pred[0]] != pred[1], facts
    elif pred[0] in watched and len(facts) < _MOST_FACTS:
        for value in (True, False):
            yield value != pred[1], {**facts, pred[0]: value}
    else:
        yield None, facts


def _merge(states, successors, node):
    """States with equal facts continue as one."""
    if len(states) == 1:
        return states
    groups: dict[_Facts, list[int]] = {}
    for last, facts in states:
        groups.setdefault(tuple(sorted(facts.items())), []).append(last)
    merged = []
    for facts, lasts in groups.items():
        if len(lasts) == 1:
            merged.append((lasts[0], dict(facts)))
            continue
        join = node(-1)
        for last in lasts:
            successors[last].append(join)
        merged.append((join, dict(facts)))
    return merged


# -- order --------------------------------------------------------------------------------------------------


class Order:
    """First, last and neighbouring letters of every projected pair. Letter x is bit 1 << x; sets are integers.

    `letter[n]` is the letter of node n of the graph, -1 for none; several nodes may carry one letter.
    """

    def __init__(self, graph: EventGraph, letter: list[int], count: int) -> None:
        self.count = count
        self.successors = graph.successors
        self.letter = letter
        self.order = graph.order
        self.predecessors = graph.predecessors
        self.nodes: list[list[int]] = [[] for _ in range(count)]
        for n in self.order:
            if letter[n] >= 0:
                self.nodes[letter[n]].append(n)
        everything = (1 << count) - 1
        passed = self._must(self.order, self.predecessors, 0, everything)
        coming = self._must(self.order[::-1], self.successors, 1, everything)
        ahead = self._may()
        #: before[x]: letters that every path from the entry passes before it reaches x.
        self.before = [self._meet(passed, x, everything) for x in range(count)]
        #: after[x]: letters that every path from x to the exit passes.
        self.after = [self._meet(coming, x, everything) for x in range(count)]
        #: reaches[x]: letters that some path passes after x; reached_by[x]: those that it passes before x.
        self.reaches = [0] * count
        self.reached_by = [0] * count
        behind = self._behind()
        for x in range(count):
            for n in self.nodes[x]:
                self.reaches[x] |= ahead[n]
                self.reached_by[x] |= behind[n]

    def exists(self, x: int) -> bool:
        return bool(self.nodes[x])

    def _meet(self, sets: list[int], x: int, everything: int) -> int:
        out = everything
        for n in self.nodes[x]:
            out &= sets[n]
        return out

    def _must(self, order: list[int], sources: list[list[int]], root: int, everything: int) -> list[int]:
        """Per node the letters on all paths from `root` (along `sources` backwards), the node itself not counted."""
        into = [everything] * len(self.letter)
        into[root] = 0
        changed = True
        while changed:
            changed = False
            for n in order:
                if n == root:
                    continue
                value = everything
                for p in sources[n]:
                    x = self.letter[p]
                    value &= into[p] | (1 << x if x >= 0 else 0)
                if value != into[n]:
                    into[n] = value
                    changed = True
        return into

    def _may(self, avoid: int = -1) -> list[int]:
        """Per node the letters that some path passes behind it, on paths that do not pass `avoid`."""
        ahead = [0] * len(self.letter)
        changed = True
        while changed:
            changed = False
            for n in reversed(self.order):
                value = 0
                for s in self.successors[n]:
                    x = self.letter[s]
                    if x < 0:
                        value |= ahead[s]
                    elif x != avoid:
                        value |= ahead[s] | 1 << x
                if value != ahead[n]:
                    ahead[n] = value
                    changed = True
        return ahead

    def _behind(self) -> list[int]:
        """Per node the letters that some path passes before it."""
        behind = [0] * len(self.letter)
        changed = True
        while changed:
            changed = False
            for n in self.order:
                value = 0
                for p in self.predecessors[n]:
                    x = self.letter[p]
                    value |= behind[p] | (1 << x if x >= 0 else 0)
                if value != behind[n]:
                    behind[n] = value
                    changed = True
        return behind

    def repeats(self, y: int) -> int:
        """Letters x for which some path leads from x to x again without passing y."""
        ahead = self._may(avoid=y)
        out = 0
        for x, nodes in enumerate(self.nodes):
            if x != y and any(ahead[n] >> x & 1 for n in nodes):
                out |= 1 << x
        return out


def _reverse_postorder(successors: list[list[int]]) -> list[int]:
    seen = {0}
    order: list[int] = []
    stack = [(0, iter(successors[0]))]
    while stack:
        n, rest = stack[-1]
        for s in rest:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(successors[s])))
                break
        else:
            order.append(n)
            stack.pop()
    order.reverse()
    return order


def cyclic(successors: list[list[int]], order: list[int], blocked: Callable[[int], bool]) -> set[int]:
    """Nodes on a cycle that passes no blocked node (strongly connected components, after Kosaraju and Sharir)."""
    inside = [n for n in order if not blocked(n)]
    keep = set(inside)
    backward: dict[int, list[int]] = {n: [] for n in inside}
    out: set[int] = set()
    for n in inside:
        for s in successors[n]:
            if s in keep:
                backward[s].append(n)
                if s == n:
                    out.add(n)
    finished: list[int] = []
    seen: set[int] = set()
    for root in inside:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(successors[root]))]
        while stack:
            n, rest = stack[-1]
            for s in rest:
                if s in keep and s not in seen:
                    seen.add(s)
                    stack.append((s, iter(successors[s])))
                    break
            else:
                finished.append(n)
                stack.pop()
    seen.clear()
    for root in reversed(finished):
        if root in seen:
            continue
        seen.add(root)
        component = [root]
        for n in component:
            fresh = [p for p in backward[n] if p not in seen]
            seen.update(fresh)
            component += dict.fromkeys(fresh)
        if len(component) > 1:
            out.update(component)
    return out
