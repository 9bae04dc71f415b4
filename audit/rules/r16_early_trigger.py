"""R16: a grid that starts its dependents and may complete without waiting for its own predecessors."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .dependency import State, coverage


def check(s: Subject) -> Iterator[Finding]:
    triggers = s.find(Kind.GRID_DEPENDENCY, op="launch")
    waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
    if not triggers or (s.contract is not None and not s.contract.launch.pdl):
        return
    cover = coverage(s)
    if cover.at_exit is not State.OPEN:
        return
    early = [t for t in triggers if cover.before[t] is State.OPEN]
    if not early:
        return
    reached = s.order.search([early[0]], stop=lambda i: i in set(waits), sync=False)
    if s.order.exit not in reached:
        return
    settle = ""
    if s.contract is None:
        settle = "a contract that says whether this kernel is launched as a dependent (launch.pdl)"
    message = (
        "dependents may start here although this grid has not waited for its own predecessors, and a "
        "thread can leave "
        "without ever waiting: the completion of this grid then says nothing about theirs"
    )
    yield s.finding(
        "R16",
        Severity.WARNING,
        message,
        [s.site(early[0], "trigger"), *(s.site(w, "dependency wait") for w in waits[:2])],
        missing="completion of the previous grids -> exit of this grid",
        fix="execute griddepcontrol.wait on every path to the end of the kernel, also where its data is "
        "not needed",
        settle=settle,
        path=s.order.trace(reached, s.order.exit, [early[0]]),
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [y];
    ld.param.u32 %r2, [n];
    mov.u32 %r1, %tid.x;
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    setp.ge.u32 %p1, %r1, %r2;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], 0f3F800000;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 16 y, .param .u32 n",
)

RULE = Rule(
    id="R16",
    title="dependents are started by a grid that may never wait for its predecessors",
    severity=Severity.WARNING,
    meaning=(
        "`griddepcontrol.wait` waits for the prerequisite grids only: the ones directly before. What "
        "lies further back "
        "is complete only if each grid of the chain waits, in every CTA, before it completes. A grid "
        "that executes "
        "`launch_dependents` before its own wait and has a way out without any wait breaks the chain: "
        "its dependents' "
        "wait returns while a grid before it may still be writing. `launch_dependents` itself publishes "
        "nothing; the "
        "dependents must wait for whatever this grid writes, early or late (R15 checks them)."
    ),
    looks_for="a path from a `launch_dependents` that no wait precedes to the exit without a "
    "`griddepcontrol.wait`",
    isa_section="Parallel Synchronization and Communication Instructions: griddepcontrol",
    fix="execute griddepcontrol.wait on every path to the end of the kernel",
    failing=_PASSING.replace("    griddepcontrol.wait;\n", "").replace(
        "@%p1 bra DONE;\n", "@%p1 bra DONE;\n    griddepcontrol.wait;\n"
    ),
    passing=_PASSING,
    mutations=(
        Mutation("wait deleted", "    griddepcontrol.wait;\n", ""),
        Mutation("early exit", "    griddepcontrol.wait;\n", "    @%p2 exit;\n    griddepcontrol.wait;\n"),
    ),
    check=check,
    contract={
        "kernel": "kernel",
        "params": [
            {"name": "y", "dtype": "f32", "role": "output", "access": "w"},
            {"name": "n", "dtype": "i32"},
        ],
        "launch": {"block": [128, 1, 1], "pdl": True},
    },
)
