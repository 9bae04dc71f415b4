"""R01: ordinary write of shared memory, read through the async proxy, with no proxy fence between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..findings import Finding, Severity, Verdict
from ..ptx.effects import Access, Kind
from ..ptx.threads import Executors
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import async_shared_reads, fences_async, generic_shared, groups

_READER = {Kind.BULK: "bulk copy", Kind.WGMMA: "wgmma operand", Kind.TCGEN05: "tcgen05 operand"}


def check(s: Subject) -> Iterator[Finding]:
    writes = list(generic_shared(s, writes=True))
    if not writes:
        return
    reported: set[int] = set()
    doubtful: list[Finding] = []
    for group in groups(s, async_shared_reads(s)):
        index, access = group[0]
        classes: dict[tuple[Executors, bool], list[tuple[int, Access]]] = {}
        for w, b in writes:
            if w not in reported and s.order.overlap(index, access, w, b):
                classes.setdefault((s.executors(w), b.asynchronous), []).append((w, b))
        for (who, copies), members in classes.items():
            readers = [i for i, _ in group]
            came = _unfenced(s, readers, who, copies)
            late = {} if who.one_thread else _unfenced(s, readers, who, copies, issuer_counts=False)
            for w, b in members:
                if w in came:
                    reported.add(w)
                    finding = _finding(s, w, b, index, access, s.order.trace(came, w, readers)[::-1])
                    if finding.verdict is Verdict.FINDING:
                        yield finding
                    else:
                        doubtful.append(finding)
                elif w in late:
                    reported.add(w)
                    doubtful.append(_late(s, w, index))
    for severity in (Severity.ERROR, Severity.NOTE):
        alike = [f for f in doubtful if f.severity is severity]
        if alike:
            more = f" ({len(alike)} writes)" if len(alike) > 1 else ""
            yield replace(alike[0], message=alike[0].message + more)


def _unfenced(
    s: Subject, readers: list[int], writer: Executors, copies: bool, issuer_counts: bool = True
) -> dict[int, int]:
    """Nodes from which a reader is reached with no fence on the way, by a search backward from the readers.

    Back to the first synchronisation the path is the issuing thread's, before that the writer's. A predicated fence
    counts if it surely is executed by that thread; `issuer_counts` False ignores fences by the issuer after the
    synchronisation. `copies` looks for `cp.async`: they are in shared memory only once their group, or the mbarrier
    that they arrive at, has been waited for, so a fence settles a path only when such a completion lies before it.
    """
    issuer = s.executors(readers[0])
    came: dict[int, int] = {}
    start = [(r, True, False) for r in readers]
    seen, queue = set(start), list(start)
    for node, own, after_fence in queue:
        for n in s.order.predecessors.get(node, ()):
            here = own and n < s.order.exit and not s.order.is_sync_edge(n, node)
            if after_fence and _completes_copies(s, n):
                continue
            fence = (
                n < len(s.body) and fences_async(s.effects[n]) and _executes(s, n, issuer if here else writer)
            )
            fence = fence and (issuer_counts or not here)
            if fence and not copies:
                came.setdefault(n, node)
                continue
            if here and n < len(s.body) and s.order.syncs(n):
                here = False
            state = (n, here, after_fence or fence)
            if state not in seen:
                seen.add(state)
                came.setdefault(n, node)
                queue.append(state)
    return came


def _executes(s: Subject, fence: int, who: Executors) -> bool:
    """A thread of `who` whose path leads over the fence executes it."""
    return s.body[fence].pred is None or s.executors(fence).includes(who)


def _late(s: Subject, w: int, r: int) -> Finding:
    return s.finding(
        "R01",
        Severity.NOTE,
        f"shared memory written by {s.executors(w)} reaches an asynchronous read with a proxy fence only in the "
        "issuing thread, after the barrier; the ISA does not say that this covers the other threads' writes",
        [s.site(w, "generic write"), s.site(r, _READER[s.effects[r].kind])],
        missing="fence.proxy.async in every writing thread",
        fix=f"put the fence after line {s.body[w].line}, before the barrier",
    )


def _completes_copies(s: Subject, i: int) -> bool:
    """After this event earlier `cp.async` writes are in shared memory."""
    if i >= len(s.body):
        return False
    e = s.effects[i]
    if e.kind is Kind.ASYNC_GROUP:
        return e.op.startswith("wait")
    if not s.order.is_wait(i):
        return False
    groups = [g for g in s.order.predecessors.get(i, ()) if g > s.order.exit]
    sources = [a for g in groups for a in s.order.predecessors.get(g, ())]
    arrivals = {a for g in sources for a in s.order.predecessors.get(g, ()) if a < len(s.body)}
    return any(s.effects[a].kind is Kind.ASYNC_GROUP for a in arrivals)


def _finding(s: Subject, w: int, b: Access, r: int, a: Access, route: list[int]) -> Finding:
    reader = _READER[s.effects[r].kind]
    certain = s.order.surely_overlap(w, b, r, a) and s.order.certain(route)
    settle = ""
    if not certain:
        settle = (
            f"that the write ({s.address(w, b).describe()}) and the {reader} ({s.address(r, a).describe()}) never "
            f"touch "
            "the same bytes, or that they never belong to one handoff"
        )
    wrong = [i for i in s.find(Kind.PROXY_FENCE) if not fences_async(s.effects[i])]
    hint = f"; {s.body[wrong[0]].name} covers another space" if wrong else ""
    who = s.executors(w)
    return s.finding(
        "R01",
        Severity.ERROR,
        f"shared memory written by {who} reaches a {reader}, which reads through the async proxy, and no proxy fence "
        f"is on the way{hint}",
        [s.site(w, "generic write"), s.site(r, reader)],
        missing="generic write -> fence.proxy.async -> async-proxy read",
        fix=(
            f"put fence.proxy.async.shared::cta after line {s.body[w].line}, in every writing thread and before the "
            "barrier that leads to the issuing thread"
        ),
        settle=settle,
        path=route,
    )


_DECLARE = ".extern .shared .align 128 .b8 smem[];"
_PASSING = snippet(
    """
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 128 out",
    declare=_DECLARE,
)

