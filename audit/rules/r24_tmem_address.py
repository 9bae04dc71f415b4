"""R24: the address that `tcgen05.alloc` writes is read by another warp before it is there."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import generic_shared


def check(s: Subject) -> Iterator[Finding]:
    reads = list(generic_shared(s, writes=False))
    for i in s.find(Kind.TCGEN05, op="alloc"):
        own = s.effects[i].accesses[0]
        came = s.order.search(
            [i], stop=lambda j: s.order.syncs(j) and s.effects[j].kind is not Kind.WARP_BARRIER
        )
        for r, a in reads:
            if r in came and s.order.overlap(i, own, r, a) and not _same_warp(s, i, r):
                certain = s.order.surely_overlap(i, own, r, a)
                yield s.finding(
                    "R24",
                    Severity.ERROR,
                    f"the tensor-memory address that {s.executors(i)} allocates is read from shared memory by "
                    f"{s.executors(r)} with no barrier between: tcgen05.alloc stores it with a weak store",
                    [s.site(i, "alloc"), s.site(r, "read")],
                    missing="tcgen05.alloc -> barrier -> read of the address by other warps",
                    fix=f"a CTA barrier (cluster barrier for a peer) before line {s.body[r].line}",
                    settle="" if certain else "that the read is not of the allocated address",
                    path=s.order.trace(came, r, [i]),
                )
                return


def _same_warp(s: Subject, i: int, j: int) -> bool:
    a, b = s.executors(i), s.executors(j)
    return a.one_warp and b.one_warp and a.warps == b.warps


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, slot;
    setp.gt.u32 %p1, %r1, 31;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%rd1], %r3;
    bar.sync 0;
    @%p1 bra DONE;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 4 out",
    declare=".shared .align 4 .b32 slot;",
    arch="sm_100a",
)

RULE = Rule(
    id="R24",
    title="tensor-memory address is read before it is published",
    severity=Severity.ERROR,
    meaning=(
        "`tcgen05.alloc` returns the address of the allocated tensor memory by a weak store to shared memory. For "
        "other "
        "warps of the CTA, and for the peer CTA of a pair, that is a store like any other: without a barrier between "
        "the allocation and their load they may read what was there before and work on other columns of tensor memory."
    ),
    looks_for="a path from tcgen05.alloc to a load of the slot it writes, by other warps, with no barrier on it",
    isa_section="tcgen05.alloc; Tensor Memory Allocation and Management",
    fix="a CTA barrier (cluster barrier for a peer) between the allocation and the load of its address",
    failing=_PASSING.replace("ALLOCATED:\n    bar.sync 0;\n", "ALLOCATED:\n"),
    passing=_PASSING,
    mutations=(
        Mutation("barrier deleted", "ALLOCATED:\n    bar.sync 0;\n", "ALLOCATED:\n"),
        Mutation(
            "warp barrier instead",
            "ALLOCATED:\n    bar.sync 0;\n",
            "ALLOCATED:\n    bar.warp.sync 0xffffffff;\n",
        ),
        Mutation("arrive only", "ALLOCATED:\n    bar.sync 0;\n", "ALLOCATED:\n    bar.arrive 0, 128;\n"),
    ),
    check=check,
)
