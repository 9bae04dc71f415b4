"""R01: ordinary write of shared memory, read through the async proxy, with no proxy fence between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..findings import Finding, Severity, Verdict
from ..ptx.effects import Access, Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import async_shared_reads, fences_async, generic_shared, groups

_READER = {Kind.BULK: "bulk copy", Kind.WGMMA: "wgmma operand", Kind.TCGEN05: "tcgen05 operand"}


def check(s: Subject) -> Iterator[Finding]:
    writes = list(generic_shared(s, writes=True))
    if not writes:
        return
    fenced = {i for i in s.order.events if fences_async(s.effects[i])}
    reported: set[int] = set()
    doubtful: list[Finding] = []
    for group in groups(s, async_shared_reads(s)):
        index, access = group[0]
        overlapping = [
            (w, b) for w, b in writes if w not in reported and s.order.overlap(index, access, w, b)
        ]
        if not overlapping:
            continue
        readers = [i for i, _ in group]
        came = s.order.search(readers, stop=fenced.__contains__, backward=True)
        copied = _before_completion(s, readers, fenced) if any(b.asynchronous for _, b in overlapping) else {}
        for w, b in overlapping:
            through = copied if b.asynchronous else came
            if w in through and w not in fenced:
                reported.add(w)
                route = s.order.trace(through, w, readers)[::-1]
                finding = _finding(s, w, b, index, access, route)
                if finding.verdict is Verdict.FINDING:
                    yield finding
                else:
                    doubtful.append(finding)
    if doubtful:
        more = f" ({len(doubtful)} writes)" if len(doubtful) > 1 else ""
        yield replace(doubtful[0], message=doubtful[0].message + more)


def _before_completion(s: Subject, readers: list[int], fenced: set[int]) -> dict[int, int]:
    """Nodes from which a reader is reached with no fence that comes after the completion of earlier `cp.async`.

    Copies are in shared memory only once their group, or the mbarrier that they arrive at, has been waited for: a
    fence before that covers nothing of them. So, going backward, a fence settles a path only when a completion
    lies before it.
    """
    came: dict[int, int] = {}
    seen = {(r, False) for r in readers}
    queue = [(r, False) for r in readers]
    for node, after_fence in queue:
        for n in s.order.predecessors.get(node, ()):
            if after_fence and _completes_copies(s, n):
                continue
            state = (n, after_fence or n in fenced)
            if state not in seen:
                seen.add(state)
                came.setdefault(n, node)
                queue.append(state)
    return came


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
