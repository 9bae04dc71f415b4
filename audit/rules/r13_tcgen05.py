"""R13: tensor memory handed between threads, or read into registers, without the waits and fences that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind, defined, used
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import waits_on

_TENSOR = ("ld", "st", "mma", "mma_ws", "cp", "shift")


def check(s: Subject) -> Iterator[Finding]:
    operations = [i for i in s.find(Kind.TCGEN05) if s.effects[i].op in _TENSOR]
    if not operations:
        return
    yield from _results(s)
    yield from _unobserved(s)
    yield from _after(s, set(operations))
    yield from _before(s, set(operations))


def _results(s: Subject) -> Iterator[Finding]:
    """Registers of `tcgen05.ld` hold nothing before `wait::ld`."""
    waits = set(s.find(Kind.TCGEN05, op="wait_ld"))
    for i in s.find(Kind.TCGEN05, op="ld"):
        values = {s.ssa.written(i, r) for r in defined(s.body[i])}
        for j in sorted(s.cfg.after([i], stop=waits.__contains__)):
            if any(s.ssa.read(j, r) in values for r in used(s.body[j]) if r in s.function.registers):
                yield s.finding(
                    "R13",
                    Severity.ERROR,
                    "a register that tcgen05.ld fills is used before tcgen05.wait::ld",
                    [s.site(i, "tcgen05.ld"), s.site(j, "use")],
                    missing="tcgen05.ld -> tcgen05.wait::ld -> use of its registers",
                    fix=f"tcgen05.wait::ld.sync.aligned before line {s.body[j].line}",
                )
                return


def _unobserved(s: Subject) -> Iterator[Finding]:
    """Results of an mma are in tensor memory when its commit has been observed: commit, then a wait that succeeded."""
    commits = {i: set(waits_on(s, i, s.effects[i].accesses[0])) for i in s.find(Kind.TCGEN05, op="commit")}
    for m in [i for i in s.find(Kind.TCGEN05) if s.effects[i].op.startswith("mma")]:
        for r in s.find(Kind.TCGEN05, op="ld"):
            if s.executors(m).disjoint(s.executors(r)):
                continue  # the reading threads do not pass the commit, so their path does not show its place
            route = _uncommitted(s, m, r, commits)
            if route:
                yield s.finding(
                    "R13",
                    Severity.ERROR,
                    "tcgen05.ld reads what a tcgen05.mma may still be writing: no commit of the mma has been "
                    "waited for",
                    [s.site(m, "tcgen05.mma"), s.site(r, "tcgen05.ld")],
                    missing="tcgen05.mma -> commit -> mbarrier wait -> fence::after_thread_sync -> tcgen05.ld",
                    fix=f"tcgen05.commit after line {s.body[m].line}, and a wait for its mbarrier before line "
                    f"{s.body[r].line}",
                    path=route,
                )
                return


def _uncommitted(s: Subject, m: int, r: int, commits: dict[int, set[int]]) -> list[int]:
    """A path from the mma to the load on which no commit is followed by a wait for its object."""
    came: dict[tuple[int, frozenset[int]], tuple[int, frozenset[int]]] = {}
    start = (m, frozenset[int]())
    queue = [start]
    seen = {start}
    for state in queue:
        node, awaited = state
        if node in commits:
            awaited = awaited | commits[node]
        elif node in awaited:
            continue
        for n in s.order.successors.get(node, ()):
            following = (n, awaited)
            if following in seen or s.order.is_sync_edge(node, n):
                continue
            seen.add(following)
            came[following] = state
            if n == r:
                route = [following]
                while route[-1] != start:
                    route.append(came[route[-1]])
                return [node for node, _ in route[::-1]]
            queue.append(following)
    return []


def _carries(s: Subject, wait: int) -> bool:
    """The mbarrier phase that is waited for is completed by tensor-memory work, or by threads that just did some."""
    order = s.order
    sources = [
        a for g in order.predecessors.get(wait, ()) if g > order.exit for a in order.predecessors.get(g, ())
    ]
    arrivals = {a for g in sources for a in order.predecessors.get(g, ()) if a < len(s.body)}
    if any(s.effects[a].kind is Kind.TCGEN05 for a in arrivals):
        return True
    plain = [a for a in arrivals if s.effects[a].kind is Kind.MBARRIER]
    came = order.search(plain, stop=order.syncs, backward=True, sync=False)
    return any(
        i < len(s.body) and s.effects[i].kind is Kind.TCGEN05 and s.effects[i].op in ("ld", "st")
        for i in came
    )


def _after(s: Subject, operations: set[int]) -> Iterator[Finding]:
    fences = set(s.find(Kind.TCGEN05, op="after_thread_sync"))
    for w in s.find(Kind.MBARRIER):
        if not s.order.is_wait(w) or not _carries(s, w):
            continue
        stops = (fences | {i for i in s.order.events if s.order.syncs(i)}) - {w}
        came = s.order.search([w], stop=stops.__contains__, sync=False)
        reached = sorted(i for i in came if i in operations)
        if reached:
            yield s.finding(
                "R13",
                Severity.ERROR,
                f"{s.body[reached[0]].name} follows the wait for other threads' tensor-memory work with no "
                "tcgen05.fence::after_thread_sync between: it is not ordered after the wait",
                [s.site(w, "wait"), s.site(reached[0], "tcgen05 operation")],
                missing="wait -> tcgen05.fence::after_thread_sync -> tcgen05 operation",
                fix=f"tcgen05.fence::after_thread_sync between lines {s.body[w].line} and {s.body[reached[0]].line}",
                path=s.order.trace(came, reached[0], [w]),
            )
            return


def _before(s: Subject, operations: set[int]) -> Iterator[Finding]:
    fences = set(s.find(Kind.TCGEN05, op="before_thread_sync"))
    after: dict[int, dict[int, int]] = {}
    for i in sorted(operations):
        op = s.effects[i].op
        if op not in ("ld", "st"):
            continue
        waits = set(s.find(Kind.TCGEN05, op=f"wait_{op}"))
        pending = s.order.search([i], stop=waits.__contains__, sync=False)
        open_ = s.order.search([i], stop=fences.__contains__, sync=False)
        for a in s.order.events:
            if (a not in open_ and a not in pending) or not _arrives(s, a):
                continue
            if a not in after:
                after[a] = s.order.search([a], stop=fences.__contains__)
            beyond = after[a]
            other = next(
                (
                    j
                    for j in sorted(operations)
                    if j in beyond and _another(s, i, j) and s.effects[j].op != op
                ),
                None,
            )
            if other is None:
                continue
            unwaited = a in pending
            missing = f"tcgen05.wait::{op}" if unwaited else "tcgen05.fence::before_thread_sync"
            yield s.finding(
                "R13",
                Severity.ERROR,
                f"tensor memory goes from this tcgen05.{op} to {s.body[other].name} in another thread, and no "
                f"{missing} "
                "comes before the arrival that announces it",
                [s.site(i, f"tcgen05.{op}"), s.site(a, "arrival"), s.site(other, "next operation")],
                missing=f"tcgen05.{op} -> wait::{op} -> fence::before_thread_sync -> arrival",
                fix=f"tcgen05.wait::{op}, then tcgen05.fence::before_thread_sync, before line {s.body[a].line}",
                path=s.order.trace(open_, a, [i]),
            )
            return


def _arrives(s: Subject, i: int) -> bool:
    e = s.effects[i]
    return e.kind is Kind.BARRIER or (e.kind is Kind.MBARRIER and e.op.startswith("arrive"))


def _another(s: Subject, i: int, j: int) -> bool:
    a, b = s.executors(i), s.executors(j)
    return not (a.one_warp and b.one_warp and a.warps == b.warps)


_PASSING = snippet(
    """
    ld.param.u64 %rd3, [out];
    ld.param.u64 %rd1, [adesc];
    ld.param.u64 %rd2, [bdesc];
    ld.param.u32 %r4, [tmem];
    ld.param.u32 %r5, [idesc];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, done;
    mov.u32 %r3, empty;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.init.shared::cta.b64 [%r3], 128;
    READY:
    bar.sync 0;
    mov.b32 %r6, 0;
    LOOP:
    and.b32 %r7, %r6, 1;
    xor.b32 %r8, %r7, 1;
    @%p1 bra ISSUED;
    WAITEMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r8;
    @!%p2 bra WAITEMPTY;
    tcgen05.fence::after_thread_sync;
    tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd1, %rd2, %r5, %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
    ISSUED:
    WAITDONE:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r7;
    @!%p2 bra WAITDONE;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r4];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.shared::cta.b64 _, [%r3];
    add.s32 %r12, %r10, %r11;
    add.s32 %r6, %r6, 1;
    setp.lt.s32 %p3, %r6, 4;
    @%p3 bra LOOP;
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd3, %rd4;
    st.global.b32 [%rd5], %r12;
    """,
    params=".param .u64 .ptr .global .align 4 out, .param .u64 adesc, .param .u64 bdesc, "
    ".param .u32 tmem, .param .u32 idesc",
    declare=".shared .align 8 .b64 done;\n.shared .align 8 .b64 empty;",
    arch="sm_100a",
)

RULE = Rule(
    id="R13",
    title="tensor memory is handed over without the tcgen05 waits and fences",
    severity=Severity.ERROR,
    meaning=(
        "tcgen05 operations are asynchronous and not in program order with each other, except for a few pairs. A "
        "register "
        "that `tcgen05.ld` fills may be used only after `tcgen05.wait::ld`. When one thread's tensor-memory work is "
        "followed by another's, the first waits for its loads and stores, executes `tcgen05.fence::before_thread_sync` "
        "and arrives; the second waits, executes `tcgen05.fence::after_thread_sync` and goes on. `tcgen05.commit` "
        "contains the first fence. Ordinary fences and barriers order none of this. SASS keeps no trace of the "
        "fences, so "
        "this rule has no second witness."
    ),
    looks_for=(
        "uses of tcgen05.ld results before wait::ld;"
        " tcgen05 operations after a wait for tensor-memory work with no fence "
        "after the wait; arrivals after tcgen05.ld or st with no wait or no fence before them, when another thread's "
        "operation follows"
    ),
    isa_section="tcgen05 Memory Consistency Model: asynchronous operations, thread-synchronization fences",
    fix="ld, wait::ld, fence::before_thread_sync, arrive; wait, fence::after_thread_sync, next operation",
    failing=_PASSING.replace("    tcgen05.fence::after_thread_sync;\n    tcgen05.ld", "    tcgen05.ld"),
    passing=_PASSING,
    mutations=(
        Mutation(
            "after fence of the load deleted",
            "    tcgen05.fence::after_thread_sync;\n    tcgen05.ld",
            "    tcgen05.ld",
        ),
        Mutation(
            "after fence of the mma deleted",
            "    tcgen05.fence::after_thread_sync;\n    tcgen05.mma",
            "    tcgen05.mma",
        ),
        Mutation(
            "commit before the mma",
            "    tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd1, %rd2, %r5, %p4;\n"
            "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];\n",
            "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];\n"
            "    tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd1, %rd2, %r5, %p4;\n",
        ),
        Mutation(
            "wait for the mma deleted",
            "WAITDONE:\n    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r7;\n    @!%p2 bra WAITDONE;\n",
            "",
        ),
        Mutation("before fence deleted", "    tcgen05.fence::before_thread_sync;\n", ""),
        Mutation("wait::ld deleted", "    tcgen05.wait::ld.sync.aligned;\n", ""),
        Mutation("fences swapped", "fence::before_thread_sync", "fence::after_thread_sync"),
        Mutation("wait for stores instead", "tcgen05.wait::ld", "tcgen05.wait::st"),
    ),
    check=check,
)
