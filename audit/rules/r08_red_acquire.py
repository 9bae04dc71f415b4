"""R08: a reduction stands where an acquire pattern needs a read."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import looked_at, narrow


def check(s: Subject) -> Iterator[Finding]:
    yield from _reductions(s)
    yield from _last_block(s)


def _last_block(s: Subject) -> Iterator[Finding]:
    """Everybody writes, counts with `atom`, and the one who sees the last count reads what all have written."""
    for i in s.find(Kind.ATOMIC):
        e = s.effects[i]
        a = e.accesses[0]
        if a.space not in ("global", "generic") or narrow(a.scope, "gpu") or not looked_at(s, i):
            continue
        own = {b for b, _ in s.address(i, a).parts}
        before = s.order.search([i], backward=True, sync=False)
        after = s.order.search([i], sync=False)
        pairs = [
            (w, b, r, c)
            for w, b in s.accesses("global")
            if w in before and b.writes and _plain(b) and not {x for x, _ in s.address(w, b).parts} & own
            for r, c in s.accesses("global")
            if r in after and c.reads and _plain(c) and s.order.overlap(w, b, r, c)
            and s.address(w, b).affine != s.address(r, c).affine
        ]  # fmt: skip
        for side, needed in (("release", e.releases), ("acquire", e.acquires)):
            if needed or not pairs:
                continue
            fences = {f for f in s.find(Kind.FENCE) if _serves(s, f, i, a, side)}
            came = s.order.search([i], stop=fences.__contains__, backward=side == "release", sync=False)
            for w, _, r, _ in pairs:
                data = w if side == "release" else r
                if data in came and data not in fences:
                    yield s.finding(
                        "R08",
                        Severity.ERROR,
                        "all contributors write, count with a relaxed atomic, and the last one reads what they have "
                        f"written; no {side} stands between the {'write' if side == 'release' else 'read'} and "
                        f"the count",
                        [s.site(w, "write"), s.site(i, "count"), s.site(r, "read")],
                        missing="write -> release -> count, and count -> acquire -> read",
                        fix=f"make the atomic .acq_rel.{a.scope}, or put fence.acq_rel.{a.scope} before and after it",
                        path=s.order.trace(came, data, [i]),
                    )
                    return


def _plain(a: Access) -> bool:
    return a.sem == "weak" and a.role == "data" and not a.asynchronous


def _serves(s: Subject, f: int, i: int, a: Access, side: str) -> bool:
    """Fence `f` is wide enough for the count, and executed by the thread that counts."""
    e = s.effects[f]
    if not (e.releases if side == "release" else e.acquires) or e.restrict or narrow(e.scope, a.scope):
        return False
    return s.body[f].pred is None or s.executors(f).includes(s.executors(i))


def _reductions(s: Subject) -> Iterator[Finding]:
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
    title="last-block pattern without its release, its acquire, or its read",
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
        "between the reduction and the reads; the same with an atomic, without a release "
        "before or an acquire after it"
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
        Mutation("release fence deleted", "    fence.acq_rel.gpu;\n    atom", "    atom"),
        Mutation("acquire fence deleted", "    fence.acq_rel.gpu;\n    setp", "    setp"),
        Mutation("fence narrowed", "fence.acq_rel.gpu", "fence.acq_rel.cta"),
        Mutation(
            "atom becomes releasing red",
            "atom.relaxed.gpu.global.add.u32 %r2, [%rd2], 1",
            "red.release.gpu.global.add.u32 [%rd2], 1",
        ),
    ),
    check=check,
)
