"""Which SASS event stands for which PTX event, when the listing names no PTX lines.

The two event graphs are walked together from their entries. Synchronisation comes first: a pair (s, p) says that
execution has just passed s in SASS and p in PTX; the next synchronisation after s must be one that may come next after
p. A mark that SASS lacks, and one that it has in excess, each cost something, and every SASS event takes the PTX event
that it reaches at the least cost (shortest paths over pairs).

Accesses come second: those between the same neighbours are shared out by what they are (direction, space, strength,
bytes) in the order of the text. An access that has no counterpart between its own neighbours is taken for the like one
that is missing elsewhere, so that the comparison shows it as moved.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .eventgraph import EventGraph, cyclic
from .witness import Mark, accepts

_SKIP = 4  # a PTX mark that SASS does not have here
_EXTRA = 3  # a SASS mark that nothing in PTX explains here
_SLACK = 2 * (_SKIP + _EXTRA)  # pairs this much worse than the best for a SASS node are not followed
_LONGEST_SKIP = 3
_FAR = 1 << 60
_WITHIN_CLUSTER_BARRIER = ("MEMBAR", "CCTL.IVALL")  # what has no place of its own in the way round it


@dataclass
class Alignment:
    """Per SASS event its PTX event, -1 for none. `counts_as`: PTX accesses that nothing tells apart, to the first of
    them. `ambiguous`: SASS events for which another PTX event would do as
    well. `unexplained`: accesses that no PTX access accounts for; `left_out`: PTX synchronisation that some path of the
    machine code passes over."""

    origin: list[int]
    counts_as: dict[int, int] = field(default_factory=dict)
    ambiguous: set[int] = field(default_factory=set)
    unexplained: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)


def align(
    ptx: Sequence[Mark],
    sass: Sequence[Mark],
    ptx_graph: EventGraph,
    sass_graph: EventGraph,
    loops: Sequence[frozenset[int]],
) -> Alignment:
    """Match the events of two programs by their structure. `loops[n]` names the loops around PTX event n."""
    found = align_sync(ptx, sass, ptx_graph, sass_graph, [-1] * len(sass))
    found.left_out = _left_out(ptx, found.origin, ptx_graph, sass_graph, loops)
    _share_accesses(ptx, sass, ptx_graph, sass_graph, found)
    return found


# -- synchronisation ----------------------------------------------------------------------------------------


def align_sync(
    ptx: Sequence[Mark],
    sass: Sequence[Mark],
    ptx_graph: EventGraph,
    sass_graph: EventGraph,
    fixed: Sequence[int],
) -> Alignment:
    """Match the synchronisation alone. `fixed` holds the PTX event of each SASS event that is known, -1 elsewhere."""
    p_event, s_event = ptx_graph.event, sass_graph.event
    p_next = _next(ptx_graph, [not m.is_access for m in ptx])
    s_next = _next(sass_graph, [not m.is_access for m in sass])
    start: _Pair = (0, 0, False)
    cost: dict[_Pair, int] = {start: 0}
    best: dict[int, int] = {}  # SASS node -> least cost of any pair with it
    edges: dict[_Pair, list[tuple[_Pair, int]]] = {}
    ahead_of: dict[int, dict[int, int]] = {}
    heap = [(0, start)]
    while heap:
        c, pair = heapq.heappop(heap)
        s, p, _ = pair
        if pair in edges or c > best.setdefault(s, c) + _SLACK:
            continue
        edges[pair] = out = []
        if p not in ahead_of:
            ahead_of[p] = _ahead(p, p_next, p_event, ptx)
        ahead = ahead_of[p]
        for t in s_next(s):
            if t == 1:
                out.append((_END, 0 if 1 in p_next(p) else _SKIP))
                continue
            mark, known = sass[s_event[t]], fixed[s_event[t]]
            out.append(((t, p, False), _EXTRA))
            for q, skipped in ahead.items():
                if p_event[q] == known or (known < 0 and accepts(ptx[p_event[q]], mark)):
                    out.append(((t, q, True), skipped))
        for to, step in out:
            if c + step < cost.get(to, _FAR):
                cost[to] = c + step
                heapq.heappush(heap, (c + step, to))
    rest = _cost_to_end(edges)
    # The cheapest complete walk through each SASS event decides what it stands for.
    choices: dict[int, dict[int, int]] = defaultdict(dict)
    for (s, p, is_match), c in cost.items():
        if s > 1 and (s, p, is_match) in edges:
            q = p_event[p] if is_match else -1
            e = s_event[s]
            choices[e][q] = min(choices[e].get(q, _FAR), c + rest.get((s, p, is_match), _SLACK))
    found = Alignment([-1] * len(sass))
    ties: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for e in sorted(choices):
        least = min(choices[e].values())
        ties[tuple(sorted(q for q, d in choices[e].items() if d == least))].append(e)
    for winners, events in ties.items():
        for n, e in enumerate(events):
            # Alike in all that was looked at: in the order of the text.
            found.origin[e] = winners[n % len(winners)]
        if len(winners) > 1:
            found.ambiguous.update(events)
    return found


def _left_out(
    ptx: Sequence[Mark],
    origin: list[int],
    ptx_graph: EventGraph,
    sass_graph: EventGraph,
    loops: Sequence[frozenset[int]],
) -> set[int]:
    """PTX marks without which a step of the machine code, from one matched mark to the next, has no like in PTX.

    A loop that is entered may be passed by: where ptxas has unrolled it, some path that no execution takes does so.
    """
    inside: dict[int, list[int]] = defaultdict(list)  # loop -> its nodes
    for n, e in enumerate(ptx_graph.event):
        if e >= 0:
            for loop in loops[e]:
                inside[loop].append(n)
    p_next = _next(ptx_graph, [not m.is_access for m in ptx])
    s_next = _next(sass_graph, [o >= 0 and not ptx[o].is_access for o in origin])
    nodes: dict[int, list[int]] = defaultdict(list)
    for n, e in enumerate(ptx_graph.event):
        nodes[e].append(n)
    steps: dict[int, set[int]] = defaultdict(
        set
    )  # PTX event (-2 the entry) -> PTX events that SASS has next (-3 the exit)
    for s in sass_graph.order:
        e = sass_graph.event[s]
        if s == 0 or (e >= 0 and origin[e] >= 0 and not ptx[origin[e]].is_access):
            for t in s_next(s):
                steps[-2 if s == 0 else origin[e]].add(-3 if t == 1 else origin[sass_graph.event[t]])
    out: set[int] = set()
    for a, following in steps.items():
        start = [0] if a == -2 else nodes[a]
        front = [n for p in start for n in p_next(p)]
        direct: set[int] = set()
        while front:
            n = front.pop()
            if n not in direct:
                direct.add(n)
                if n == 1:
                    continue
                e = ptx_graph.event[n]
                mark = ptx[e]
                for loop in loops[e] - (loops[a] if a >= 0 else frozenset()):
                    front += [
                        q
                        for m in inside[loop]
                        for q in p_next(m)
                        if q == 1 or loop not in loops[ptx_graph.event[q]]
                    ]
                # Part of a cluster barrier is passed over when its stand-in has been taken for the whole of it.
                if mark.way_round and mark.kind in _WITHIN_CLUSTER_BARRIER:
                    front += p_next(n)
        reached = {-3 if n == 1 else ptx_graph.event[n] for n in direct}
        if following - reached:
            out |= reached - following - {-3} or {a}
    return out - {-2}


_Pair = tuple[int, int, bool]  # SASS node, PTX node, whether the former was taken for the latter
_END: _Pair = (1, 1, True)


def _cost_to_end(edges: dict[_Pair, list[tuple[_Pair, int]]]) -> dict[_Pair, int]:
    """Least cost from each pair to the end of both programs."""
    backward: dict[_Pair, list[tuple[_Pair, int]]] = defaultdict(list)
    for pair, out in edges.items():
        for to, step in out:
            backward[to].append((pair, step))
    rest: dict[_Pair, int] = {}
    heap = [(0, _END)]
    while heap:
        c, pair = heapq.heappop(heap)
        if pair not in rest:
            rest[pair] = c
            for before, step in backward[pair]:
                if before not in rest:
                    heapq.heappush(heap, (c + step, before))
    return rest


def _next(graph: EventGraph, sync: Sequence[bool]) -> Callable[[int], tuple[int, ...]]:
    """Per node the synchronisation, or the exit (node 1), that comes next on some path."""
    known: dict[int, tuple[int, ...]] = {}

    def following(n: int) -> tuple[int, ...]:
        if n not in known:
            found: dict[int, None] = {}
            seen: set[int] = set()
            stack = [n]
            while stack:
                for s in graph.successors[stack.pop()]:
                    e = graph.event[s]
                    if s == 1 or (e >= 0 and sync[e]):
                        found[s] = None
                    elif s not in seen:
                        seen.add(s)
                        stack.append(s)
            known[n] = tuple(found)
        return known[n]

    return following


def _ahead(
    p: int, following: Callable[[int], tuple[int, ...]], event: Sequence[int], marks: Sequence[Mark]
) -> dict[int, int]:
    """PTX synchronisation that may come next after p, with the cost of the marks left out on the way."""
    out: dict[int, int] = {}
    front = {p: 0}
    for _ in range(_LONGEST_SKIP + 1):
        new: dict[int, int] = {}
        for q, c in front.items():
            for r in following(q):
                if r != 1 and c < out.get(r, _FAR):
                    out[r] = c
                    mark = marks[event[r]]
                    new[r] = c + (0 if mark.way_round and mark.kind in _WITHIN_CLUSTER_BARRIER else _SKIP)
        front = new
        if not front:
            break
    return out


# -- accesses -----------------------------------------------------------------------------------------------

_Slot = tuple[int, int]  # sets of the PTX synchronisation that may have been the last, and may be the next
_Kind = tuple[str, frozenset[str]]


def _share_accesses(
    ptx: Sequence[Mark], sass: Sequence[Mark], ptx_graph: EventGraph, sass_graph: EventGraph, found: Alignment
) -> None:
    own = [n if not m.is_access else -1 for n, m in enumerate(ptx)]
    stands = [o if not m.is_access else -1 for o, m in zip(found.origin, sass, strict=True)]
    p_slots = _slots(ptx_graph, own, len(ptx))
    s_slots = _slots(sass_graph, stands, len(ptx))
    event = ptx_graph.event
    around = cyclic(ptx_graph.successors, ptx_graph.order, lambda n: event[n] >= 0 and own[event[n]] >= 0)
    supplies: dict[tuple[_Kind, _Slot], _Supply] = {}
    for n, m in enumerate(ptx):
        if m.is_access and n in p_slots:
            kind = (m.kind, m.classes)
            supply = supplies.setdefault((kind, p_slots[n]), _Supply(kind, p_slots[n], n))
            supply.bytes += m.width or _UNKNOWN_WIDTH
            found.counts_as[n] = supply.first
    for x in around:
        if event[x] in found.counts_as:
            key = (ptx[event[x]].kind, ptx[event[x]].classes), p_slots[event[x]]
            supplies[key].bytes = _FAR
    by_kind: dict[str, list[_Supply]] = defaultdict(list)
    for supply in supplies.values():
        by_kind[supply.kind[0]].append(supply)
    # Each stretch of the machine code may use what its slot supplies once more: ptxas copies code.
    left: list[int] = []
    used: dict[int, int] = defaultdict(int)
    demand: dict[tuple[_Kind, _Slot, int], list[int]] = defaultdict(list)
    stretch = 0  # of one block, between two marks
    for e, m in enumerate(sass):
        stretch += not m.is_access or sass_graph.place.get(e) != sass_graph.place.get(e - 1)
        if m.is_access and e in s_slots:
            demand[(m.kind, m.classes), s_slots[e], stretch].append(e)
    for (kind, slot, _), events in demand.items():
        fitting = [
            s
            for s in by_kind[kind[0]]
            if alike(s.kind[1], kind[1]) and not slot[0] & ~s.slot[0] and not slot[1] & ~s.slot[1]
        ]
        fitting.sort(key=lambda s: ("strong" in s.kind[1]) != ("strong" in kind[1]))
        room = {s.first: s.bytes for s in fitting}
        for e in events:
            width = sass[e].width or 0
            supply = next((s for s in fitting if room[s.first] >= width), None)
            if supply is None:
                left.append(e)
            else:
                room[supply.first] -= width
                found.origin[e] = supply.first
        for s in fitting:
            used[s.first] = max(used[s.first], s.bytes - room[s.first])
    for e in left:
        width = sass[e].width or 0
        short = [
            s
            for s in by_kind[sass[e].kind]
            if alike(s.kind[1], sass[e].classes) and s.bytes < _FAR and s.bytes - used[s.first] >= width
        ]
        if short:
            found.origin[e] = short[0].first
            used[short[0].first] += width
        else:
            found.unexplained.append(e)


@dataclass
class _Supply:
    """PTX accesses of one kind between the same neighbours: nothing in SASS tells them apart. `first` is the first
    of them, `bytes` what one pass through them moves per thread."""

    kind: _Kind
    slot: _Slot
    first: int
    bytes: int = 0


_UNKNOWN_WIDTH = 16  # the widest that one machine access of a thread had before 256-bit loads


def alike(ptx: frozenset[str], sass: frozenset[str]) -> bool:
    """Same space, as far as either tells; a weak PTX access may be strong in SASS (`ld.global.cg`), not the reverse."""
    if "strong" in ptx and "strong" not in sass and not any(c.startswith("shared") for c in sass):
        return False
    return bool((ptx & sass) - {"strong"})


def _slots(graph: EventGraph, mark: list[int], count: int) -> dict[int, _Slot]:
    """Per access event the marks that may come just before it and just after it; bit `count` is entry or exit."""
    order, predecessors = graph.order, graph.predecessors
    last = [0] * len(graph.event)
    last[0] = 1 << count
    following = [0] * len(graph.event)
    following[1] = 1 << count

    def own(n: int) -> int:
        e = graph.event[n]
        return 1 << mark[e] if e >= 0 and mark[e] >= 0 else 0

    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            value = 0
            for p in predecessors[n]:
                value |= own(p) or last[p]
            if value != last[n]:
                last[n] = value
                changed = True
    changed = True
    while changed:
        changed = False
        for n in reversed(order):
            if n == 1:
                continue
            value = 0
            for s in graph.successors[n]:
                value |= own(s) or following[s]
            if value != following[n]:
                following[n] = value
                changed = True
    slots: dict[int, _Slot] = {}
    for n in order:
        e = graph.event[n]
        if e >= 0 and mark[e] < 0:
            before, after = slots.get(e, (0, 0))
            slots[e] = (before | last[n], after | following[n])
    return slots
