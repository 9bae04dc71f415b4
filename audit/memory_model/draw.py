"""An execution drawn for a person: a timeline in text, and a graph as SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from textwrap import wrap

from . import axioms
from .events import Kind, ReadOf, evaluate
from .execution import Execution
from .explain import direct_order, shortest_path
from .graph import Graph
from .litmus import instruction_text, place_text
from .program import Place
from .relation import bits, closure, is_irreflexive, pairs

Broken = Mapping[str, tuple[int, ...]]  # axiom -> the events that show how it is broken


def event_text(g: Graph, event: int) -> str:
    """Thread and instruction of an event."""
    e = g.events[event]
    if e.thread < 0:
        return f"init {e.address}={e.value}"
    return f"{g.program.threads[e.thread].name} {_what(g, event)}"


def _what(g: Graph, event: int) -> str:
    e = g.events[event]
    if e.source is None:
        return {Kind.START: "grid starts", Kind.END: "grid ends"}[e.kind]
    part = {Kind.BARRIER_ARRIVE: " (arrive)", Kind.BARRIER_WAIT: " (wait)"}.get(e.kind, "")
    if e.operation is not None:
        part = {Kind.READ: " (source read)", Kind.WRITE: " (write)"}.get(e.kind, " (completion)")
    elif event in g.rmw.values():
        part = " (write)"
    elif event in g.rmw:
        part = " (read)"
    return instruction_text(e.source) + part + (f" [PTX line {e.line}]" if e.line else "")


@dataclass
class Picture:
    """An execution laid out: events from top to bottom in an order that respects what precedes what."""

    execution: Execution
    rows: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, x: Execution) -> Picture:
        rows = _layout(x)
        names = {}
        for k, event in enumerate(e for e in rows if x.graph.events[e].thread >= 0):
            names[event] = _letter(k)
        for location, event in x.graph.initial.items():
            names[event] = f"init {location}"
        return cls(x, rows, names)

    def value(self, event: int) -> str:
        """ " = 1" behind a read or a write whose instruction does not show its value."""
        x = self.execution
        e = x.graph.events[event]
        if e.kind in (Kind.READ, Kind.MBARRIER_WAIT):
            value = x.value(ReadOf(e.thread, e.index))
        elif e.kind == Kind.WRITE and not isinstance(e.value, int):
            value = evaluate(e.value, x.value)
        else:
            return ""
        return "" if value is None else f" = {value}"

    def edges(self) -> dict[str, list[tuple[int, int, str]]]:
        """Drawn relations: reads-from, coherence (immediate), from-reads, synchronizes-with (with its cause)."""
        x = self.execution
        g = x.graph
        shown = {i for i in range(g.n) if i in self.names}
        immediate = [
            (a, b, "")
            for a, b in pairs(x.coherence)
            if not any(x.coherence[a] >> k & 1 and x.coherence[k] >> b & 1 for k in g.writes)
        ]
        back = [
            (r, b, "")
            for r, w in x.reads_from.items()
            for b in bits(x.coherence[w])
            if not any(x.coherence[w] >> k & 1 and x.coherence[k] >> b & 1 for k in g.writes)
            and g.rmw.get(r) != b
        ]
        out = {
            "rf": [(w, r, "") for r, w in x.reads_from.items()],
            "co": immediate,
            "fr": back,
            "sw": list(x.synchronizes()),
        }
        return {k: [e for e in v if {e[0], e[1]} <= shown] for k, v in out.items()}


def _letter(k: int) -> str:
    return chr(ord("a") + k % 26) + ("" if k < 26 else str(k // 26))


def _layout(x: Execution) -> list[int]:
    """Events of threads, ordered by causality and reads where these form no cycle, else by causality alone."""
    g = x.graph
    base = axioms.base_causality_order(g, x.order)
    rows = list(base)
    for r, w in x.reads_from.items():
        rows[w] |= 1 << r
    order = closure(rows)
    if not is_irreflexive(order):
        order = list(g.program_order) if not is_irreflexive(base) else base
    events = [i for i, e in enumerate(g.events) if e.thread >= 0]
    done: list[int] = []
    while events:
        ready = [i for i in events if not any(order[j] >> i & 1 for j in events if j != i)]
        # Stay in a thread as long as possible: less zigzag to read.
        last = g.events[done[-1]].thread if done else -1
        best = min(ready, key=lambda i: (g.events[i].thread != last, g.events[i].thread, i))
        done.append(best)
        events.remove(best)
    return done


def reason(x: Execution, axiom: str, events: tuple[int, ...], names: Mapping[int, str]) -> str:
    """What about an execution breaks an axiom, in one sentence."""
    n = [names.get(e, "?") for e in events]
    match axiom, len(events):
        case "Causality", 3:
            via = _route(x, events[0], events[1], names)
            return (
                f"{n[0]} precedes {n[1]} in causality order{via}, so {n[1]} may not return {n[2]}, "
                f"which precedes {n[0]} in coherence order"
            )
        case "Causality", 2:
            via = _route(x, events[0], events[1], names)
            return f"{n[0]} precedes {n[1]} in causality order{via}, so it may not return its value"
        case "Coherence", 2:
            return f"{n[0]} precedes {n[1]} in causality order, but not in coherence order"
        case "Atomicity", 3:
            return f"{n[1]} comes in coherence order between {n[0]}, which the atomic reads, and its own write {n[2]}"
        case (("SC-per-Location" | "No-Thin-Air"), _) if events:
            return f"the cycle {' -> '.join(n)}"
        case "Fence-SC", _:
            return f"no order of the fences {', '.join(dict.fromkeys(n))} agrees with causality order"
    return "events " + ", ".join(n) if n else "no execution of the barriers allows it"


def _remark(x: Execution, axiom: str, events: tuple[int, ...], names: Mapping[int, str]) -> str:
    where = f"{axiom} {axioms.AXIOMS[axiom]}" if axiom in axioms.AXIOMS else f"the meaning of {axiom}"
    return f"breaks {where}: {reason(x, axiom, events, names)}"


def _route(x: Execution, a: int, b: int, names: Mapping[int, str]) -> str:
    """The steps of base causality order from a to b, perhaps after an observation of a."""
    rows = direct_order(x)
    path = shortest_path(rows, a, b)
    if not path:
        rows[a] |= axioms.observation_order(x.graph, x.reads_from)[a]
        path = shortest_path(rows, a, b)
    return f" ({' -> '.join(names.get(e, '?') for e in path)})" if len(path) > 2 else ""


def timeline(x: Execution, broken: Broken | None = None) -> str:
    """The execution as text: one column per thread, time downwards, relations below."""
    picture = Picture.of(x)
    g = x.graph
    threads = g.program.threads
    cells = {e: f"{picture.names[e]}: {_what(g, e)}{picture.value(e)}" for e in picture.rows}
    widths = []
    for t, thread in enumerate(threads):
        mine = [len(cells[e]) for e in picture.rows if g.events[e].thread == t]
        widths.append(max([len(_heading(thread.name, thread.place)), *mine]))
    lines = [
        "  ".join(_heading(t.name, t.place).ljust(w) for t, w in zip(threads, widths, strict=True)).rstrip()
    ]
    for e in picture.rows:
        column = g.events[e].thread
        lines.append(" " * sum(w + 2 for w in widths[:column]) + cells[e])
    lines.append("")
    for name, edges in picture.edges().items():
        texts = []
        for a, b, why in edges:
            texts.append(f"{picture.names[a]} -> {picture.names[b]}" + (f" ({why})" if why else ""))
        if texts:
            lines.append(f"{name}: " + ", ".join(dict.fromkeys(texts)))
    for axiom, events in (broken or {}).items():
        section = axioms.AXIOMS.get(axiom, "")
        lines.append(
            f"breaks {axiom} {section}: {reason(x, axiom, events, picture.names)}".replace(" :", ":")
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(name: str, place: Place) -> str:
    return f"{name}@{place_text(place)}"


# SVG.

_COLOURS = {"po": "#9aa0a6", "rf": "#c5221f", "co": "#1a73e8", "fr": "#e8710a", "sw": "#188038"}
_MEANING = {
    "po": "program order",
    "rf": "reads from",
    "co": "coherence order",
    "fr": "from reads",
    "sw": "synchronizes with",
}
_ROW, _BOX, _TOP, _LEFT = 54, 26, 60, 20
_GAP = 90  # between the boxes of neighbouring threads, for arrows
_CHARACTER = 6.7  # width of one character of 11px monospace


def svg(x: Execution, broken: Broken | None = None) -> str:
    """The execution as a graph, in one self-contained SVG document."""
    picture = Picture.of(x)
    g = x.graph
    edges = picture.edges()
    touched = {e for drawn in edges.values() for a, b, _ in drawn for e in (a, b)}
    texts = {e: picture.names[e] for e in g.initial.values() if e in touched}
    texts |= {e: f"{picture.names[e]}: {_what(g, e)}{picture.value(e)}" for e in picture.rows}
    columns = _columns(g, picture, texts)
    boxes: dict[int, _Box] = {}
    initial = [e for e in texts if e not in picture.rows]
    for k, e in enumerate(initial):
        boxes[e] = _Box(_LEFT + 60 + 130 * k, _TOP + 14, _width(texts[e]))
    top = _TOP + (_ROW if initial else 0) + 40
    for k, e in enumerate(picture.rows):
        boxes[e] = _Box(columns[g.events[e].thread], top + _ROW * k, _width(texts[e]))
    width = max(*(b.x + b.width / 2 + _GAP for b in boxes.values()), 5 * 160 + _LEFT)
    remarks = [
        line
        for axiom, events in (broken or {}).items()
        for line in wrap(_remark(x, axiom, events, picture.names), int((width - 2 * _LEFT) / _CHARACTER))
    ]
    height = top + _ROW * len(picture.rows) + 10 + 16 * len(remarks)
    marked = {e for events in (broken or {}).values() for e in events}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">',
        f"<title>{escape(g.program.name)}: {escape(str(x.outcome))}</title>",
        "<defs>",
        *(_arrowhead(name, colour) for name, colour in _COLOURS.items()),
        "</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13" font-weight="bold">{escape(g.program.name)}: '
        f"{escape(str(x.outcome))}</text>",
        *_legend(),
    ]
    for thread, centre in zip(g.program.threads, columns, strict=True):
        parts.append(
            f'<text x="{centre:.1f}" y="{top - 28}" text-anchor="middle" font-weight="bold">'
            f"{escape(_heading(thread.name, thread.place))}</text>"
        )
    for order in g.sequence:
        parts += [_edge("po", boxes[a], boxes[b], "", 0) for a, b in pairwise(order)]
    for bend, (name, drawn) in enumerate(edges.items(), start=1):
        parts += [_edge(name, boxes[a], boxes[b], why, bend) for a, b, why in drawn]
    parts += [_node(box, texts[e], e in marked) for e, box in boxes.items()]
    for k, line in enumerate(remarks):
        y = height - 10 - 16 * (len(remarks) - 1 - k)
        parts.append(f'<text x="{_LEFT}" y="{y:.0f}" fill="#c5221f">{escape(line)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Box:
    """Centre and width of a node."""

    x: float
    y: float
    width: float


def _width(text: str) -> float:
    return max(len(text) * _CHARACTER + 14, 40)


def _columns(g: Graph, picture: Picture, texts: Mapping[int, str]) -> list[float]:
    """The centre of each thread's column, as wide as its widest event."""
    out = []
    left = float(_LEFT)
    for t, thread in enumerate(g.program.threads):
        mine = [texts[e] for e in picture.rows if g.events[e].thread == t]
        wide = max(map(_width, [_heading(thread.name, thread.place), *mine]))
        out.append(left + wide / 2)
        left += wide + _GAP
    return out


