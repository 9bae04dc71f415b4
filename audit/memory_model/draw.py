"""An execution drawn for a person."""

from __future__ import annotations

from .events import Kind
from .graph import Graph
from .litmus import instruction_text


def event_text(g: Graph, event: int) -> str:
    """Thread and instruction of an event."""
    e = g.events[event]
    if e.thread < 0:
        return f"init {e.address}={e.value}"
    name = g.program.threads[e.thread].name
    if e.source is None:
        return f"{name} {e.kind}"
    part = {Kind.BARRIER_ARRIVE: " (arrive)", Kind.BARRIER_WAIT: " (wait)"}.get(e.kind, "")
    if e.operation is not None:
        part = {Kind.READ: " (source read)", Kind.WRITE: " (write)"}.get(e.kind, " (completion)")
    return f"{name} {instruction_text(e.source)}{part}"
