"""R04: a bulk store that no wait of its issuing thread covers."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .bulk import Outstanding, grouped_stores, is_wait


def check(s: Subject) -> Iterator[Finding]:
    commits = set(s.find(Kind.BULK_GROUP, op="commit"))
    waits = [i for i in s.find(Kind.BULK_GROUP) if is_wait(s, i, also_read=True)]
    for i, _, _ in grouped_stores(s):
        enter = s.order.as_thread_of(i)
        open_ = s.order.search([i], stop=commits.__contains__, sync=False, enter=enter)
        if s.order.exit in open_:
            yield _finding(
                s, i, [], "is not committed to a bulk group on some path to the exit: no wait can cover it",
                "bulk store -> cp.async.bulk.commit_group", "cp.async.bulk.commit_group after it, in the same thread",
                s.order.trace(open_, s.order.exit, [i]),
            )  # fmt: skip
            return

        left = Outstanding(s, i, also_read=True, own=True).came
        if s.order.exit in left:
            foreign = [w for w in waits if s.executors(w).disjoint(s.executors(i))]
            message = (
                f"is waited for only by {s.executors(foreign[0])}, but groups belong to the thread that issued them "
                f"({s.executors(i)})"
                if foreign
                else "can still be reading shared memory when its thread leaves the kernel: no wait follows its commit"
            )
            yield _finding(
                s, i, foreign[:1], message, "commit_group -> wait_group in the issuing thread -> exit",
                "cp.async.bulk.wait_group (or .read) in the issuing thread before the exit",
                s.order.trace(left, s.order.exit, [i]),
            )  # fmt: skip
            return


def _finding(
    s: Subject, i: int, others: list[int], message: str, missing: str, fix: str, route: list[int]
) -> Finding:
    return s.finding(
        "R04",
        Severity.ERROR,
        f"a bulk store {message}",
        [s.site(i, "bulk store"), *(s.site(j, "wait by others") for j in others)],
        missing=missing,
        fix=fix,
        path=route,
    )


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
    cp.async.bulk.wait_group.read 0;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 128 out",
    declare=".extern .shared .align 128 .b8 smem[];",
)

RULE = Rule(
    id="R04",
    title="bulk store without a commit, or without a wait in its issuing thread",
    severity=Severity.ERROR,
    meaning=(
        "Bulk operations that complete by group are waited for by group, and groups belong to the thread that issued "
        "their members: an operation that is not committed is in no group, and `wait_group` in another thread "
        "waits for "
        "nothing of this one. Until the wait the source in shared memory is still being read, also when the "
        "thread, and "
        "with it perhaps the CTA, has left the kernel."
    ),
    looks_for=(
        "a path from a bulk store to the exit without a commit, or from its commit to the exit without a wait, "
        "following "
        "only what the issuing thread can execute"
    ),
    isa_section="Asynchronous Operations: bulk async-group based completion; cp.async.bulk.commit_group",
    fix="commit and wait in the thread that issues the bulk store",
    failing=_PASSING.replace("    cp.async.bulk.commit_group;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("commit deleted", "    cp.async.bulk.commit_group;\n", ""),
        Mutation("wait deleted", "    cp.async.bulk.wait_group.read 0;\n", ""),
        Mutation(
            "wait by the other threads",
            "    cp.async.bulk.wait_group.read 0;\n    DONE:\n".replace("    DONE:", "DONE:"),
            "    bra END;\nDONE:\n    cp.async.bulk.wait_group.read 0;\nEND:\n",
        ),
        Mutation(
            "early exit",
            "    cp.async.bulk.wait_group.read 0;\n",
            "    @%p2 exit;\n    cp.async.bulk.wait_group.read 0;\n",
        ),
        Mutation(
            "wait for the other kind of group", "cp.async.bulk.wait_group.read 0", "cp.async.wait_group 0"
        ),
    ),
    check=check,
)
