"""R26: the destination of an asynchronous copy is read before the copy's completion has been observed."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .bulk import Outstanding
from .memory import async_shared_reads, generic_shared, looked_at, one_place, waits_on


def check(s: Subject) -> Iterator[Finding]:
    yield from _ignored(s)
    reads = [(r, a) for r, a in generic_shared(s, writes=False) if not a.asynchronous] + list(
        async_shared_reads(s)
    )
    reads = [(r, a) for r, a in reads if one_place(s, r, a)]
    for i in s.find(Kind.BULK, Kind.ASYNC_COPY):
        for own in s.effects[i].accesses:
            if not own.writes or own.role not in ("data", "tensor") or not own.space.startswith("shared"):
                continue
            overlapping = [(r, a) for r, a in reads if r != i and s.order.surely_overlap(i, own, r, a)]
            if not overlapping or not one_place(s, i, own):
                continue
            waits = _waits(s, i)
            if waits is None:
                continue
            met = s.order.search(waits, stop=[i].__contains__)
            stops = set(waits) | {j for j in met if j < len(s.body) and s.order.syncs(j)}
            for r, _ in overlapping:
                came, start = s.order.seen_by(r, i, stop=stops.__contains__)
                if r in came:
                    yield _finding(s, i, r, sorted(waits)[:1], s.order.trace(came, r, [start]))
                    return


def _ignored(s: Subject) -> Iterator[Finding]:
    for w in s.find(Kind.MBARRIER):
        if s.order.is_wait(w) and not looked_at(s, w):
            yield s.finding(
                "R26",
                Severity.ERROR,
                f"nobody looks at the result of {s.body[w].name}: it may have returned false, and then nothing is "
                f"complete",
                [s.site(w, "wait")],
                missing="wait returned true -> what follows it",
                fix="branch back to the wait until its result is true",
            )
            return


def _waits(s: Subject, i: int) -> set[int] | None:
    """Waits that observe the completion of copy `i`; None if it completes on an object whose place is not known."""
    if s.effects[i].kind is Kind.BULK:
        barrier = next((a for a in s.effects[i].accesses if a.role == "mbarrier"), None)
        return set(waits_on(s, i, barrier)) if barrier is not None and one_place(s, i, barrier) else None
    found = set(Outstanding(s, i, also_read=False, own=True).waits)
    for j in s.find(Kind.ASYNC_GROUP, op="mbarrier_arrive"):
        found |= set(waits_on(s, j, s.effects[j].accesses[0]))
    return found


def _finding(s: Subject, i: int, r: int, waits: list[int], route: list[int]) -> Finding:
    return s.finding(
        "R26",
        Severity.ERROR,
        f"shared memory that an asynchronous copy fills is read by {s.executors(r)} on a path where nothing has waited "
        "for the copy to complete",
        [s.site(i, "asynchronous copy"), s.site(r, "read"), *(s.site(w, "wait") for w in waits)],
        missing="copy complete -> observed (mbarrier wait that returned true, or wait_group) -> read",
        fix=f"wait for the copy before line {s.body[r].line}, and branch back until the wait succeeds",
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
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
    READY:
    bar.sync 0;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    ld.shared.b32 %r8, [%r5];
    st.global.b32 [%rd2], %r8;
    """,
    params=".param .u64 .ptr .global .align 128 x, .param .u64 .ptr .global .align 4 y",
    declare=".shared .align 128 .b8 smem[512];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R26",
    title="destination of an asynchronous copy is read before its completion was observed",
    severity=Severity.ERROR,
    meaning=(
        "An asynchronous copy writes its destination at some time after it was issued; a barrier does not wait for it. "
        "Its completion must be observed: an mbarrier wait that has returned true (a try_wait may return false, so its "
        "result must be looked at), or for `cp.async` a wait_group that covers its group. Threads that did not wait "
        "themselves need a barrier after the wait of one that did. The rule judges copies to fixed places;"
        " in a ring of "
        "stages it cannot tell which stage a wait is for."
    ),
    looks_for=(
        "an mbarrier wait whose result decides nothing;"
        " a path from an asynchronous copy, or past it for threads that do not issue it, to a read of the same "
        "bytes with "
        "no wait for its mbarrier or group"
    ),
    isa_section="Asynchronous Operations: completion mechanisms; mbarrier.try_wait; cp.async.wait_group",
    fix="wait for the copy's mbarrier (in a loop until it succeeds) or group before the read",
    failing=_PASSING.replace("    @!%p2 bra WAIT;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation(
            "wait deleted",
            "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n    @!%p2 bra WAIT;\n",
            "",
        ),
        Mutation("result ignored", "    @!%p2 bra WAIT;\n", ""),
        Mutation(
            "wait moved below the read",
            "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n    @!%p2 bra WAIT;\n"
            "    ld.shared.b32 %r8, [%r5];\n",
            "    ld.shared.b32 %r8, [%r5];\nWAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n"
            "    @!%p2 bra WAIT;\n",
        ),
        Mutation(
            "wait for another object", "[%r3], 0;\n    @!%p2 bra WAIT", "[%r3+8], 0;\n    @!%p2 bra WAIT"
        ),
    ),
    check=check,
)
