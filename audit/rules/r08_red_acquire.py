"""R08: a reduction stands where an acquire pattern needs a read."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import narrow


def check(s: Subject) -> Iterator[Finding]:
    for red in s.find(Kind.REDUCTION):
        flag = s.effects[red].accesses[0]
        if flag.space not in ("global", "generic") or flag.sem == "weak":
            continue
        came = s.order.search([red], stop=lambda i: _observes(s, i), sync=False)
        fences = [
            i for i in came if i < len(s.body) and s.effects[i].kind is Kind.FENCE and s.effects[i].acquires
        ]
        fences = [f for f in fences if not narrow(s.effects[f].scope, "gpu")]
        if not fences:
            continue
        before = s.order.search([red], backward=True, sync=False)
        beyond = s.order.search(fences, stop=lambda i: _observes(s, i), sync=False)
        for read, a in s.accesses("global"):
            if read not in beyond or not a.reads or a.sem != "weak" or a.role != "data":
                continue
            produced = [
                w
                for w, b in s.accesses("global")
                if w in before
                and b.writes
                and b.sem == "weak"
                and b.role == "data"
                and s.order.overlap(w, b, read, a)
            ]
            if produced:
                yield s.finding(
                    "R08",
                    Severity.ERROR,
                    "data that all contributors write before a counter is read after it, but the counter is only "
                    "incremented by a reduction and never read: a reduction starts no acquire pattern",
                    [s.site(produced[0], "write"), s.site(red, "reduction"), s.site(read, "read")],
                    missing="reduction by the others -> observed by a read of the counter -> acquire -> read",
                    fix="use atom (its result tells who is last), or poll the counter with ld.acquire before the read",
                    path=s.order.trace(beyond, read, fences),
                )
                return


def _observes(s: Subject, i: int) -> bool:
    """A strong read, or another way to learn that others are done."""
    e = s.effects[i]
    if e.kind is Kind.GRID_DEPENDENCY:
        return e.op == "wait"
    return any(
        a.reads and a.role == "data" and a.sem not in ("weak", "") and e.kind is not Kind.REDUCTION
        for a in e.accesses
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [partial];
    ld.param.u64 %rd2, [counter];
    ld.param.u64 %rd3, [out];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd1, %rd4;
    st.global.b32 [%rd5], %r1;
    fence.acq_rel.gpu;
    atom.relaxed.gpu.global.add.u32 %r2, [%rd2], 1;
    fence.acq_rel.gpu;
    setp.ne.s32 %p1, %r2, 7;
    @%p1 bra DONE;
    ld.global.b32 %r3, [%rd1+4];
    st.global.b32 [%rd3], %r3;
    DONE:
    """,
    params=", ".join(f".param .u64 .ptr .global .align 4 {name}" for name in ("partial", "counter", "out")),
)

RULE = Rule(
    id="R08",
    title="reduction used as the reading half of a handoff",
    severity=Severity.ERROR,
    meaning=(
        "To see what others released, a thread must read a value that they wrote: an acquire pattern begins with "
        "a read. "
        "`red` updates memory without returning anything and counts as no such read, so a fence after it acquires "
        "nothing. The last-block pattern therefore needs `atom`, whose result says how many came before, or a strong "
        "load of the counter."
    ),
    looks_for=(
        "weak writes, a reduction of a counter, an acquiring fence, and reads of the same data, with no strong read "
        "between the reduction and the reads"
    ),
    isa_section="Memory Consistency Model: Acquire Patterns (reductions do not form acquire patterns)",
    fix="atom instead of red, or ld.acquire of the counter before the data is read",
    failing=_PASSING.replace(
        "atom.relaxed.gpu.global.add.u32 %r2, [%rd2], 1", "red.relaxed.gpu.global.add.u32 [%rd2], 1"
    ),
    passing=_PASSING,
    mutations=(
        Mutation(
            "atom becomes red",
            "atom.relaxed.gpu.global.add.u32 %r2, [%rd2], 1",
            "red.relaxed.gpu.global.add.u32 [%rd2], 1",
        ),
        Mutation(
            "atom becomes releasing red",
            "atom.relaxed.gpu.global.add.u32 %r2, [%rd2], 1",
            "red.release.gpu.global.add.u32 [%rd2], 1",
        ),
    ),
    check=check,
)
