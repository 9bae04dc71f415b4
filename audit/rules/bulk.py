"""Bulk async groups: what the rules on bulk stores share."""

from __future__ import annotations

from ..ptx.effects import Access, Kind
from ..subject import Subject
from .memory import SHARED


def grouped_stores(s: Subject) -> list[tuple[int, Access, Access]]:
    """(instruction, destination, source) of bulk operations that complete by a bulk group."""
    out = []
    for i in s.find(Kind.BULK):
        accesses = s.effects[i].accesses
        if any(a.role == "mbarrier" for a in accesses):
            continue
        to = next((a for a in accesses if a.writes and a.role in ("data", "tensor")), None)
        source = next((a for a in accesses if a.reads and a.space in SHARED and a.role == "data"), None)
        if to is not None and source is not None and s.effects[i].op not in ("st_async", "red_async"):
            out.append((i, to, source))
    return out


def is_wait(s: Subject, i: int, also_read: bool) -> bool:
    """`cp.async.bulk.wait_group`; with `also_read` the `.read` form too."""
    e = s.effects[i]
    return e.kind is Kind.BULK_GROUP and (e.op == "wait" or (also_read and e.op == "wait_read"))


def same_threads(s: Subject, i: int):
    """Follow only what the threads that execute instruction `i` can execute."""
    who = s.executors(i)

    def enter(before: int, node: int) -> bool:
        here = s.order.entering(before, node)
        return here is None or not here.disjoint(who)

    return enter
