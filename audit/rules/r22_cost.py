"""R22: order that costs more than it needs to. Notes, never findings that stop anything."""

from __future__ import annotations

from collections.abc import Iterator

from k3_audit.artifact.contract import Role

from ..findings import Finding, Severity
from ..ptx.effects import Kind
from ..subject import Subject
from .base import Mutation, Rule, snippet
from .memory import SHARED


def check(s: Subject) -> Iterator[Finding]:
    yield from _all_space_fences(s)
    yield from _system_scope(s)
    yield from _sequential(s)


def _note(s: Subject, i: int, message: str, fix: str) -> Finding:
    return s.finding(
        "R22", Severity.NOTE, message, [s.site(i, "fence")], missing="nothing: it is right", fix=fix
    )


def _all_space_fences(s: Subject) -> Iterator[Finding]:
    """`fence.proxy.async` without a space waits for global memory too."""
    spaces = {
        a.space.split("::")[0]
        for i in s.find(Kind.BULK, Kind.WGMMA, Kind.TCGEN05)
        for a in s.effects[i].accesses
        if a.proxy == "async" and (a.space in SHARED or a.reads)
    }
    for i in s.find(Kind.PROXY_FENCE):
        e = s.effects[i]
        if e.proxy == "async" and not e.space and not e.sem and spaces == {"shared"}:
            yield _note(
                s, i,
                "fence.proxy.async covers all state spaces, and the kernel's asynchronous reads are of shared "
                "memory only: "
                "it also waits for outstanding global stores",
                "fence.proxy.async.shared::cta",
            )  # fmt: skip
            return


def _system_scope(s: Subject) -> Iterator[Finding]:
    """With a contract that names no peer, system scope reaches further than anybody listens."""
    if s.contract is None or any(p.role in (Role.PEER, Role.MULTICAST) for p in s.contract.params):
        return
    if any(h.scope == "sys" for h in s.contract.handoffs):
        return
    for i in s.find(Kind.FENCE):
        if s.effects[i].scope == "sys":
            yield _note(
                s, i, "a fence at system scope, in a kernel whose contract shares nothing with other GPUs or the host",
                f"{s.body[i].name.replace('.sys', '.gpu')}",
            )  # fmt: skip
            return


def _sequential(s: Subject) -> Iterator[Finding]:
    """fence.sc serves only code that stores one strong flag and then loads another."""
    strong = [
        (i, a) for i in s.order.events for a in s.effects[i].accesses
        if a.role == "data" and a.sem not in ("weak", "") and not a.asynchronous
    ]  # fmt: skip
    stores = {i for i, a in strong if a.writes}
    loads = {i for i, a in strong if a.reads}
    for i in s.find(Kind.FENCE):
        if s.effects[i].sem != "sc" or s.body[i].opcode == "membar":
            continue
        before = s.order.search([i], backward=True, sync=False)
        after = s.order.search([i], sync=False)
        if not (stores & before.keys() and loads & after.keys()):
            yield _note(
                s, i, "fence.sc where no strong store before it and strong load after it need a total order",
                f"{s.body[i].name.replace('.sc', '.acq_rel')}",
            )  # fmt: skip
            return


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [flag];
    st.global.b32 [%rd1], 7;
    fence.acq_rel.gpu;
    st.relaxed.gpu.global.b32 [%rd2], 1;
    """,
    params=".param .u64 .ptr .global .align 4 data, .param .u64 .ptr .global .align 4 flag",
)

RULE = Rule(
    id="R22",
    title="order that costs more than it needs to",
    severity=Severity.NOTE,
    meaning=(
        "Order has a price: a fence at system scope waits for the far end of the machine, `fence.sc` also takes "
        "part in "
        "one total order of all of them, and a proxy fence without a space waits for global stores as well as for "
        "shared "
        "ones. Where a narrower form gives the same guarantee, it is free speed. The rule only names forms that are "
        "wider than anything in the kernel (or its contract) can use."
    ),
    looks_for=(
        "fence.sc with no strong store before and strong load after it;"
        " fence.proxy.async without a space when only shared "
        "memory is read asynchronously; .sys when the contract knows no peer"
    ),
    isa_section="membar / fence; Memory Consistency Model: Scope, Fence-SC Order",
    fix="the narrower form that the note names",
    failing=_PASSING.replace("fence.acq_rel.gpu", "fence.sc.gpu"),
    passing=_PASSING,
    mutations=(
        Mutation("sc", "fence.acq_rel.gpu", "fence.sc.gpu"),
        Mutation("sys", "fence.acq_rel.gpu", "fence.acq_rel.sys"),
    ),
    check=check,
    contract={
        "kernel": "kernel",
        "params": [
            {"name": "data", "dtype": "i32", "role": "output", "access": "w"},
            {"name": "flag", "dtype": "i32", "role": "flag", "access": "w"},
        ],
        "launch": {"block": [128, 1, 1]},
    },
)
