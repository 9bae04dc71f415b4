"""R07: a thread waits on a flag with loads that give no order."""

from __future__ import annotations

from collections.abc import Iterator

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..ptx.cfg import Loop
from ..ptx.effects import Access, Kind, defined, used
from ..ptx.provenance import Base
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import live, narrow

_SPACES = ("global", "shared::cta", "shared::cluster", "generic")


def polls(s: Subject) -> Iterator[tuple[Loop, int, Access]]:
    """(loop, load, access): loops that are left when a value read from one fixed address changes."""
    for loop in s.cfg.loops:
        inside = [i for b in loop.blocks for i in range(s.cfg.blocks[b].start, s.cfg.blocks[b].end)]
        made = {(i, r) for i in inside for r in defined(s.body[i])}
        if any(s.effects[i].kind in (Kind.STORE, Kind.BULK) for i in inside):
            continue  # it works while it waits: no plain polling loop
        deciding = _deciding(s, loop, {i for i, _ in made})
        for i in sorted(deciding):
            e = s.effects[i]
            if e.kind not in (Kind.LOAD, Kind.ATOMIC) or not e.accesses or e.accesses[0].space not in _SPACES:
                continue
            if _fixed(s, i, loop):
                yield loop, i, e.accesses[0]


def _deciding(s: Subject, loop: Loop, inside: set[int]) -> set[int]:
    """Instructions of the loop on which its leaving depends."""
    work = []
    for b in loop.blocks:
        last = s.cfg.terminator(b)
        if (
            last is not None
            and last.pred is not None
            and any(t not in loop.blocks for t in s.cfg.successors[b])
        ):
            work.append(s.ssa.read(last.index, last.pred[0]))
    seen: set[int] = set()
    found: set[int] = set()
    while work:
        v = work.pop()
        if v in seen:
            continue
        seen.add(v)
        value = s.ssa.values[v]
        work.extend(i for _, i in value.inputs)
        if value.index in inside:
            found.add(value.index)
            if s.effects[value.index].kind not in (Kind.LOAD, Kind.ATOMIC):
                work.extend(
                    s.ssa.read(value.index, r) for r in used(s.body[value.index]) if r in s.function.registers
                )
    return found


def _fixed(s: Subject, i: int, loop: Loop) -> bool:
    """The address does not change from one round to the next."""
    for atom, _ in s.address(i, s.effects[i].accesses[0]).affine.terms:
        if atom[0] == "value" and isinstance(atom[1], int) and atom[1] >= 0:
            value = s.ssa.values[atom[1]]
            block = value.block if value.is_phi else s.cfg.block_of[value.index] if value.index >= 0 else -1
            if block in loop.blocks:
                return False
    return True


def check(s: Subject) -> Iterator[Finding]:
    """One finding per kind and instruction name: an unrolled poll is one poll."""
    seen: set[tuple[str, str]] = set()
    for finding in _check(s):
        key = (finding.verdict, finding.sites[0].text.split()[0])
        if key not in seen:
            seen.add(key)
            yield finding


def _unread(s: Subject) -> Iterator[Finding]:
    """A strong load whose value nobody uses: an acquire counts only if the value that was waited for was seen."""
    needed = live(s)
    for i in s.find(Kind.LOAD):
        a = s.effects[i].accesses[0] if s.effects[i].accesses else None
        if a is None or a.sem in ("weak", "") or a.space not in _SPACES:
            continue
        results = [s.ssa.written(i, r) for r in defined(s.body[i])]
        if all(v not in needed for v in results):
            yield s.finding(
                "R07",
                Severity.ERROR,
                f"{s.body[i].name} reads a flag whose value nobody looks at: what follows is ordered after nothing",
                [s.site(i, "flag")],
                missing="flag seen -> what follows it",
                fix="branch back until the value is the one that was waited for",
            )


