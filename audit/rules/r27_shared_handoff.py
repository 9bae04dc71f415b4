"""R27: shared memory that some threads wrote is read by others who never met them."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import generic_shared, one_place, peer


def check(s: Subject) -> Iterator[Finding]:
    writes = [(w, a) for w, a in generic_shared(s, writes=True) if _plain(s, w, a)]
    reads = [(r, a) for r, a in generic_shared(s, writes=False) if _plain(s, r, a)]
    reported: set[int] = set()
    for w, a in writes:
        near: dict[int, int] | None = None
        for r, b in reads:
            if r in reported or not s.order.surely_overlap(w, a, r, b) or not _by_others(s, w, a, r, b):
                continue
            if near is None:
                near = s.order.search([w], stop=lambda i: _meets(s, i), sync=False)
            if r not in near:
                continue
            came, start = s.order.seen_by(
                r, w, stop=s.order.syncs if _same_warp(s, w, r) else lambda i: _meets(s, i)
            )
            if r in came:
                reported.add(r)
                yield _finding(s, w, r, s.order.trace(came, r, [start]))
                return


def _plain(s: Subject, i: int, a: Access) -> bool:
    weak = a.sem == "weak" and not a.asynchronous and s.effects[i].op != "matrix"
    return weak and not peer(s, i, a) and one_place(s, i, a)


def _by_others(s: Subject, w: int, a: Access, r: int, b: Access) -> bool:
    """The reading thread is surely not always the one that wrote the bytes."""
    writer, reader = s.executors(w), s.executors(r)
    if writer.varying or reader.varying:
        return False
    if writer.one_thread:
        return not (reader.one_thread and writer.includes(reader))
    by_thread, read_by_thread = s.address(w, a).affine.terms, s.address(r, b).affine.terms
    # All write their own element and all read one and the same.
    return (
        by_thread != read_by_thread
        and all(atom[0] == "sym" for atom, _ in read_by_thread)
        and not reader.one_thread
    )


def _same_warp(s: Subject, w: int, r: int) -> bool:
    a, b = s.executors(w), s.executors(r)
    return a.one_warp and b.one_warp and a.warps == b.warps


def _meets(s: Subject, i: int) -> bool:
    return s.order.syncs(i) and s.effects[i].kind is not Kind.WARP_BARRIER


def _finding(s: Subject, w: int, r: int, route: list[int]) -> Finding:
    return s.finding(
        "R27",
        Severity.ERROR,
        f"shared memory that {s.executors(w)} wrote is read by {s.executors(r)} with no barrier, mbarrier wait or "
        f"acquire "
        "between",
        [s.site(w, "write"), s.site(r, "read")],
        missing="write -> barrier -> read by other threads",
        fix=f"bar.sync for all of them between line {s.body[w].line} and line {s.body[r].line}",
        path=route,
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    bar.sync 0;
    ld.shared.b32 %r5, [%r2+124];
    st.global.b32 [%rd1], %r5;
    """,
    params=".param .u64 .ptr .global .align 4 y",
    declare=".shared .align 16 .b8 smem[512];",
)

RULE = Rule(
    id="R27",
    title="shared memory is handed over with nothing between write and read",
    severity=Severity.ERROR,
    meaning=(
        "Threads of a CTA see each other's writes of shared memory only after they have met: at a CTA barrier, at an "
        "mbarrier phase, or through an acquire. Threads of one warp need `bar.warp.sync`; that they often run together "
        "promises nothing. The rule judges places that are surely the same bytes and surely of different threads: one "
        "element that all read, or what a single thread wrote. Elements chosen by data are beyond it."
    ),
    looks_for=(
        "a plain write of shared memory and a plain read of the same bytes by other threads, with a path between that "
        "passes no barrier, wait or acquire"
    ),
    isa_section="Memory Consistency Model: Causality Order; bar.sync; bar.warp.sync",
    fix="a barrier for writers and readers between the write and the read",
    failing=_PASSING.replace("    bar.sync 0;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("barrier deleted", "    bar.sync 0;\n", ""),
        Mutation("arrive only", "bar.sync 0;", "bar.arrive 0, 128;"),
        Mutation("warp barrier instead", "bar.sync 0;", "bar.warp.sync 0xffffffff;"),
        Mutation(
            "barrier below the read",
            "    bar.sync 0;\n    ld.shared.b32 %r5, [%r2+124];\n",
            "    ld.shared.b32 %r5, [%r2+124];\n    bar.sync 0;\n",
        ),
        Mutation("fence instead", "bar.sync 0;", "fence.acq_rel.cta;"),
    ),
    check=check,
)