RULE = Rule(
    id="R01",
    title="generic write of shared memory reaches an async-proxy read without a proxy fence",
    severity=Severity.ERROR,
    meaning=(
        "Bulk copies, wgmma and tcgen05 read shared memory through the async proxy; ordinary stores, `stmatrix` and "
        "`cp.async` write it through the generic proxy. A barrier orders threads, not proxies: without a "
        "`fence.proxy.async` that covers shared memory the reader may see what was there before. The fence belongs "
        "into every writing thread, before the barrier that leads to the issuer; the issuer may fence instead, after "
        "that barrier. Matrix operands are taken to reach 1024 bytes per 8 rows from their descriptor's address, and "
        "memory behind a tensor map is taken to be none of the kernel's pointer arguments."
    ),
    looks_for=(
        "a path, through program order and through barriers, mbarriers and flags, from a generic write of shared "
        "memory to an async-proxy read that may touch the same bytes, with no covering proxy fence on it"
    ),
    isa_section="Memory Consistency Model: Proxies, Causality Order; membar / fence: fence.proxy.async",
    fix="fence.proxy.async.shared::cta in every writing thread, before the barrier that leads to the issuing thread",
    failing=_PASSING.replace("    fence.proxy.async.shared::cta;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("fence deleted", "    fence.proxy.async.shared::cta;\n", ""),
        Mutation("wrong space", "fence.proxy.async.shared::cta", "fence.proxy.async.global"),
        Mutation("not a proxy fence", "fence.proxy.async.shared::cta", "fence.acq_rel.cta"),
        Mutation(
            "fence by one thread before the barrier",
            "    fence.proxy.async.shared::cta;\n",
            "    setp.eq.s32 %p2, %r1, 0;\n    @!%p2 bra NOFENCE;\n    fence.proxy.async.shared::cta;\nNOFENCE:\n",
        ),
        Mutation(
            "write after the fence",
            "    bar.sync 0;\n",
            "    st.shared.b32 [%r4], %r3;\n    bar.sync 0;\n",
        ),
        Mutation(
            "copies instead of stores",
            "    st.shared.b32 [%r4], %r1;\n    fence.proxy.async.shared::cta;\n",
            "    fence.proxy.async.shared::cta;\n    cp.async.ca.shared.global [%r4], [%rd1], 4;\n"
            "    cp.async.wait_all;\n",
        ),
    ),
    check=check,
)
