"""R21: a CTA may exit while another CTA of its cluster can still touch its shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..ptx.provenance import may_overlap
from ..ptx.threads import Executors
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import exact, peer

Enter = Callable[[int, int], bool]


def check(s: Subject) -> Iterator[Finding]:
    remote = [
        (i, a)
        for i in s.order.events
        for a in s.effects[i].accesses
        if a.space != "tmem" and (peer(s, i, a) or a.multicast)
    ]
    if not remote:
        return
    barriers = set(s.find(Kind.CLUSTER_BARRIER, op="wait"))
    # An arrival tells the target that what came before it is done; the arrival is checked itself, its scope by R06.
    telling = {i for i, _ in remote if s.effects[i].kind is Kind.MBARRIER}
    leaving = s.order.search([s.order.exit], stop=barriers.__contains__, backward=True, sync=False)
    untold = s.order.search(
        [s.order.exit], stop=lambda i: i in barriers or i in telling, backward=True, sync=False
    )
    done: set[object] = set()
    for i, a in remote:
        if i not in leaving or i in done:
            continue
        done.add(i)
        completion = _completion(s, i)
        waits = _waits_for(s, i, completion) if completion is not None else []
        if (waits and _outlives(s, i, waits)) or (completion is None and i not in untold):
            continue
        route = s.order.trace(leaving, i, [s.order.exit])
        yield _finding(s, i, a, completion, waits, route)
        return  # one place is enough: the cure, a cluster barrier at the end, cures all


def _completion(s: Subject, i: int) -> Access | None:
    """The object on which the receiving CTA can see that the access is done, if there is one."""
    e = s.effects[i]
    if e.kind is Kind.MBARRIER:
        return e.accesses[0] if e.op.startswith(("arrive", "complete_tx")) else None
    return next((a for a in e.accesses if a.role == "mbarrier"), None)


def _waits_for(s: Subject, i: int, own: Access) -> list[int]:
    """Waits of the receiving CTA for the phase that this access helps to complete."""
    target = s.address(i, own)
    return [
        w
        for w in s.find(Kind.MBARRIER)
        if s.order.is_wait(w)
        and may_overlap(target, 8, s.address(w, s.effects[w].accesses[0]), 8, same_cta=False)
    ]


def _outlives(s: Subject, access: int, waits: list[int]) -> bool:
    """A CTA that has made the access itself cannot end before some thread of it has passed one of the waits.

    All CTAs run the same code, so what this CTA sends to others is what others send to it. Only threads
    that could execute a wait are followed, and, where the wait is for one CTA of the cluster, only in that
    CTA: the others receive nothing there.
    """
    stops = set(waits)
    for w in waits:
        who, as_waiter = s.executors(w), s.order.as_thread_of(w)

        def enter(before: int, node: int, who: Executors = who, as_waiter: Enter = as_waiter) -> bool:
            here = s.order.entering(before, node)
            apart = here is not None and (here.ranks[1] < who.ranks[0] or who.ranks[1] < here.ranks[0])
            return not apart and as_waiter(before, node)

        start = s.order.seen_by(w, access)[1]
        reached = s.order.search([start], stop=stops.__contains__, sync=False, enter=enter)
        if s.order.exit not in reached:
            return True
    return False


def _finding(
    s: Subject, i: int, a: Access, completion: Access | None, waits: list[int], route: list[int]
) -> Finding:
    what = {Kind.LOAD: "load from", Kind.MBARRIER: "arrival at"}.get(s.effects[i].kind, "write to")
    message = (
        f"after this {what} another CTA's shared memory a thread can leave the kernel without a cluster barrier, and "
        + (
            "not every CTA that is the target surely waits for it"
            if completion is not None
            else "nothing tells the target CTA that it is done"
        )
        + ": the target may have exited"
    )
    settle = "" if exact(s, i, a) else f"which CTA {s.address(i, a).describe()} lies in when the others exit"
    if waits and all(s.executors(w).varying for w in waits):
        settle = f"that some thread of every target CTA executes the wait at line {s.body[waits[0]].line}"
    if a.multicast or not peer(s, i, a):
        settle = settle or "which CTAs the multicast mask names, and that all of them wait"
    return s.finding(
        "R21",
        Severity.ERROR,
        message,
        [s.site(i, "remote access"), *(s.site(w, "wait") for w in waits[:2])],
        missing="remote access done -> exit of the target CTA",
        fix="end with barrier.cluster.arrive and barrier.cluster.wait in all threads of all CTAs of the cluster",
        settle=settle if settle.startswith("that some") or not _certain(s, i, a) else "",
        path=route,
    )


def _certain(s: Subject, i: int, a: Access) -> bool:
    """Every origin of the address is another CTA's shared memory, wherever in it."""
    parts = s.address(i, a).parts
    return bool(parts) and all(b is not None and b.peer for b, _ in parts)