def _check(s: Subject) -> Iterator[Finding]:
    yield from _unread(s)
    yield from _announced(s)
    for loop, i, access in polls(s):
        if access.sem in ("acquire", "acq_rel", "mmio"):
            continue
        came = s.order.search([i], stop=lambda j: _acquires(s, j), sync=False)
        leaves = [n for n in came if (b := s.order.block(n)) is not None and b not in loop.blocks]
        guarded = [j for j in sorted(leaves) if j < len(s.body) and _depends(s, j, i)]
        if access.sem == "weak":
            yield s.finding(
                "R07",
                Severity.ERROR,
                "a loop waits for a value that a weak load reads: the load may be done once for all rounds, and "
                "whatever "
                "is read after the loop is not ordered after the writer's data",
                [s.site(i, "poll"), *(s.site(j, "guarded read") for j in guarded[:1])],
                missing="flag read -> acquire -> data read",
                fix=f"poll with ld.acquire at the scope of both parties ({s.body[i].name} is weak)",
            )
        elif guarded:
            volatile = ".volatile orders nothing but itself"
            kind = volatile if access.sem == "volatile" else "a relaxed load orders nothing"
            yield s.finding(
                "R07",
                Severity.ERROR,
                f"a loop waits for a flag with {s.body[i].name} and data is read after it with no acquire "
                f"between: {kind}",
                [s.site(i, "poll"), s.site(guarded[0], "guarded read")],
                missing="flag read -> acquire -> data read",
                fix=f"poll with ld.acquire, or put fence.acq_rel.{access.scope or 'gpu'} after the loop",
                settle=""
                if _only_a_flag(s, i) or any(s.role(b) is Role.FLAG for b, _ in s.address(i, access).parts)
                else "that the reads after the loop do not depend on what the writer of the flag wrote before it",
                path=s.order.trace(came, guarded[0], [i]),
            )


def _acquires(s: Subject, i: int) -> bool:
    e = s.effects[i]
    if e.kind is Kind.FENCE:
        return e.acquires
    if e.kind in (Kind.CLUSTER_BARRIER, Kind.BARRIER, Kind.WARP_BARRIER) or s.order.is_wait(i):
        return False  # they order the CTA or cluster, but not against the writer of the flag
    return e.acquires or (e.kind is Kind.GRID_DEPENDENCY and e.op == "wait")


def _announced(s: Subject) -> Iterator[Finding]:
    """A relaxed store of a constant other than 0 after data, with no release between: a flag raised too freely."""
    for i in s.find(Kind.STORE):
        e = s.effects[i]
        a = e.accesses[0]
        value = s.body[i].operands[-1]
        constant = s.provenance.operand_affine(s.body[i], value).constant
        if a.sem not in ("relaxed", "volatile") or narrow(a.scope, "gpu") or constant in (None, 0):
            continue
        if a.space not in ("global", "generic"):
            continue
        fences = {f for f in s.find(Kind.FENCE) if _releases_for(s, f, i)}
        came = s.order.search([i], stop=fences.__contains__, backward=True, sync=False)
        flag = {b for b, _ in s.address(i, a).parts}
        data = sorted(j for j in came if j < len(s.body) and j not in fences and _plain_write(s, j, flag))
        if data:
            yield s.finding(
                "R07",
                Severity.ERROR,
                f"{s.body[i].name} raises a flag after data has been written, and no fence releases the data before it",
                [s.site(data[-1], "data"), s.site(i, "flag")],
                missing="data -> release -> flag",
                fix=f"st.release.{a.scope}, or fence.acq_rel.{a.scope} before line {s.body[i].line}",
                path=s.order.trace(came, data[-1], [i])[::-1],
            )


def _releases_for(s: Subject, f: int, i: int) -> bool:
    """Fence `f` releases for the thread that makes the strong write `i`; R06 judges its scope."""
    e = s.effects[f]
    if not e.releases or e.restrict:
        return False
    return s.body[f].pred is None or s.executors(f).includes(s.executors(i))


