"""The sync skeleton: how a kernel synchronises, in a few lines that survive a renaming of registers.

One line per synchronising instruction, in program order, equal neighbours folded:

    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 [shared dynamic+8] by all threads | W peer
    shared ; R shared

that is: the instruction with its modifiers, the object it works on, who executes it, and after the bar what
it guards: the memory that is accessed before it and after it without another synchronising instruction in
between. `W` and `R` are writes and reads, `p3` the memory behind parameter 3, `~` an asynchronous access.
Lines hold no register, no label and no line number, so that two builds can be compared by `diff`.
"""

from __future__ import annotations

import math
from itertools import groupby

from .ptx.effects import Access, Kind
from .ptx.ir import Imm
from .ptx.provenance import Base
from .subject import Subject

_ALWAYS = frozenset(
    {
        Kind.FENCE,
        Kind.PROXY_FENCE,
        Kind.BARRIER,
        Kind.WARP_BARRIER,
        Kind.CLUSTER_BARRIER,
        Kind.MBARRIER,
        Kind.ASYNC_GROUP,
        Kind.BULK_GROUP,
        Kind.GRID_DEPENDENCY,
        Kind.UNKNOWN,
        Kind.CALL,
    }
)
_SOMETIMES = {
    Kind.WGMMA: ("fence", "commit", "wait"),
    Kind.TCGEN05: (
        "alloc",
        "dealloc",
        "commit",
        "before_thread_sync",
        "after_thread_sync",
        "wait_ld",
        "wait_st",
    ),
}


def synchronises(s: Subject, i: int) -> bool:
    """The instruction orders memory, or is a strong access."""
    e = s.effects[i]
    if e.kind in _ALWAYS or e.op in _SOMETIMES.get(e.kind, ()):
        return True
    return any(a.role == "mbarrier" or (a.role == "data" and a.sem not in ("weak", "")) for a in e.accesses)


def skeleton(s: Subject) -> list[str]:
    """The lines of one kernel's skeleton."""
    marks = [i for i in s.order.events if synchronises(s, i)]
    stops = set(marks)
    lines = []
    for i in sorted(marks):
        before = _guarded(s, s.order.search([i], stop=stops.__contains__, backward=True, sync=False), stops)
        after = _guarded(s, s.order.search([i], stop=stops.__contains__, sync=False), stops)
        guards = f"{before} ; {after}" if before or after else ""
        lines.append(f"{_instruction(s, i)} by {s.executors(i)} | {guards}".rstrip(" |"))
    folded = ((line, len(list(same))) for line, same in groupby(lines))
    return [f"{line}  x{count}" if count > 1 else line for line, count in folded]


def _instruction(s: Subject, i: int) -> str:
    ins, e = s.body[i], s.effects[i]
    objects = [
        f"[{_object(s, i, a)}]" for a in e.accesses if a.role == "mbarrier" or a.sem not in ("weak", "")
    ]
    numbers = [str(op.value) for op in ins.operands if isinstance(op, Imm)]
    keep = e.kind in (
        Kind.BARRIER,
        Kind.WARP_BARRIER,
        Kind.ASYNC_GROUP,
        Kind.BULK_GROUP,
        Kind.WGMMA,
        Kind.MBARRIER,
    )
    return " ".join([ins.name, *dict.fromkeys(objects), *(numbers if keep else ())])


def _object(s: Subject, i: int, a: Access) -> str:
    parts = []
    for base, (low, high) in s.address(i, a).parts:
        name = _name(s, base)
        bounded = base is not None and base.kind == "shared" and math.isfinite(low) and math.isfinite(high)
        place = (f"+{low}" if low == high else f"+{low}..{high}") if bounded else ""
        parts.append(name + place)
    return " or ".join(dict.fromkeys(parts)) or "?"


def _name(s: Subject, base: Base | None) -> str:
    if base is None:
        return "absolute"
    if base.kind == "param":
        known = s.param(base)
        name = known.name if known is not None else f"p{base.index}"
        return name + (f".{base.offset}" if base.offset else "")
    if base.kind == "shared":
        name = base.name if base.name != "dynamic" else ""
        return f"{'peer ' * base.peer}shared {name}".strip()
    return {"loaded": "pointer", "param_space": "param"}.get(base.kind, f"{base.kind} {base.name}".strip())


def _guarded(s: Subject, region: dict[int, int], stops: set[int]) -> str:
    """Memory that the events of a region access, e.g. "W shared, R p3"."""
    found: set[tuple[str, str]] = set()
    for i in region:
        if i >= len(s.body) or i in stops:
            continue
        for a in s.effects[i].accesses:
            if a.role == "tensormap" or a.space in ("local", "param", "const"):
                continue
            letters = ("W" if a.writes else "") + ("R" if a.reads else "") + ("~" if a.asynchronous else "")
            if a.space == "tmem":
                found.add((letters, "tmem"))
                continue
            for base, _ in s.address(i, a).parts:
                found.add((letters, _name(s, base)))
    by_letters: dict[str, list[str]] = {}
    for letters, name in sorted(found):
        by_letters.setdefault(letters, []).append(name)
    return ", ".join(
        f"{letters} {' '.join(names)}" for letters, names in sorted(by_letters.items(), reverse=True)
    )
