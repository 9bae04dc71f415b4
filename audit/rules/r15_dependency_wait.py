"""R15: memory of the previous grid touched before `griddepcontrol.wait`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..ptx.provenance import Base
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .dependency import State, coverage

GLOBAL = ("global", "multimem")
# Synchronised by protocols of their own, which other rules check.
_OWN_PROTOCOL = frozenset({Role.FLAG, Role.PEER, Role.MULTICAST, Role.SCRATCH})


@dataclass
class _Group:
    """Early accesses to one origin."""

    base: Base | None
    writes: bool
    at: list[int] = field(default_factory=list)


def check(s: Subject) -> Iterator[Finding]:
    waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
    if s.contract is not None and not s.contract.launch.pdl:
        return  # launched in plain stream order: nothing of the previous grid is still running
    if not waits and s.contract is None:
        return  # nothing says that this kernel is ever launched as a dependent
    groups: dict[tuple[Base | None, bool], _Group] = {}
    cover = coverage(s)
    for i, a in s.accesses(*GLOBAL):
        if cover.before[i] is State.COVERED or a.role == "mbarrier":
            continue
        bases = [b for b, _ in s.address(i, a).parts if _may_be_global(b, a)]
        for base in bases:
            for writes in (False, True):
                if (a.writes if writes else a.reads) and not _harmless(s, base, writes):
                    groups.setdefault((base, writes), _Group(base, writes)).at.append(i)
    for group in groups.values():
        yield _finding(s, group, waits)


def _may_be_global(base: Base | None, access: Access) -> bool:
    if base is None:
        return True
    return base.kind in ("param", "global", "loaded", "unknown")


def _harmless(s: Subject, base: Base | None, writes: bool) -> bool:
    if base is not None and base.kind == "global":
        return not writes and _constant_table(s, base.name)
    role = s.role(base)
    if role is None:
        return False
    if role in _OWN_PROTOCOL:
        return True
    if writes:
        return False
    if role is Role.STABLE:
        # Distance 1 is the previous launch, which may still be running.
        return s.contract is not None and s.contract.launch.stable_distance >= 2
    return role is Role.WEIGHT


def _constant_table(s: Subject, name: str) -> bool:
    """A variable of this module with an initialiser that no other function of the module mentions."""
    variable = s.module.variables.get(name)
    if variable is None or not variable.init or variable.linkage:
        return False
    stores = any(
        a.writes and any(b is not None and b.name == name for b, _ in s.address(i, a).parts)
        for i, a in s.accesses("global")
    )
    others = (f for f in s.module.functions.values() if f.is_entry and f is not s.entry)
    return not stores and not any(name in ins.text for f in others for ins in f.body)


def _finding(s: Subject, group: _Group, waits: list[int]) -> Finding:
    first = group.at[0]
    what = "written" if group.writes else "read"
    name = s.name(group.base)
    later = s.cfg.after([first])
    wait = next((w for w in waits if w in later), waits[0] if waits else None)
    sites = [s.site(first, "store" if group.writes else "load")]
    sites += [s.site(wait, "dependency wait")] if wait is not None else []
    sites += [s.site(i, "also") for i in group.at[1:4]]
    more = f" ({len(group.at)} accesses)" if len(group.at) > 1 else ""
    role = s.role(group.base)
    where = "before the dependency wait" if wait is not None else "in a kernel without a dependency wait"
    path = s.order.trace(
        s.order.search([s.order.head(0)], stop=lambda i: i in set(waits), sync=False),
        first,
        [s.order.head(0)],
    )
    if role is not None:
        kind = (
            "the previous grid may still read or write it"
            if group.writes
            else "the previous grid may still write it"
        )
        return s.finding(
            "R15",
            Severity.ERROR,
            f"{name} has role {role} and is {what} {where}{more}: {kind}",
            sites,
            missing="completion of the previous grid -> this access (griddepcontrol.wait)",
            fix=f"execute griddepcontrol.wait on every path to line {s.body[first].line}, or move the "
            f"access below it",
            path=path,
        )
    return s.finding(
        "R15",
        Severity.ERROR,
        f"{name} is {what} {where}{more}, and nothing here says whether the previous grid touches it",
        sites,
        missing="completion of the previous grid -> this access (griddepcontrol.wait)",
        fix="move the access below the wait unless no earlier grid that may still run touches this memory",
        settle=f"a contract that gives {name} a role: weight, stable, upstream, output or state",
        path=path,
    )


_PARAMS = ", ".join(f".param .u64 .ptr .global .align 16 {name}" for name in ("weights", "x", "y"))
_PASSING = snippet(
    """
    ld.param.u64 %rd1, [weights];
    ld.param.u64 %rd2, [x];
    ld.param.u64 %rd3, [y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd1, %rd4;
    ld.global.f32 %f1, [%rd5];
    add.s64 %rd6, %rd2, %rd4;
    griddepcontrol.wait;
    ld.global.f32 %f2, [%rd6];
    add.f32 %f3, %f1, %f2;
    add.s64 %rd7, %rd3, %rd4;
    st.global.f32 [%rd7], %f3;
    griddepcontrol.launch_dependents;
    """,
    params=_PARAMS,
)

RULE = Rule(
    id="R15",
    title="memory of the previous grid is touched before the dependency wait",
    severity=Severity.ERROR,
    meaning=(
        "A grid that is launched with programmatic stream serialization may start while the previous "
        "grid still runs. "
        "Only `griddepcontrol.wait` waits for the previous grids to complete and makes their writes "
        "visible, and only "
        "to the threads that execute it (or synchronise with one that did). A load of their output "
        "before it may see "
        "old data; a store before it may overwrite what they still read, or be overwritten. "
        "`launch_dependents` in the "
        "previous grid publishes nothing."
    ),
    looks_for=(
        "loads and stores of global memory, including bulk copies, that some path reaches without a "
        "dependency wait; "
        "the contract's roles tell weights and stable inputs, which may be read early, from upstream "
        "data, state and "
        "output, which may not. Without a contract such an access makes the verdict inconclusive."
    ),
    isa_section="Parallel Synchronization and Communication Instructions: griddepcontrol",
    fix="execute griddepcontrol.wait on every path before the access, in the thread that makes it",
    failing=_PASSING.replace(
        "    griddepcontrol.wait;\n    ld.global.f32 %f2, [%rd6];\n",
        "    ld.global.f32 %f2, [%rd6];\n    griddepcontrol.wait;\n",
    ),
    passing=_PASSING,
    mutations=(
        Mutation("wait deleted", "    griddepcontrol.wait;\n", ""),
        Mutation(
            "load hoisted",
            "    griddepcontrol.wait;\n    ld.global.f32 %f2, [%rd6];\n",
            "    ld.global.f32 %f2, [%rd6];\n    griddepcontrol.wait;\n",
        ),
        Mutation(
            "wait by one thread only",
            "    griddepcontrol.wait;\n",
            "    setp.eq.s32 %p1, %r1, 0;\n    @%p1 griddepcontrol.wait;\n",
        ),
        Mutation(
            "wait on one path only",
            "    griddepcontrol.wait;\n",
            "    setp.gt.u32 %p1, %r1, 31;\n    @%p1 bra SKIP;\n    griddepcontrol.wait;\nSKIP:\n",
        ),
        Mutation(
            "store hoisted",
            "    griddepcontrol.wait;\n",
            "    add.s64 %rd8, %rd3, %rd4;\n    st.global.f32 [%rd8], %f1;\n    griddepcontrol.wait;\n",
        ),
        Mutation("launch instead of wait", "griddepcontrol.wait", "griddepcontrol.launch_dependents"),
    ),
    check=check,
    contract={
        "kernel": "kernel",
        "params": [
            {"name": "weights", "dtype": "f32", "role": "weight", "access": "r"},
            {"name": "x", "dtype": "f32", "role": "upstream", "access": "r"},
            {"name": "y", "dtype": "f32", "role": "output", "access": "w"},
        ],
        "launch": {"block": [128, 1, 1], "pdl": True},
    },
)
