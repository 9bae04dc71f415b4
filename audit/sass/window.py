"""How many bytes a thread can move between two marks.

A window for one class of access opens at a mark that keeps such accesses from sinking below it (or at the entry) and
closes at any mark after it that keeps them from rising above it, up to the next that opens one. Nothing of the class may enter a window from outside, and
copying code adds nothing to any single path; so the most bytes that a path through a window moves in SASS cannot
exceed what the PTX moves there. It is the check that holds when single accesses cannot be told apart, and when the
line table of a listing cannot be believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .eventgraph import EventGraph, cyclic
from .witness import Mark

UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class Excess:
    """On some path from `opens` to `closes` (PTX events, -1 for the entry) SASS moves `found` bytes of `access`, PTX
    at most `allowed`. `events` are the SASS accesses of that class in the window."""

    access: tuple[str, str]
    opens: int
    closes: int
    found: int
    allowed: int
    events: tuple[int, ...]


def excesses(
    ptx: Sequence[Mark],
    sass: Sequence[Mark],
    letters: Sequence[int],
    origin: Sequence[int],
    ptx_graph: EventGraph,
    sass_graph: EventGraph,
) -> Iterator[Excess]:
    """Windows through which SASS can move more than PTX. `letters` and `origin` name the PTX event that each event of
    PTX and SASS counts as (-1 for none)."""
    for access in sorted({(m.kind, c) for m in sass for c in m.classes if m.is_access and c != "strong"}):
        kind, name = access
        opens = {n for n, m in enumerate(ptx) if name in m.keeps_before}
        closes = {n for n, m in enumerate(ptx) if name in m.keeps_after}
        if not closes:
            continue
        p_bytes = [_bytes(m, access, UNBOUNDED) for m in ptx]
        s_bytes = [
            _bytes(m, access, 4) if len(m.classes - {"strong"}) == 1 or kind == "atomic" else 0 for m in sass
        ]
        allowed = _windows(ptx_graph, letters, p_bytes, opens, closes)
        for window, (most, events) in _windows(sass_graph, origin, s_bytes, opens, closes).items():
            if window in allowed and allowed[window][0] < most < UNBOUNDED:
                yield Excess(access, *window, most, allowed[window][0], tuple(events))


def _bytes(mark: Mark, access: tuple[str, str], unknown: int) -> int:
    if not mark.is_access or mark.kind != access[0] or access[1] not in mark.classes:
        return 0
    return unknown if mark.width is None else mark.width


def _windows(
    graph: EventGraph, origin: Sequence[int], size: Sequence[int], opens: set[int], closes: set[int]
) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """Per window, as (opening event, closing event), the most bytes on a path and the accesses that may lie on one."""
    event = graph.event

    def mark(n: int) -> int:
        return origin[event[n]] if event[n] >= 0 else -1

    def ends(n: int) -> bool:
        return mark(n) in opens

    loops = cyclic(graph.successors, graph.order, ends)
    rank = {n: i for i, n in enumerate(graph.order)}
    out: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for start in graph.order:
        if start != 0 and mark(start) not in opens:
            continue
        inside = _inside(graph, start, ends)
        most = {start: 0}
        closing: dict[int, int] = {}
        # Within a loop that passes no mark the bytes have no bound; elsewhere the order is that of a DAG.
        for n in sorted(inside, key=lambda n: -1 if n == start else rank[n]):
            if n not in most:
                continue
            here = most[n]
            if n != start and event[n] >= 0 and size[event[n]]:
                here = UNBOUNDED if n in loops else min(UNBOUNDED, here + size[event[n]])
            for s in graph.successors[n]:
                if mark(s) in closes:
                    closing[mark(s)] = max(closing.get(mark(s), 0), here)
                if s in inside and s != start:
                    most[s] = max(most.get(s, 0), here)
        for close, value in closing.items():
            key = (mark(start) if start else -1, close)
            old, events = out.get(key, (0, []))
            fresh = sorted({event[n] for n in inside if event[n] >= 0 and size[event[n]]} - set(events))
            out[key] = (max(old, value), events + fresh)
    return out


def _inside(graph: EventGraph, start: int, ends) -> set[int]:  # noqa: ANN001
    """Nodes that can be reached from `start` without passing a mark that opens a window."""
    seen = {start}
    stack = [start]
    while stack:
        for s in graph.successors[stack.pop()]:
            if s not in seen and s != 1 and not ends(s):
                seen.add(s)
                stack.append(s)
    return seen
