"""R23: one lane announces what its whole warp wrote, before the warp has met."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet


def check(s: Subject) -> Iterator[Finding]:
    for i in s.order.events:
        if not _announces(s, i):
            continue
        leader = s.executors(i)
        if not leader.one_lane or leader.varying:
            continue
        came = s.order.search([i], stop=_meets(s), backward=True, sync=False)
        for w in sorted(came, reverse=True):
            if w >= len(s.body) or w == i or not _writes(s, w):
                continue
            who = s.executors(w)
            if who.one_lane or who.disjoint(leader):
                continue
            yield s.finding(
                "R23",
                Severity.WARNING,
                f"{leader} announces data that {who} wrote, and the warp has not met since: the other lanes may "
                f"not have "
                "written yet, and the leader's release does not cover their writes",
                [s.site(w, "write by all lanes"), s.site(i, "announcement by one lane")],
                missing="writes of all lanes -> bar.warp.sync -> release by the leader",
                fix=f"bar.warp.sync (__syncwarp) between lines {s.body[w].line} and {s.body[i].line}",
                path=s.order.trace(came, w, [i])[::-1],
            )
            return


def _announces(s: Subject, i: int) -> bool:
    e = s.effects[i]
    if e.kind is Kind.MBARRIER:
        return e.op in ("arrive", "arrive_drop") and e.sem == "release"
    return e.releases and any(a.role == "data" and a.writes and not a.asynchronous for a in e.accesses)


def _meets(s: Subject):
    def stop(i: int) -> bool:
        e = s.effects[i]
        if e.kind in (Kind.WARP_BARRIER, Kind.BARRIER, Kind.CLUSTER_BARRIER):
            return True
        return e.kind in (Kind.WGMMA, Kind.TCGEN05) and ".sync" in s.body[i].text

    return stop


def _writes(s: Subject, i: int) -> bool:
    e = s.effects[i]
    ordinary = e.kind in (Kind.STORE, Kind.ATOMIC, Kind.REDUCTION)
    return ordinary and any(
        a.writes
        and a.role == "data"
        and a.sem == "weak"
        and a.space in ("global", "generic", "shared::cta", "shared::cluster")
        for a in e.accesses
    )


_PASSING = snippet(
    """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    mov.u32 %r3, full;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 4;
    READY:
    bar.sync 0;
    st.shared.b32 [%r5], %r1;
    bar.warp.sync 0xffffffff;
    elect.sync _|%p2, 0xffffffff;
    @!%p2 bra ARRIVED;
    mbarrier.arrive.shared::cta.b64 _, [%r3];
    ARRIVED:
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r6, [%r2+4];
    """,
    declare=".shared .align 16 .b8 smem[512];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R23",
    title="a leader announces its warp's writes before the warp has met",
    severity=Severity.WARNING,
    meaning=(
        "A release covers what the releasing thread itself did, and what it has synchronised with. When an "
        "elected lane "
        "arrives on behalf of its warp, the other lanes' writes must be ordered before its arrival by a barrier of the "
        "warp: lanes may have diverged, and neither `elect.sync` nor a shuffle orders memory."
    ),
    looks_for=(
        "an arrival or releasing store by one lane of a warp, reached from writes by more lanes with no "
        "bar.warp.sync or "
        "wider barrier on the way"
    ),
    isa_section="bar.warp.sync; elect.sync; Memory Consistency Model: Release Patterns",
    fix="bar.warp.sync over the writing lanes before the leader's arrival",
    failing=_PASSING.replace("    bar.warp.sync 0xffffffff;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("warp barrier deleted", "    bar.warp.sync 0xffffffff;\n", ""),
        Mutation(
            "warp barrier before the write",
            "    st.shared.b32 [%r5], %r1;\n    bar.warp.sync 0xffffffff;\n",
            "    bar.warp.sync 0xffffffff;\n    st.shared.b32 [%r5], %r1;\n",
        ),
        Mutation("shuffle instead", "bar.warp.sync 0xffffffff", "shfl.sync.idx.b32 %r7, %r1, 0, 31, -1"),
    ),
    check=check,
)
