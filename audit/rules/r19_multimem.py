"""R19: multicast (multimem) memory used by ordinary accesses, or signalled too weakly."""

from __future__ import annotations

from collections.abc import Iterator

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..ptx.provenance import Base
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import narrow


def check(s: Subject) -> Iterator[Finding]:
    by_base: dict[Base, tuple[list[int], list[int]]] = {}
    for i, a in s.accesses("global", "multimem"):
        for base, _ in s.address(i, a).parts:
            if base is not None and base.kind == "param" and a.role == "data":
                by_base.setdefault(base, ([], []))[a.space != "multimem"].append(i)
    for base, (multimem, plain) in by_base.items():
        if plain and (multimem or s.role(base) is Role.MULTICAST):
            yield s.finding(
                "R19",
                Severity.ERROR,
                f"{s.name(base)} is a multimem address, and {s.body[plain[0]].name} accesses it: only multimem "
                "instructions may",
                [s.site(plain[0], "ordinary access"), *(s.site(i, "multimem access") for i in multimem[:1])],
                missing="an access through the memory's own (unicast) address",
                fix="use the unicast address of the local copy; multimem.* is for the multicast address",
            )
        if multimem and s.contract is not None and s.role(base) not in (Role.MULTICAST, None):
            yield s.finding(
                "R19",
                Severity.ERROR,
                f"{s.name(base)} has role {s.role(base)} and is accessed by {s.body[multimem[0]].name}",
                [s.site(multimem[0], "multimem access")],
                missing="a multicast address",
                fix="pass a multicast address and give it role multicast, or use an ordinary access",
            )
    yield from _signals(s)


def _signals(s: Subject) -> Iterator[Finding]:
    """`multimem.red` as a signal to other GPUs must release at system scope."""
    fences = {
        f for f in s.find(Kind.FENCE) if s.effects[f].releases and not narrow(s.effects[f].scope, "sys")
    }
    for i in s.find(Kind.REDUCTION, op="multimem"):
        e = s.effects[i]
        if e.releases and not narrow(e.scope, "sys"):
            continue
        came = s.order.search([i], stop=fences.__contains__, backward=True, sync=False)
        data = [j for j in came if j < len(s.body) and _publishes(s, j, i)]
        if data:
            yield s.finding(
                "R19",
                Severity.ERROR,
                f"{s.body[i].name} follows writes of memory that other GPUs read, and nothing releases them at system "
                "scope before it",
                [s.site(max(data), "write"), s.site(i, "signal")],
                missing="writes -> release at .sys scope -> multimem.red",
                fix="multimem.red.release.sys, or fence.acq_rel.sys before it",
                settle=""
                if _shared_with_peers(s, max(data))
                else "that no other GPU reads what is written before the signal",
                path=s.order.trace(came, max(data), [i])[::-1],
            )
            return


def _publishes(s: Subject, j: int, signal: int) -> bool:
    return j != signal and any(
        a.writes and a.role in ("data", "tensor") and a.space in ("global", "generic", "multimem")
        for a in s.effects[j].accesses
    ) and s.effects[j].kind is not Kind.REDUCTION  # fmt: skip


def _shared_with_peers(s: Subject, i: int) -> bool:
    for a in s.effects[i].accesses:
        if a.space == "multimem" or any(
            s.role(b) in (Role.PEER, Role.MULTICAST) for b, _ in s.address(i, a).parts
        ):
            return True
    return False


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [everywhere];
    ld.param.u64 %rd2, [signal];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    multimem.st.weak.global.f32 [%rd4], 0f3F800000;
    bar.sync 0;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra DONE;
    multimem.red.release.sys.global.add.u32 [%rd2], 1;
    DONE:
    """,
    params=".param .u64 everywhere, .param .u64 signal",
)

RULE = Rule(
    id="R19",
    title="multicast memory is accessed or signalled wrongly",
    severity=Severity.ERROR,
    meaning=(
        "A multicast address stands for the copies of several GPUs at once. Only `multimem` instructions may use "
        "it; an "
        "ordinary load or store through it is undefined. `multimem.ld_reduce` and `multimem.st` are weak unless "
        "they say "
        "otherwise, and `multimem.red` is relaxed: as a signal to the other GPUs it must be `.release.sys`, or "
        "follow a "
        "fence at system scope. Readers poll their own copy through its unicast address."
    ),
    looks_for=(
        "one parameter used by multimem and ordinary instructions; ordinary accesses of what the contract calls "
        "multicast; a multimem.red after writes of shared memory of the GPUs without a release at system scope"
    ),
    isa_section="Multimem addresses; multimem.ld_reduce, multimem.st, multimem.red",
    fix="multimem for the multicast address, the unicast address for local accesses, .release.sys for signals",
    failing=_PASSING.replace("multimem.red.release.sys", "multimem.red.relaxed.sys"),
    passing=_PASSING,
    mutations=(
        Mutation("relaxed", "multimem.red.release.sys", "multimem.red.relaxed.sys"),
        Mutation("default", "multimem.red.release.sys", "multimem.red"),
        Mutation("gpu scope", "multimem.red.release.sys", "multimem.red.release.gpu"),
        Mutation("ordinary load", "    bar.sync 0;\n", "    ld.global.f32 %f1, [%rd4];\n    bar.sync 0;\n"),
        Mutation(
            "ordinary signal",
            "multimem.red.release.sys.global.add.u32 [%rd2], 1",
            "multimem.red.release.sys.global.add.u32 [%rd2], 1;\n    st.release.sys.global.u32 [%rd2], 1",
        ),
    ),
    check=check,
)
