"""Bulk async groups: what the rules on bulk stores share."""

from __future__ import annotations

from ..ptx.effects import Access, Kind
from ..ptx.ir import Imm
from ..subject import Subject
from .memory import SHARED

_DEEPEST = 8  # outstanding groups that are told apart


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


def _allowed(s: Subject, wait: int) -> int:
    """N of `wait_group N`: how many later groups may still be outstanding. `wait_all` waits for what has no group."""
    if s.effects[wait].op == "wait_all":
        return -1
    number = s.body[wait].operands[0] if s.body[wait].operands else None
    return number.value if isinstance(number, Imm) and isinstance(number.value, int) else 0


class Outstanding:
    """Where one operation that completes by group may not be complete yet.

    `came` holds the nodes that are reached from the operation before a wait that covers its group, each with the
    node before; `waits` the covering waits. A wait for all but N groups covers it when more than N commits lie
    between. With `own` only paths of the issuing thread are followed. Bulk operations and `cp.async` have groups of
    their own kinds; `also_read` lets a wait for the source of a bulk operation count.
    """

    def __init__(self, s: Subject, operation: int, also_read: bool, own: bool) -> None:
        self.came: dict[int, int] = {}
        self.waits: list[int] = []
        kind = Kind.ASYNC_GROUP if s.effects[operation].kind is Kind.ASYNC_COPY else Kind.BULK_GROUP
        enter = s.order.as_thread_of(operation)
        seen = {(operation, 0)}
        stack = [(operation, 0)]
        for node, commits in stack:
            if node != operation and node < len(s.body) and s.effects[node].kind is kind:
                op = s.effects[node].op
                waits = op in ("wait", "wait_all") or (also_read and op == "wait_read")
                if waits and commits > _allowed(s, node):
                    self.waits.append(node)
                    continue
                if op == "commit":
                    commits = min(commits + 1, _DEEPEST)
            for n in s.order.successors.get(node, ()):
                if n > s.order.exit or (n, commits) in seen or s.order.is_sync_edge(node, n):
                    continue
                if own and not enter(node, n):
                    continue
                seen.add((n, commits))
                self.came.setdefault(n, node)
                stack.append((n, commits))
