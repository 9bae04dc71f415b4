"""R03: the result of a bulk store is announced although only its source has been waited for."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .bulk import Outstanding, grouped_stores, is_wait
from .memory import narrow


def check(s: Subject) -> Iterator[Finding]:
    announcements = {i for i in s.order.events if _announces(s, i)}
    if not announcements:
        return
    for i, _, _ in grouped_stores(s):
        came = dict(Outstanding(s, i, also_read=False, own=True).came)
        # Other threads may announce after meeting the issuing one.
        met = [j for j in came if j < len(s.body) and _meets(s, j)]
        beyond = s.order.search(met, stop=lambda j: is_wait(s, j, also_read=False), sync=False)
        flag = next((j for j in sorted({*came, *beyond}) if j in announcements), None)
        if flag is None:
            continue
        route = s.order.trace(came | {n: p for n, p in beyond.items() if n not in came}, flag, [i])
        reads = [j for j in route if j < len(s.body) and is_wait(s, j, also_read=True)]
        what = (
            f"the wait at line {s.body[reads[-1]].line} is the .read form, which waits for the source only"
            if reads
            else "nothing waits for the store"
        )
        yield s.finding(
            "R03",
            Severity.ERROR,
            f"the result of a bulk store is announced to other threads, but {what}: the data may not be written yet",
            [
                s.site(i, "bulk store"),
                *(s.site(j, "wait for the source") for j in reads[-1:]),
                s.site(flag, "announced"),
            ],
            missing="bulk store complete (wait_group without .read) -> release",
            fix=f"cp.async.bulk.wait_group 0 (without .read) in the issuing thread before line {s.body[flag].line}",
            path=route,
        )
        return


def _meets(s: Subject, i: int) -> bool:
    return s.effects[i].kind in (Kind.BARRIER, Kind.CLUSTER_BARRIER, Kind.WARP_BARRIER, Kind.MBARRIER)


def _announces(s: Subject, i: int) -> bool:
    """A strong write of global memory at gpu or sys scope that releases, itself or by a fence just before."""
    e = s.effects[i]
    strong = [
        a
        for a in e.accesses
        if a.role == "data" and a.writes and a.sem not in ("weak", "") and not a.asynchronous
    ]
    if not any(a.space in ("global", "generic", "multimem") and not narrow(a.scope, "gpu") for a in strong):
        return False
    if e.releases:
        return True
    before = s.order.search([i], stop=lambda j: s.effects[j].kind is Kind.FENCE, backward=True, sync=False)
    return any(
        j < len(s.body)
        and s.effects[j].kind is Kind.FENCE
        and s.effects[j].releases
        and not narrow(s.effects[j].scope, "gpu")
        for j in before
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [flag];
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
    st.release.gpu.global.b32 [%rd2], 1;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 128 out, .param .u64 .ptr .global .align 4 flag",
    declare=".extern .shared .align 128 .b8 smem[];",
)

RULE = Rule(
    id="R03",
    title="bulk store is announced before its writes are complete",
    severity=Severity.ERROR,
    meaning=(
        "`cp.async.bulk.wait_group.read` returns when the source has been read, so that it may be reused. Only "
        "the form "
        "without `.read` also waits for the writes and makes them visible to the waiting thread, who may then release "
        "them to others. A flag that is set after a `.read` wait, or after none, can be seen before the data."
    ),
    looks_for=(
        "a path from a bulk store to a releasing store or atomic of global memory at gpu or sys scope, in the issuing "
        "thread or after a barrier, with no cp.async.bulk.wait_group without .read on it"
    ),
    isa_section="cp.async.bulk.wait_group; Asynchronous Operations: bulk async-group based completion",
    fix="cp.async.bulk.wait_group 0 (without .read) in the issuing thread, then the release",
    failing=_PASSING.replace("wait_group 0", "wait_group.read 0"),
    passing=_PASSING,
    mutations=(
        Mutation(".read added", "wait_group 0", "wait_group.read 0"),
        Mutation(
            "wait moved below the flag",
            "    cp.async.bulk.wait_group 0;\n    st.release.gpu.global.b32 [%rd2], 1;\n",
            "    st.release.gpu.global.b32 [%rd2], 1;\n    cp.async.bulk.wait_group 0;\n",
        ),
        Mutation(
            "fence and relaxed flag",
            "    cp.async.bulk.wait_group 0;\n    st.release.gpu",
            "    cp.async.bulk.wait_group.read 0;\n    fence.acq_rel.gpu;\n    st.relaxed.gpu",
        ),
    ),
    check=check,
)