def _plain_write(s: Subject, j: int, flag: set[Base | None]) -> bool:
    return any(
        a.writes and a.role == "data" and a.sem == "weak" and not a.asynchronous and a.space in ("global", "generic")
        and not {b for b, _ in s.address(j, a).parts} & flag
        for a in s.effects[j].accesses
    )  # fmt: skip


def _only_a_flag(s: Subject, poll: int) -> bool:
    """The value serves comparisons alone: a mailbox word, which is data itself, would be used further."""
    names = defined(s.body[poll])
    values = {s.ssa.written(poll, r) for r in names}
    for v, value in enumerate(s.ssa.values):
        if any(i in values for _, i in value.inputs):
            values.add(v)
    for ins in s.body:
        if (
            s.cfg.block_of[ins.index] in s.cfg.reachable
            and ins.opcode != "setp"
            and any(r in names and s.ssa.read(ins.index, r) in values for r in used(ins))
        ):
            return False
    return True


def _depends(s: Subject, i: int, poll: int) -> bool:
    """A plain read that other threads' writes could feed: not of weights, not of what the poll itself reads."""
    flag = {b for b, _ in s.address(poll, s.effects[poll].accesses[0]).parts}
    for a in s.effects[i].accesses:
        if (
            not a.reads
            or a.role not in ("data", "tensor")
            or a.sem != "weak"
            or a.space not in ("global", "generic")
        ):
            continue
        bases = {b for b, _ in s.address(i, a).parts}
        if bases & flag or a.proxy == "noncoherent":
            continue
        roles = {s.role(b) for b in bases}
        if s.contract is None or not roles <= {Role.WEIGHT, Role.STABLE}:
            return True
    return False


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [flag];
    ld.param.u64 %rd2, [data];
    ld.param.u64 %rd3, [out];
    WAIT:
    ld.acquire.gpu.global.b32 %r1, [%rd1];
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra WAIT;
    ld.global.b32 %r2, [%rd2];
    st.global.b32 [%rd3], %r2;
    """,
    params=", ".join(f".param .u64 .ptr .global .align 4 {name}" for name in ("flag", "data", "out")),
)

RULE = Rule(
    id="R07",
    title="polling loop without acquire",
    severity=Severity.ERROR,
    meaning=(
        "A loop that waits for another thread's flag must read it with a strong load, or the compiler and the hardware "
        "may serve every round from the first;"
        " and it needs an acquire, or the data that the flag announces may be read "
        "too early. `.volatile` is a relaxed access at system scope: it is read anew each time, but it orders no other "
        "access. A relaxed poll followed by a fence is fine. A value that is itself the data (a mailbox word that is "
        "polled until it differs from a sentinel) needs no acquire, and is not reported."
    ),
    looks_for=(
        "loops that end when a value at a fixed address changes, read by a weak load; or by a relaxed or volatile load "
        "with no acquiring fence before other global data is read; strong loads whose value "
        "nobody uses; a relaxed store of a constant after data with no release between"
    ),
    isa_section="Memory Consistency Model: Operation Types, Volatile Operation, Acquire Patterns",
    fix="ld.acquire in the loop, or ld.relaxed and an acquiring fence after it, at the scope of both parties",
    failing=_PASSING.replace("ld.acquire.gpu.global", "ld.global"),
    passing=_PASSING,
    mutations=(
        Mutation("weak", "ld.acquire.gpu.global", "ld.global"),
        Mutation("volatile", "ld.acquire.gpu.global", "ld.volatile.global"),
        Mutation("relaxed", "ld.acquire.gpu.global", "ld.relaxed.gpu.global"),
        Mutation(
            "fence before the loop",
            "WAIT:\n    ld.acquire.gpu",
            "    fence.acq_rel.gpu;\nWAIT:\n    ld.relaxed.gpu",
        ),
    ),
    check=check,
)
