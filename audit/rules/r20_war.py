"""R20: shared memory that is still being read is overwritten through the async proxy."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import async_shared_writes, fences_async, generic_shared, groups, peer


def check(s: Subject) -> Iterator[Finding]:
    reads = [(i, a) for i, a in generic_shared(s, writes=False) if not a.asynchronous and not peer(s, i, a)]
    fenced = {i for i in s.order.events if fences_async(s.effects[i])}
    for group in groups(s, async_shared_writes(s)):
        index, access = group[0]
        issues = [i for i, _ in group]
        overlapping = [(r, b) for r, b in reads if s.order.overlap(index, access, r, b)]
        if not overlapping:
            continue
        across = access.multicast or peer(s, index, access)
        bare = s.order.search(issues, stop=s.order.syncs, backward=True, sync=False)
        unfenced = s.order.search(issues, stop=fenced.__contains__, backward=True)
        for r, b in overlapping:
            alone = s.executors(r).one_thread and s.executors(index).includes(s.executors(r))
            if r in bare and not alone:
                yield _finding(
                    s, index, access, r, b, Severity.ERROR,
                    "are overwritten by an asynchronous copy with no barrier or wait after the read",
                    "read -> barrier or mbarrier -> issue of the copy", s.order.trace(bare, r, issues)[::-1],
                )  # fmt: skip
                return
            if r in unfenced and (across or alone):
                yield _finding(
                    s, index, access, r, b, Severity.ERROR if across else Severity.NOTE,
                    "are overwritten through the async proxy with no proxy fence between",
                    "generic read -> fence.proxy.async -> asynchronous write",
                    s.order.trace(unfenced, r, issues)[::-1],
                )  # fmt: skip
                return
            if r in unfenced:
                yield _finding(
                    s, index, access, r, b, Severity.NOTE,
                    "are overwritten through the async proxy after a barrier, but with no proxy fence between",
                    "generic read -> fence.proxy.async -> asynchronous write",
                    s.order.trace(unfenced, r, issues)[::-1],
                )  # fmt: skip
                return


def _finding(
    s: Subject,
    w: int,
    a: Access,
    r: int,
    b: Access,
    severity: Severity,
    message: str,
    missing: str,
    route: list[int],
) -> Finding:
    settle = ""
    if not s.order.surely_overlap(w, a, r, b):
        settle = (
            f"that {s.address(r, b).describe()} and {s.address(w, a).describe()} are never the same bytes"
        )
    return s.finding(
        "R20",
        severity,
        f"bytes of shared memory that {s.executors(r)} read {message}",
        [s.site(r, "generic read"), s.site(w, "asynchronous write")],
        missing=missing,
        fix=f"order the read at line {s.body[r].line} before the issue at line {s.body[w].line}: barrier or "
        f"mbarrier, and "
        "fence.proxy.async before it",
        settle=settle,
        path=route,
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    mov.u32 %r3, full;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    READY:
    bar.sync 0;
    mov.b32 %r6, 0;
    LOOP:
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
    ISSUED:
    and.b32 %r7, %r6, 1;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r7;
    @!%p2 bra WAIT;
    ld.shared.b32 %r8, [%r5];
    fence.proxy.async.shared::cta;
    bar.sync 0;
    add.s64 %rd1, %rd1, 512;
    add.s32 %r6, %r6, 1;
    setp.lt.s32 %p3, %r6, 8;
    @%p3 bra LOOP;
    st.global.b32 [%rd2], %r8;
    """,
    params=".param .u64 .ptr .global .align 128 x, .param .u64 .ptr .global .align 4 y",
    declare=".shared .align 128 .b8 smem[512];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R20",
    title="shared memory is overwritten asynchronously while it may still be read",
    severity=Severity.ERROR,
    meaning=(
        "A buffer that a bulk load refills must have been read first: every reader must have passed a barrier, or "
        "arrived "
        "at an mbarrier that the issuing thread waits for. Without that the new data may replace the old under the "
        "reader's hands. The ISA's own examples also put a proxy fence between a generic read and an asynchronous "
        "write of "
        "the same bytes. Single-CTA pipelines commonly leave it out, which is reported as a note;"
        " across CTAs (multicast, "
        "or a copy into another CTA) it is an error."
    ),
    looks_for=(
        "a path from a generic read to the issue of an asynchronous write of the same bytes with no barrier, wait or "
        "acquire on it, or with no proxy fence on it"
    ),
    isa_section="Memory Consistency Model: Proxies; clusterlaunchcontrol.try_cancel (example)",
    fix="barrier or empty-mbarrier between read and refill, with fence.proxy.async before it",
    failing=_PASSING.replace(
        "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n    add.s64", "    add.s64"
    ),
    passing=_PASSING,
    mutations=(
        Mutation(
            "barrier deleted",
            "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n    add.s64",
            "    fence.proxy.async.shared::cta;\n    add.s64",
        ),
        Mutation(
            "fence deleted", "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n", "    bar.sync 0;\n"
        ),
        Mutation(
            "barrier before the read",
            "    ld.shared.b32 %r8, [%r5];\n    fence.proxy.async.shared::cta;\n    bar.sync 0;\n",
            "    bar.sync 0;\n    ld.shared.b32 %r8, [%r5];\n",
        ),
    ),
    check=check,
)
