"""R06: a handoff whose release, acquire or fence has a scope that leaves one of the parties out."""

from __future__ import annotations

from collections.abc import Iterator

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..ptx.provenance import may_overlap
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import RANK, generic_shared, narrow, peer

_STRONG = frozenset({"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"})


def check(s: Subject) -> Iterator[Finding]:
    yield from _remote_arrivals(s)
    yield from _relaxed(s)
    yield from _narrow_waits(s)
    yield from _strong_accesses(s)
    yield from _cluster_handoffs(s)
    yield from _narrow_fences(s)


# -- mbarriers --------------------------------------------------------------------------------------------


def _remote_arrivals(s: Subject) -> Iterator[Finding]:
    """An arrival on another CTA's object hands over at least the right to reuse a buffer."""
    for i in s.find(Kind.MBARRIER):
        e = s.effects[i]
        if not e.op.startswith("arrive") or not peer(s, i, e.accesses[0]):
            continue
        if e.sem == "release" and narrow(e.scope, "cluster"):
            yield s.finding(
                "R06",
                Severity.ERROR,
                f"arrival on another CTA's mbarrier releases at .{e.scope} scope only: the waiting CTA is not in "
                f"it, so "
                "what this thread did before is not ordered before what follows the wait",
                [s.site(i, "arrive")],
                missing="release at cluster scope -> acquire in the waiting CTA",
                fix="write mbarrier.arrive.release.cluster.shared::cluster (the default scope is .cta)",
            )
        elif e.sem == "relaxed":
            fences = {
                f
                for f in s.find(Kind.FENCE)
                if s.effects[f].releases and not narrow(s.effects[f].scope, "cluster")
            }
            came = s.order.search([i], stop=fences.__contains__, backward=True, sync=False)
            before = [j for j in came if j < len(s.body) and j not in fences and _plain_data(s, j)]
            if before:
                yield s.finding(
                    "R06",
                    Severity.ERROR,
                    "a relaxed arrival on another CTA's mbarrier orders nothing, and no fence at cluster scope comes "
                    "between it and the accesses before it",
                    [s.site(max(before), "access"), s.site(i, "arrive")],
                    missing="access -> release at cluster scope -> arrival",
                    fix="use mbarrier.arrive.release.cluster, or fence.acq_rel.cluster before the relaxed arrival",
                    path=s.order.trace(came, max(before), [i])[::-1],
                )


def _relaxed(s: Subject) -> Iterator[Finding]:
    """A relaxed wait or arrival of this CTA needs a fence of its own."""
    for i in s.find(Kind.MBARRIER):
        e = s.effects[i]
        if e.sem != "relaxed" or "tx" in e.op or peer(s, i, e.accesses[0]):
            continue
        waits = s.order.is_wait(i)
        fences = {
            f for f in s.find(Kind.FENCE) if (s.effects[f].acquires if waits else s.effects[f].releases)
        }
        stops = (fences | {j for j in s.order.events if s.order.syncs(j)}) - {i}
        came = s.order.search([i], stop=stops.__contains__, backward=not waits, sync=False)
        data = sorted(
            j for j in came if j < len(s.body) and j not in fences and _shared_data(s, j, reads=waits)
        )
        if data:
            j = data[0] if waits else data[-1]
            side, fence = ("acquire", "after") if waits else ("release", "before")
            yield s.finding(
                "R06",
                Severity.ERROR,
                f"{s.body[i].name} is relaxed and orders nothing, and no {side} fence comes {fence} it: the data at "
                f"line {s.body[j].line} is not part of the handoff",
                [s.site(i, "mbarrier"), s.site(j, "data")],
                missing=f"{side} at the mbarrier, or a fence {fence} it",
                fix=f"use .{side} (the default), or fence.{side} {fence} line {s.body[i].line}",
                path=s.order.trace(came, j, [i]),
            )
            return


def _shared_data(s: Subject, i: int, reads: bool) -> bool:
    return any(
        a.role == "data" and not a.asynchronous and (a.reads if reads else a.writes)
        and a.space in ("shared::cta", "shared::cluster", "generic", "global")
        for a in s.effects[i].accesses
    )  # fmt: skip


def _plain_data(s: Subject, i: int) -> bool:
    return any(a.role == "data" and not a.asynchronous and a.space != "tmem" for a in s.effects[i].accesses)


