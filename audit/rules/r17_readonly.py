"""R17: a non-coherent load of memory that is written while the kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..subject import Subject
from .base import Mutation, Rule, snippet


def check(s: Subject) -> Iterator[Finding]:
    reads = [(i, a) for i, a in s.accesses("global") if a.proxy == "noncoherent"]
    if not reads:
        return
    writes = [(i, a) for i, a in s.accesses("global") if a.writes and a.role == "data"]
    reported = set()
    for i, a in reads:
        bases = tuple(b for b, _ in s.address(i, a).parts)
        if bases in reported:
            continue
        for w, b in writes:
            known = s.address(w, b).known and s.address(i, a).known
            if known and s.order.overlap(i, a, w, b):
                reported.add(bases)
                yield s.finding(
                    "R17",
                    Severity.ERROR,
                    f"{s.name(bases[0])} is read with {s.body[i].name} and written in the same launch: the "
                    f"non-coherent "
                    "path promises that nobody writes the memory while the kernel runs, and no fence reaches it",
                    [s.site(i, "non-coherent load"), s.site(w, "write")],
                    missing="no order exists between a write and a non-coherent load",
                    fix="load without .nc (and without __ldg or const __restrict__ in the source)",
                    settle="" if _surely(s, i, w) else "that the two never touch the same bytes",
                )
                break
        role = s.role(bases[0])
        early = s.contract is not None and s.contract.launch.pdl
        if role in (Role.UPSTREAM, Role.STATE, Role.FLAG, Role.PEER) and early and bases not in reported:
            reported.add(bases)
            yield s.finding(
                "R17",
                Severity.ERROR,
                f"{s.name(bases[0])} has role {role} and is read with {s.body[i].name}: this kernel may start "
                f"while the "
                "previous grid still writes it, so it is not read-only while the kernel runs",
                [s.site(i, "non-coherent load")],
                missing="no order exists between a write and a non-coherent load",
                fix="load without .nc",
            )


def _surely(s: Subject, i: int, w: int) -> bool:
    """Both addresses have the same single origin; one parameter is one buffer."""
    a, b = s.address(i, s.effects[i].accesses[0]), s.address(w, s.effects[w].accesses[0])
    return len(a.parts) == len(b.parts) == 1


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.nc.f32 %f1, [%rd4];
    st.global.f32 [%rd5], %f1;
    """,
    params=".param .u64 .ptr .global .align 4 x, .param .u64 .ptr .global .align 4 y",
)

RULE = Rule(
    id="R17",
    title="non-coherent load of memory that is written meanwhile",
    severity=Severity.ERROR,
    meaning=(
        "`ld.global.nc` reads through a path that the memory consistency model does not cover: it may return "
        "stale data "
        "whatever fences, barriers or waits lie before it. It is for memory that nobody writes from the start of the "
        "kernel to its end. Memory written in the same launch, by any CTA, is not that;"
        " nor is the output of a previous "
        "grid when this kernel may start before that grid has completed, even after the dependency wait."
    ),
    looks_for=(
        "non-coherent loads and writes of the same parameter in one kernel; with a contract, non-coherent loads of "
        "upstream, state, flag or peer memory in a kernel that is launched as a dependent"
    ),
    isa_section="ld.global.nc; Memory Consistency Model: Scope and applicability of the model",
    fix="a coherent load",
    failing=_PASSING.replace("st.global.f32 [%rd5]", "st.global.f32 [%rd4]"),
    passing=_PASSING,
    mutations=(
        Mutation("in place", "st.global.f32 [%rd5]", "st.global.f32 [%rd4]"),
        Mutation(
            "second read",
            "    st.global.f32 [%rd5], %f1;\n",
            "    st.global.f32 [%rd5], %f1;\n    bar.sync 0;\n    ld.global.nc.f32 %f2, [%rd5];\n",
        ),
        Mutation("atomic", "st.global.f32 [%rd5], %f1", "red.global.add.f32 [%rd4], %f1"),
    ),
    check=check,
)
