"""R10: an mbarrier used before its initialisation was published to the user."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..ptx.provenance import may_overlap
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import narrow, peer


def check(s: Subject) -> Iterator[Finding]:
    inits = s.find(Kind.MBARRIER, op="init")
    if not inits:
        return
    uses = [(i, a) for i in s.order.events for a in s.effects[i].accesses if a.role == "mbarrier"]
    uses = [(i, a) for i, a in uses if s.effects[i].op not in ("init", "inval")]
    for init in inits:
        own = s.effects[init].accesses[0]
        users = [(i, a) for i, a in uses if _same(s, init, own, i, a)]
        remote = [(i, a) for i, a in users if peer(s, i, a) or a.multicast]
        local = [(i, a) for i, a in users if not (peer(s, i, a) or a.multicast)]
        finding = _remote(s, init, own, remote) or _local(s, init, own, local)
        if finding is not None:
            yield finding


def _same(s: Subject, i: int, a: Access, j: int, b: Access) -> bool:
    return may_overlap(s.address(i, a), 8, s.address(j, b), 8, same_cta=False)


def _remote(s: Subject, init: int, own: Access, users: list[tuple[int, Access]]) -> Finding | None:
    """Used from another CTA: a cluster barrier must lie between, and the initialisation be released before it."""
    if not users:
        return None
    waits = set(s.find(Kind.CLUSTER_BARRIER, op="wait"))
    for i, a in users:
        came, start = s.order.seen_by(i, init, stop=waits.__contains__)
        if i in came:
            return _finding(
                s, init, own, i, a,
                "another CTA's mbarrier is used although no cluster barrier separates the use from its initialisation",
                "mbarrier.init -> fence.mbarrier_init.release.cluster -> cluster barrier -> remote use",
                "after the init: fence.mbarrier_init.release.cluster, barrier.cluster.arrive.relaxed, and "
                f"barrier.cluster.wait before line {s.body[i].line}",
                s.order.trace(came, i, [start]),
            )  # fmt: skip
    fences = {i for i in s.find(Kind.FENCE) if _publishes(s, i)}
    unfenced = s.order.search([init], stop=lambda i: i in fences or i in waits, sync=False)
    for i in s.find(Kind.CLUSTER_BARRIER, op="arrive"):
        if i in unfenced and not s.effects[i].releases and not s.executors(init).disjoint(s.executors(i)):
            user, a = users[0]
            return _finding(
                s, init, own, user, a,
                f"the cluster barrier at line {s.body[i].line} arrives with .relaxed and no fence releases the "
                "initialisation before it",
                "mbarrier.init -> release at cluster scope -> cluster barrier",
                f"fence.mbarrier_init.release.cluster between lines {s.body[init].line} and {s.body[i].line}, in the "
                "initialising thread",
                s.order.trace(unfenced, i, [init]),
            )  # fmt: skip
    return None


def _publishes(s: Subject, i: int) -> bool:
    e = s.effects[i]
    if e.restrict == "mbarrier_init":
        return True
    return e.releases and not e.restrict and not narrow(e.scope, "cluster")


def _local(s: Subject, init: int, own: Access, users: list[tuple[int, Access]]) -> Finding | None:
    """Used in this CTA by threads other than the initialising one: a barrier must lie between."""
    who = s.executors(init)
    for i, a in users:
        here = s.executors(i)
        alone = who.one_thread and here.one_thread and who.includes(here)
        if alone:
            continue
        came, start = s.order.seen_by(i, init, stop=lambda j: _joins(s, j))
        if i in came:
            return _finding(
                s, init, own, i, a,
                f"an mbarrier that {who} initialises is used by {here} with no barrier between",
                "mbarrier.init -> CTA barrier -> use by another thread",
                f"bar.sync (or a cluster barrier) for all users between lines {s.body[init].line} and "
                f"{s.body[i].line}",
                s.order.trace(came, i, [start]),
            )  # fmt: skip
    return None


def _joins(s: Subject, i: int) -> bool:
    """A barrier at which the initialising thread meets the others."""
    e = s.effects[i]
    if e.kind is Kind.BARRIER:
        return e.op != "arrive"
    if e.kind is Kind.CLUSTER_BARRIER:
        return e.op == "wait"
    return False


def _finding(
    s: Subject,
    init: int,
    own: Access,
    use: int,
    a: Access,
    message: str,
    missing: str,
    fix: str,
    route: list[int],
) -> Finding:
    settle = ""
    if not s.order.surely_overlap(init, own, use, a):
        settle = (
            f"that the two never mean one object: {s.address(init, own).describe()} is initialised, "
            f"{s.address(use, a).describe()} is used"
        )
    return s.finding(
        "R10",
        Severity.ERROR,
        message,
        [s.site(init, "init"), s.site(use, "use")],
        missing=missing,
        fix=fix,
        settle=settle,
        path=route,
    )


_PASSING = snippet(
    """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, bar;
    mov.u32 %r3, buf;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4;
    fence.mbarrier_init.release.cluster;
    INITIALISED:
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra SENT;
    mov.u32 %r4, %cluster_ctarank;
    xor.b32 %r5, %r4, 1;
    mapa.shared::cluster.u32 %r6, %r2, %r5;
    mapa.shared::cluster.u32 %r7, %r3, %r5;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7], %r4, [%r6];
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
    id="R10",
    title="mbarrier used before its initialisation is published",
    severity=Severity.ERROR,
    meaning=(
        "`mbarrier.init` is an ordinary write of the object. A thread of the same CTA may use the object only after a "
        "barrier with the initialising thread. A thread of another CTA, and any operation that completes on another "
        "CTA's object, needs a cluster barrier, and the initialisation must be released at cluster scope before the "
        "arrival: `fence.mbarrier_init.release.cluster` exists for that, and a cluster barrier that arrives with "
        "`.relaxed` publishes nothing by itself. A use that comes too early works on whatever bytes were there."
    ),
    looks_for=(
        "uses of an object by other threads that a path reaches from its init without a barrier; remote uses without a "
        "cluster barrier; a relaxed cluster arrival with no releasing fence before it"
    ),
    isa_section="mbarrier: mbarrier.init; membar / fence: fence.mbarrier_init; barrier.cluster",
    fix="init, fence.mbarrier_init.release.cluster, cluster barrier (or bar.sync within one CTA), then use",
    failing=_PASSING.replace("    fence.mbarrier_init.release.cluster;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("fence deleted", "    fence.mbarrier_init.release.cluster;\n", ""),
        Mutation("scope weakened", "fence.mbarrier_init.release.cluster", "fence.acq_rel.cta"),
        Mutation("cluster barrier deleted", "    barrier.cluster.arrive.relaxed.aligned;\n"
                 "    barrier.cluster.wait.aligned;\n", ""),
        Mutation("wait deleted", "    barrier.cluster.wait.aligned;\n", ""),
        Mutation("CTA barrier instead", "    barrier.cluster.arrive.relaxed.aligned;\n"
                 "    barrier.cluster.wait.aligned;\n", "    bar.sync 0;\n"),
    ),
    check=check,
)  # fmt: skip