def _narrow_waits(s: Subject) -> Iterator[Finding]:
    """A wait whose phase other CTAs complete must acquire at cluster scope."""
    sources = [(i, a) for i in s.order.events for a, _ in s.order.arrivals(i)]
    sources = [(i, a) for i, a in sources if peer(s, i, a) or a.multicast]
    reported = set()
    for w in s.find(Kind.MBARRIER):
        if (
            not s.order.is_wait(w)
            or s.effects[w].sem != "acquire"
            or not narrow(s.effects[w].scope, "cluster")
        ):
            continue
        own = s.effects[w].accesses[0]
        address = s.address(w, own)
        for i, a in sources:
            if address.parts in reported or not may_overlap(address, 8, s.address(i, a), 8, same_cta=False):
                continue
            reported.add(address.parts)
            certain = s.order.surely_overlap(w, own, i, a) and not a.multicast
            settle = "" if certain else "that this object is never completed by another CTA"
            if a.multicast:
                settle = (
                    "how the ISA wants a multicast copy of another CTA to be acquired: its complete-tx is a release at "
                    "cluster scope, which an acquire at .cta scope is not morally strong with"
                )
            yield s.finding(
                "R06",
                Severity.ERROR,
                "the wait acquires at .cta scope, but its phase is completed from another CTA: their writes need "
                "not be "
                "visible after it",
                [s.site(i, "completes the phase"), s.site(w, "wait")],
                missing="release at cluster scope by the other CTA -> acquire at cluster scope here",
                fix="write mbarrier.try_wait.parity.acquire.cluster (the default scope is .cta)",
                settle=settle,
            )


# -- flags and peers --------------------------------------------------------------------------------------


def _strong_accesses(s: Subject) -> Iterator[Finding]:
    """Strong accesses of memory that other CTAs or other GPUs use must have them in their scope."""
    for i in s.order.events:
        for a in s.effects[i].accesses:
            if a.role != "data" or a.sem not in _STRONG or a.asynchronous:
                continue
            needed, why = _needed(s, i, a)
            if narrow(a.scope, needed):
                yield s.finding(
                    "R06",
                    Severity.ERROR,
                    f"{s.body[i].name} has scope .{a.scope}, but {why}",
                    [s.site(i, "access")],
                    missing=f"a scope that includes both parties: .{needed}",
                    fix=f"write .{needed} instead of .{a.scope}, here and on the other side of the handoff",
                )


def _needed(s: Subject, i: int, a: Access) -> tuple[str, str]:
    scope, why = "", ""
    if peer(s, i, a):
        scope, why = "cluster", "the address is in another CTA of the cluster"
    for base, _ in s.address(i, a).parts:
        role = s.role(base)
        if role in (Role.PEER, Role.MULTICAST):
            return "sys", f"{s.name(base)} is shared with other GPUs"
        if role is Role.FLAG and s.contract is not None:
            for h in s.contract.handoffs:
                if h.via in ("flag", "mailbox") and h.scope in RANK and narrow(scope, h.scope):
                    scope, why = h.scope, f"the contract's handoff {h.name!r} needs .{h.scope}"
    return scope, why


# -- shared memory between CTAs ---------------------------------------------------------------------------


def _cluster_handoffs(s: Subject) -> Iterator[Finding]:
    """Data that one CTA writes and another reads, through distributed shared memory, by ordinary accesses."""
    writes = [(i, a, peer(s, i, a)) for i, a in generic_shared(s, writes=True) if not a.asynchronous]
    reads = [(i, a, peer(s, i, a)) for i, a in generic_shared(s, writes=False) if not a.asynchronous]
    if not any(remote for _, _, remote in (*writes, *reads)):
        return
    pairs = [
        (w, a, r, b)
        for w, a, there in writes
        for r, b, here in reads
        if there != here and w != r and _meet(s, w, a, r, b)
    ]
    seen: set[int] = set()
    for w, a, r, b in pairs:
        if w in seen:
            continue
        came = s.order.search([w], stop=lambda i: _meets_cluster(s, i))
        if r in came:
            seen.add(w)
            yield _handoff(
                s, w, a, r, b, s.order.trace(came, r, [w]),
                "data goes from one CTA to another through distributed shared memory, and nothing between the write "
                "and the read synchronises the cluster",
                "write -> release and acquire at cluster scope -> read in the other CTA",
                "a cluster barrier (arrive with release, wait with acquire) between the write and the read",
            )  # fmt: skip
            continue
        unreleased = s.order.search([w], stop=lambda i: _releases_cluster(s, i), sync=False)
        for i in s.find(Kind.CLUSTER_BARRIER, op="arrive"):
            if i in unreleased and not s.effects[i].releases and r in s.order.search([i]):
                seen.add(w)
                yield _handoff(
                    s, w, a, r, b, s.order.trace(unreleased, i, [w]),
                    f"the cluster barrier at line {s.body[i].line} arrives with .relaxed, which publishes nothing, and "
                    "no fence at cluster scope releases the write before it",
                    "write -> release at cluster scope -> cluster barrier -> read in the other CTA",
                    f"barrier.cluster.arrive.release at line {s.body[i].line}, or fence.acq_rel.cluster before it",
                )  # fmt: skip
                break


