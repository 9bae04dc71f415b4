"""R09: two flags crossed with a fence that allows both sides to miss the other's store."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind, defined, used
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import narrow
from .r07_weak_flag import polls


def check(s: Subject) -> Iterator[Finding]:
    strong = [
        (i, a)
        for i in s.order.events
        for a in s.effects[i].accesses
        if a.role == "data"
        and a.sem not in ("weak", "")
        and not a.asynchronous
        and a.space in ("global", "generic")
    ]
    stores = [(i, a) for i, a in strong if a.writes]
    # A load that a loop repeats looks again; so does the copy of it that the compiler puts before the loop.
    waiting = {s.address(i, a).affine for _, i, a in polls(s)}
    loads = [(i, a) for i, a in strong if a.reads and not a.writes and s.address(i, a).affine not in waiting]
    if not stores or not loads:
        return
    shapes = []
    for i, a in stores:
        full = {f for f in s.find(Kind.FENCE) if _forbids(s, f, i, a)}
        came = s.order.search([i], stop=full.__contains__, sync=False)
        for j, b in loads:
            if j in came and s.address(i, a).affine != s.address(j, b).affine and _decides(s, j):
                shapes.append((i, a, j, b, came))
    for i, a, j, b, came in shapes:
        # The other side stores what this one loads, and loads what this one stores.
        if any(_meet(s, x, c, j, b) and _meet(s, i, a, y, d) for x, c, y, d, _ in shapes):
            yield s.finding(
                "R09",
                Severity.ERROR,
                "a flag is stored and then another side's flag is loaded, and the other side does the same: without "
                "fence.sc between store and load both may read the old value",
                [s.site(i, "store of the own flag"), s.site(j, "load of the other flag")],
                missing="store -> fence.sc -> load, on both sides",
                fix=f"fence.sc at the scope of both sides between line {s.body[i].line} and line {s.body[j].line}",
                path=s.order.trace(came, j, [i]),
            )
            return


def _forbids(s: Subject, f: int, i: int, a: Access) -> bool:
    """fence.sc, as wide as the flag, by the thread that stores it."""
    e = s.effects[f]
    if e.sem != "sc" or narrow(e.scope, a.scope):
        return False
    return s.body[f].pred is None or s.executors(f).includes(s.executors(i))


def _meet(s: Subject, i: int, a: Access, j: int, b: Access) -> bool:
    """Surely the same array of flags: through pointers loaded from memory one cannot tell."""
    return s.address(i, a).known and s.address(j, b).known and s.order.overlap(i, a, j, b)


def _decides(s: Subject, load: int) -> bool:
    """The loaded value feeds a branch or a predicate."""

    values = {s.ssa.written(load, r) for r in defined(s.body[load])}
    tests = (
        i
        for i in s.body
        if i.opcode in ("setp", "set", "selp") and s.cfg.block_of[i.index] in s.cfg.reachable
    )
    registers = s.function.registers
    return any(s.ssa.read(i.index, r) in values for i in tests for r in used(i) if r in registers)


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [flags];
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, %ctaid.x;
    xor.b32 %r2, %r1, 1;
    mul.wide.u32 %rd3, %r1, 4;
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd5, %rd1, %rd3;
    add.s64 %rd6, %rd1, %rd4;
    st.relaxed.gpu.global.b32 [%rd5], 1;
    fence.sc.gpu;
    ld.relaxed.gpu.global.b32 %r3, [%rd6];
    setp.ne.s32 %p1, %r3, 0;
    @%p1 bra DONE;
    st.global.b32 [%rd2], %r1;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 4 flags, .param .u64 .ptr .global .align 4 out",
)

RULE = Rule(
    id="R09",
    title="crossed flags need fence.sc",
    severity=Severity.ERROR,
    meaning=(
        "When two sides each store their own flag and then look at the other's, `fence.acq_rel` between store and load "
        "allows an execution in which both look before either store is visible, so both go on (store buffering). Only "
        "`fence.sc` on both sides forbids it. Release and acquire on the flags do not help either: they order data "
        "around a flag that was seen, not the flags themselves. A loop that waits for the other flag is no such case, "
        "because it looks again."
    ),
    looks_for=(
        "a strong store and a later strong load of another location whose value decides a branch, with no fence.sc "
        "between, where the same code (or other code of the kernel) stores what is loaded and loads what is stored"
    ),
    isa_section="Memory Consistency Model: Fence-SC Order, Causality Order",
    fix="fence.sc between store and load, on both sides, at the scope that includes both",
    failing=_PASSING.replace("fence.sc.gpu", "fence.acq_rel.gpu"),
    passing=_PASSING,
    mutations=(
        Mutation("sc becomes acq_rel", "fence.sc.gpu", "fence.acq_rel.gpu"),
        Mutation("fence deleted", "    fence.sc.gpu;\n", ""),
        Mutation(
            "release and acquire instead",
            "st.relaxed.gpu.global.b32 [%rd5], 1;\n    fence.sc.gpu;\n    ld.relaxed",
            "st.release.gpu.global.b32 [%rd5], 1;\n    ld.acquire",
        ),
    ),
    check=check,
)
