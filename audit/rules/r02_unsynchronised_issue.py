"""R02: shared memory is read by an asynchronous operation whose issuer never met the threads that wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import async_shared_reads, generic_shared, groups


def check(s: Subject) -> Iterator[Finding]:
    writes = [(w, b) for w, b in generic_shared(s, writes=True) if not b.asynchronous]
    reported: set[int] = set()
    for group in groups(s, async_shared_reads(s)):
        index, access = group[0]
        readers = [i for i, _ in group]
        overlapping = [
            (w, b) for w, b in writes if w not in reported and s.order.overlap(index, access, w, b)
        ]
        if not overlapping:
            continue
        near = s.order.search(readers, stop=lambda i: _meets(s, i), backward=True, sync=False)
        warps = s.order.search(readers, stop=s.order.syncs, backward=True, sync=False)
        for w, b in overlapping:
            if (
                w in near
                and not _same_thread(s, w, index)
                and not (w not in warps and _same_warp(s, w, index))
            ):
                reported.add(w)
                yield _finding(s, w, b, index, access, s.order.trace(near, w, readers)[::-1])


def _meets(s: Subject, i: int) -> bool:
    """More than a warp meets here."""
    return s.order.syncs(i) and s.effects[i].kind is not Kind.WARP_BARRIER


def _same_warp(s: Subject, w: int, r: int) -> bool:
    a, b = s.executors(w), s.executors(r)
    return a.one_warp and b.one_warp and a.warps == b.warps


def _same_thread(s: Subject, w: int, r: int) -> bool:
    writer, reader = s.executors(w), s.executors(r)
    return writer.one_thread and reader.one_thread and writer.includes(reader)


def _finding(s: Subject, w: int, b: Access, r: int, a: Access, route: list[int]) -> Finding:
    settle = ""
    if not s.order.surely_overlap(w, b, r, a):
        settle = (
            f"that the write ({s.address(w, b).describe()}) and the read ({s.address(r, a).describe()}) never "
            f"touch the "
            "same bytes"
        )
    return s.finding(
        "R02",
        Severity.ERROR,
        f"shared memory written by {s.executors(w)} is read by an asynchronous operation that {s.executors(r)} issues, "
        "and no barrier or wait lies between: a fence by the writers does not tell the issuer that they are done",
        [s.site(w, "write"), s.site(r, "asynchronous read")],
        missing="write -> (fence) -> barrier -> issue",
        fix=f"a CTA barrier (or mbarrier) between line {s.body[w].line} and line {s.body[r].line}, after the "
        f"writers' fence",
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
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 128 out",
    declare=".extern .shared .align 128 .b8 smem[];",
)

RULE = Rule(
    id="R02",
    title="asynchronous read is issued without synchronising with the writers",
    severity=Severity.ERROR,
    meaning=(
        "A proxy fence orders the accesses of the thread that executes it. It does not tell another thread that "
        "they are "
        "done. When one thread issues the bulk store, the wgmma or the tcgen05 operation that reads what many threads "
        "wrote, a barrier or an mbarrier must lie between: write, fence, barrier, issue. With the barrier before the "
        "writes, or none at all, the operation reads what happens to be there."
    ),
    looks_for=(
        "a path from a generic write of shared memory to an asynchronous read of the same bytes, issued by other "
        "threads, "
        "on which no barrier, mbarrier wait or acquire lies"
    ),
    isa_section="Memory Consistency Model: Causality Order; Asynchronous Operations",
    fix="put a CTA barrier after the writers' proxy fence and before the issue",
    failing=_PASSING.replace("    bar.sync 0;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("barrier deleted", "    bar.sync 0;\n", ""),
        Mutation(
            "barrier before the writes",
            "    st.shared.b32 [%r4], %r1;\n    fence.proxy.async.shared::cta;\n    bar.sync 0;\n",
            "    bar.sync 0;\n    st.shared.b32 [%r4], %r1;\n    fence.proxy.async.shared::cta;\n",
        ),
        Mutation("arrive only", "bar.sync 0;", "bar.arrive 0, 128;"),
    ),
    check=check,
)