def _meet(s: Subject, w: int, a: Access, r: int, b: Access) -> bool:
    return may_overlap(s.address(w, a), s.width(w, a), s.address(r, b), s.width(r, b), same_cta=False)


def _meets_cluster(s: Subject, i: int) -> bool:
    e = s.effects[i]
    if e.kind is Kind.CLUSTER_BARRIER:
        return e.op == "wait"
    if s.order.is_wait(i):
        return not narrow(e.scope, "cluster")
    return e.acquires and not narrow(e.scope, "cluster") and not e.restrict


def _releases_cluster(s: Subject, i: int) -> bool:
    """A fence covers everything before it; a release operation only what an acquire of its own object sees."""
    e = s.effects[i]
    covers = e.kind in (Kind.FENCE, Kind.CLUSTER_BARRIER) and e.releases
    return (covers and not narrow(e.scope, "cluster") and not e.restrict) or _meets_cluster(s, i)


def _handoff(
    s: Subject, w: int, a: Access, r: int, b: Access, route: list[int], message: str, missing: str, fix: str
) -> Finding:
    settle = ""
    if not (s.order.surely_overlap(w, a, r, b) and s.order.certain(route)):
        settle = (
            f"that the write ({s.address(w, a).describe()}) and the read ({s.address(r, b).describe()}) never "
            f"touch the "
            "same bytes"
        )
    return s.finding(
        "R06",
        Severity.ERROR,
        message,
        [s.site(w, "write"), s.site(r, "read")],
        missing=missing,
        fix=fix,
        settle=settle,
        path=route,
    )


# -- fences narrower than their flag ----------------------------------------------------------------------


def _narrow_fences(s: Subject) -> Iterator[Finding]:
    """Release and acquire patterns take the scope of their fence: `fence.acq_rel.cta` before a `.gpu` flag."""
    fences = [f for f in s.find(Kind.FENCE) if not s.effects[f].restrict]
    for i in s.order.events:
        for a in s.effects[i].accesses:
            if (
                a.role != "data"
                or a.sem != "relaxed"
                or a.space not in ("global", "generic")
                or a.asynchronous
            ):
                continue
            for backward in (True, False):
                if a.writes if backward else a.reads and s.effects[i].kind is not Kind.REDUCTION:
                    finding = _crossed(s, i, a, fences, backward)
                    if finding is not None:
                        yield finding


def _crossed(s: Subject, flag: int, a: Access, fences: list[int], backward: bool) -> Finding | None:
    wide = {f for f in fences if not narrow(s.effects[f].scope, a.scope)}
    slim = [f for f in fences if narrow(s.effects[f].scope, a.scope)]
    if not slim:
        return None
    # A fence serves the strong accesses next to it: behind another one of the same kind it is somebody else's.
    others = {i for i in s.order.events if i != flag and _is_flag(s, i, backward)}
    near = s.order.search([flag], stop=lambda i: i in wide or i in others, backward=backward, sync=False)
    side = "release" if backward else "acquire"
    for f in slim:
        if f not in near:
            continue
        beyond = s.order.search([f], stop=wide.__contains__, backward=backward, sync=False)
        data = [
            j
            for j in beyond
            if j < len(s.body)
            and any(_global_data(s, j, b, backward) for b in s.effects[j].accesses)
            and j != flag
        ]
        if data:
            scope, needed = s.effects[f].scope, a.scope
            return s.finding(
                "R06",
                Severity.ERROR,
                f"the fence has scope .{scope} but the flag that it serves has .{needed}: the {side} pattern is "
                f"only as "
                "wide as its fence",
                [s.site(data[0], "data"), s.site(f, "fence"), s.site(flag, "flag")],
                missing=f"data {'->' if backward else '<-'} {side} fence at .{needed} scope",
                fix=f"widen the fence at line {s.body[f].line} to .{needed}",
                path=s.order.trace(near, f, [flag]),
            )
    return None