def _arrowhead(name: str, colour: str) -> str:
    return (
        f'<marker id="arrow-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    )


def _legend() -> list[str]:
    out = []
    for k, (name, colour) in enumerate(_COLOURS.items()):
        at = _LEFT + 160 * k
        out.append(
            f'<line x1="{at}" y1="38" x2="{at + 22}" y2="38" stroke="{colour}" stroke-width="1.6" '
            f'marker-end="url(#arrow-{name})"/>'
            f'<text x="{at + 28}" y="42" fill="{colour}">{_MEANING[name]}</text>'
        )
    return out


def _node(box: _Box, text: str, marked: bool) -> str:
    return (
        f'<rect x="{box.x - box.width / 2:.1f}" y="{box.y - _BOX / 2:.1f}" width="{box.width:.1f}" height="{_BOX}" '
        f'rx="5" fill="#f8f9fa" stroke="{"#c5221f" if marked else "#5f6368"}" stroke-width="{2 if marked else 1}"/>'
        f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}" text-anchor="middle">{escape(text)}</text>'
    )


def _edge(name: str, a: _Box, b: _Box, why: str, bend: int) -> str:
    """An arrow between two boxes: straight down within a thread, around its right side for other relations, and
    bent differently for each relation between threads so that none hides another."""
    if a.x == b.x and bend:
        x1, y1, x2, y2 = a.x + a.width / 2, a.y, b.x + b.width / 2, b.y
        mx, my = max(x1, x2) + 24 + 12 * bend, (y1 + y2) / 2
    else:
        down = b.y >= a.y
        x1, y1 = a.x, a.y + (_BOX / 2 if down else -_BOX / 2)
        x2, y2 = b.x, b.y - (_BOX / 2 if down else -_BOX / 2)
        mx, my = (x1 + x2) / 2 + 14 * bend * (1 if x2 >= x1 else -1), (y1 + y2) / 2
    return (
        f'<path d="M{x1:.1f},{y1:.1f} Q{mx:.1f},{my:.1f} {x2:.1f},{y2:.1f}" fill="none" '
        f'stroke="{_COLOURS[name]}" stroke-width="{1 if name == "po" else 1.6}" '
        f'marker-end="url(#arrow-{name})"><title>{escape(why or _MEANING[name])}</title></path>'
    )
