"""R05: the source of a bulk store is overwritten before everybody knows that it has been read."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .bulk import Outstanding, grouped_stores, is_wait
from .memory import async_shared_writes, generic_shared


def check(s: Subject) -> Iterator[Finding]:
    writes = [*generic_shared(s, writes=True), *async_shared_writes(s)]
    for i, _, source in grouped_stores(s):
        overlapping = [(w, b) for w, b in writes if s.order.overlap(i, source, w, b)]
        if not overlapping:
            continue
        outstanding = Outstanding(s, i, also_read=True, own=True)
        unmet = s.order.search(outstanding.waits, stop=s.order.syncs, sync=False)
        # What other threads do after they met the issuing one while the store is outstanding.
        met = [j for j in outstanding.came if j < len(s.body) and s.order.syncs(j)]
        beyond = s.order.search(
            met, stop=lambda j: is_wait(s, j, also_read=True) or s.order.syncs(j), sync=False
        )
        for w, b in overlapping:
            alone = s.executors(w).one_thread and s.executors(i).includes(s.executors(w))
            if w in outstanding.came or (w in beyond and not alone):
                came = outstanding.came if w in outstanding.came else beyond
                yield _finding(
                    s, i, source, w, b,
                    "is overwritten although nothing has waited until the store has read it",
                    "bulk store has read its source (wait_group.read) -> overwrite",
                    f"cp.async.bulk.wait_group.read 0 in the issuing thread before line {s.body[w].line}",
                    s.order.trace(came, w, [i]),
                )  # fmt: skip
                return
            if w in unmet and not alone:
                yield _finding(
                    s, i, source, w, b,
                    f"is overwritten by {s.executors(w)}, but only the issuing thread ({s.executors(i)}) has waited "
                    "until it was read, and no barrier follows that wait",
                    "wait_group.read by the issuer -> CTA barrier -> overwrite by others",
                    f"a CTA barrier between line {s.body[outstanding.waits[0]].line} and line {s.body[w].line}",
                    s.order.trace(unmet, w, outstanding.waits),
                )  # fmt: skip
                return


def _finding(
    s: Subject,
    i: int,
    source: Access,
    w: int,
    b: Access,
    message: str,
    missing: str,
    fix: str,
    route: list[int],
) -> Finding:
    settle = ""
    if not s.order.surely_overlap(i, source, w, b):
        settle = (
            f"that the source ({s.address(i, source).describe()}) and the write ({s.address(w, b).describe()}) "
            f"are never "
            "the same bytes while the store is outstanding"
        )
    return s.finding(
        "R05",
        Severity.ERROR,
        f"the source of a bulk store {message}",
        [s.site(i, "bulk store"), s.site(w, "overwrite")],
        missing=missing,
        fix=fix,
        settle=settle,
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
    @%p1 bra SENT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    SENT:
    bar.sync 0;
    st.shared.b32 [%r4], %r3;
    """,
    params=".param .u64 .ptr .global .align 128 out",
    declare=".extern .shared .align 128 .b8 smem[];",
)

RULE = Rule(
    id="R05",
    title="source of a bulk store is reused too early",
    severity=Severity.ERROR,
    meaning=(
        "From the issue of a bulk store until its source has been read, the source must not change. The issuing thread "
        "learns that by `cp.async.bulk.wait_group.read`; the other threads learn it only by a barrier with the issuing "
        "thread after that wait. A barrier before the wait tells them nothing."
    ),
    looks_for=(
        "writes of the source's bytes that a path reaches from the store without a wait, or from the wait without a "
        "barrier when other threads than the issuer write"
    ),
    isa_section="cp.async.bulk.wait_group; Asynchronous Operations",
    fix="wait_group.read in the issuing thread, then a CTA barrier, then the reuse",
    failing=_PASSING.replace("SENT:\n    bar.sync 0;\n", "SENT:\n"),
    passing=_PASSING,
    mutations=(
        Mutation("barrier deleted", "SENT:\n    bar.sync 0;\n", "SENT:\n"),
        Mutation("wait deleted", "    cp.async.bulk.wait_group.read 0;\n", ""),
        Mutation(
            "barrier before the wait",
            "    cp.async.bulk.wait_group.read 0;\nSENT:\n    bar.sync 0;\n",
            "SENT:\n    bar.sync 0;\n    cp.async.bulk.wait_group.read 0;\n",
        ),
    ),
    check=check,
)