def _is_flag(s: Subject, i: int, written: bool) -> bool:
    e = s.effects[i]
    return any(
        b.role == "data"
        and b.sem not in ("weak", "")
        and not b.asynchronous
        and (b.writes if written else b.reads)
        for b in e.accesses
    )


def _global_data(s: Subject, i: int, a: Access, written: bool) -> bool:
    return (
        a.role == "data"
        and a.space in ("global", "generic")
        and a.sem == "weak"
        and (a.writes if written else a.reads)
    )


_PASSING = snippet(
    """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, bar;
    mov.u32 %r3, buf;
    mov.u32 %r4, %cluster_ctarank;
    xor.b32 %r5, %r4, 1;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    READY:
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra SENT;
    mapa.shared::cluster.u32 %r6, %r3, %r5;
    mapa.shared::cluster.u32 %r7, %r2, %r5;
    st.shared::cluster.b32 [%r6], %r4;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
    SENT:
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r8, [%r3];
    """,
    declare=".shared .align 8 .b64 bar;\n.shared .align 16 .b8 buf[16];",
    directives=".reqnctapercluster 2, 1, 1",
)

RULE = Rule(
    id="R06",
    title="handoff with a scope narrower than its parties",
    severity=Severity.ERROR,
    meaning=(
        "A release orders, and an acquire sees, only for threads inside the scope that is written on it: two "
        "operations "
        "whose scopes leave each other's thread out are not morally strong and synchronise nothing. The defaults are "
        "narrow: `mbarrier.arrive` and `mbarrier.try_wait` are `.cta` unless told otherwise, also on an address "
        "in another "
        "CTA. Counting still works, so such code passes tests and loses data only when timing is bad. A pattern made "
        "with a fence has the scope of the fence, whatever the flag's scope is. A `.relaxed` arrival publishes nothing."
    ),
    looks_for=(
        "arrivals on a mapa address that release at .cta; waits at .cta on objects that other CTAs complete; strong "
        "accesses at .cta of another CTA's memory, or below .sys of memory that the contract calls peer or multicast; "
        "distributed shared memory handed over without a cluster-scope release and acquire;"
        " fences narrower than the flag "
        "they serve"
    ),
    isa_section="Memory Consistency Model: Scope, Morally strong operations; mbarrier.arrive, mbarrier.try_wait",
    fix="name the narrowest scope that includes both parties, on both sides: .cluster, .gpu or .sys",
    failing=_PASSING.replace(
        "mbarrier.arrive.release.cluster.shared::cluster", "mbarrier.arrive.shared::cluster"
    ),
    passing=_PASSING,
    mutations=(
        Mutation("default scope of arrive", "mbarrier.arrive.release.cluster.", "mbarrier.arrive."),
        Mutation("default scope of wait", "try_wait.parity.acquire.cluster.", "try_wait.parity."),
        Mutation("narrow arrive", "arrive.release.cluster", "arrive.release.cta"),
        Mutation("narrow wait", "acquire.cluster", "acquire.cta"),
        Mutation("relaxed arrive", "arrive.release.cluster", "arrive.relaxed.cluster"),
        Mutation("relaxed wait", "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster"),
        Mutation(
            "strong store at .cta",
            "    st.shared::cluster.b32 [%r6], %r4;\n",
            "    st.relaxed.cta.shared::cluster.b32 [%r6], %r4;\n",
        ),
        Mutation(
            "no synchronisation",
            "WAIT:\n    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;\n    @!%p2 bra WAIT;\n",
            "    bar.sync 0;\n",
        ),
        Mutation(
            "relaxed cluster barrier",
            "WAIT:\n    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;\n    @!%p2 bra WAIT;\n",
            "    barrier.cluster.arrive.relaxed.aligned;\n    barrier.cluster.wait.aligned;\n",
        ),
    ),
    check=check,
)