_PASSING = snippet(
    """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, buf;
    mov.u32 %r3, %cluster_ctarank;
    xor.b32 %r4, %r3, 1;
    shl.b32 %r5, %r1, 2;
    add.s32 %r6, %r2, %r5;
    st.shared.b32 [%r6], %r1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r7, %r6, %r4;
    ld.shared::cluster.b32 %r8, [%r7];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """,
    declare=".shared .align 16 .b8 buf[512];",
    directives=".reqnctapercluster 2, 1, 1",
)

RULE = Rule(
    id="R21",
    title="a CTA may exit while its shared memory is still used by another",
    severity=Severity.ERROR,
    meaning=(
        "Shared memory, mbarriers included, lives as long as its CTA. A remote load or store, an arrival on another "
        "CTA's mbarrier, and a copy or multicast into another CTA may therefore be outstanding only while the "
        "target is "
        "certain to be alive: until a cluster barrier that both reach, or until the target has itself waited for the "
        "completion. Otherwise the access goes to memory that may already belong to another CTA, or faults."
    ),
    looks_for=(
        "a remote access from which some path leads to the exit without a cluster barrier, unless it completes on an "
        "mbarrier that a thread of every target CTA surely waits for before it ends"
    ),
    isa_section="State Spaces: Shared State Space (.shared::cluster); barrier.cluster; mapa",
    fix="end with a cluster barrier in all threads of all CTAs of the cluster",
    failing=_PASSING.replace(
        "    ld.shared::cluster.b32 %r8, [%r7];\n    barrier.cluster.arrive.aligned;\n"
        "    barrier.cluster.wait.aligned;\n",
        "    ld.shared::cluster.b32 %r8, [%r7];\n",
    ),
    passing=_PASSING,
    mutations=(
        Mutation(
            "last cluster barrier deleted",
            "    ld.shared::cluster.b32 %r8, [%r7];\n    barrier.cluster.arrive.aligned;\n"
            "    barrier.cluster.wait.aligned;\n",
            "    ld.shared::cluster.b32 %r8, [%r7];\n",
        ),
        Mutation(
            "CTA barrier instead",
            "    ld.shared::cluster.b32 %r8, [%r7];\n    barrier.cluster.arrive.aligned;\n"
            "    barrier.cluster.wait.aligned;\n",
            "    ld.shared::cluster.b32 %r8, [%r7];\n    bar.sync 0;\n",
        ),
        Mutation(
            "early exit",
            "    ld.shared::cluster.b32 %r8, [%r7];\n",
            "    ld.shared::cluster.b32 %r8, [%r7];\n    setp.eq.s32 %p1, %r8, 0;\n    @%p1 exit;\n",
        ),
        Mutation(
            "access after the last barrier",
            "    barrier.cluster.wait.aligned;\n    ret;",
            "    barrier.cluster.wait.aligned;\n    st.shared::cluster.b32 [%r7], %r8;\n    ret;",
        ),
        Mutation(
            "arrival after the last barrier",
            "    barrier.cluster.wait.aligned;\n    ret;",
            "    barrier.cluster.wait.aligned;\n"
            "    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];\n    ret;",
        ),
    ),
    check=check,
)
