"""R14: registers of an outstanding wgmma are touched, or a wgmma starts without `wgmma.fence`."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Kind, defined, used
from ..ptx.ir import Imm, Reg, Vec
from ..subject import Subject
from .base import Mutation, Rule, snippet

_DEEPEST = 8  # outstanding groups that are told apart


def check(s: Subject) -> Iterator[Finding]:
    operations = s.find(Kind.WGMMA, op="mma")
    if not operations:
        return
    yield from _unfenced(s, operations)
    yield from _touched(s, operations)


def _registers(s: Subject, i: int) -> tuple[frozenset[str], frozenset[str]]:
    """(accumulators, A fragment) of one wgmma."""
    ins = s.body[i]
    a = ins.operands[1]
    fragment = frozenset(x.name for x in a.items if isinstance(x, Reg)) if isinstance(a, Vec) else frozenset()
    return frozenset(defined(ins)), fragment


def _unfenced(s: Subject, operations: list[int]) -> Iterator[Finding]:
    fences = set(s.find(Kind.WGMMA, op="fence"))
    early = s.cfg.from_entry(fences.__contains__)
    for i in operations:
        if i in early:
            yield s.finding(
                "R14",
                Severity.ERROR,
                "a wgmma can start although no wgmma.fence has been executed",
                [s.site(i, "wgmma")],
                missing="wgmma.fence -> first wgmma.mma_async",
                fix=f"wgmma.fence.sync.aligned before line {s.body[i].line}, on every path",
            )
            return
    for i in operations:
        accumulators, fragment = _registers(s, i)
        near = s.cfg.before([i], stop=fences.__contains__)
        for j in sorted(near):
            if s.effects[j].kind is Kind.WGMMA:
                continue
            written = set(defined(s.body[j])) & (accumulators | fragment)
            if written and _feeds(s, j, i, written):
                yield s.finding(
                    "R14",
                    Severity.ERROR,
                    f"register {sorted(written)[0]} is written after the last wgmma.fence and then used by a wgmma",
                    [s.site(j, "register write"), s.site(i, "wgmma")],
                    missing="register write -> wgmma.fence -> wgmma",
                    fix=f"wgmma.fence.sync.aligned between lines {s.body[j].line} and {s.body[i].line}",
                )
                return


def _feeds(s: Subject, j: int, i: int, registers: set[str]) -> bool:
    return any(s.ssa.written(j, r) == s.ssa.read(i, r) for r in registers if r in used(s.body[i]))


def _touched(s: Subject, operations: list[int]) -> Iterator[Finding]:
    """Follow each wgmma until a `wait_group` covers its group; nothing on the way may touch its registers."""
    cfg = s.cfg
    for i in operations:
        accumulators, fragment = _registers(s, i)
        seen: set[tuple[int, int]] = set()
        stack = [(cfg.block_of[i], i + 1, 0)]  # block, instruction, commits since
        while stack:
            block, at, commits = stack.pop()
            covered = False
            for j in range(at, cfg.blocks[block].end):
                e = s.effects[j]
                if e.kind is Kind.WGMMA:
                    if e.op == "commit":
                        commits = min(commits + 1, _DEEPEST)
                    elif e.op == "wait" and commits > _allowed(s, j):
                        covered = True
                        break
                    continue  # same-shape accumulator chaining is in order
                touched = (
                    set(defined(s.body[j])) & (accumulators | fragment) or set(used(s.body[j])) & accumulators
                )
                if touched:
                    yield _finding(s, i, j, sorted(touched)[0], commits)
                    return
            if covered:
                continue
            for t in cfg.successors[block]:
                if t != cfg.exit and (t, commits) not in seen:
                    seen.add((t, commits))
                    stack.append((t, cfg.blocks[t].start, commits))


def _allowed(s: Subject, wait: int) -> int:
    """N of `wait_group N`: how many later groups may still be outstanding."""
    number = s.body[wait].operands[0] if s.body[wait].operands else None
    return number.value if isinstance(number, Imm) and isinstance(number.value, int) else 0


def _finding(s: Subject, i: int, j: int, register: str, commits: int) -> Finding:
    reason = "its group has not been waited for" if commits else "its group has not even been committed"
    copies = s.body[j].opcode == "mov"
    return s.finding(
        "R14",
        Severity.ERROR,
        f"register {register} of a wgmma is touched while the wgmma may still run: {reason}",
        [s.site(i, "wgmma"), s.site(j, "touch")],
        missing="wgmma -> commit_group -> wait_group that covers it -> use of its registers",
        fix=f"wgmma.commit_group and wgmma.wait_group before line {s.body[j].line}",
        settle="that the assembler coalesces this copy: look for WARPGROUP.DEPBAR in the machine code"
        if copies
        else "",
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [adesc];
    ld.param.u64 %rd2, [bdesc];
    ld.param.u64 %rd3, [out];
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, 0f00000000;
    mov.f32 %f3, 0f00000000;
    mov.f32 %f4, 0f00000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};
    """,
    params=".param .u64 adesc, .param .u64 bdesc, .param .u64 .ptr .global .align 16 out",
)

RULE = Rule(
    id="R14",
    title="wgmma registers are touched too early, or wgmma.fence is missing",
    severity=Severity.ERROR,
    meaning=(
        "`wgmma.mma_async` runs on after it is issued. Its accumulators, and the registers of an A fragment, "
        "belong to it "
        "until a `wgmma.wait_group` covers the group that it was committed to. Before the first one, and after every "
        "ordinary write of such a register, `wgmma.fence` must order the registers. Chains of the same accumulator and "
        "shape need no fence between them. The fence orders registers only; operands in shared memory need a proxy "
        "fence (R01)."
    ),
    looks_for=(
        "a path to a wgmma without wgmma.fence;"
        " a register written between the last fence and the wgmma that uses it; a "
        "use or write of its registers before a wait_group that counts its group"
    ),
    isa_section="Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence, wgmma.wait_group",
    fix="wgmma.fence, mma_async, commit_group, wait_group, then the registers",
    failing=_PASSING.replace("    wgmma.wait_group.sync.aligned 0;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("wait deleted", "    wgmma.wait_group.sync.aligned 0;\n", ""),
        Mutation("wait for older groups only", "wait_group.sync.aligned 0", "wait_group.sync.aligned 1"),
        Mutation("commit deleted", "    wgmma.commit_group.sync.aligned;\n", ""),
        Mutation("fence deleted", "    wgmma.fence.sync.aligned;\n", ""),
        Mutation(
            "register written after the fence",
            "    wgmma.fence.sync.aligned;\n",
            "    wgmma.fence.sync.aligned;\n    add.f32 %f1, %f1, %f1;\n",
        ),
        Mutation(
            "wait moved below the use",
            "    wgmma.wait_group.sync.aligned 0;\n    st.global.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};\n",
            "    st.global.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};\n    wgmma.wait_group.sync.aligned 0;\n",
        ),
    ),
    check=check,
)
