"""How many bytes a thread can move between two marks.

A window for one class of access opens at a mark that keeps such accesses from sinking below it (or at the entry) and
closes at any mark after it that keeps them from rising above it, up to the next that opens one. Nothing of the class
may enter a window from outside, and copying code adds nothing to any single path; so the most bytes that a path
through a window moves in SASS cannot exceed what the PTX moves there. It is the check that holds when single accesses
cannot be told apart, and when the line table of a listing cannot be believed.
"""

from __future__ import annotations

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
    slack: int = 0,
) -> Iterator[Excess]:
    """Windows through which SASS can move more than PTX. `letters` and `origin` name the PTX event that each event of
    PTX and SASS counts as (-1 for none); `slack` bytes of shared memory are not counted."""
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
        found = _windows(sass_graph, origin, s_bytes, opens, closes)
        for window, most in found.items():
            spare = slack if name.startswith("shared") else 0
            if window in allowed and allowed[window] + spare < most < UNBOUNDED:
                inside = _accesses(sass_graph, origin, s_bytes, opens, window)
                yield Excess(access, *window, most, allowed[window], inside)


def _bytes(mark: Mark, access: tuple[str, str], unknown: int) -> int:
    if not mark.is_access or mark.kind != access[0] or access[1] not in mark.classes:
        return 0
    return unknown if mark.width is None else mark.width


def _windows(
    graph: EventGraph, origin: Sequence[int], size: Sequence[int], opens: set[int], closes: set[int]
) -> dict[tuple[int, int], int]:
    """Per window, as (opening event, closing event), the most bytes on a path."""
    event = graph.event
    mark = [origin[e] if e >= 0 else -1 for e in event]
    opening = [m in opens for m in mark]
    loops = cyclic(graph.successors, graph.order, opening.__getitem__)
    rank = {n: i for i, n in enumerate(graph.order)}
    out: dict[tuple[int, int], int] = {}
    for start in graph.order:
        if start != 0 and not opening[start]:
            continue
        opened = mark[start] if start else -1
        inside = _inside(graph, start, opening)
        most = {start: 0}
        # Within a loop that passes no opening mark the bytes have no bound; elsewhere the order is that of a DAG.
        for n in (start, *sorted(inside - {start}, key=rank.__getitem__)):
            if n not in most:
                continue
            here = most[n]
            if n != start and event[n] >= 0 and size[event[n]]:
                here = UNBOUNDED if n in loops else min(UNBOUNDED, here + size[event[n]])
            for s in graph.successors[n]:
                if mark[s] in closes:
                    out[opened, mark[s]] = max(out.get((opened, mark[s]), 0), here)
                if s in inside and s != start:
                    most[s] = max(most.get(s, 0), here)
    return out


def _inside(graph: EventGraph, start: int, opening: Sequence[bool]) -> set[int]:
    """Nodes that can be reached from `start` without passing a mark that opens a window."""
    seen = {start}
    stack = [start]
    while stack:
        for s in graph.successors[stack.pop()]:
            if s not in seen and s != 1 and not opening[s]:
                seen.add(s)
                stack.append(s)
    return seen


def _accesses(
    graph: EventGraph, origin: Sequence[int], size: Sequence[int], opens: set[int], window: tuple[int, int]
) -> tuple[int, ...]:
    """The accesses that may be executed after the window's opening and before another one opens."""
    mark = [origin[e] if e >= 0 else -1 for e in graph.event]
    opening = [m in opens for m in mark]
    starts = [n for n in graph.order if (n == 0 if window[0] < 0 else mark[n] == window[0])]
    inside = {n for start in starts for n in _inside(graph, start, opening)}
    return tuple(sorted({graph.event[n] for n in inside if graph.event[n] >= 0 and size[graph.event[n]]}))
